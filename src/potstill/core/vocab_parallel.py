"""Tensor parallelism over the vocabulary: who owns which ids, and the one all-reduce that joins coarse logits.

Every rank of a group holds the logits of its own ids (or the head's rows for them) and the same token ids, masks and
teacher rows. Each folds its columns into coarse logits; their sum over ranks, K + tp numbers a row, is all that is
exchanged. From there on every rank computes the whole loss, so that backward needs no collective: a rank's gradient
of its own contribution is the gradient of the sum. torch's differentiable all_reduce would add those tp equal
gradients up.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from potstill.core.numerics import INF, logsumexp


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
        bounds: (start, stop) of every rank, where they are known: then nothing is exchanged.

    Raises:
        ValueError: bounds that leave a gap, overlap, or do not end at vocab_size; a rank that is not in the group.
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
        _check_member(self.group)
        own = (self.start, self.stop)
        if not self.bounds:
            found: list[tuple[int, int]] = [own] * self.size
            dist.all_gather_object(found, own, group=self.group)
            object.__setattr__(self, "bounds", tuple(found))
        if len(self.bounds) != self.size or self.bounds[self.rank] != own:
            raise ValueError(f"bounds {self.bounds} are not those of {self.size} ranks of which this one owns {own}")
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
        _check_member(group)
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


def _check_member(group: dist.ProcessGroup | None) -> None:
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the shard's group: pass the tensor-parallel group that it belongs to"
        )


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
    total = _Sum.apply(torch.cat(own, -1), shard)
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
    def forward(ctx, x, shard):
        return add_up(x, shard)

    @staticmethod
    def backward(ctx, upstream):
        return upstream, None


def gather(x: Tensor, shard: VocabShard) -> list[Tensor]:
    """What every rank has in the place of x, in rank order."""
    parts = [torch.empty_like(x) for _ in range(shard.size)]
    dist.all_gather(parts, x.contiguous(), group=shard.group)
    return parts


def add_up(x: Tensor, shard: VocabShard) -> Tensor:
    """The sum of every rank's x."""
    total = x.clone()
    dist.all_reduce(total, group=shard.group)
    return total


def share_out(x: Tensor, shard: VocabShard) -> None:
    """Overwrite x with the first rank's."""
    dist.broadcast(x, group=shard.group, group_src=0)


def to_shards(hidden: Tensor, shard: VocabShard) -> Tensor:
    """Hidden states as every rank's product needs them, all rows; their gradient is the sum over ranks."""
    return _ToShards.apply(hidden, shard)


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
            return add_up(upstream.contiguous(), shard), None
        parts = list(upstream.contiguous().chunk(shard.size))
        own = torch.empty_like(parts[shard.rank])
        dist.reduce_scatter(own, parts, group=shard.group)
        return own, None
