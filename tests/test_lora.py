"""LoRA students: the adapter alone is trained and saved, and its base can be the teacher, in one model."""

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM

from potstill import LogitTransform
from potstill.teachers.local import LocalTeacher, OwnBase
from potstill.train import RecipeError, load_recipe, run
from potstill.train.batch import batch_for
from potstill.train.models import add_adapter
from potstill.train.recipe import Lora, Teacher
from train_fixtures import make_model, make_tokenizer, write_recipe

PLAIN = LogitTransform()
ROWS = [{"prompt_ids": [1, 4, 5], "answer": None}, {"prompt_ids": [1, 6], "answer": None}]


@pytest.fixture
def recipe_file(tmp_path):
    path = write_recipe(tmp_path)
    source = yaml.safe_load(path.read_text())
    source["student"] = {"model": source.pop("teacher")["model"], "lora": {"r": 2, "alpha": 4}}
    path.write_text(yaml.safe_dump(source))
    return path


def moved(model):
    """Give the adapter weights of some size: PEFT starts them at zero."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


def test_the_own_base_scores_as_the_base_does_and_leaves_the_student_as_it_is():
    base = make_model(seed=1, attention_dropout=0.5)
    student = moved(add_adapter(make_model(seed=1, attention_dropout=0.5), Lora(r=2, alpha=4))).train()
    batch = batch_for(base, make_tokenizer(), ROWS, [[7, 8, 2], [9, 2]])
    trained = [name for name, parameter in student.named_parameters() if parameter.requires_grad]
    assert trained and all("lora" in name for name in trained)
    own, expected = OwnBase(student, PLAIN, 4)(batch), LocalTeacher(base, PLAIN, 4)(batch)
    assert torch.equal(own.token_ids, expected.token_ids)
    torch.testing.assert_close(own.log_probs, expected.log_probs)
    assert student.training
    assert trained == [name for name, parameter in student.named_parameters() if parameter.requires_grad]
    with torch.no_grad():
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logits = student.eval()(**inputs).logits[batch["score_mask"]]
    assert not torch.allclose(logits.log_softmax(-1).gather(1, own.token_ids), own.log_probs)


@pytest.mark.parametrize("teacher", [None, "self", "another"])
def test_a_recipe_trains_and_saves_the_adapter_alone(recipe_file, teacher):
    folder = recipe_file.parent / "teacher"
    overrides = ["warmup.steps=2", "warmup.learning_rate=1e-2"]
    if teacher == "self":
        overrides.append("teacher=self")
    elif teacher == "another":
        make_model(seed=3).save_pretrained(recipe_file.parent / "another")
        make_tokenizer().save_pretrained(recipe_file.parent / "another")
        overrides.append(f"teacher={recipe_file.parent / 'another'}")
    recipe = load_recipe(recipe_file, overrides)
    assert recipe.teacher == Teacher(str(folder) if teacher != "another" else str(recipe_file.parent / "another"))
    result = run(recipe)
    if teacher != "another":
        assert result.before["eval_kl"] > result.after["eval_kl"] > 0  # it returns to its base
    base, saved = AutoModelForCausalLM.from_pretrained(folder), AutoPeftModelForCausalLM.from_pretrained(result.folder)
    assert isinstance(saved, PeftModel) and not (result.folder / "model.safetensors").exists()
    ids = torch.tensor([[1, 4, 5, 6]])
    assert not torch.allclose(saved(ids).logits, base(ids).logits)
    with saved.disable_adapter():
        assert torch.equal(saved(ids).logits, base(ids).logits)
    card = (result.folder / "README.md").read_text()
    assert f"Distilled from `{recipe.teacher.model}`" in card


def test_only_one_model_is_in_memory(recipe_file, monkeypatch):
    loaded = []
    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loaded.append(k) or load(*a, **k))
    run(load_recipe(recipe_file, ["training.max_steps=1"]))
    assert len(loaded) == 1


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["student.lora=", "teacher=self"], "teacher: self is the base of a student with an adapter"),
        (["student.lora="], "teacher is missing"),
        (
            ["student={prune: {layers: 1}, lora: {r: 2}}", "teacher=x/y"],
            "student.lora needs student.model, .*got prune",
        ),
        (["student.model=x/y.gguf"], "student.lora needs student.model, .*got x/y.gguf"),
        (["student.lora.r=0"], "student.lora.r is 0; expected 1 or more"),
        (["student.lora.rank=2"], r"unknown key student.lora.rank; known: r, alpha, target_modules"),
    ],
)
def test_what_a_recipe_is_refused_for(recipe_file, overrides, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe_file, overrides)


@pytest.mark.parametrize("modules", [["q_proj", "lm_head"], ".*(q_proj|lm_head)"])
def test_an_adapter_on_the_head_is_refused(recipe_file, modules):
    with pytest.raises(RecipeError, match=r"student: lora\.target_modules .* include the head"):
        run(load_recipe(recipe_file, [f"student.lora.target_modules={modules}"]))


def test_a_layer_that_is_not_there(recipe_file):
    with pytest.raises(RecipeError, match=r"student: .*q_prj"):
        run(load_recipe(recipe_file, ["student.lora.target_modules=[q_prj]"]))


def test_a_run_resumes_with_its_adapter(recipe_file):
    options = ["training.save_strategy=steps", "training.save_steps=2", "warmup.steps=2"]
    whole = run(load_recipe(recipe_file, options))
    weights = AutoPeftModelForCausalLM.from_pretrained(whole.folder).state_dict()
    checkpoint = f"training.resume_from_checkpoint={whole.folder / 'checkpoint-2'}"
    run(load_recipe(recipe_file, [*options, checkpoint]))
    resumed = AutoPeftModelForCausalLM.from_pretrained(whole.folder).state_dict()
    assert all(torch.equal(weights[name], value) for name, value in resumed.items())
