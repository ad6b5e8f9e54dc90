"""Training on a cache is training on its teacher: the same loss, to coding error, and no teacher in memory."""

import itertools
import json

import pytest
import torch
import yaml

from potstill import SampledTargets, topk_distillation_loss
from potstill.cli import main
from potstill.teachers.cache import CachedSamples
from potstill.train import RecipeError, load_recipe, run
from potstill.train.batch import batch_for
from potstill.train.capture import capture
from potstill.train.load import build_trainer, training_arguments
from potstill.train.replay import CachedRows, cached_rows_of
from train_fixtures import WORDS, make_model, make_tokenizer, write_recipe


@pytest.fixture
def recipe_file(tmp_path):
    return write_recipe(tmp_path)


def cached(file, *overrides):
    """The recipe with a cache of its own teacher."""
    folder = str(file.parent / "cache")
    capture(load_recipe(file, [f"cache.folder={folder}", *overrides]))
    return load_recipe(file, [f"teacher.cache={folder}", *overrides])


@pytest.mark.parametrize(("bits", "bound"), [(16, 1e-4), (8, 5e-3)])
def test_a_cache_says_what_its_teacher_says(recipe_file, bits, bound):
    recipe = cached(recipe_file, f"cache.bits={bits}")
    live = build_trainer(load_recipe(recipe_file), training_arguments(recipe)).teacher
    student, tokenizer = make_model(seed=5), make_tokenizer()
    stored = CachedRows(CachedSamples(recipe.teacher.cache))
    rows = [stored[i] for i in (11, 3, 7, 3)]
    batch = batch_for(student, tokenizer, rows, [row["completion_ids"] for row in rows])
    logits = student(batch["input_ids"], batch["attention_mask"]).logits.flatten(0, 1)[batch["scored_rows"]]
    per_token = [topk_distillation_loss(logits, teacher(batch)).per_token for teacher in (cached_rows_of, live)]
    torch.testing.assert_close(*per_token, rtol=0, atol=bound)
    assert per_token[0].min() > 10 * bound


def test_a_run_over_epochs_with_another_student(recipe_file, monkeypatch):
    """The cache's samples, in a new order at every epoch; the teacher measures the held-out prompts."""
    recipe = cached(recipe_file, "training.max_steps=10", "warmup.steps=1", "training.seed=3")
    seen = []
    monkeypatch.setattr(
        "potstill.train.load.cached_rows_of",
        lambda batch: seen.append([tuple(x) for x in batch["completions"]]) or cached_rows_of(batch),
    )
    result = run(recipe)
    epochs = [sorted(itertools.chain(*seen[i : i + 4])) for i in (0, 4)]
    assert epochs[0] == epochs[1] == sorted(tuple(x.completion_ids) for x in CachedSamples(recipe.teacher.cache))
    assert seen[:4] != seen[4:8]
    assert 0 < result.after["eval_kl"] < result.before["eval_kl"]


def test_no_teacher_is_loaded_where_none_is_needed(recipe_file, monkeypatch):
    recipe = cached(recipe_file)
    make_model(seed=3).save_pretrained(recipe_file.parent / "student")
    make_tokenizer().save_pretrained(recipe_file.parent / "student")
    source = yaml.safe_load(recipe_file.read_text()) | {
        "student": str(recipe_file.parent / "student"),
        "teacher": {"cache": recipe.teacher.cache},
        "data": {},
    }
    recipe_file.write_text(yaml.safe_dump(source))
    (recipe_file.parent / "teacher").rename(recipe_file.parent / "gone")
    assert main(["train", str(recipe_file), "training.logging_steps=1"]) == 0
    losses = [json.loads(x) for x in (recipe_file.parent / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in losses if "loss" in row] == [1, 2, 3, 4]


def test_a_student_with_more_stop_tokens_scores_up_to_its_own(recipe_file):
    recipe = cached(recipe_file)
    stored = CachedRows(CachedSamples(recipe.teacher.cache))
    row = next(row for row in stored if len(set(row["completion_ids"])) > 2)
    early = row["completion_ids"][1]
    student = make_model(eos_token_id=[2, early])
    student.generation_config.eos_token_id = [2, early]
    batch = batch_for(student, make_tokenizer(), [row], [row["completion_ids"]])
    length = row["completion_ids"].index(early) + 1
    rows = cached_rows_of(batch)
    assert len(batch["completions"][0]) == length == len(rows.token_ids)
    assert torch.equal(rows.token_ids, row["teacher_rows"].token_ids[:length])


def test_sampled_targets_come_back(recipe_file):
    recipe = cached(recipe_file, "loss.targets=threshold")
    assert isinstance(CachedRows(CachedSamples(recipe.teacher.cache))[0]["teacher_rows"], SampledTargets)
    assert run(recipe).after["eval_kl"] > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.top_k=3"], "loss.top_k is 3 but teacher.cache=.* has 4; set loss.top_k=4, or make a new cache"),
        (["loss.temperature=2"], "loss.temperature is 2.0 but teacher.cache=.* has 1.0"),
        (["loss.targets=threshold"], "loss.targets is threshold but teacher.cache=.* has top_k"),
        (["loss={estimator: k1, policy_gradient: true}"], "loss.estimator=k1 needs a teacher that scores"),
        (["teacher.cache=/nowhere"], "teacher.cache='/nowhere': .*No such file"),
        (["teacher={model: other}"], "was made with another tokenizer than other's"),
    ],
)
def test_caches_that_do_not_fit_are_refused_before_models_load(recipe_file, monkeypatch, overrides, message):
    recipe = cached(recipe_file)
    make_tokenizer([*WORDS[:-2], WORDS[-1], WORDS[-2]]).save_pretrained(recipe_file.parent / "other")
    make_model().save_pretrained(recipe_file.parent / "other")
    monkeypatch.setattr("potstill.train.load.load_model", lambda *x: pytest.fail("a model was loaded"))
    monkeypatch.chdir(recipe_file.parent)
    with pytest.raises(RecipeError, match=message):
        run(load_recipe(recipe_file, [f"teacher.cache={recipe.teacher.cache}", *_with_cache(overrides, recipe)]))


def _with_cache(overrides, recipe):
    return [x.replace("{model: other}", f"{{model: other, cache: {recipe.teacher.cache}}}") for x in overrides]
