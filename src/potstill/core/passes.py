"""The two passes over the vocabulary: statistics of each row forward, gradients backward, tile by tile.

Plain functions on raw logits; coarse.py and single_pass.py wire them to autograd. A row's rest is kept as a shift
near its largest logit and the total of exp(z - shift), because their sum of logarithms would lose what the size of
the logits costs in float32. `numbers` are (shift, total, rest_mean) and `upstream` the gradients of (selected, total,
rest_mean), where rest_mean is None without entropy.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from potstill.core.checks import is_fake
from potstill.core.numerics import INF, compute_dtype
from potstill.core.tiles import (
    LinearLogits,
    TileReader,
    chunk_bounds,
    columns_of,
    multiply,
    row_blocks,
    row_pieces,
)
from potstill.kernels import compiled

Numbers = tuple[Tensor, Tensor, Tensor | None]
Upstream = tuple[Tensor, Tensor, Tensor | None]


def statistics(
    raw: Tensor, token_ids: Tensor, reader: TileReader, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """selected [N, K], total [N], shift [N] and rest_mean [N] (empty without entropy) of raw logits with N rows."""
    n_rows, k = token_ids.shape
    dtype = compute_dtype(raw.dtype)
    selected = raw.new_empty((n_rows, k), dtype=dtype)
    total, shift = (raw.new_empty((n_rows,), dtype=dtype) for _ in range(2))
    rest_mean = raw.new_empty((n_rows if entropy else 0,), dtype=dtype)
    fused = reader.fused and not entropy
    dtype_of_tile = raw.dtype if fused else None
    factor = reader.factor(total)
    for start, stop, tile in reader.tiles(raw, dtype=dtype_of_tile, transformed=not fused):  # [C, V + 1]
        columns = columns_of(token_ids[start:stop], 0, reader.width)
        rows = slice(start, stop)
        selected[rows] = tile.gather(1, columns)
        put_(tile, columns, tile.new_full((), -INF).expand_as(columns))
        if fused:
            shift[rows], total[rows] = compiled.peak_and_total(tile, factor)
            continue
        peak = tile.amax(1)
        shift[rows] = peak.masked_fill_(peak == -INF, 0.0)
        tile.sub_(peak[:, None])
        if entropy:
            # exp is 0 at -1e30 as it is at -inf, and 0 * -1e30 is 0.
            weights = tile.clamp_(min=-1e30).exp()
            total[rows] = weights.sum(1)
            mean = weights.mul_(tile).sum(1) / total[rows] + peak
            rest_mean[rows] = mean.masked_fill(total[rows] == 0, 0.0)
        else:
            torch.sum(tile.exp_(), 1, out=total[rows])
    if fused:
        selected *= factor
    return selected, total, shift, rest_mean


def put_(tile: Tensor, columns: Tensor, values: Tensor) -> None:
    """tile[n, columns[n, k]] = values[n, k], whichever comes last where columns repeat."""
    if tile.element_size() == 2:  # on a CPU a scatter into 16-bit floats walks the whole tile; one of bits does not
        tile, values = tile.view(torch.int16), values.to(tile.dtype).view(torch.int16)
    tile.scatter_(1, columns, values)


def join(pieces: Iterable[tuple[Tensor, ...]]) -> Iterable[Tensor]:
    """Concatenate the rows of pieces, field by field."""
    fields = list(zip(*pieces, strict=True))
    return (field[0] if len(field) == 1 else torch.cat(field) for field in fields)


def idle_rows(upstream: Upstream) -> Tensor:
    """Rows [N] whose gradients are all zero: nothing of theirs may reach a gradient, not even a NaN."""
    d_selected, d_total, d_rest_mean = upstream
    idle = (d_selected == 0).all(1) & (d_total == 0)
    return idle if d_rest_mean is None else idle & (d_rest_mean == 0)


def zero_rows_(tile: Tensor, rows: Tensor) -> None:
    """Set the rows [C] of a tile to 0, whatever they hold."""
    if rows.is_cpu and not is_fake(rows):
        tile[rows.nonzero().squeeze(1)] = 0.0  # a masked fill of the whole tile costs as much as its exp there
    else:
        tile.masked_fill_(rows[:, None], 0.0)  # without a host sync


def gradient(
    raw: Tensor,
    token_ids: Tensor,
    reader: TileReader,
    numbers: Numbers,
    upstream: Upstream,
    *,
    out: Tensor,
    start_id: int = 0,
    width: int | None = None,
) -> None:
    """dL/d raw of the ids start_id <= id < start_id + width, written to `out` (which may be `raw` itself).

    Rows whose gradients are all zero get exact zeros, whatever their logits hold.
    """
    width = reader.width if width is None else width
    out_blocks = row_blocks(out)
    (shift, total, rest_mean), (d_selected, d_total, d_rest_mean) = numbers, upstream
    idle = idle_rows(upstream)
    if d_rest_mean is not None and rest_mean is not None:
        d_rest_mean = d_rest_mean / total.masked_fill(total == 0, INF)  # a row of nothing but selected ids has none
    fused = reader.fused and d_rest_mean is None
    dtype_of_tile = raw.dtype if fused else None
    factor = reader.factor(total)
    for start, stop, tile in reader.tiles(raw, width, dtype_of_tile, not fused):  # [C, width + 1]
        rows = slice(start, stop)
        columns = columns_of(token_ids[rows], start_id, start_id + width)
        if fused:
            compiled.weigh_(tile, shift[rows], d_total[rows], factor)
            put_(tile, columns, d_selected[rows] * factor)
        else:
            slope = reader.transform.derivative(tile, reader.temperature)
            tile.sub_(shift[rows, None])
            if rest_mean is None or d_rest_mean is None:
                tile.exp_().mul_(d_total[rows, None])
            else:
                weights = tile.clamp_(min=-1e30).exp()
                centre = 1.0 + shift[rows] - rest_mean[rows]
                tile.add_(centre[:, None]).mul_(d_rest_mean[rows, None]).add_(d_total[rows, None])
                tile.mul_(weights)
            put_(tile, columns, d_selected[rows])
            if not (isinstance(slope, float) and slope == 1.0):
                tile.mul_(slope)
        zero_rows_(tile, idle[rows])
        for rows_of_tile, block in row_pieces(out_blocks, start, stop):
            block[:, :width].copy_(tile[rows_of_tile, :width])
            block[:, width:].zero_()


def linear_gradients(
    linear: LinearLogits,
    token_ids: Tensor,
    reader: TileReader,
    numbers: Numbers,
    upstream: Upstream,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of hidden, weight and bias by multiplying again, over vocabulary tiles that hold every row."""
    shape = linear.hidden.shape
    hidden = linear.hidden.reshape(-1, shape[-1])
    linear = LinearLogits(hidden.masked_fill(idle_rows(upstream)[:, None], 0.0), *linear[1:])
    n_rows = hidden.shape[0]
    d_hidden = torch.zeros_like(hidden, dtype=compute_dtype(hidden.dtype)) if needs[0] else None
    d_weight = linear.weight.new_zeros(linear.weight.shape) if needs[1] else None
    d_bias = torch.zeros_like(linear.bias) if linear.bias is not None and needs[2] else None
    tile_width = max(1, reader.product_rows(linear) * reader.width // max(n_rows, 1))
    buffer = hidden.new_empty(n_rows * min(tile_width, reader.width))
    for start, stop in chunk_bounds(reader.width, tile_width):
        product = buffer[: n_rows * (stop - start)].view(n_rows, stop - start)  # [N, v]
        multiply(linear, start, stop, out=product)
        gradient(product, token_ids, reader, numbers, upstream, out=product, start_id=start, width=stop - start)
        if d_hidden is not None:
            d_hidden += product @ linear.weight[start:stop]
        if d_weight is not None:
            torch.mm(product.t(), linear.hidden, out=d_weight[start:stop])
        if d_bias is not None:
            d_bias[start:stop] = product.sum(0, dtype=compute_dtype(product.dtype))
    if d_hidden is not None:
        d_hidden = d_hidden.to(hidden.dtype).reshape(shape)
    return d_hidden, d_weight, d_bias
