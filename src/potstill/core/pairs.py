"""Student and teacher side by side, tile by tile, and the loss of a tile's rows: what full_vocab.py is made of."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from potstill.core.divergences import DIVERGENCES
from potstill.core.numerics import compute_dtype, logsumexp
from potstill.core.passes import zero_rows_
from potstill.core.tiles import LinearLogits, Logits, RawRows, TileReader, chunk_bounds, row_shape
from potstill.core.topk import tile_top_ids


@dataclass(frozen=True)
class RowLoss:
    """The loss of the rows of a tile [C, V] of student and teacher logits: ordinary, differentiable PyTorch."""

    divergence: str
    options: dict[str, float]
    k: int | None
    shape_weight: float | None
    scale: float

    def __call__(self, student_z: Tensor, teacher_z: Tensor, mask: Tensor) -> Tensor:
        """per_token [C], 0 at unscored rows."""
        unscored = ~mask[:, None]
        # Unscored rows may hold NaN; replaced before any arithmetic, their gradient is exactly 0.
        teacher_z = teacher_z.masked_fill(unscored, 0.0)
        student, teacher = student_z.masked_fill(unscored, 0.0).log_softmax(1), teacher_z.log_softmax(1)
        terms = DIVERGENCES[self.divergence].terms
        value = terms(student, teacher, **self.options).sum(1)
        if self.k is not None and self.shape_weight is not None:
            # The full KL is the bucket loss plus p_tail times the KL of the tails' shapes.
            token_ids = tile_top_ids(teacher_z, self.k)
            bucket = terms(fold(student, token_ids), fold(teacher, token_ids), **self.options).sum(1)
            value = bucket + self.shape_weight * (value - bucket)
        return torch.where(mask, value * self.scale, 0.0)


def fold(log_probs: Float[Tensor, "rows V"], token_ids: Tensor) -> Float[Tensor, "rows categories"]:
    """Log-probabilities of the ids [C, K] and, last, of anything else."""
    rest = logsumexp(log_probs.scatter(1, token_ids, -torch.inf))
    return torch.cat([log_probs.gather(1, token_ids), rest[:, None]], 1)


class Pairs(NamedTuple):
    """Student and teacher, read side by side in tiles of the same rows."""

    student: Logits
    teacher: Logits
    student_reader: TileReader
    teacher_reader: TileReader

    def pieces(self) -> Iterator[tuple[slice, list[Tensor], list[Tensor]]]:
        """Yield (rows, raw student, raw teacher) as row blocks; each LinearLogits side is multiplied there."""
        n_rows = math.prod(row_shape(self.student))
        sides = ((self.student, self.student_reader), (self.teacher, self.teacher_reader))
        size = min([n_rows, *(reader.product_rows(x) for x, reader in sides if isinstance(x, LinearLogits))])
        student, teacher = (RawRows(x, reader.width) for x, reader in sides)
        for start, stop in chunk_bounds(n_rows, max(size, 1)):
            yield slice(start, stop), student(start, stop), teacher(start, stop)

    def tiles(self, student: list[Tensor], teacher: list[Tensor]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (rows within the piece, student z, teacher z), both [C, V] in the student's compute dtype."""
        width, dtype = self.student_reader.width, compute_dtype(student[0].dtype)
        student_tiles = self.student_reader.tiles(student, dtype=dtype)
        teacher_tiles = self.teacher_reader.tiles(teacher, dtype=dtype)
        for (start, stop, student_z), (_, _, teacher_z) in zip(student_tiles, teacher_tiles, strict=True):
            yield slice(start, stop), student_z[:, :width], teacher_z[:, :width]

    def gradients(
        self, student: list[Tensor], teacher: list[Tensor], row_loss: "RowLoss", mask: Tensor, upstream: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (rows, per_token, gradient of sum(upstream * per_token) by the raw student [C, V]), tile by tile."""
        reader = self.student_reader
        for rows, student_z, teacher_z in self.tiles(student, teacher):
            slope = reader.transform.derivative(student_z, reader.temperature)
            with torch.enable_grad():
                z = student_z.detach().requires_grad_()
                per_token = row_loss(z, teacher_z, mask[rows])
            (d_z,) = torch.autograd.grad(per_token, z, upstream[rows])
            # A NaN in an unscored row survives the slope of a softcap, so its zeros come last.
            idle = (upstream[rows] == 0) | ~mask[rows]
            zero_rows_(d_z.mul_(slope), idle)
            yield rows, per_token.detach(), d_z
