"""Stopping and going on: to the last bit where an uninterrupted run ends, and never from half a checkpoint."""

import json
import random
import shutil
import signal
import subprocess
import sys
import threading

import numpy
import pytest
import torch
from transformers import TrainerCallback

import potstill.train
from potstill.cli import main
from potstill.rollouts.transformers import TransformersRollouts
from potstill.train.checkpoints import StopRequest, checkpoints_in, is_whole, newest_checkpoint
from potstill.train.run import first_measurement
from test_trainer import ROWS, TOKENIZER, make_trainer
from train_fixtures import make_model, write_recipe

OWN = [{**row, "completion_ids": [6, 7, 2]} for row in ROWS]


class StopIn(TrainerCallback):
    """A signal that comes in the middle of a step."""

    def __init__(self, step):
        self.step = step
        self.trainer = None

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            self.trainer.stop.signum = signal.SIGTERM


def long_run(folder, seen, **options):
    """Six steps of three micro-batches of one row, over 2.25 epochs, with dropout, a schedule and a coin."""
    sample = TransformersRollouts(TOKENIZER, max_new_tokens=6)

    def rollouts(model, rows, *, seed):
        completions = sample(model, rows, seed=seed)
        seen.append(([row["prompt_ids"] for row in rows], completions))
        return completions

    defaults = {"max_steps": 6, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "lmbda": 0.5}
    defaults |= {"optim": "adamw_torch", "learning_rate": 1e-2, "lr_scheduler_type": "linear", "train_dataset": OWN}
    return make_trainer(folder, model=make_model(attention_dropout=0.2), rollouts=rollouts, **{**defaults, **options})


def generators():
    # Not Python's: the type checks of the test run draw from it.
    return numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def flat_state(trainer):
    return [
        *trainer.model.parameters(),
        *[value for state in trainer.optimizer.state.values() for value in state.values()],
    ]


@pytest.mark.parametrize("stop", [1, 3, 4, 5], ids="after step {}".format)  # an epoch has 3 steps
def test_a_stopped_and_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, stop):
    whole_seen, seen = [], []
    whole = long_run(tmp_path / "whole", whole_seen)
    whole.train()
    whole_generators = generators()

    stopper = StopIn(stop)
    first = long_run(tmp_path / "parts", seen, callbacks=[stopper])
    stopper.trainer = first
    first.train()
    assert first.stopped and first.state.global_step == stop
    assert [path.name for path in checkpoints_in(tmp_path / "parts")] == [f"checkpoint-{stop}"]

    random.seed(99), numpy.random.seed(99), torch.manual_seed(99)
    second = long_run(tmp_path / "parts", seen)
    second.train(resume_from_checkpoint=str(newest_checkpoint(tmp_path / "parts")))
    assert not second.stopped and second.state.global_step == 6
    assert seen == whole_seen  # order of the data, coin and samples
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(flat_state(second), flat_state(whole), strict=True))
    assert second.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()
    assert generators() == whole_generators
    rows = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    ]
    losses = [[(row["step"], row["loss"], row["grad_norm"]) for row in part if "loss" in row] for part in rows]
    assert losses[0] == losses[1]
    assert [row["step"] for row in rows[1] if "train_runtime" in row] == [6]


def test_metrics_repeat_no_step_after_a_crash(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    make_trainer(tmp_path, max_steps=5, eval_dataset=ROWS, **options).train()
    metrics = tmp_path / "metrics.jsonl"
    other = '{"phase": "warm-up", "step": 5, "loss": 1.0}\n'
    metrics.write_text(other + metrics.read_text() + '{"phase": "distil", "st')  # the crash came in mid-line
    trainer = make_trainer(tmp_path, max_steps=6, eval_dataset=ROWS, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert metrics.read_text().startswith(other)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()[1:]]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "eval_kl" in row] == [2, 4, 6]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_trainer(folder, model=make_model(), max_steps=10, save_strategy="steps", save_steps=5).train()
    assert [path.name for path in checkpoints_in(folder)] == ["checkpoint-10", "checkpoint-5"]
    return folder


FILES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_with_a_file_missing_or_cut_short_is_passed_over(two_checkpoints, name):
    newest, older = checkpoints_in(two_checkpoints)
    assert newest_checkpoint(two_checkpoints) == newest
    path = newest / name
    content = path.read_bytes()
    for size in (0, 4, len(content) // 2, len(content) - 2):
        path.write_bytes(content[:size])
        assert not is_whole(newest) and newest_checkpoint(two_checkpoints) == older, size
    path.unlink()
    assert newest_checkpoint(two_checkpoints) == older
    path.write_bytes(content)
    assert newest_checkpoint(two_checkpoints) == newest


def test_a_checkpoint_whose_configuration_was_cut_short_is_passed_over(two_checkpoints):
    newest, older = checkpoints_in(two_checkpoints)
    content = (newest / "config.json").read_bytes()
    (newest / "config.json").write_bytes(content[: len(content) // 2])
    assert newest_checkpoint(two_checkpoints) == older
    (newest / "config.json").write_bytes(content)


def test_a_checkpoint_that_is_being_overwritten_is_not_whole(two_checkpoints, tmp_path, monkeypatch):
    run = shutil.copytree(two_checkpoints, tmp_path / "run")
    options = {"model": make_model(), "max_steps": 10, "save_strategy": "steps", "save_steps": 5}
    trainer = make_trainer(run, **options)
    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", lambda folder: sys.exit("killed"))
    with pytest.raises(SystemExit, match="killed"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-5"))
    assert newest_checkpoint(run) == run / "checkpoint-5"


def test_shards_adapters_ranks_and_no_checkpoint(two_checkpoints, tmp_path):
    assert newest_checkpoint(tmp_path / "nowhere") is None and newest_checkpoint(tmp_path) is None
    newest, _ = checkpoints_in(two_checkpoints)
    assert not is_whole(newest, world_size=2)
    copy = tmp_path / newest.name
    copy.mkdir()
    for path in newest.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "rng_state_0.pth").write_bytes((copy / "rng_state.pth").read_bytes())
    assert not is_whole(copy, world_size=2)
    (copy / "rng_state_1.pth").write_bytes((copy / "rng_state.pth").read_bytes())
    assert is_whole(copy, world_size=2)
    weights = (copy / "model.safetensors").rename(copy / "adapter_model.safetensors")
    assert is_whole(copy)
    weights.unlink()
    assert not is_whole(copy)
    make_model().save_pretrained(copy, max_shard_size="4KB")
    shards = sorted(copy.glob("model-*.safetensors"))
    assert len(shards) > 1 and is_whole(copy)
    shards[-1].unlink()
    assert not is_whole(copy)


def test_the_second_signal_acts_as_always(capfd):
    stop, before = StopRequest(), signal.getsignal(signal.SIGINT)
    with stop, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        assert stop.signum == signal.SIGINT
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert "finishing the step" in capfd.readouterr().err
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    entered = []
    thread = threading.Thread(target=lambda: entered.append(StopRequest().__enter__()))
    thread.start()
    thread.join()
    assert len(entered) == 1 and signal.getsignal(signal.SIGINT) is before


def test_resume_without_and_start_with_checkpoints_are_refused(tmp_path, capsys):
    recipe = str(write_recipe(tmp_path))
    assert main(["train", recipe, "--resume"]) == 2
    assert "--resume: no whole checkpoint of 1 process(es) in" in capsys.readouterr().err
    saving = ["training.save_strategy=steps", "training.save_steps=2", "training.max_steps=3"]
    saving += ["training.lr_scheduler_type=constant", "training.logging_steps=1"]
    assert main(["train", recipe, *saving]) == 0
    assert main(["train", recipe]) == 2
    assert "has checkpoints of an earlier run, such as checkpoint-3; go on from them with --resume" in (
        capsys.readouterr().err
    )
    # The last checkpoint of a run that is done: measured and saved again, not trained further.
    out = tmp_path / "out"
    weights, table = (out / "model.safetensors").read_bytes(), (out / "README.md").read_text()
    assert main(["train", recipe, *saving, "--resume"]) == 0
    assert (out / "model.safetensors").read_bytes() == weights and (out / "README.md").read_text() == table
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "loss" in row] == [1, 2, 3]


def test_the_first_measurement_outlives_a_line_that_was_cut_short(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert first_measurement(metrics) == {}
    metrics.write_text('{"phase": "distil", "step": 1, "loss": 1.0}\n{"phase": "dis')
    assert first_measurement(metrics) == {}
    metrics.write_text('{"phase": "distil", "step": 0, "eval_kl": 0.5}\n{"phase": "dis')
    assert first_measurement(metrics) == {"eval_kl": 0.5}


def test_steps_that_are_not_finite_end_the_command_with_code_1(tmp_path, monkeypatch, capsys):
    def fail(recipe, *, resume):
        raise FloatingPointError("3 steps in a row")

    monkeypatch.setattr(potstill.train, "run", fail)
    assert main(["train", str(write_recipe(tmp_path))]) == 1
    assert capsys.readouterr().err == "potstill: 3 steps in a row\n"


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_save_and_exit_cleanly(tmp_path, number, code):
    command = [sys.executable, "-m", "potstill.cli", "train", str(write_recipe(tmp_path)), "training.logging_steps=1"]
    process = subprocess.Popen(
        [*command, "training.max_steps=1000000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("distil step 3/"):
            process.send_signal(number)
            break
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "finishing the step" in err and "Traceback" not in err
    (checkpoint,) = checkpoints_in(tmp_path / "out")
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    assert is_whole(checkpoint) and step >= 3
    assert f"stopped after step {step}; to go on, give the same command with --resume" in out
    done = subprocess.run(
        [*command, f"training.max_steps={step + 2}", "--resume"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"going on from {checkpoint}" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, step + 3))
