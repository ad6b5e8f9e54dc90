"""The model card, and that uploading keeps it."""

import json

import pytest
import transformers.trainer
from huggingface_hub import ModelCard

from potstill.train import load_recipe, run
from potstill.train.card import model_card
from potstill.train.strict import RecipeError
from train_fixtures import write_recipe


@pytest.fixture
def recipe_file(tmp_path):
    return write_recipe(tmp_path)


def test_the_card_names_sources_and_licences_to_check(recipe_file):
    metrics = {"eval_kl": 0.5, "eval_truncated_share": 0.25, "eval_mean_length": 9.5, "eval_tokens": 1200.0}
    text = model_card(load_recipe(recipe_file), {}, metrics)
    assert "on completions that the student sampled itself. The student started as a copy of the teacher" in text
    assert "|        - |   0.5000 |" in text and "|        - |    25.0% |" in text and "1,200 tokens" in text
    assert "Whoever publishes these has to check" in text
    assert "teacher`: not stated where it was loaded from" in text
    assert "- the data, `train.jsonl`: not known here" in text
    assert "max_new_tokens: 5" in text  # the recipe
    assert ModelCard(text).data.to_dict()["library_name"] == "transformers"
    mixed = model_card(load_recipe(recipe_file, ["rollout.lmbda=0.25"]), {}, {})
    assert "on completions of which the student sampled 25%" in mixed
    assert "on completions of the data." in model_card(load_recipe(recipe_file, ["rollout.lmbda=0"]), {}, {})


def test_the_card_of_an_adapter_is_ours(recipe_file):
    teacher = recipe_file.parent / "teacher"
    options = ["data.heldout=", "training.max_steps=1", f"student={{model: {teacher}, lora: {{r: 2}}}}"]
    folder = run(load_recipe(recipe_file, [*options, f"teacher={teacher}"])).folder
    data = ModelCard.load(folder / "README.md").data
    assert data.library_name == "peft" and data.tags == ["potstill", "distillation"]


def test_the_best_model_is_the_one_that_is_measured_and_saved(recipe_file):
    best = ["training.load_best_model_at_end=true", "training.eval_strategy=steps", "training.eval_steps=1"]
    best += ["training.save_strategy=steps", "training.save_steps=1", "training.learning_rate=0.03"]
    with pytest.raises(RecipeError, match=r"metric_for_best_model is loss; expected a figure of the held-out prompts"):
        run(load_recipe(recipe_file, best))
    # The highest KL, which is the first one: not the last.
    best += ["training.metric_for_best_model=kl", "training.greater_is_better=true"]
    result = run(load_recipe(recipe_file, best))
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    values = [row["eval_kl"] for row in rows if "eval_kl" in row and row["step"] > 0]
    assert len(values) == 5 and values[-1] == result.after["eval_kl"] == values[0] > values[3]


def test_push_to_hub_uploads_the_model_with_its_card(recipe_file, monkeypatch):
    uploads = []

    class Api:
        def create_repo(self, name, **options):
            return type("Repo", (), {"repo_id": f"me/{name}"})()

        def upload_folder(self, folder_path, **options):
            files = {path.name for path in (recipe_file.parent / "out").iterdir()}
            card = (recipe_file.parent / "out" / "README.md").read_text()
            uploads.append((folder_path, options["repo_id"], files, card))

    monkeypatch.setattr(transformers.trainer, "hf_api", Api)
    result = run(load_recipe(recipe_file, ["training.push_to_hub=true", "training.hub_model_id=little"]))
    ((folder, name, files, card),) = uploads
    assert card == (result.folder / "README.md").read_text()
    assert folder == str(result.folder) and name == "me/little"
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= files
    assert f"{result.after['eval_kl']:.4f}" in card and "## Recipe" in card
