"""Logits as float32 tiles: rows of a tensor, or of `hidden @ weight.T` that is never formed whole.

Every pass over the vocabulary in this library reads its logits here. A tile has one spare column after the
real ones: empty slots and ids of other tiles point to it, so that selecting and scattering need no masks, no
host sync and no special case. Memory: one tile, plus for LinearLogits one product in the inputs' dtype.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Integer
from torch import Tensor

from potstill.core.numerics import INF, compute_dtype
from potstill.core.transform import LogitTransform

if TYPE_CHECKING:
    from potstill.core.vocab_parallel import VocabShard

PLAIN = LogitTransform()


class LinearLogits(NamedTuple):
    """Logits that are not there yet: `hidden @ weight.T + bias`. Accepted wherever logits are.

    Shapes: hidden [..., H], weight [V, H], bias [V] or None, of one floating dtype (under autocast, differing
    dtypes are cast to the autocast dtype).
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None


Logits = Tensor | LinearLogits


def parts_of(logits: Logits) -> tuple[Tensor | None, ...]:
    """The tensors of logits, as an autograd.Function takes them: (logits,) or (hidden, weight, bias or None)."""
    return tuple(logits) if isinstance(logits, LinearLogits) else (logits,)


def from_parts(parts: Sequence[Any]) -> Logits:
    """The inverse of parts_of."""
    return LinearLogits(*parts) if len(parts) > 1 else parts[0]


def first_part(logits: Logits) -> Tensor:
    """The tensor that says what device, dtype and rows logits have."""
    return logits.hidden if isinstance(logits, LinearLogits) else logits


def row_shape(logits: Logits) -> torch.Size:
    """The leading dimensions [...] of logits [..., V]."""
    return first_part(logits).shape[:-1]


def vocab_width(logits: Logits) -> int:
    """The number of columns V of logits [..., V], padding included."""
    return logits.weight.shape[0] if isinstance(logits, LinearLogits) else logits.shape[-1]


def chunk_bounds(n_rows: int, chunk_size: int) -> list[tuple[int, int]]:
    """Cut n_rows into ceil(n_rows / chunk_size) half-open ranges of nearly equal size, the larger ones first."""
    n_chunks = -(-n_rows // chunk_size)
    size, larger = divmod(n_rows, max(n_chunks, 1))
    starts = [i * size + min(i, larger) for i in range(n_chunks + 1)]
    return list(pairwise(starts))


class Budget(NamedTuple):
    """Bytes a device may spend on one elementwise tile, one product, and one float32 weight gradient."""

    tile: int
    product: int
    weight_gradient: int


def budget(device: torch.device) -> Budget:
    """The byte budgets of a device; every default that depends on memory is taken from here.

    On a CPU a tile should stay in the cache; a product has to be tall enough to keep the matrix units busy. On a
    GPU both only have to be small beside the logits.
    """
    if device.type == "cpu":
        return Budget(tile=8 << 20, product=256 << 20, weight_gradient=2 << 30)
    return Budget(tile=64 << 20, product=384 << 20, weight_gradient=4 << 30)


def rows_within(n_bytes: int, width: int, itemsize: int, chunk_size: int | None) -> int:
    """Rows [width] that fit in n_bytes, at least 2 (a single row is summed in another order), at most chunk_size."""
    rows = max(2, n_bytes // (max(width, 1) * itemsize))
    return rows if chunk_size is None else min(rows, chunk_size)


def columns_of(token_ids: Integer[Tensor, "rows k"], start: int, stop: int) -> Integer[Tensor, "rows k"]:
    """Column of each id in a tile of the ids start <= id < stop; the spare column where it is not there."""
    inside = (token_ids >= start) & (token_ids < stop)
    return torch.where(inside, token_ids - start, stop - start)


def row_blocks(x: Tensor) -> list[Tensor]:
    """Views [rows, V] that make up x [..., V] in order, for any strides: never a copy."""
    try:
        return [x.view(math.prod(x.shape[:-1]), x.shape[-1])]
    except RuntimeError:
        return [block for part in x for block in row_blocks(part)]


def row_pieces(blocks: list[Tensor], start: int, stop: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield (position within [start, stop), view [rows, V]) for the rows start to stop of `blocks`."""
    offset = 0
    for block in blocks:
        first, last = max(start - offset, 0), min(stop - offset, block.shape[0])
        if first < last:
            yield slice(first + offset - start, last + offset - start), block[first:last]
        offset += block.shape[0]


class TileReader(NamedTuple):
    """How raw logits become z: the transform, the temperature, the real width and the rows of a tile."""

    transform: LogitTransform
    temperature: float
    width: int
    chunk_size: int | None
    real: int = 0  # columns over all ranks, padding left out
    fused: bool = False  # use the compiled bodies where they apply
    widest: int | None = (
        None  # the width that rows are budgeted for: of a shard's widest rank, so that ranks cut alike
    )

    def tiles(
        self,
        raw: Tensor | list[Tensor],
        width: int | None = None,
        dtype: torch.dtype | None = None,
        transformed: bool = True,
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (start, stop, tile): rows start to stop of z, [rows, width + 1], the spare column at -inf.

        z is in compute_dtype, or in `dtype`; with transformed=False the tile holds the raw logits instead.

        The tile is scratch memory: it may be overwritten, and is by the next one. `raw` [..., V] may have any
        strides (or be its row_blocks) and is only read; its columns from `width` on are not looked at.
        """
        width = self.width if width is None else width
        blocks = raw if isinstance(raw, list) else row_blocks(raw)
        n_rows = sum(block.shape[0] for block in blocks)
        if n_rows == 0:
            return
        dtype = dtype or compute_dtype(blocks[0].dtype)
        rows = rows_within(budget(blocks[0].device).tile, width, dtype.itemsize, self.chunk_size)
        scratch = blocks[0].new_empty((min(rows, n_rows), width + 1), dtype=dtype)
        for start, stop in chunk_bounds(n_rows, rows):
            tile = scratch[: stop - start]
            for rows_of_tile, block in row_pieces(blocks, start, stop):
                tile[rows_of_tile, :width].copy_(block[:, :width])
            if transformed:
                self.transform.apply_(tile[:, :width], self.temperature)
            tile[:, width].fill_(-INF)
            yield start, stop, tile

    def factor(self, like: Tensor) -> Tensor:
        """z / raw, where there is no softcap: a 0-dim tensor beside `like`."""
        return like.new_tensor(self.transform.scale / self.temperature)

    def product_rows(self, linear: LinearLogits) -> int:
        """Rows of one product `hidden @ weight.T` over the full width."""
        hidden = linear.hidden
        width = self.width if self.widest is None else self.widest
        return rows_within(budget(hidden.device).product, width, hidden.dtype.itemsize, self.chunk_size)

    def products(self, logits: Logits, most: int | None = None) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (start, stop, raw): the raw logits of rows start to stop, up to the real width.

        There is at least one piece, and at most `most`. A tensor of logits is one, as it is; a LinearLogits is
        multiplied piece by piece into one buffer, which may be overwritten.

        Raises:
            ValueError: chunk_size asks for more pieces than `most`.
        """
        if not isinstance(logits, LinearLogits):
            yield 0, math.prod(logits.shape[:-1]), logits
            return
        raw_rows = RawRows(logits, self.width)
        n_rows, rows = math.prod(row_shape(logits)), self.product_rows(logits)
        if most is not None and -(-n_rows // rows) > most:
            if self.chunk_size is not None and -(-n_rows // self.chunk_size) > most:
                raise ValueError(
                    f"chunk_size={self.chunk_size} cuts {n_rows} rows into more than the {most} pieces that "
                    "single_pass may take over vocabulary shards (one all-reduce each); raise it, or pass "
                    "memory='recompute'"
                )
            rows = -(-n_rows // most)
        for start, stop in chunk_bounds(n_rows, rows) or [(0, 0)]:
            yield start, stop, raw_rows(start, stop)[0]


class RawRows:
    """Raw logits by rows, as row blocks; those of a LinearLogits are multiplied into one buffer, reused each time."""

    def __init__(self, logits: Logits, width: int) -> None:
        self.width = width
        self.linear = logits if isinstance(logits, LinearLogits) else None
        self.blocks = [] if isinstance(logits, LinearLogits) else row_blocks(logits)
        self.buffer: Tensor | None = None

    def __call__(self, start: int, stop: int) -> list[Tensor]:
        """Row blocks of the rows start to stop, valid until the next call."""
        if self.linear is None:
            return [block for _, block in row_pieces(self.blocks, start, stop)]
        hidden = self.linear.hidden.reshape(-1, self.linear.hidden.shape[-1])[start:stop]
        if self.buffer is None or self.buffer.shape[0] < stop - start:
            self.buffer = hidden.new_empty((stop - start, self.width))
        out = self.buffer[: stop - start]
        return [multiply(LinearLogits(hidden, *self.linear[1:]), 0, self.width, out=out)]


def multiply(linear: LinearLogits, start: int, stop: int, out: Tensor) -> Tensor:
    """Raw logits of the ids start <= id < stop into `out` [rows, stop - start], accumulated in float32."""
    hidden, weight, bias = linear
    if bias is None:
        return torch.mm(hidden, weight[start:stop].t(), out=out)
    return torch.addmm(bias[start:stop], hidden, weight[start:stop].t(), out=out)


def read_as(
    logits: Logits,
    transform: LogitTransform | None,
    temperature: float,
    chunk_size: int | None,
    shard: "VocabShard | None" = None,
) -> TileReader:
    """Check the options that say how logits are read, and bind them; those of a shard are one rank's columns.

    Raises:
        TypeError: for a chunk_size or a transform of another type.
        ValueError: for a temperature that is not positive, or a chunk_size below 1.
    """
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be a finite number > 0, got {temperature}")
    if chunk_size is not None and not isinstance(chunk_size, int):
        raise TypeError(f"chunk_size must be a whole number of rows or None, got {chunk_size!r}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be >= 1 row, got {chunk_size}; use None to take it from the budget")
    if not isinstance(transform, LogitTransform | None):
        raise TypeError(f"transform must be a LogitTransform or None, got {type(transform).__name__}")
    transform = PLAIN if transform is None else transform
    width = vocab_width(logits) if shard is None else shard.vocab_size
    if transform.vocab_size is not None and transform.vocab_size > width:
        raise ValueError(f"transform.vocab_size is {transform.vocab_size} but the logits have only {width} columns")
    real = transform.vocab_size or width
    reader = TileReader(transform, float(temperature), real, chunk_size, real)
    return reader if shard is None else reader._replace(width=shard.real(real), widest=shard.largest)
