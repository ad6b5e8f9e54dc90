"""Losses on LinearLogits with their gradients formed in forward, while each tile is there: three GEMMs in all.

For every piece of rows: multiply, take the coarse numbers, let the loss run on them, turn the tile into its own
gradient, and multiply it into the gradients of hidden and weight. No [N, V] tensor, and nothing to recompute.
What it costs: the weight's gradient accumulates in float32 (4 V H bytes; a 16-bit result is written into the
front of the same storage and returned as a view of it), and only the scalar loss can be differentiated, once.
Use memory="recompute" where that does not fit.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from potstill.core.checks import refuse_double_backward
from potstill.core.coarse import CoarseLogits
from potstill.core.metrics import RowNumbers
from potstill.core.numerics import compute_dtype
from potstill.core.operators import outside_graph
from potstill.core.passes import gradient, idle_rows, join, statistics
from potstill.core.rows import RowWeights
from potstill.core.tiles import LinearLogits, Logits, TileReader, budget, chunk_bounds, parts_of
from potstill.core.vocab_parallel import VocabShard

WEIGHT_BLOCK = 16384  # vocabulary rows whose float32 update is in memory at a time
MOST_PIECES = 8  # over vocabulary shards each piece of rows is one all-reduce

Needs = tuple[bool, bool, bool]
"""Which of hidden, weight and bias need a gradient."""

Form = Callable[[LinearLogits, Needs, Tensor], tuple[tuple[Tensor, ...], "LinearGradients"]]
"""From the parts and a factor [N]: numbers of each row, per_token first, and the gradients of per_token @ factor."""

Score = Callable[[CoarseLogits, slice], RowNumbers]
"""The loss of some rows: their coarse logits and which rows they are, to their numbers."""


def needs_gradient(logits: Logits) -> bool:
    """Whether a backward through any part can follow."""
    return torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in parts_of(logits))


def single_pass_pays(linear: LinearLogits, memory: str, shard: VocabShard | None = None) -> bool:
    """Whether a loss forms its gradients in forward: what `memory` names, or the rule behind "auto".

    "auto" recomputes where the weight's gradient is needed and 6 V H bytes exceed this device's budget, over
    vocabulary shards, or under torch.compile. Without a gradient to form there is nothing to choose.
    """
    if memory == "recompute" or not needs_gradient(linear):
        return False
    if memory == "single_pass":
        return True
    weight = linear.weight
    fits = not weight.requires_grad or 6 * weight.numel() <= budget(weight.device).weight_gradient
    return fits and (shard is None or shard.size == 1) and not torch.compiler.is_compiling()


def single_pass(form: Form, linear: LinearLogits, weights: RowWeights) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss sum(per_token * weights.factor) and the row numbers of `form`; differentiable in `linear`, once."""
    with torch.autocast(linear.hidden.device.type, enabled=False):
        loss, *rows = outside_graph(_SinglePass.apply, form, weights, *linear)
    return loss, tuple(rows)


def form_coarse(
    linear: LinearLogits,
    needs: Needs,
    factor: Tensor,
    *,
    token_ids: Tensor,
    reader: TileReader,
    score: Score,
    entropy: bool,
    shard: VocabShard | None,
) -> tuple[RowNumbers, "LinearGradients"]:
    """The numbers of every row from its coarse logits, and the gradients of sum(per_token * factor)."""
    hidden = linear.hidden.reshape(-1, linear.hidden.shape[-1])
    grads = LinearGradients.zeros(linear, needs)
    pieces = []
    own_ids = token_ids if shard is None else shard.local(token_ids)
    for start, stop, product in reader.products(linear, MOST_PIECES if shard is not None and shard.size > 1 else None):
        rows = slice(start, stop)
        selected, total, shift, rest_mean = statistics(product, own_ids[rows], reader, entropy)
        with torch.enable_grad():
            inputs = selected.requires_grad_(), total.requires_grad_()
            coarse = CoarseLogits.of(*inputs, shift, rest_mean if entropy else None)
            numbers = score(coarse.joined(token_ids[rows], shard), rows)
        d_selected, d_total = torch.autograd.grad(numbers.per_token, inputs, factor[rows])
        upstream = d_selected, d_total, None
        pieces.append(tuple(x.detach() for x in numbers))
        gradient(product, own_ids[rows], reader, (shift, total.detach(), None), upstream, out=product)
        grads.add(product, hidden[rows].masked_fill(idle_rows(upstream)[:, None], 0.0), linear.weight, rows)
    return RowNumbers(*join(pieces)), grads


class LinearGradients(NamedTuple):
    """Gradients of hidden [N, H], weight [V, H] and bias [V], the last two in float32; None where not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def zeros(cls, linear: LinearLogits, needs: Needs) -> "LinearGradients":
        """Room for the gradients that are needed."""
        hidden, weight, bias = linear
        return cls(
            hidden.new_empty(math.prod(hidden.shape[:-1]), hidden.shape[-1]) if needs[0] else None,
            weight.new_zeros(weight.shape, dtype=compute_dtype(weight.dtype)) if needs[1] else None,
            torch.zeros_like(bias, dtype=compute_dtype(weight.dtype)) if needs[2] and bias is not None else None,
        )

    def add(self, d_raw: Tensor, hidden: Tensor, weight: Tensor, rows: slice) -> None:
        """Take in the rows of dL/d raw [C, v], which is there only now."""
        width = d_raw.shape[1]
        if self.hidden is not None:
            torch.mm(d_raw, weight[:width], out=self.hidden[rows])
        if self.weight is not None and self.weight.dtype == hidden.dtype:
            torch.addmm(self.weight[:width], d_raw.t(), hidden, out=self.weight[:width])
        elif self.weight is not None:
            for start, stop in chunk_bounds(width, WEIGHT_BLOCK):
                self.weight[start:stop] += d_raw[:, start:stop].t() @ hidden
        if self.bias is not None:
            self.bias[:width] += d_raw.sum(0, dtype=self.bias.dtype)


def scale_into(grad: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """grad * scale in `dtype`, in place: a narrower result is a view of the front of the same storage.

    float64, which is for checking gradients and not for training, is left alone so that it can be asked for again.
    """
    if grad.dtype == torch.float64:
        return grad * scale
    grad.mul_(scale)
    if grad.dtype == dtype:
        return grad
    flat = grad.view(-1)
    narrow = flat.view(dtype)[: flat.numel()]
    for start, stop in chunk_bounds(flat.numel(), WEIGHT_BLOCK * 256):
        narrow[start:stop] = flat[start:stop].clone()  # never ahead of what is still to be read
    return narrow.view(grad.shape)


class _SinglePass(torch.autograd.Function):
    """Forward keeps the gradients that `form` gives, backward scales them by the loss's own."""

    @staticmethod
    def forward(ctx, form, weights, *parts):
        ctx.set_materialize_grads(False)
        linear = LinearLogits(*parts)
        # Gradients are kept in units of a power of two, near 1 whatever the token count: float16 does not underflow,
        # and taking the unit back is exact.
        largest = weights.factor.abs().amax() if weights.factor.numel() else weights.per_row
        unit = torch.where(largest > 0, largest, 1.0).log2().floor().exp2()
        rows, grads = form(linear, tuple(ctx.needs_input_grad[2:]), weights.factor / unit)
        ctx.save_for_backward(unit, *grads)
        ctx.hidden_shape, ctx.dtype, ctx.spent = linear.hidden.shape, linear.hidden.dtype, False
        ctx.mark_non_differentiable(*rows[1:])
        return weights.total(rows[0]), *rows

    @staticmethod
    def backward(ctx, d_loss, d_per_token, *_):
        refuse_double_backward()
        if d_per_token is not None:
            raise RuntimeError(
                "single_pass forms gradients for `loss` alone, but a gradient arrived for `per_token`: pass "
                'memory="recompute" (or logits, in full_vocab), or weigh the rows with token_weights'
            )
        if ctx.spent and ctx.dtype != torch.float64:
            raise RuntimeError(
                'single_pass keeps its gradients for one backward; pass memory="recompute" for a second one'
            )
        ctx.spent = True
        unit, *grads = ctx.saved_tensors
        if d_loss is None:
            return (None,) * 5
        d_hidden, d_weight, d_bias = (x if x is None else scale_into(x, d_loss * unit, ctx.dtype) for x in grads)
        return None, None, d_hidden if d_hidden is None else d_hidden.view(ctx.hidden_shape), d_weight, d_bias
