"""Recipes: every mistake is answered with file, key and remedy, before any model is loaded."""

import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from potstill import DIVERGENCES, TAILS
from potstill.train import load_recipe
from potstill.train.recipe import (
    Data,
    Loss,
    Recipe,
    Rollout,
    Source,
    Student,
    Teacher,
    Warmup,
    dump,
    resolved_training,
)
from potstill.train.strict import RecipeError, parse_yaml
from train_fixtures import write_recipe


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("template"))


@pytest.fixture
def recipe_file(template, tmp_path):
    shutil.copytree(template.parent, tmp_path, ignore=shutil.ignore_patterns("teacher"), dirs_exist_ok=True)
    return tmp_path / template.name


def test_a_recipe_becomes_dataclasses(recipe_file):
    recipe = load_recipe(recipe_file, ["training.max_steps=5", "warmup.learning_rate=1e-3", "loss.tail=drop"])
    assert recipe.name == "tiny" and recipe.folder == recipe_file.parent
    assert recipe.student.prune.layers == 2 and recipe.student.model is None
    assert recipe.warmup == Warmup(steps=0, learning_rate=1e-3)
    assert recipe.loss == Loss(top_k=4, tail="drop")
    assert recipe.training["max_steps"] == 5
    assert recipe.source["training"]["max_steps"] == 5


def test_defaults_and_short_forms(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}')
    path = tmp_path / "r.yaml"
    path.write_text("student: org/small\nteacher: org/large\ndata: {train: p.jsonl}\nwarmup:\ntraining:\n")
    assert load_recipe(path) == Recipe(
        student=Student(model="org/small"),
        teacher=Teacher(model="org/large"),
        data=Data(train="p.jsonl"),
        warmup=Warmup(),
        rollout=Rollout(),
        loss=Loss(),
        name="r",
        folder=tmp_path,
        source=load_recipe(path).source,
    )
    assert load_recipe(path, ["teacher=org/other"]).teacher.model == "org/other"
    assert load_recipe(path, ["teacher.dtype=float32"]).teacher == Teacher("org/large", "float32")


@pytest.mark.parametrize("setting, value", [("temperature", 0.7), ("top_p", 0.9), ("lmbda", 0.5)])
def test_estimators_need_samples_of_the_distribution_itself(recipe_file, setting, value):
    load_recipe(recipe_file, [f"rollout.{setting}={value}"])
    with pytest.raises(RecipeError, match=rf"rollout\.{setting} is {value}; expected 1 with loss\.estimator"):
        load_recipe(recipe_file, ["loss={estimator: k2}", f"rollout.{setting}={value}"])


@pytest.mark.parametrize(
    "override, message",
    [
        ("los.tail=drop", r"unknown key los; did you mean loss\?"),
        ("loss.topk=4", r"unknown key loss.topk; did you mean loss.top_k\?"),
        ("student.prune.layer=3", r"unknown key student.prune.layer; did you mean student.prune.layers\?"),
        ("training.max_stepz=4", r"unknown key training.max_stepz; did you mean training.max_steps\?"),
        ("rollout.zzz=4", "unknown key rollout.zzz; known: max_new_tokens, temperature, top_p"),
        ("training.max_steps=many", "training.max_steps is 'many'; expected int"),
        ("training.optim=adamw_torhc", r"training.optim is 'adamw_torhc'; did you mean adamw_torch\?"),
        ("training.lr_scheduler_type=cosin", r"training.lr_scheduler_type is 'cosin'; did you mean cosine\?"),
        ("training.save_strategy=never", "training.save_strategy is 'never'; known: no, steps, epoch, best"),
        (
            "training.output_dir=/dev/null/out",
            "training.output_dir is '/dev/null/out', but /dev/null is no folder that",
        ),
        ("training.learning_rate=true", "training.learning_rate is True; expected float"),
        ("loss.top_k=4.5", r"loss.top_k is 4.5; expected int"),
        ("student.dtype=int8", "student.dtype is 'int8'; expected one of auto, float32, bfloat16, float16"),
        ("student.prune.layers=[1, x]", r"student.prune.layers is \[1, 'x'\]; expected int or a list of int"),
        ("loss=3", "loss is 3; expected a mapping"),
        ("teacher={}", "teacher.model is missing"),
        ("data=", "data is missing"),
        ("student.model=x", "exactly one of model, prune and config; got model and prune"),
        ("student=", "student is missing"),
        ("student={}", "exactly one of model, prune and config; got none of them"),
        ("student={config: {model_type: lama}}", r"student.config.model_type is 'lama'; did you mean llama\?"),
        ("student={config: {model_type: llama, hiden_size: 8}}", r"did you mean student.config.hidden_size\?"),
        ("student={config: {model_type: llama, vocab_size: 8}}", "student.config.vocab_size comes from the teacher"),
        ("student={config: {model_type: llama, hidden_size: x}}", "student.config: .*hidden_size"),
        ("warmup.steps=-1", "warmup.steps is -1; expected 0 or more"),
        ("warmup.learning_rate=0", "warmup.learning_rate is 0; expected a number above 0"),
        ("rollout.temperature=0", "rollout.temperature is 0; expected a number above 0"),
        ("rollout.top_p=1.5", "rollout.top_p is 1.5; expected at most 1"),
        ("rollout.max_new_tokens=0", "rollout.max_new_tokens is 0; expected 1 or more"),
        ("loss.top_k=0", "loss.top_k is 0; expected 1 or more"),
        ("loss.tail=bukket", r"loss.tail is 'bukket'; did you mean bucket\?"),
        ("loss.divergence=forwad_kl", r"loss.divergence is 'forwad_kl'; did you mean forward_kl\?"),
        ("loss.divergence=kl", "loss.divergence is 'kl'; known: forward_kl, "),
        ("loss={estimator: k9}", r"loss.estimator is 'k9'; (did you mean|known: k1, k2)"),
        ("loss={estimator: k1}", "loss: estimator='k1' has no learning signal as a loss"),
        ("loss={estimator: k3, tail: drop}", "loss.tail is 'drop', which only goes without estimator"),
        ("loss={estimator: k3, top_k: 4}", "loss.top_k is 4, which only goes without estimator"),
        ("loss={policy_gradient: true}", "loss.policy_gradient is True, which only goes with estimator"),
        ("loss={estimator: k2, clip_ratio_low: 0.3}", "clip_ratio_low is 0.3, which only goes with policy_gradient"),
        ("loss={estimator: k2, temperature: 2}", "rollout.temperature is 1; expected 2 with loss.estimator"),
        ("loss.temperature=0", "loss.temperature is 0; expected a number above 0"),
        ("loss.chunk_size=0", "loss.chunk_size is 0; expected 1 or more"),
        ("loss={divergence: jsd, beta: 2}", "loss: .*beta"),
        ("loss={divergence: jsd, alpha: 0.5}", "loss: .*alpha"),
        ("loss={tail: renormalize, top_k: 1}", "loss: tail='renormalize' has no learning signal at K = 1"),
        ("loss={log_prob_min_clamp: -10}", "loss: log_prob_min_clamp only goes with"),
        ("data.train=x.jsonl", r"data.train: no file .*x.jsonl; paths are relative to the recipe's folder"),
        ("data.train=x", r"data.train: no file .*x; paths are relative to the recipe's folder"),
        ("data.train={path: a/b.parquet}", r"data.train: no file .*a/b.parquet; paths are"),
        ("data.train={pth: a/b}", r"unknown key data.train.pth; did you mean data.train.path\?"),
        ("data.train=3", "data.train is 3; expected text or a mapping"),
        ("data.long_prompts=cut", "data.long_prompts is 'cut'; expected one of drop, truncate, refuse"),
        ("data.answer_regex=abc", "data.answer_regex 'abc' has no group"),
        ("data.answer_regex='('", "data.answer_regex .* is no regular expression"),
        ("training.fsdp=full_shard", "training.fsdp is not supported: start several processes with torchrun"),
        ("training.use_liger_kernel=true", "training.use_liger_kernel is not supported"),
        ("training.per_device_train_batch_size=0", "training.per_device_train_batch_size is 0; expected 1 or more"),
        ("training.per_device_eval_batch_size=0", "training.per_device_eval_batch_size is 0; expected 1 or more"),
        ("training.gradient_accumulation_steps=0", "training.gradient_accumulation_steps is 0; expected 1 or more"),
        ("training.learning_rate=-1", "training.learning_rate is -1; expected 0 or more"),
        ("training.learning_rate=.nan", "training.learning_rate is nan; expected 0 or more"),
        ("training.seed=-1", "training.seed is -1; expected 0 or more"),
        ("student={config: {model_type: llama, num_attention_heads: 0}}", "student.config: "),
        ("max_steps", "'max_steps' is no override; write section.key=value"),
        ("loss.tail.x=1", "tail is .*; expected a mapping"),
        ("loss.tail=[", "not valid YAML"),
    ],
)
def test_mistakes_are_named(recipe_file, override, message):
    source = yaml.safe_load(recipe_file.read_text())
    source["loss"]["tail"] = "bucket"
    recipe_file.write_text(yaml.safe_dump(source))
    with pytest.raises(RecipeError, match=rf"tiny\.yaml: .*{message}"):
        load_recipe(recipe_file, [override])


def test_a_training_key_without_a_value_means_its_default(recipe_file):
    recipe = load_recipe(recipe_file, ["training.output_dir=", "training.learning_rate=", "training.logging_steps="])
    training = resolved_training(recipe)
    assert training["output_dir"] == "runs/tiny" and training["logging_steps"] == 10
    assert "learning_rate" not in training


def test_a_recipe_of_any_top_k_is_checked_in_little_memory(recipe_file):
    assert load_recipe(recipe_file, ["loss.top_k=1000000000000"]).loss.top_k == 10**12


def test_a_dump_loads_again_to_the_same_recipe(recipe_file):
    overrides = ["loss={estimator: k2, loss_max_clamp: 1e-5}", "data.heldout={path: a/b, name: '1e-4', split: no}"]
    recipe = load_recipe(recipe_file, [*overrides, "training.learning_rate=1e-5", "data.answer_regex='(\\d+)'"])
    again = recipe_file.parent / "again.yaml"
    again.write_text(dump(recipe))
    loaded = load_recipe(again)
    assert loaded == replace(recipe, name="again", training=resolved_training(recipe))
    assert dump(loaded) == dump(recipe)
    assert loaded.data.heldout == Source("a/b", "1e-4", "no")
    sections = yaml.safe_load(dump(recipe))  # a reader of YAML 1.1
    assert sections["data"]["heldout"] == {"path": "a/b", "name": "1e-4", "split": "no"}
    assert sections["loss"]["temperature"] == 1.0 and sections["rollout"]["top_p"] == 1.0
    assert sections["training"]["logging_steps"] == 10


def test_files_that_are_no_recipe(tmp_path):
    with pytest.raises(RecipeError, match=r"none\.yaml: cannot read the recipe \(No such file"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(RecipeError, match=r"the recipe is \[1\]; expected a mapping"):
        load_recipe(tmp_path / "list.yaml")
    (tmp_path / "twice.yaml").write_text("teacher: a\nteacher: b\n")
    with pytest.raises(RecipeError, match="key 'teacher' is given twice"):
        load_recipe(tmp_path / "twice.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"teacher: \xe9\n")
    with pytest.raises(RecipeError, match="no UTF-8"):
        load_recipe(tmp_path / "latin.yaml")


def test_yaml_is_version_1_2():
    text = "{a: 1e-4, b: no, c: off, d: 1_000, e: 012, f: true, g: -3, h: 1.5e3, i: ~, j: 12:30, k: .5}"
    assert parse_yaml(text) == {
        **{"a": 1e-4, "b": "no", "c": "off", "d": "1_000", "e": "012", "f": True},
        **{"g": -3, "h": 1500.0, "i": None, "j": "12:30", "k": 0.5},
    }


def test_the_documentation_has_every_key_and_default():
    text = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    shown = parse_yaml(text.partition("```yaml\n")[2].partition("```")[0])
    recipe = asdict(Recipe(Student(), Teacher("..."), Data("...")))
    assert shown == {key: value for key, value in recipe.items() if key not in ("name", "folder", "source", "notes")}
    for name in (*DIVERGENCES, *TAILS):
        assert re.search(rf"\b{name}\b", text), name
