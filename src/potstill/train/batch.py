"""Prompts and completions as tensors. The only place that knows that row s predicts token s + 1."""

from collections.abc import Collection, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from potstill.rollouts.dataset import PromptRow
from potstill.rollouts.transformers import cut_after_eos, pad_id, stop_token_ids


class Layout(TypedDict):
    """B sequences, padded on the right to S tokens; N scored rows.

    A row of the model's output is scored if the *next* token belongs to the completion: its logits are what is
    compared with the teacher's. The first EOS is scored; prompt, padding and all after the first EOS are not.
    """

    input_ids: Tensor  # [B, S] int64
    attention_mask: Tensor  # [B, S] int64, 0 at padding
    position_ids: Tensor  # [B, S] int64
    score_mask: Tensor  # [B, S] bool
    scored_rows: Tensor  # [N] int64, where score_mask is true in the flattened [B * S]
    target_ids: Tensor  # [N] int64, the token that each scored row predicts


class Batch(Layout):
    """A layout with what it was made from, for teachers that read more than tensors."""

    rows: list[PromptRow]  # B
    completions: list[list[int]]  # B, up to the first EOS; together N tokens, in the order of the scored rows
    token_weights: Tensor | None  # [N] float32, of rows that have a `weight`


def make_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    eos_token_ids: Collection[int],
    pad_token_id: int,
) -> Layout:
    """Lay out prompts and completions side by side.

    Args:
        prompts: token ids, at least one per prompt, since no row predicts a first token.
        completions: token ids, one completion per prompt; what follows the first EOS is left out. A completion
            without EOS, cut short by its maximal length, is scored as a whole.
        eos_token_ids: ids that end a completion.
        pad_token_id: any valid id: masks come from lengths, never from comparing with it.

    Raises:
        ValueError: a prompt is empty, or the numbers of prompts and completions differ.
    """
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts but {len(completions)} completions; give one completion per prompt")
    completions = [cut_after_eos(completion, eos_token_ids) for completion in completions]
    lengths = [len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True)]
    shape = (len(prompts), max(lengths, default=0))
    input_ids = torch.full(shape, pad_token_id)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    score_mask = torch.zeros(shape, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if not prompt:
            raise ValueError(f"prompt {row} is empty; begin it with the tokenizer's BOS token")
        input_ids[row, : lengths[row]] = torch.tensor([*prompt, *completion])
        attention_mask[row, : lengths[row]] = 1
        score_mask[row, len(prompt) - 1 : lengths[row] - 1] = True
    scored_rows = score_mask.flatten().nonzero().squeeze(1)
    return Layout(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=torch.arange(shape[1]).expand(shape).contiguous(),
        score_mask=score_mask,
        scored_rows=scored_rows,
        target_ids=input_ids.flatten()[scored_rows + 1],
    )


def as_teacher_reads(batch: Batch) -> Batch:
    """The batch with the prompts that rows have for their teacher; the scored tokens are the same, in their order."""
    if not any("teacher_prompt_ids" in row for row in batch["rows"]):
        return batch
    rows: list[PromptRow] = [
        {**row, "prompt_ids": row.get("teacher_prompt_ids", row["prompt_ids"])} for row in batch["rows"]
    ]
    # Completions have been cut where they end, and any id will do for padding.
    layout = make_batch([row["prompt_ids"] for row in rows], batch["completions"], eos_token_ids=(), pad_token_id=0)
    device = batch["input_ids"].device
    tensors: Any = {name: tensor.to(device) for name, tensor in layout.items()}  # type: ignore[attr-defined]
    return {**batch, **tensors, "rows": rows}


def batch_for(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[PromptRow],
    completions: Sequence[Sequence[int]],
) -> Batch:
    """`make_batch` with the EOS and padding tokens of model and tokenizer, on the model's device."""
    eos_token_ids = stop_token_ids(model, tokenizer)
    layout = make_batch(
        [row["prompt_ids"] for row in rows],
        completions,
        eos_token_ids=eos_token_ids,
        pad_token_id=pad_id(tokenizer, eos_token_ids),
    )
    tensors: Any = {name: tensor.to(model.device) for name, tensor in layout.items()}  # type: ignore[attr-defined]
    cut = [cut_after_eos(completion, eos_token_ids) for completion in completions]
    weights = None
    if any("weight" in row for row in rows):
        per_row = torch.tensor([row.get("weight", 1.0) for row in rows])
        weights = per_row.repeat_interleave(torch.tensor([len(x) for x in cut])).to(model.device)
    return Batch(  # type: ignore[typeddict-item]
        **tensors, rows=list(rows), completions=cut, token_weights=weights
    )
