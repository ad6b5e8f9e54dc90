"""Two ranks train like one process: the loss is normalised by the token count of all ranks."""

import json
import os
import socket

import pytest
import torch
from torch.multiprocessing import spawn
from transformers import AutoModelForCausalLM

from potstill.teachers.local import LocalTeacher
from potstill.train import DistillationTrainer, load_recipe, run
from test_trainer import PLAIN, ROWS, TOKENIZER, arguments
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
    torch.distributed.destroy_process_group()


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
    # A whole recipe, warm-up and held-out prompts included, wrote one model and one set of metrics.
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 1, 2, 3, 4]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 2
