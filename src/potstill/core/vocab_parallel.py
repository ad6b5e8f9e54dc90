"""Tensor parallelism over the vocabulary: who owns which ids, and the one all-reduce that joins coarse logits.

Every rank of a group holds the logits of its own ids (or the head's rows for them) and the same token ids, masks and
teacher rows. Each folds its columns into coarse logits; their sum over ranks, K + tp numbers a row, is all that is
exchanged. From there on every rank computes the whole loss, so that backward needs no collective: a rank's gradient
of its own contribution is the gradient of the sum. torch's differentiable all_reduce would add those tp equal
gradients up.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from potstill.core.checks import check_logits
from potstill.core.numerics import INF, logsumexp
from potstill.core.tiles import LinearLogits, Logits, from_parts, parts_of, vocab_width


@dataclass(frozen=True)
class VocabShard:
    """This rank owns the ids start <= id < stop of a vocabulary that the ranks of `group` share out in rank order.

    Making one is a collective: the ranks exchange their bounds, once. Keep it and pass it to every call.

    Args:
        start: first id of this rank.
        stop: one past its last; equal to start for a rank that owns nothing.
        group: the tensor-parallel process group; None is torch's default group.
        vocab_size: V, the global width of the head, padding included; checked against the bounds.
        sequence_parallel: `hidden` holds this rank's part of the rows, cut along the first dimension: they are
            gathered in forward, and their gradient is reduced and scattered.

    Raises:
        ValueError: bounds that leave a gap, overlap, or do not end at vocab_size.
    """

    start: int
    stop: int
    group: dist.ProcessGroup | None = None
    vocab_size: int = None  # type: ignore[assignment]
    sequence_parallel: bool = False
    bounds: tuple[tuple[int, int], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not dist.is_initialized():
            raise ValueError("VocabShard needs a process group: call torch.distributed.init_process_group first")
        own = (self.start, self.stop)
        if not self.bounds:
            found: list[tuple[int, int]] = [own] * self.size
            dist.all_gather_object(found, own, group=self.group)
            object.__setattr__(self, "bounds", tuple(found))
        edges = [0, *(edge for bounds in self.bounds for edge in bounds)]
        if any(a != b for a, b in zip(edges[::2], edges[1::2], strict=False)) or edges != sorted(edges):
            raise ValueError(
                f"the ranks own the ids {self.bounds}; in rank order they must begin at 0 and follow one another "
                "without gap or overlap"
            )
        if self.vocab_size is None:
            object.__setattr__(self, "vocab_size", edges[-1])
        elif self.vocab_size != edges[-1]:
            raise ValueError(f"vocab_size is {self.vocab_size} but the ranks own the ids below {edges[-1]}")

    @classmethod
    def even(
        cls, vocab_size: int, group: dist.ProcessGroup | None = None, *, sequence_parallel: bool = False
    ) -> "VocabShard":
        """The cut of torch.chunk and DTensor: ceil(V / tp) ids each, the last ranks fewer or none. No collective."""
        size = dist.get_world_size(group)
        width = -(-vocab_size // size)
        bounds = tuple((min(r * width, vocab_size), min((r + 1) * width, vocab_size)) for r in range(size))
        own = bounds[dist.get_rank(group)]
        return cls(*own, group, vocab_size, sequence_parallel, bounds)

    @property
    def size(self) -> int:
        """The number of ranks, tp."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return dist.get_rank(self.group)

    @property
    def width(self) -> int:
        """How many ids this rank owns."""
        return self.stop - self.start

    @property
    def largest(self) -> int:
        """How many ids the rank with most of them owns: what ranks derive chunk sizes from, so that they agree."""
        return max(stop - start for start, stop in self.bounds)

    def check_width(self, width: int, name: str = "logits") -> None:
        """Refuse logits of another width than this rank's ids.

        Raises:
            ValueError: naming the width, and what to do about gathered logits.
        """
        if width != self.width:
            gathered = "; they look gathered: pass this rank's columns, or leave shard out" * (
                width == self.vocab_size
            )
            raise ValueError(
                f"{name} have {width} columns but this rank owns the {self.width} ids from {self.start} to "
                f"{self.stop}{gathered}"
            )

    def owns(self, token_ids: Tensor) -> Tensor:
        """Where an id is this rank's."""
        return (token_ids >= self.start) & (token_ids < self.stop)

    def local(self, token_ids: Tensor) -> Tensor:
        """Column of each id here; -1, an empty slot, where it is not this rank's."""
        return torch.where(self.owns(token_ids), token_ids - self.start, -1)

    def real(self, vocab_size: int) -> int:
        """How many of this rank's ids are below the real vocabulary size."""
        return min(max(vocab_size - self.start, 0), self.width)


def combine(
    shard: VocabShard, token_ids: Tensor, selected: Tensor, rest: Tensor, rest_mean: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Coarse logits of the whole vocabulary from every rank's own: one all-reduce forward, none backward.

    Args:
        shard: who owns what.
        token_ids: [..., K] global ids; -1 is an empty slot.
        selected: [..., K] of this rank; what it holds at the ids of others does not matter.
        rest: [...] of this rank, -inf if it has none.
        rest_mean: [...] of this rank, or None.

    Returns:
        selected, rest and rest_mean of the whole vocabulary; -inf where no rank owns the id.
    """
    k = token_ids.shape[-1]
    own = [torch.where(shard.owns(token_ids), selected, 0.0)]
    own += [_in_column(x, shard) for x in (rest, rest_mean) if x is not None]
    total = _Sum.apply(torch.cat(own, -1), shard.group)
    rests = total[..., k : k + shard.size]
    rest = logsumexp(rests)
    if rest_mean is not None:
        share = (rests - rest.masked_fill(rest == -INF, 0.0).unsqueeze(-1)).exp()
        rest_mean = (share * total[..., k + shard.size :]).sum(-1)
    return total[..., :k].masked_fill(token_ids < 0, -INF), rest, rest_mean


def _in_column(x: Tensor, shard: VocabShard) -> Tensor:
    """x [...] as the rank's own of tp columns [..., tp], 0 in the others."""
    return torch.nn.functional.pad(x.unsqueeze(-1), (shard.rank, shard.size - 1 - shard.rank))


class _Sum(torch.autograd.Function):
    """Sum over ranks of what each contributes to a loss that each computes whole: the gradient is the upstream's."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, upstream):
        return upstream, None


def enter(logits: Logits, shard: VocabShard | None, name: str = "logits") -> tuple[Logits, VocabShard | None]:
    """Checked logits of this rank and the shard they are: the given one, or a DTensor's own.

    Hidden states come back as every rank needs them, all rows, with a gradient that is the sum over ranks.

    Raises:
        TypeError: as check_logits; for a DTensor whose placement is no shard of the vocabulary here.
        ValueError: as check_logits; for logits of another width than the rank's ids.
    """
    logits, shard = from_dtensor(logits, shard, name)
    logits = check_logits(logits, name)
    if shard is None:
        return logits, None
    width = vocab_width(logits)
    if width != shard.width:
        gathered = "; they look gathered: pass this rank's columns, or leave shard out" * (width == shard.vocab_size)
        raise ValueError(
            f"{name} have {width} columns but this rank owns the {shard.width} ids from {shard.start} to "
            f"{shard.stop}{gathered}"
        )
    if isinstance(logits, LinearLogits):
        logits = LinearLogits(_ToShards.apply(logits.hidden, shard), *logits[1:])
    return logits, shard


def from_dtensor(logits: Logits, shard: VocabShard | None, name: str) -> tuple[Logits, VocabShard | None]:
    """The local part of DTensors and the shard that they are, if any; plain tensors as they are."""
    parts = parts_of(logits)
    found: list[Any] = [part for part in parts if _is_dtensor(part)]
    if not found:
        return logits, shard
    if shard is not None:
        raise TypeError(f"{name} are a DTensor, which knows its own shard; leave shard out, or pass to_local() of it")
    linear = isinstance(logits, LinearLogits)
    head: Any = logits.weight if isinstance(logits, LinearLogits) else logits
    vocab = 0 if linear else head.ndim - 1
    placements = head.placements if _is_dtensor(head) else ()
    cut = [i for i, placement in enumerate(placements) if placement.is_shard(vocab)]
    told = ", ".join(str(part.placements) for part in found)
    if any(placement.is_partial() for part in found for placement in part.placements):
        raise TypeError(f"{name}: a DTensor of partial sums ({told}); redistribute it to Replicate or Shard first")
    if len(cut) > 1 or (linear and any(placement.is_shard(1) for placement in placements)):
        raise TypeError(f"{name}: expected a head cut along the vocabulary on one dimension of the mesh, got {told}")
    if linear and cut:
        hidden: Any = parts[0]
        if (
            not _is_dtensor(hidden)
            or hidden.device_mesh != head.device_mesh
            or any(x.is_shard() for x in hidden.placements)
        ):
            raise TypeError(
                f"{name}: the weight is a DTensor cut along its first dimension ({told}) but hidden is not a DTensor "
                "replicated on the same mesh. If FSDP cut it, call the loss inside the forward of the module that "
                "owns it (PotstillHead), where it is whole; if tensor parallelism did, pass weight.to_local() "
                "with shard=VocabShard(...)"
            )
    local = from_parts([part.to_local() if _is_dtensor(part) else part for part in parts])  # type: ignore[union-attr]
    if cut:
        shard = VocabShard.even(head.shape[vocab], head.device_mesh.get_group(cut[0]))
    return local, shard


def _is_dtensor(x: object) -> bool:
    return isinstance(x, Tensor) and hasattr(x, "device_mesh")


def gather(x: Tensor, shard: VocabShard) -> list[Tensor]:
    """What every rank has in the place of x, in rank order."""
    parts = [torch.empty_like(x) for _ in range(shard.size)]
    dist.all_gather(parts, x.contiguous(), group=shard.group)
    return parts


class _ToShards(torch.autograd.Function):
    """The same hidden states into every rank's product: the gradient is a sum over ranks."""

    @staticmethod
    def forward(ctx, hidden, shard):
        ctx.shard = shard
        if not shard.sequence_parallel:
            return hidden.view_as(hidden)
        whole = hidden.new_empty((shard.size * hidden.shape[0], *hidden.shape[1:]))
        dist.all_gather(list(whole.chunk(shard.size)), hidden.contiguous(), group=shard.group)
        return whole

    @staticmethod
    def backward(ctx, upstream):
        shard = ctx.shard
        if not shard.sequence_parallel:
            total = upstream.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=shard.group)
            return total, None
        parts = list(upstream.contiguous().chunk(shard.size))
        own = torch.empty_like(parts[shard.rank])
        dist.reduce_scatter(own, parts, group=shard.group)
        return own, None
