"""What torch.compile sees of the core: coarse logits as one operator, everything else outside the graph.

Used only while compiling. As an operator the loop over tiles is not unrolled, a new number of rows compiles nothing
anew, and fullgraph=True works; it runs the two functions of coarse.py that eager code runs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from potstill.core.coarse import coarse_backward, coarse_forward
from potstill.core.numerics import compute_dtype
from potstill.core.tiles import TileReader
from potstill.core.transform import LogitTransform


def outside_graph(function: Callable, *args: Any) -> Any:
    """function(*args); while compiling as a graph break, for what torch.compile need not look into."""
    if torch.compiler.is_compiling():
        return torch._dynamo.disable(function)(*args)
    return function(*args)


@torch.library.custom_op("potstill::coarse", mutates_args=())
def coarse_op(
    first: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    token_ids: Tensor,
    entropy: bool,
    scale: float,
    softcap: float | None,
    temperature: float,
    width: int,
    chunk_size: int | None,
    real: int,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """selected, total, shift and rest_mean; the arguments spell out a LinearLogits (or logits) and a TileReader."""
    reader = TileReader(LogitTransform(scale, softcap), temperature, width, chunk_size, real, fused)
    return coarse_forward(_parts(first, weight, bias), token_ids, reader, entropy)


@torch.library.custom_op("potstill::coarse_backward", mutates_args=())
def coarse_backward_op(
    d_selected: Tensor,
    d_total: Tensor,
    d_rest_mean: Tensor,
    shift: Tensor,
    total: Tensor,
    rest_mean: Tensor,
    first: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    token_ids: Tensor,
    entropy: bool,
    scale: float,
    softcap: float | None,
    temperature: float,
    width: int,
    chunk_size: int | None,
    real: int,
    fused: bool,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients that are needed, in the order of the parts."""
    reader = TileReader(LogitTransform(scale, softcap), temperature, width, chunk_size, real, fused)
    upstream, numbers = (d_selected, d_total, d_rest_mean), (shift, total, rest_mean)
    parts = _parts(first, weight, bias)
    grads = coarse_backward(parts, token_ids, reader, entropy, numbers, upstream, needs[: len(parts)])
    return [grad for grad in grads if grad is not None]


@coarse_op.register_fake
def _(first, weight, bias, token_ids, entropy, *_):
    n_rows, k = token_ids.shape
    new = lambda *shape: first.new_empty(shape, dtype=compute_dtype(first.dtype))  # noqa: E731
    return new(n_rows, k), new(n_rows), new(n_rows), new(n_rows if entropy else 0)


@coarse_backward_op.register_fake
def _(d_selected, d_total, d_rest_mean, shift, total, rest_mean, first, weight, bias, *args):
    parts = (first, weight, bias)
    return [
        torch.empty_like(part, memory_format=torch.contiguous_format)
        for part, needed in zip(parts, args[-1], strict=True)
        if needed
    ]


def _setup_context(ctx, inputs, output):
    first, weight, bias, token_ids, *settings = inputs
    _, total, shift, rest_mean = output
    ctx.save_for_backward(shift, total, rest_mean, first, weight, bias, token_ids)
    ctx.settings = settings
    ctx.mark_non_differentiable(shift)


def _backward(ctx, d_selected, d_total, _, d_rest_mean):
    needs = list(ctx.needs_input_grad[:3])
    saved = ctx.saved_tensors
    grads = iter(coarse_backward_op(d_selected, d_total, d_rest_mean, *saved, *ctx.settings, needs))
    return *(next(grads) if needed else None for needed in needs), *[None] * (1 + len(ctx.settings))


coarse_op.register_autograd(_backward, setup_context=_setup_context)


def _parts(first: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    return (first,) if weight is None else (first, weight, bias)
