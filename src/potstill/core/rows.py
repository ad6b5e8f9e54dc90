"""The rows of a loss call, made flat and clean: which count and how much, and what the teacher says of them."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from potstill.core.numerics import INF, compute_dtype, estimated_rest
from potstill.core.teacher import SampledTargets, TeacherTopK


def global_num_tokens(masks: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> Tensor:
    """The number of scored rows of an optimiser step, which every loss call of the step takes as num_tokens.

    Args:
        masks: the mask [...] of each micro-batch of this rank, bool or integer, non-zero = scored. One at least, so
            that the count is on its device; it may be without a scored row.
        group: the ranks that hold other rows: those of data and context parallelism, not those of tensor parallelism,
            which hold the same. None is torch's default group. One all-reduce, where torch.distributed is initialised.

    Returns:
        A 0-dim int64 tensor, the same on every rank of the group.
    """
    count = torch.stack([(mask != 0).sum() for mask in masks]).sum()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(count, group=group)
    return count


class TeacherRows(NamedTuple):
    """A teacher's rows, flat and clean: empty slots and unscored rows select nothing.

    token_ids [N, K] with -1 where empty; values [N, K]: log-probabilities (-inf where empty) or weights (0 where
    empty); rest [N] log-probability; mass [N] on the ids, as delivered.
    """

    token_ids: Tensor
    values: Tensor
    rest: Tensor
    mass: Tensor

    @classmethod
    def of(cls, teacher: TeacherTopK | SampledTargets, mask: Tensor, dtype: torch.dtype) -> "TeacherRows":
        """Flatten, empty what is unscored, and fill in a rest that was not delivered."""
        k = teacher.token_ids.shape[-1]
        ids = teacher.token_ids.detach().reshape(mask.numel(), k).to(torch.int64)
        delivered_rest = None
        if isinstance(teacher, SampledTargets):
            given, nothing = teacher.weights, 0.0
        else:
            given, nothing, delivered_rest = teacher.log_probs, -INF, teacher.rest_log_prob
        given = given.detach().reshape(mask.numel(), k)
        empty = (ids < 0) | (given == nothing) | ~mask[:, None]
        ids, values = ids.masked_fill(empty, -1), given.to(compute_dtype(given.dtype)).masked_fill(empty, nothing)
        mass = (values if isinstance(teacher, SampledTargets) else values.exp()).sum(1)
        if delivered_rest is None:
            rest = estimated_rest(mass)
        else:
            rest = delivered_rest.detach().reshape(mask.numel()).to(values.dtype)
        rest = rest.masked_fill(~mask, 0.0)
        return cls(ids, values.to(dtype), rest.to(dtype), mass.to(dtype))


class RowWeights(NamedTuple):
    """mask [N] bool, factor [N] = mask * token_weights / num_tokens, and per_row [] = 1 / num_tokens (or 0)."""

    mask: Tensor
    factor: Tensor
    per_row: Tensor

    def total(self, x: Tensor) -> Tensor:
        """sum(x * factor) of x [N]; a weight of 0 silences even an infinite x."""
        return torch.where(self.factor != 0, x * self.factor, 0.0).sum()

    def mean(self, x: Tensor) -> Tensor:
        """Sum of x [N] over the scored rows / num_tokens, without token_weights."""
        return torch.where(self.mask & (self.per_row > 0), x.to(self.per_row.dtype), 0.0).sum() * self.per_row

    @classmethod
    def of(
        cls,
        shape: torch.Size,
        mask: Tensor | None,
        token_weights: Tensor | None,
        num_tokens: int | float | Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "RowWeights":
        """Check the shapes and dtypes of what was passed, and flatten it."""
        for name, x in (("mask", mask), ("token_weights", token_weights)):
            if x is not None and x.shape != shape:
                raise ValueError(f"{name} must have the rows of the logits, {list(shape)}, got {list(x.shape)}")
        if mask is not None and mask.is_floating_point():
            raise TypeError(f"mask must be bool or integer, got {mask.dtype}; weights of rows go into token_weights")
        if token_weights is not None and not token_weights.is_floating_point():
            raise TypeError(
                f"token_weights must be floating point, got {token_weights.dtype}; a selection goes into mask"
            )
        n_rows = math.prod(shape)
        scored = torch.ones(n_rows, dtype=torch.bool, device=device) if mask is None else mask.reshape(-1) != 0
        count = scored.sum() if num_tokens is None else torch.as_tensor(num_tokens, device=device)
        if isinstance(num_tokens, float) and not math.isfinite(num_tokens):
            raise ValueError(f"num_tokens must be a finite number, got {num_tokens}; count the scored tokens")
        if count.ndim != 0:
            raise ValueError(f"num_tokens must be a number or a 0-dim tensor, got shape {list(count.shape)}")
        count = count.detach().to(dtype)
        per_row = torch.where(count > 0, 1 / count, 0.0)
        factor = scored.to(dtype) * per_row
        if token_weights is not None:
            factor = torch.where(scored, token_weights.detach().reshape(-1).to(dtype), 0.0) * per_row
        return cls(scored, factor, per_row)
