"""Whole-vocabulary divergences over vocabulary shards: each rank adds up the terms of its own ids.

A row's value is the sum over all ids of f(z - lse, t - lse_t). What ranks exchange, in forward alone: first both
sides' logsumexp, then the value and its derivative by the student's logsumexp, which is all that the gradient of one
rank's columns needs to know of the others':

    d value / d z_j = f'_j + (d value / d lse) * exp(z_j - lse)

Logits are read twice in forward and once in backward, a LinearLogits is multiplied out as often.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from potstill.core.checks import refuse_double_backward
from potstill.core.coarse import coarse_of
from potstill.core.divergences import DIVERGENCES
from potstill.core.numerics import compute_dtype, logsumexp
from potstill.core.operators import outside_graph
from potstill.core.pairs import Pairs, RowLoss
from potstill.core.passes import zero_rows_
from potstill.core.single_pass import LinearGradients, Needs, needs_gradient
from potstill.core.tiles import LinearLogits, first_part, from_parts, parts_of
from potstill.core.topk import top_coarse
from potstill.core.vocab_parallel import VocabShard, add_up, gather


def full_vocab_over_shards(pairs: Pairs, row_loss: RowLoss, mask: Tensor, shard: VocabShard) -> Tensor:
    """per_token [N] of every rank's tiles, differentiable in the student."""
    student, teacher = parts_of(pairs.student), parts_of(pairs.teacher)
    with torch.autocast(mask.device.type, enabled=False):
        given = pairs, row_loss, mask, shard, needs_gradient(pairs.student)
        return outside_graph(_OverShards.apply, *given, *student, *teacher)


def bucket_over_shards(pairs: Pairs, row_loss: RowLoss, mask: Tensor, k: int, shard: VocabShard) -> Tensor:
    """The bucket loss [N] on the teacher's top k ids, differentiable in the student."""
    ids, teacher = top_coarse(pairs.teacher, k, pairs.teacher_reader, shard)
    student = coarse_of(pairs.student, ids, pairs.student_reader, shard)
    sides = (coarse.flatten().scored(mask).all_log_probs for coarse in (student, teacher))
    value = DIVERGENCES[row_loss.divergence].terms(*sides, **row_loss.options).sum(1)
    return torch.where(mask, value * row_loss.scale, 0.0)


class _OverShards(torch.autograd.Function):
    """Keeps the inputs and 3 numbers a row."""

    @staticmethod
    def forward(ctx, pairs, row_loss, mask, shard, needed, *parts):
        lse = _logsumexps(pairs, shard)
        value, slope = add_up(_values(pairs, row_loss, mask, lse, needed), shard)
        ctx.row_loss, ctx.readers, ctx.n_student = row_loss, pairs[2:], len(parts_of(pairs.student))
        ctx.unsaved = parts if any(x is not None and x.is_inference() for x in parts) else ()
        ctx.save_for_backward(mask, lse, slope, *(() if ctx.unsaved else parts))
        return value

    @staticmethod
    def backward(ctx, upstream):
        refuse_double_backward()
        mask, lse, slope, *parts = ctx.saved_tensors
        parts = ctx.unsaved or parts
        n = ctx.n_student
        pairs = Pairs(from_parts(parts[:n]), from_parts(parts[n:]), *ctx.readers)
        tiles, student = _gradients(pairs, ctx.row_loss, mask, lse, slope, upstream), pairs.student
        if isinstance(student, LinearLogits):
            grads = _linear_gradients(student, mask, tiles, ctx.needs_input_grad[5:8])
        else:
            grads = (_logits_gradient(student, mask, tiles),)
        return None, None, None, None, None, *grads, *[None] * (len(parts) - n)


def _logsumexps(pairs: Pairs, shard: VocabShard) -> Tensor:
    """logsumexp [2, N] of student and teacher over the ids of all ranks."""
    first = first_part(pairs.student)
    n_rows = first.shape[:-1].numel()
    own = torch.empty((2, n_rows), dtype=compute_dtype(first.dtype), device=first.device)
    for rows, student, teacher in pairs.pieces():
        for tile, student_z, teacher_z in pairs.tiles(student, teacher):
            own[:, rows][:, tile] = torch.stack([logsumexp(student_z), logsumexp(teacher_z)])
    return logsumexp(torch.stack(gather(own, shard)), 0)


def _terms(
    row_loss: RowLoss, student_z: Tensor, teacher_z: Tensor, student_lse: Tensor, teacher_lse: Tensor, mask: Tensor
) -> Tensor:
    """The part [C] of each row's value that is of this rank's ids; 0 at unscored rows."""
    student, teacher = (
        z.masked_fill(~mask[:, None], 0.0) - lse.masked_fill(~mask, 0.0)[:, None]
        for z, lse in ((student_z, student_lse), (teacher_z, teacher_lse))
    )
    value = DIVERGENCES[row_loss.divergence].terms(student, teacher, **row_loss.options).sum(1)
    return torch.where(mask, value * row_loss.scale, 0.0)


def _values(pairs: Pairs, row_loss: RowLoss, mask: Tensor, lse: Tensor, needed: bool) -> Tensor:
    """This rank's part [2, N] of each row's value and, if needed, of its derivative by the student's logsumexp."""
    own = torch.zeros_like(lse)
    for rows, student, teacher in pairs.pieces():
        for tile, student_z, teacher_z in pairs.tiles(student, teacher):
            given = lse[:, rows][:, tile]
            with torch.set_grad_enabled(needed):
                student_lse = given[0].clone().requires_grad_(needed)
                value = _terms(row_loss, student_z, teacher_z, student_lse, given[1], mask[rows][tile])
            own[0, rows][tile] = value.detach()
            if needed:
                (own[1, rows][tile],) = torch.autograd.grad(value, student_lse, torch.ones_like(value))
    return own


def _gradients(
    pairs: Pairs, row_loss: RowLoss, mask: Tensor, lse: Tensor, slope: Tensor, upstream: Tensor
) -> Iterator[tuple[slice, slice, Tensor, list[Tensor]]]:
    """Yield (rows of a piece, rows of a tile in it, gradient [C, V] by the raw student, that piece of the student)."""
    reader = pairs.student_reader
    for rows, student, teacher in pairs.pieces():
        for tile, student_z, teacher_z in pairs.tiles(student, teacher):
            scored, up, given = mask[rows][tile], upstream[rows][tile], lse[:, rows][:, tile]
            derivative = reader.transform.derivative(student_z, reader.temperature)
            with torch.enable_grad():
                z = student_z.detach().requires_grad_()
                value = _terms(row_loss, z, teacher_z, given[0], given[1], scored)
            (d_z,) = torch.autograd.grad(value, z, up)
            d_z = d_z + (up * slope[rows][tile])[:, None] * (student_z - given[0][:, None]).exp()
            # A NaN in an unscored row survives the factors, so its zeros come last.
            zero_rows_(d_z.mul_(derivative), (up == 0) | ~scored)
            yield rows, tile, d_z, student


def _logits_gradient(logits: Tensor, mask: Tensor, tiles: Iterator[tuple[slice, slice, Tensor, Any]]) -> Tensor:
    d_logits = torch.zeros_like(logits, memory_format=torch.contiguous_format)
    out = d_logits.view(len(mask), logits.shape[-1])
    for rows, tile, d_z, _ in tiles:
        out[rows][tile, : d_z.shape[1]] = d_z
    return d_logits


def _linear_gradients(
    linear: LinearLogits, mask: Tensor, tiles: Iterator[tuple[slice, slice, Tensor, list[Tensor]]], needs: Needs
) -> tuple[Tensor | None, ...]:
    shape, dtype = linear.hidden.shape, linear.hidden.dtype
    hidden = linear.hidden.reshape(-1, shape[-1]).masked_fill(~mask[:, None], 0.0)
    grads = LinearGradients.zeros(linear, needs)
    for rows, tile, d_z, raw in tiles:
        raw[0][tile] = d_z
        if tile.stop == rows.stop - rows.start:  # the piece is its own gradient now
            grads.add(raw[0], hidden[rows], linear.weight, rows)
    d_hidden, d_weight, d_bias = (x if x is None else x.to(dtype) for x in grads)
    return d_hidden if d_hidden is None else d_hidden.view(shape), d_weight, d_bias
