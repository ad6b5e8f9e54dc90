"""Two ranks train like one process: the loss is normalised by the token count of all ranks."""

import json
import os
import signal
import socket

import pytest
import torch
from torch.multiprocessing import spawn
from transformers import AutoModelForCausalLM, TrainerCallback

from potstill.teachers.local import LocalTeacher
from potstill.train import DistillationTrainer, load_recipe, run
from potstill.train.checkpoints import newest_checkpoint
from potstill.train.losses import topk_loss
from test_trainer import OWN, PLAIN, ROWS, TOKENIZER, arguments, make_trainer
from train_fixtures import make_model, write_recipe


def uneven_completions(model, rows, *, seed):
    """Of the row alone, so that ranks and one process see the same; rank 1's second half has no tokens at all."""
    return [[5, 6, 7, 8, 9, 2][: row["prompt_ids"][1] % 6] for row in rows]


def train(folder, **options):
    trainer = DistillationTrainer(
        make_model().double(),
        arguments(folder, **options),
        teacher=LocalTeacher(make_model(seed=1, hidden=24).double(), PLAIN, top_k=4),
        rollouts=uneven_completions,
        train_dataset=ROWS,
        processing_class=TOKENIZER,
    )
    trainer.train()
    trainer.save_model()


def rank_main(rank, port, folder, recipe):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", OMP_NUM_THREADS="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    train(folder / "two", per_device_train_batch_size=2, gradient_accumulation_steps=2, ddp_backend="gloo")
    run(load_recipe(recipe, ["warmup.steps=3", "training.ddp_backend=gloo", "training.logging_steps=1"]))
    one_rank_in_trouble(rank, folder)
    torch.distributed.destroy_process_group()


def one_rank_in_trouble(rank, folder):
    """Rank 1 alone has an infinite loss in step 2, rank 0 alone gets a signal in step 3; both do the same."""

    class Weights(TrainerCallback):
        def __init__(self):
            self.after = []

        def on_step_begin(self, args, state, control, **kwargs):
            if rank == 0 and state.global_step + 1 == 3 and not resuming:
                trainer.stop.signum = signal.SIGTERM

        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.after.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))

    def loss(logits, batch, **options):
        output = topk_loss(logits, batch, **options)
        if rank == 1 and trainer.state.global_step + 1 == 2:  # infinite, with gradients that are not
            return output._replace(loss=output.loss + torch.inf)
        return output

    folder = folder / "trouble"
    for resuming in (False, True):
        weights = Weights()
        own = {"loss": loss, "callbacks": [weights], "train_dataset": OWN, "lmbda": 0.5}
        options = {"per_device_train_batch_size": 2, "max_steps": 5, "ddp_backend": "gloo"}
        trainer = make_trainer(folder, **own, **options)
        newest = newest_checkpoint(folder, world_size=2)
        assert resuming == (newest is not None)
        trainer.train(resume_from_checkpoint=str(newest) if newest else None)
        others = [torch.zeros_like(weights.after[-1]) for _ in range(2)]
        torch.distributed.all_gather(others, weights.after[-1])
        assert torch.equal(*others)
        if not resuming:
            assert trainer.stopped and trainer.state.global_step == 3
            assert torch.equal(weights.after[0], weights.after[1]) and not torch.equal(*weights.after[1:])
            assert (folder / f"skipped-step-2-rank-{rank}.pt").exists()
        else:
            assert not trainer.stopped and trainer.state.global_step == 5 and len(weights.after) == 2


@pytest.mark.slow
def test_two_ranks_equal_one_process(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    recipe = write_recipe(tmp_path)
    spawn(rank_main, args=(port, tmp_path, recipe), nprocs=2)
    train(tmp_path / "one", per_device_train_batch_size=8)
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("one", "two"))
    for name, weight in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], weight, rtol=0, atol=1e-12, msg=name)
    logs = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    for ours, theirs in zip(*([row for row in rows if "loss" in row] for rows in logs), strict=True):
        for name in ("loss", "student_mass", "teacher_mass", "grad_norm"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-5), name
    steps = [json.loads(line) for line in (tmp_path / "trouble" / "metrics.jsonl").read_text().splitlines()]
    skipped = [(row["step"], row["skipped_steps"]) for row in steps if "loss" in row]
    assert skipped == [(1, 0), (2, 1), (3, 0), (4, 0), (5, 0)]
    # A whole recipe, warm-up and held-out prompts included, wrote one model and one set of metrics.
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 1, 2, 3, 4]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 2
