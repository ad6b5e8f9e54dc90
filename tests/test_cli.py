"""The command line and whole runs: from a recipe on disk to a model folder."""

import json
import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from potstill.cli import main
from potstill.train import load_recipe, run
from train_fixtures import make_model, make_tokenizer, write_recipe


@pytest.fixture
def recipe_file(tmp_path):
    return write_recipe(tmp_path)


def test_a_recipe_becomes_a_model_folder(recipe_file, capsys):
    assert main(["train", str(recipe_file), "warmup.steps=3", "training.logging_steps=1", "training.bf16=false"]) == 0
    out = recipe_file.parent / "out"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [f"model: {out}", f"metrics: {out / 'metrics.jsonl'}"]
    assert any(line.startswith("distil step 4/4  loss 0.") and line.endswith(" left") for line in lines)
    assert any(line.startswith("| forward KL, teacher to student") for line in lines)

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config.num_hidden_layers == 2 and model.config.use_cache
    assert tokenizer.get_vocab() == make_tokenizer().get_vocab()

    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["phase"] == "warm-up" and "loss" in row] == [1, 2, 3]
    assert [row["step"] for row in rows if row["phase"] == "distil" and "loss" in row] == [1, 2, 3, 4]
    held_out = [row for row in rows if "eval_kl" in row]
    assert [row["step"] for row in held_out] == [0, 4]

    card = (out / "README.md").read_text()
    assert "pipeline_tag: text-generation" in card
    assert "copy of the teacher with fewer layers" in card
    assert f"{held_out[1]['eval_kl']:.4f}" in card
    assert "not stated" in card and "steps: 3" in card


def test_the_warm_up_learns_the_answers_and_training_starts_from_it(recipe_file):
    recipe = load_recipe(
        recipe_file, ["warmup.steps=60", "warmup.learning_rate=2e-2", "training.learning_rate=0", "loss.top_k=2"]
    )
    result = run(recipe)
    assert result.before == result.after  # a learning rate of 0 leaves the warmed-up student as it is
    assert result.before["eval_exact_match"] > 0.6


def test_runs_repeat(recipe_file):
    weights = []
    for folder in ("one", "two"):
        recipe = load_recipe(recipe_file, [f"training.output_dir={recipe_file.parent / folder}", "warmup.steps=2"])
        weights.append(_weights(run(recipe).folder))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_run_resumes_where_it_stopped(recipe_file):
    out = recipe_file.parent / "out"
    options = ["training.save_strategy=steps", "training.save_steps=2"]
    whole = run(load_recipe(recipe_file, options))
    weights = _weights(out)
    resumed = run(load_recipe(recipe_file, [*options, f"training.resume_from_checkpoint={out / 'checkpoint-2'}"]))
    assert resumed.before == pytest.approx(whole.before) and resumed.after == whole.after
    assert all(torch.equal(weights[name], value) for name, value in _weights(out).items())


def _weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_a_student_from_a_folder_and_without_heldout_prompts(recipe_file, tmp_path, capsys):
    student = tmp_path / "student"
    make_model(seed=3, vocab_size=24).save_pretrained(student)  # a head padded to another width
    make_tokenizer().save_pretrained(student)
    (student / "README.md").write_text("---\nlicense: mit\n---\n")
    result = run(load_recipe(recipe_file, [f"student={student}", "data.heldout="]))
    assert result.before == result.after == {}
    assert f"- `{student}`: mit" in (result.folder / "README.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(result.folder).config.vocab_size == 24


@pytest.mark.parametrize(
    "override, message",
    [
        ("training.max_stepz=3", r"tiny\.yaml: unknown key training.max_stepz; did you mean training.max_steps\?"),
        ("teacher=/nowhere/at/all", "teacher.model='/nowhere/at/all': "),
        ("student.prune.layers=9", "student: prune.layers is 9; the teacher has 4 layers"),
        ("student={config: {model_type: bloom}}", "student: model_type 'bloom' is not in the table of families"),
        ("student=/nowhere/at/all", "student: "),
        ("loss.top_k=23", "loss.top_k is 23; expected 1 to 22, the teacher's vocabulary"),
        ("data.max_prompt_tokens=2", "data.train: all 16 prompts have more than 2 tokens"),
        ("loss.top_k=1000000000000", "loss.top_k is 1000000000000; expected 1 to 22, the teacher's vocabulary"),
        (
            "rollout.max_new_tokens=60",
            "data.train: prompt 1 has 6 tokens, up to 66 with .* the teacher has positions for 64",
        ),
        ("training.seed=4294967296", "training.seed: "),
        ("training.eval_strategy=never", "training.eval_strategy is 'never'; known: no, steps, epoch"),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(recipe_file, capsys, override, message):
    assert main(["train", str(recipe_file), override]) == 2
    err = capsys.readouterr().err
    assert re.match(f"potstill: .*{message}", err) and "Traceback" not in err


def test_data_mistakes_name_file_and_line(recipe_file, capsys):
    (recipe_file.parent / "train.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    assert main(["train", str(recipe_file)]) == 2
    assert "train.jsonl, line 2: expected exactly one of `prompt` and `messages`" in capsys.readouterr().err
    (recipe_file.parent / "train.jsonl").write_text('{"prompt": "a"}\n')
    assert main(["train", str(recipe_file), "warmup.steps=1"]) == 2
    assert "warmup.steps: no row of data.train has an `answer`" in capsys.readouterr().err


def test_completions_longer_than_the_student_are_refused(recipe_file, capsys):
    rows = [{"prompt": "a b", "completion": "c"}, {"prompt": "a b", "completion": "c " * 62}]
    (recipe_file.parent / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["train", str(recipe_file), "training.max_steps=1"]) == 0  # completed by the student, in 5 tokens
    assert main(["train", str(recipe_file), "rollout.lmbda=0.5"]) == 2
    assert "data.train: prompt 2 has 3 tokens, up to 66 with its completion" in capsys.readouterr().err


def test_weights_that_were_cut_short_and_a_backend_that_is_not_installed(recipe_file, capsys, monkeypatch):
    monkeypatch.setattr("transformers.integrations.integration_utils.is_tensorboard_available", lambda: False)
    assert main(["train", str(recipe_file), "training.report_to=tensorboard"]) == 2
    assert re.match("potstill: training: .*tensorboard", capsys.readouterr().err)
    weights = recipe_file.parent / "teacher" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert main(["train", str(recipe_file)]) == 2
    assert "potstill: teacher.model=" in capsys.readouterr().err


def test_another_tokenizer_is_refused(recipe_file, tmp_path, capsys):
    words = sorted(make_tokenizer().get_vocab(), key=make_tokenizer().get_vocab().get)
    student = tmp_path / "student"
    make_model().save_pretrained(student)
    make_tokenizer([*words[:4], words[5], words[4], *words[6:]]).save_pretrained(student)
    assert main(["train", str(recipe_file), f"student={student}"]) == 2
    assert "token 'a' has id 5 in the student and 4 in the teacher" in capsys.readouterr().err


def test_dump_config_prints_the_whole_recipe_and_runs_nothing(recipe_file, capsys):
    text = "  use_chunked_topk: false\n  loss_mode: forward_kl_topk\n  topk: 4\n"
    recipe_file.write_text(recipe_file.read_text().replace("loss:\n  top_k: 4\n", "distillation_loss:\n" + text))
    assert main(["train", str(recipe_file), "--dump-config", "training.max_steps=7"]) == 0
    out = capsys.readouterr().out
    assert "# use_chunked_topk: false has no effect" in out
    assert "  tail: drop\n" in out and "  max_steps: 7\n" in out and "  max_prompt_tokens: 1024\n" in out
    assert not (recipe_file.parent / "out").exists()
    again = recipe_file.parent / "again.yaml"
    again.write_text(out)
    assert main(["train", "--dump-config", str(again)]) == 0
    assert capsys.readouterr().out.splitlines() == [line for line in out.splitlines() if "use_chunked" not in line]
    assert main(["train", str(recipe_file), "data.heldout=", "training.max_steps=1"]) == 0
    assert capsys.readouterr().out.count("note: use_chunked_topk: false has no effect") == 1


def test_a_wrong_call_says_usage(capsys):
    for arguments, usage in (
        ([], "potstill"),
        (["train"], "potstill train"),
        (["train", "r", "--reusme"], "potstill"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert f"usage: {usage} [-h]" in capsys.readouterr().err


def test_losses_on_the_sampled_token_train(recipe_file):
    options = ["training.max_steps=20", "training.per_device_train_batch_size=16", "training.learning_rate=5e-3"]
    first, second = (
        run(load_recipe(recipe_file, [*options, f"loss={loss}"]))
        for loss in ("{estimator: k2}", "{estimator: k1, policy_gradient: true}")
    )
    assert first.after["eval_kl"] < 0.9 * first.before["eval_kl"]
    assert first.after == second.after  # (log r)^2 / 2 differentiated, and -log r as a reward: the same gradient


def test_version_and_help_are_light():
    program = "import sys; from potstill.cli import main\ntry: main(['--version'])\nexcept SystemExit: pass\n"
    program += "assert 'transformers' not in sys.modules and 'yaml' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("potstill 0.")
    with pytest.raises(SystemExit, match="2"):
        main([])
