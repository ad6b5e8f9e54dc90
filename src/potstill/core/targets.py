"""Sparse unbiased targets: a full teacher row p becomes K weighted ids whose mean is p.

With weights w of mean p the loss -sum w log q has the mean gradient q - p, that of the full forward KL: what is
lost is no part of the distribution, only precision. The squared error E|w - p|^2 says how much:

    random      K draws from p, weight count / K                     (1 - sum p^2) / K, also where q = p
    top_h       the top h ids exact, K - h distinct ids of the rest  c p_t - sum_tail p^2
    threshold   h chosen by the row itself                           the same, and the least of any unbiased K ids

Threshold sampling solves sum_i min(1, p_i / c) = K. Ids with p_i >= c keep their own weight p_i; the tail, all
others, of mass p_t, shares the m slots that are left: an id of the tail is selected with probability p_i / c and then
weighs c = p_t / m. Systematic sampling selects exactly m distinct ids. top_h does the same with at least top_h exact
ids.
Sources: Fearnhead and Clifford (2003), doi:10.1111/1467-9868.00421; random: Anshumann et al. (2025), arXiv:2503.16870.

What it costs: the tile is read twice; a cumulative sum in float64 is four more tiles. No tensor [N, V]. Each row has
its own random numbers, drawn before the rows are cut into chunks.
"""

import math

import torch
from torch import Tensor

from potstill.core.checks import check_logits
from potstill.core.coarse import join
from potstill.core.numerics import compute_dtype
from potstill.core.tiles import LinearLogits, Logits, TileReader, read_as, row_shape
from potstill.core.topk import top_ids
from potstill.core.transform import LogitTransform

METHODS = ("threshold", "top_h", "random")
CERTAIN = 1 - 1e-9  # ids selected with at least this probability are exact: rounding never selects one twice


@torch.no_grad()
def sample_targets(
    logits: Logits,
    k: int,
    *,
    method: str,
    top_h: int | None,
    generator: torch.Generator | None,
    temperature: float,
    transform: LogitTransform | None,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """token_ids [..., k] (int64, -1 in empty slots) and weights [..., k] of every row: SampledTargets.from_logits."""
    logits = check_logits(logits)
    reader = read_as(logits, transform, temperature, chunk_size)
    if not 1 <= k <= reader.width:
        raise ValueError(f"k must be between 1 and the {reader.width} real tokens of the vocabulary, got {k}")
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if method != "top_h" and top_h is not None:
        raise ValueError(f"top_h only goes with method='top_h', got top_h={top_h} and method={method!r}; leave it out")
    if method == "top_h" and (top_h is None or not 0 < top_h < k):
        raise ValueError(
            f"method='top_h' needs 0 < top_h < k = {k}, got top_h={top_h}; "
            "method='threshold' chooses how many ids are exact by itself"
        )
    shape, part = row_shape(logits), logits.hidden if isinstance(logits, LinearLogits) else logits
    uniforms = torch.rand(
        (math.prod(shape), k if method == "random" else 1),
        generator=generator,
        dtype=torch.float64,
        device=part.device if generator is None else generator.device,
    ).to(part.device)
    pieces = []
    for start, stop, raw in reader.products(logits):
        if method == "random":
            pieces.append(draw(raw, uniforms[start:stop], reader))
        else:
            pieces.append(keep_and_select(raw, k, top_h or 0, uniforms[start:stop], reader))
    token_ids, weights = join(pieces)
    weights = weights.to(compute_dtype(part.dtype))
    return token_ids.masked_fill(weights == 0, -1).reshape(*shape, k), weights.reshape(*shape, k)


def draw(raw: Tensor, uniforms: Tensor, reader: TileReader) -> tuple[Tensor, Tensor]:
    """One draw from p per uniform [N, K], ids ascending; repeats merged in their first slot at weight count / K."""
    n_rows, k = uniforms.shape
    token_ids = torch.empty((n_rows, k), dtype=torch.int64, device=raw.device)
    for start, stop, tile in reader.tiles(raw):  # [C, V + 1]
        masses = tile.sub_(tile.amax(1, keepdim=True)).exp_()
        token_ids[start:stop] = ids_at(uniforms[start:stop], masses)
    token_ids = token_ids.sort(1).values
    first = torch.ones_like(token_ids, dtype=torch.bool)
    first[:, 1:] = token_ids[:, 1:] != token_ids[:, :-1]
    count = torch.searchsorted(token_ids, token_ids, right=True) - torch.arange(k, device=raw.device)
    return token_ids.where(first, -1), torch.where(first, count.double() / k, 0.0)


def keep_and_select(raw: Tensor, k: int, top_h: int, uniforms: Tensor, reader: TileReader) -> tuple[Tensor, Tensor]:
    """The largest ids of each row at their own weight (at least top_h), and systematic samples of the others.

    Masses below are probabilities times a constant of the row, which cancels.
    """
    top = top_ids(raw, k, reader)  # [N, K], largest first
    token_ids = torch.empty_like(top)
    weights = torch.empty_like(top, dtype=torch.float64)
    slots = torch.arange(k, device=raw.device)
    for start, stop, tile in reader.tiles(raw):  # [C, V + 1]
        ids = top[start:stop]
        masses = tile.sub_(tile.gather(1, ids[:, :1])).exp_()
        kept = masses.gather(1, ids)
        masses.scatter_(1, ids, 0.0)
        rest = masses.sum(1, keepdim=True, dtype=torch.float64)
        tail = rest + kept.double().flip(1).cumsum(1).flip(1)  # [C, K]: what is left if h ids are exact
        share = tail / (k - slots)  # c, if h ids are exact
        enough = kept < CERTAIN * share
        enough[:, :top_h] = False
        enough[:, -1] = True  # a single slot needs no more
        exact = (enough.cumsum(1) == 0).sum(1, keepdim=True)
        c = share.gather(1, exact)
        exact = torch.where(rest == 0, k, exact)  # nothing is left out: the row as it is
        masses.scatter_(1, ids, kept.masked_fill(slots < exact, 0.0))
        points = (uniforms[start:stop] + (slots - exact).clamp(min=0)) / (k - exact).clamp(min=1)
        token_ids[start:stop] = torch.where(slots < exact, ids, ids_at(points, masses))
        weights[start:stop] = torch.where(slots < exact, kept, c) / tail[:, :1]
    return token_ids, weights


def ids_at(points: Tensor, masses: Tensor) -> Tensor:
    """The columns at which the masses [C, V] add up to more than points [C, K] in [0, 1) of their total."""
    sums = masses.cumsum(1, dtype=torch.float64)
    total = sums[:, -1:].contiguous()
    # Rounding may bring a point up to the total: that is the last column with any mass.
    return torch.minimum(torch.searchsorted(sums, points * total, right=True), torch.searchsorted(sums, total))
