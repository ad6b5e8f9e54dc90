"""Coarse logits: at each position K selected logits, and one number for all the others.

    selected_k = z[token_ids_k]        rest = logsumexp of z over every id that is not selected

The softmax of these K + 1 numbers is the model's exact distribution over "one of the K ids, or anything else".
Every top-k loss is ordinary PyTorch on them, so this file holds the only hand-written gradient:

    dL/dz_j = g_selected_k                        where j = token_ids_k
    dL/dz_j = g_rest * exp(z_j - rest)            elsewhere

    plus g_rest_mean * exp(z_j - rest) * (1 + z_j - rest_mean) where the entropy is asked for

What it costs. Logits: nothing of size [N, V] is kept but the caller's own tensor, backward allocates the
gradient and one tile. LinearLogits: no [N, V] at all; backward multiplies again, over vocabulary tiles that hold
all rows, so that each piece of the weight's gradient is one GEMM (4 GEMMs in all instead of 3).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from potstill.core.checks import check_choice, check_reusable, check_token_ids, refuse_double_backward
from potstill.core.entry import enter
from potstill.core.kernel_choice import use_compiled
from potstill.core.numerics import INF, logsumexp
from potstill.core.passes import gradient, join, linear_gradients, statistics
from potstill.core.tiles import (
    LinearLogits,
    Logits,
    TileReader,
    from_parts,
    parts_of,
    read_as,
    row_shape,
    vocab_width,
)
from potstill.core.transform import LogitTransform
from potstill.core.vocab_parallel import VocabShard, combine


class CoarseLogits(NamedTuple):
    """The K + 1 numbers of each row, and what follows from them. Differentiable; in nats.

    Shapes: selected [..., K] (-inf in empty slots), rest [...] (-inf where every id is selected), rest_mean
    [...] (mean of z under the softmax over the rest, 0 where there is none) or None; rest_error [...] is what
    float32 took from rest, so that log-probabilities do not lose what the size of the logits costs.
    """

    selected: Tensor
    rest: Tensor
    rest_mean: Tensor | None = None
    rest_error: Tensor | None = None

    @classmethod
    def of(cls, selected: Tensor, total: Tensor, shift: Tensor, rest_mean: Tensor | None = None) -> "CoarseLogits":
        """From the total of exp(z - shift) over the rest, 0 where there is none."""
        some = total > 0
        wide = torch.float32 if total.device.type == "mps" else torch.float64  # N numbers; there is no float64 on MPS
        exact = total.masked_fill(~some, 1.0).to(wide).log() + shift
        rest = exact.to(total.dtype)
        with torch.no_grad():
            error = (exact - rest).to(total.dtype)
            none = total - INF  # -inf where the total is 0, NaN where it is NaN; a row of that gets no gradient here
        return cls(selected, torch.where(some, rest, none), rest_mean, torch.where(some, error, 0.0))

    def flatten(self) -> "CoarseLogits":
        """The same with the leading dimensions as one."""
        k = self.selected.shape[-1]
        return self.map_rows(lambda x: x.reshape(-1))._replace(selected=self.selected.reshape(self.rest.numel(), k))

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> "CoarseLogits":
        """The same with every number of a row [...] changed, and the selected ones as they are."""
        rest_mean, rest_error = (None if x is None else change(x) for x in (self.rest_mean, self.rest_error))
        return CoarseLogits(self.selected, change(self.rest), rest_mean, rest_error)

    def scored(self, mask: Tensor) -> "CoarseLogits":
        """With zeros in the rows that mask [...] leaves out, which may hold NaN: their gradient is exactly 0."""
        others = self.map_rows(lambda x: torch.where(mask, x, 0.0))
        return others._replace(selected=torch.where(mask.unsqueeze(-1), self.selected, 0.0))

    def joined(self, token_ids: Tensor, shard: VocabShard | None) -> "CoarseLogits":
        """Those of the whole vocabulary, from every rank's own at the global ids; the same without a shard.

        Over shards rest_error is lost: float32 log-probabilities then err by half a unit of the logits' last place.
        """
        if shard is None:
            return self
        return CoarseLogits(*combine(shard, token_ids, self.selected, self.rest, self.rest_mean))

    @property
    def all_log_probs(self) -> Float[Tensor, "... categories"]:
        """Log-probabilities [..., K + 1] of the ids and, last, of anything else."""
        z = torch.cat([self.selected, self.rest.unsqueeze(-1)], -1)
        z = z - z.detach().amax(-1, keepdim=True).round()  # a whole number: exact, where subtracting the peak is not
        if self.rest_error is not None:
            z = torch.cat([z[..., :-1], (z[..., -1] + self.rest_error).unsqueeze(-1)], -1)
        return z - torch.logsumexp(z, -1, keepdim=True)

    @property
    def log_probs(self) -> Float[Tensor, "... k"]:
        """log q at the selected ids: softmax over the whole vocabulary, exact."""
        return self.all_log_probs[..., :-1]

    @property
    def rest_log_prob(self) -> Float[Tensor, "..."]:
        """log of the mass outside the selected ids: exact, no `1 - Q`, no epsilon."""
        return self.all_log_probs[..., -1]

    @property
    def lse(self) -> Float[Tensor, "..."]:
        """logsumexp of z over the whole vocabulary."""
        return logsumexp(torch.cat([self.selected, self.rest.unsqueeze(-1)], -1))

    @property
    def entropy(self) -> Float[Tensor, "..."]:
        """Entropy -sum q log q over the whole vocabulary, >= 0.

        Raises:
            ValueError: if the coarse logits were computed without entropy=True.
        """
        if self.rest_mean is None:
            raise ValueError("entropy was not computed: call coarse_logits(..., entropy=True)")
        log_probs = self.all_log_probs
        within_rest = (self.rest - self.rest_mean).masked_fill(self.rest == -INF, 0.0)
        probs = log_probs.exp()
        return probs[..., -1] * within_rest - (probs * log_probs.masked_fill(log_probs == -INF, 0.0)).sum(-1)


def coarse_logits(
    logits: Float[Tensor, "... V"] | LinearLogits,
    token_ids: Integer[Tensor, "... K"],
    *,
    temperature: float = 1.0,
    transform: LogitTransform | None = None,
    shard: VocabShard | None = None,
    entropy: bool = False,
    chunk_size: int | None = None,
    reuse_logits: bool = False,
    memory: str = "auto",
    kernel: str = "auto",
) -> CoarseLogits:
    """K selected logits and the logsumexp of all others, exactly, chunk by chunk.

    `coarse_logits(LinearLogits(hidden, weight), token_ids).log_probs` is the fused linear + selected
    log-probabilities: no [N, V] tensor in forward or backward.

    Args:
        logits: [..., V] in any float dtype and strides, or LinearLogits.
        token_ids: [..., K] of any integer dtype; -1 is an empty slot (-inf). K may be 0. Ids of one row differ.
        temperature: divides z after the transform, in float32.
        transform: the model's own scale, softcap and padded vocabulary.
        shard: the ids that this rank's logits (or weight) are of; token_ids stay global. One all-reduce of
            [N, K + tp] numbers in forward (with entropy K + 2 tp); for LinearLogits one of hidden's gradient in
            backward.
        entropy: also compute what `.entropy` needs.
        chunk_size: an exact upper bound on the rows of any full-width tile; None takes it from a byte budget.
        reuse_logits: backward writes the gradient into the caller's logits (peak 1 instead of 2 times them).
            The logits must not be used again: autograd raises if they are.
        memory: how LinearLogits are differentiated: "recompute" (which "auto" means here).
        kernel: "eager", "compiled" (bodies fused by torch.compile; not for a softcap or float64), or "auto": compiled
            where the logits are large, with one warning and the eager body where that fails.

    Returns:
        CoarseLogits in float32 (float64 for float64 inputs).

    Peak extra memory: one tile in forward; in backward one tile and the gradients.

    Raises:
        TypeError: for logits that are no floating-point tensor, or token_ids that are no integers.
        ValueError: for rows that do not match, an id outside [-1, V) (on CUDA: an asynchronous assert), or
            reuse_logits where the logits may not be overwritten.
    """
    logits, shard = enter(logits, shard)
    reader = read_as(logits, transform, temperature, chunk_size, shard)
    check_choice("memory", memory, ("auto", "recompute"))
    reader = reader._replace(fused=use_compiled(kernel, logits, reader))
    if reuse_logits:
        check_reusable(logits)
    check_token_ids(token_ids, row_shape(logits), vocab_width(logits) if shard is None else shard.vocab_size)
    return coarse_of(logits, token_ids, reader, shard, entropy=entropy, reuse_logits=reuse_logits)


def coarse_of(
    logits: Logits,
    token_ids: Tensor,
    reader: TileReader,
    shard: VocabShard | None,
    *,
    entropy: bool = False,
    reuse_logits: bool = False,
) -> CoarseLogits:
    """`coarse_logits` of what was checked, and of a rank's own logits as `enter` gives them."""
    shape, k = row_shape(logits), token_ids.shape[-1]
    ids = token_ids if shard is None else shard.local(token_ids)
    ids = ids.reshape(math.prod(shape), k).to(torch.int64)
    parts = parts_of(logits)
    with torch.autocast(token_ids.device.type, enabled=False):
        if torch.compiler.is_compiling():
            from potstill.core.operators import coarse_op

            first, weight, bias = (*parts, None, None)[:3]
            settings = (reader.transform.scale, reader.transform.softcap, *reader[1:6])
            outputs = coarse_op(first, weight, bias, ids, entropy, *settings)
        else:
            if ids.is_inference() and not torch.is_inference_mode_enabled():
                ids = ids.clone()  # a teacher scored in inference mode; autograd could not save its ids
            outputs = _Coarse.apply(ids, reader, entropy, reuse_logits, *parts)
    selected, *others = outputs if entropy else outputs[:3]
    return CoarseLogits.of(selected.reshape(*shape, k), *(x.reshape(shape) for x in others)).joined(token_ids, shard)


def coarse_forward(
    parts: Sequence[Tensor | None], token_ids: Tensor, reader: TileReader, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`statistics` of every row of logits given by their parts."""
    pieces = reader.products(from_parts(parts))
    selected, total, shift, rest_mean = join(statistics(raw, token_ids[a:b], reader, entropy) for a, b, raw in pieces)
    return selected, total, shift, rest_mean


def coarse_backward(
    parts: Sequence[Tensor | None],
    token_ids: Tensor,
    reader: TileReader,
    entropy: bool,
    numbers: Sequence[Tensor],
    upstream: Sequence[Tensor],
    needs: Sequence[bool],
    *,
    reuse_logits: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients of the parts from (shift, total, rest_mean) and the gradients of (selected, total, rest_mean)."""
    (shift, total, rest_mean), (d_selected, d_total, d_rest_mean) = numbers, upstream
    given = (shift, total, rest_mean if entropy else None), (d_selected, d_total, d_rest_mean if entropy else None)
    logits = from_parts(parts)
    with torch.autocast(token_ids.device.type, enabled=False):
        if isinstance(logits, LinearLogits):
            return linear_gradients(logits, token_ids, reader, *given, needs)
        out = logits if reuse_logits else torch.empty_like(logits, memory_format=torch.contiguous_format)
        gradient(logits, token_ids, reader, *given, out=out)
        return (out,)


class _Coarse(torch.autograd.Function):
    """Wires coarse_forward to coarse_backward. Reused logits are written through the saved tensor: autograd sees."""

    @staticmethod
    def forward(ctx, token_ids, reader, entropy, reuse_logits, *parts):
        selected, total, shift, rest_mean = coarse_forward(parts, token_ids, reader, entropy)
        ctx.save_for_backward(token_ids, shift, total, rest_mean, *parts)
        ctx.reader, ctx.entropy, ctx.reuse_logits = reader, entropy, reuse_logits
        ctx.mark_non_differentiable(shift)
        return selected, total, shift, rest_mean

    @staticmethod
    def backward(ctx, d_selected, d_total, _, d_rest_mean):
        refuse_double_backward()
        token_ids, *numbers_and_parts = ctx.saved_tensors
        numbers, parts = numbers_and_parts[:3], numbers_and_parts[3:]
        upstream = d_selected, d_total, d_rest_mean
        given = (parts, token_ids, ctx.reader, ctx.entropy, numbers, upstream, ctx.needs_input_grad[4:])
        return None, None, None, None, *coarse_backward(*given, reuse_logits=ctx.reuse_logits)
