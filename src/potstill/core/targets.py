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

What it costs: the tile is read three times; a cumulative sum in float64 is four more tiles. No tensor [N, V]. Each row
has its own random numbers, drawn before the rows are cut into chunks.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from potstill.core.coarse import coarse_of
from potstill.core.entry import enter
from potstill.core.numerics import compute_dtype
from potstill.core.passes import join
from potstill.core.tiles import LinearLogits, Logits, TileReader, columns_of, read_as, row_shape
from potstill.core.topk import top_coarse
from potstill.core.transform import LogitTransform
from potstill.core.vocab_parallel import VocabShard, add_up, gather, share_out

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
    shard: VocabShard | None,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """token_ids [..., k] (int64, -1 in empty slots) and weights [..., k] of every row: SampledTargets.from_logits."""
    logits, shard = enter(logits, shard)
    reader = read_as(logits, transform, temperature, chunk_size, shard)
    if not 1 <= k <= reader.real:
        raise ValueError(f"k must be between 1 and the {reader.real} real tokens of the vocabulary, got {k}")
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
    if shard is not None:
        share_out(uniforms, shard)
    pieces = []
    for start, stop, raw in reader.products(logits):
        if method == "random":
            pieces.append(draw(raw, uniforms[start:stop], reader, shard))
        else:
            pieces.append(keep_and_select(raw, k, top_h or 0, uniforms[start:stop], reader, shard))
    token_ids, weights = join(pieces)
    weights = weights.to(compute_dtype(part.dtype))
    return token_ids.masked_fill(weights == 0, -1).reshape(*shape, k), weights.reshape(*shape, k)


def draw(raw: Tensor, uniforms: Tensor, reader: TileReader, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """One draw from p per uniform [N, K], ids ascending; repeats merged in their first slot at weight count / K."""
    k = uniforms.shape[1]
    nothing = torch.empty((*row_shape(raw), 0), dtype=torch.int64, device=raw.device)
    lse = coarse_of(raw, nothing, reader, shard).lse.reshape(-1)
    token_ids = select(raw, uniforms, nothing.view(len(uniforms), 0), lse, reader, shard).sort(1).values
    first = torch.ones_like(token_ids, dtype=torch.bool)
    first[:, 1:] = token_ids[:, 1:] != token_ids[:, :-1]
    count = torch.searchsorted(token_ids, token_ids, right=True) - torch.arange(k, device=raw.device)
    return token_ids.where(first, -1), torch.where(first, count.double() / k, 0.0)


def keep_and_select(
    raw: Tensor, k: int, top_h: int, uniforms: Tensor, reader: TileReader, shard: VocabShard | None = None
) -> tuple[Tensor, Tensor]:
    """The largest ids of each row at their own weight (at least top_h), and systematic samples of the others.

    Masses below are probabilities times a constant of the row, which cancels.
    """
    ids, coarse = top_coarse(raw, k, reader, shard)
    ids, coarse = ids.reshape(-1, k), coarse.flatten()  # [N, K], largest first
    peak = coarse.selected[:, 0]
    kept = (coarse.selected - peak[:, None]).double().exp()
    rest = (coarse.rest - peak).double().exp()[:, None]
    slots = torch.arange(k, device=raw.device)
    tail = rest + kept.flip(1).cumsum(1).flip(1)  # [N, K]: what is left if h ids are exact
    share = tail / (k - slots)  # c, if h ids are exact
    enough = kept < CERTAIN * share
    enough[:, :top_h] = False
    enough[:, -1] = True  # a single slot needs no more
    exact = (enough.cumsum(1) == 0).sum(1, keepdim=True)
    c = share.gather(1, exact)
    exact = slots < torch.where(rest == 0, k, exact)  # [N, K]; nothing is left out: the row as it is
    drawn = (~exact).sum(1, keepdim=True)
    points = (uniforms + (~exact).cumsum(1).sub(1).clamp(min=0)) / drawn.clamp(min=1)
    token_ids = torch.where(exact, ids, select(raw, points, ids.where(exact, -1), peak, reader, shard))
    return token_ids, torch.where(exact, kept, c) / tail[:, :1]


def select(
    raw: Tensor, points: Tensor, exact_ids: Tensor, shift: Tensor, reader: TileReader, shard: VocabShard | None
) -> Tensor:
    """The ids at which the masses exp(z - shift), but those of the exact ids, add up to points [N, K] in [0, 1).

    Over vocabulary shards the ranks tell each other their totals, and each finds the ids that lie in its part: two
    collectives.
    """
    own_ids = exact_ids if shard is None else shard.local(exact_ids)

    def masses() -> Iterator[tuple[slice, Tensor]]:
        for start, stop, tile in reader.tiles(raw):  # [C, V + 1]
            rows = slice(start, stop)
            tile.sub_(shift[rows, None]).exp_()
            yield rows, tile.scatter_(1, columns_of(own_ids[rows], 0, reader.width), 0.0)

    here = None
    if shard is not None:
        total = torch.empty(len(points), dtype=torch.float64, device=points.device)
        for rows, tile in masses():
            total[rows] = tile.sum(1, dtype=torch.float64)
        sums = torch.stack(gather(total, shard), 1).cumsum(1)  # [N, tp]
        wanted = points * sums[:, -1:]
        here = last_at_most(sums, wanted) == shard.rank
        points = ((wanted - sums[:, [shard.rank]] + total[:, None]) / total[:, None]).where(here, 0.0).clamp(0, 1)
    token_ids = torch.empty_like(points, dtype=torch.int64)
    for rows, tile in masses():
        sums = tile.cumsum(1, dtype=torch.float64)
        token_ids[rows] = last_at_most(sums, points[rows] * sums[:, -1:])
    if shard is None or here is None:
        return token_ids
    return add_up((token_ids + shard.start).where(here, 0), shard)


def last_at_most(sums: Tensor, wanted: Tensor) -> Tensor:
    """Columns at which ascending sums [C, V] exceed wanted [C, K], or, where rounding leaves none, the last rise."""
    total = sums[:, -1:].contiguous()
    return torch.minimum(torch.searchsorted(sums, wanted, right=True), torch.searchsorted(sums, total))
