"""How a step is laid out changes neither its loss nor its gradient: padding, width, order, cuts."""

import pytest
import torch

from potstill.rollouts.transformers import TransformersRollouts
from potstill.train.batch import make_batch
from test_trainer import ROWS, TOKENIZER, make_trainer
from train_fixtures import make_model


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return make_trainer(tmp_path_factory.mktemp("out"))


@pytest.fixture(scope="module")
def completions():
    """Of several lengths, one of them without EOS, one empty, one only of EOS."""
    sampled = TransformersRollouts(TOKENIZER, max_new_tokens=6)(make_model().double(), ROWS, seed=0)
    return [*sampled[:5], [5, 6, 7, 8, 9, 4], [], [2]]


def lay_out(rows, completions, left=0, right=0):
    """A batch with so many columns of padding on either side, which hold ids that would be seen if they were read."""
    batch = make_batch([row["prompt_ids"] for row in rows], completions, eos_token_ids=[2], pad_token_id=0)
    width = batch["input_ids"].shape[1]

    def pad(name, value):
        return torch.nn.functional.pad(batch[name], (left, right), value=value)

    rows_of, columns = batch["scored_rows"] // width, batch["scored_rows"] % width
    return {
        **batch,
        "input_ids": pad("input_ids", 9),
        "attention_mask": pad("attention_mask", 0),
        "position_ids": pad("position_ids", 0),
        "score_mask": pad("score_mask", False),
        "scored_rows": rows_of * (left + width + right) + left + columns,
    }


def left_aligned(rows, completions):
    """Every row pushed to the right edge: padding on its left, as wide as the row is short."""
    batch = make_batch([row["prompt_ids"] for row in rows], completions, eos_token_ids=[2], pad_token_id=0)
    width = batch["input_ids"].shape[1]
    shift = width - batch["attention_mask"].sum(1, keepdim=True)
    source = (torch.arange(width) - shift) % width  # [B, S], the column that each one comes from
    moved = {name: batch[name].gather(1, source) for name in ("input_ids", "attention_mask", "score_mask")}
    positions = (moved["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return {**batch, **moved, "position_ids": positions, "scored_rows": moved["score_mask"].flatten().nonzero()[:, 0]}


def loss_and_gradients(trainer, batches, num_tokens):
    trainer.model.zero_grad()
    losses = []
    for batch in batches:
        batch = {**batch, "teacher": trainer.teacher(batch)}
        losses.append(trainer.compute_loss(trainer.model, batch, num_items_in_batch=num_tokens))
        losses[-1].backward()
    return sum(losses).detach(), {name: weight.grad.clone() for name, weight in trainer.model.named_parameters()}


def permuted(values):
    return [values[index] for index in (3, 7, 0, 6, 2, 5, 1, 4)]


LAYOUTS = {
    "wider on the right": lambda rows, texts: [lay_out(rows, texts, right=3)],
    "wider on the left": lambda rows, texts: [lay_out(rows, texts, left=4)],
    "wider on both sides": lambda rows, texts: [lay_out(rows, texts, left=2, right=5)],
    "padded on the left": lambda rows, texts: [left_aligned(rows, texts)],
    "another order of rows": lambda rows, texts: [lay_out(permuted(rows), permuted(texts))],
    "micro-batches of 4": lambda rows, texts: [lay_out(rows[i : i + 4], texts[i : i + 4]) for i in (0, 4)],
    "micro-batches of 1, of many widths": lambda rows, texts: [
        lay_out(rows[i : i + 1], texts[i : i + 1], right=i) for i in range(8)
    ],
    "uneven micro-batches in another order": lambda rows, texts: [
        lay_out(permuted(rows)[part], permuted(texts)[part]) for part in (slice(0, 3), slice(3, 8))
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_do_not_depend_on_the_layout(trainer, completions, layout):
    plain = lay_out(ROWS, completions)
    num_tokens = len(plain["scored_rows"])
    expected, gradients = loss_and_gradients(trainer, [plain], num_tokens)
    assert expected > 0.1 and num_tokens > 10
    batches = LAYOUTS[layout](ROWS, completions)
    assert sum(len(batch["scored_rows"]) for batch in batches) == num_tokens
    loss, others = loss_and_gradients(trainer, batches, num_tokens)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 1e-6, name
        torch.testing.assert_close(others[name], gradient, rtol=0, atol=1e-13, msg=name)


def test_the_layouts_are_what_they_say():
    batch = left_aligned(ROWS[:3], [[5, 2], [6], [7, 8, 2]])
    assert batch["attention_mask"].tolist() == [[0, 0, 0, 1, 1, 1, 1], [0] * 3 + [1] * 4, [1] * 7]
    assert batch["position_ids"][0].tolist() == [0, 0, 0, 0, 1, 2, 3]
    assert batch["input_ids"].flatten()[batch["scored_rows"] + 1].tolist() == batch["target_ids"].tolist()
    batch = lay_out(ROWS[:2], [[5, 2], [6]], left=1, right=2)
    assert batch["input_ids"].flatten()[batch["scored_rows"] + 1].tolist() == batch["target_ids"].tolist()
    assert batch["score_mask"].flatten().nonzero()[:, 0].tolist() == batch["scored_rows"].tolist()


@pytest.mark.parametrize("size", [4, 2, 1])
def test_accumulated_gradients_are_those_of_one_batch(tmp_path, completions, size):
    """The same through Trainer's own loop: what clipping and optimiser see after accumulation."""
    seen = []

    def keep_gradients(folder, size):
        trainer = make_trainer(
            folder,
            rollouts=lambda model, rows, *, seed: [completions[ROWS.index(row)] for row in rows],
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
            max_steps=1,
        )
        clip = trainer._get_grad_norm
        trainer._get_grad_norm = lambda model, grad_norm=None: (
            seen.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
            or clip(model, grad_norm)
        )
        trainer.train()

    keep_gradients(tmp_path / "whole", 8)
    keep_gradients(tmp_path / "parts", size)
    for name, gradient in seen[0].items():
        torch.testing.assert_close(seen[1][name], gradient, rtol=0, atol=1e-13, msg=name)
