"""The k most probable tokens of each row, ties to the lower id, with exact log-probabilities."""

import math

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from potstill.core.coarse import CoarseLogits
from potstill.core.entry import enter
from potstill.core.numerics import INF, logsumexp
from potstill.core.passes import join, statistics
from potstill.core.tiles import LinearLogits, Logits, TileReader, read_as, row_shape
from potstill.core.transform import LogitTransform
from potstill.core.vocab_parallel import VocabShard, gather


def student_topk(
    logits: Float[Tensor, "... V"] | LinearLogits,
    k: int,
    *,
    transform: LogitTransform | None = None,
    shard: VocabShard | None = None,
    chunk_size: int | None = None,
) -> tuple[Integer[Tensor, "... k"], Float[Tensor, "... k"]]:
    """Ids and log-probabilities of the k most probable tokens, most probable first, ties to the lower id.

    Args:
        logits: [..., V] or LinearLogits; no gradient is taken.
        k: 1 <= k <= V.
        transform: the model's own scale, softcap and padded vocabulary.
        shard: the ids that this rank's logits (or weight) are of; one all-gather of 2 k + 1 numbers a row.
        chunk_size: upper bound on the rows of a full-width tile.

    Returns:
        token_ids [..., k] (int64) and log_probs [..., k] (nats, at temperature 1, over the whole vocabulary).

    Peak extra memory: one tile (for LinearLogits also one product). One GEMM for LinearLogits.

    Raises:
        ValueError: for a k outside 1 to V.
    """
    logits, shard = enter(logits, shard)
    token_ids, coarse = top_coarse(logits, k, read_as(logits, transform, 1.0, chunk_size, shard), shard)
    return token_ids, coarse.log_probs


@torch.no_grad()
def top_coarse(
    logits: Logits, k: int, reader: TileReader, shard: VocabShard | None = None
) -> tuple[Tensor, CoarseLogits]:
    """The top k ids [..., k] and the coarse logits at them, in one pass (one GEMM for LinearLogits).

    Over vocabulary shards every rank takes its own top k, and one all-gather of 2 k + 1 numbers a row lets all find
    the top k of these. What a rank's others were, and the candidates that were not taken, add up to the rest.
    """
    if not 1 <= k <= reader.real:
        raise ValueError(f"k must be between 1 and the {reader.real} real tokens of the vocabulary, got {k}")
    own = min(k, reader.width)
    pieces = []
    for _, _, raw in reader.products(logits):
        token_ids = top_ids(raw, own, reader)
        pieces.append((token_ids, *statistics(raw, token_ids, reader, entropy=False)[:3]))
    token_ids, selected, *others = join(pieces)
    shape = row_shape(logits)
    coarse = CoarseLogits.of(selected, *others)
    if shard is not None:
        token_ids, coarse = _best_of_ranks(token_ids + shard.start, coarse, k, shard)
    coarse = coarse.map_rows(lambda x: x.reshape(shape))._replace(selected=coarse.selected.reshape(*shape, k))
    return token_ids.reshape(*shape, k), coarse


def _best_of_ranks(token_ids: Tensor, coarse: CoarseLogits, k: int, shard: VocabShard) -> tuple[Tensor, CoarseLogits]:
    """The k best of every rank's candidates [N, own], largest first, ties to the lower id."""
    missing = k - token_ids.shape[1]  # ranks send equally much: a narrow one fills up with what nobody takes
    values = torch.nn.functional.pad(coarse.selected.double(), (0, missing), value=-INF)
    ids = torch.nn.functional.pad(token_ids.double(), (0, missing), value=shard.vocab_size)  # exact below 2^53
    sent = torch.cat([values, ids, coarse.rest.double().unsqueeze(1)], 1)
    values, ids, rests = torch.stack(gather(sent, shard), 1).split([k, k, 1], -1)  # [N, tp, ...]
    ids, order = ids.flatten(1).sort(1)
    values, best = values.flatten(1).gather(1, order).sort(dim=1, descending=True, stable=True)
    rest = logsumexp(torch.cat([values[:, k:], rests.squeeze(-1)], 1))
    dtype = coarse.rest.dtype
    return ids.gather(1, best[:, :k]).to(torch.int64), CoarseLogits(values[:, :k].to(dtype), rest.to(dtype))


def top_ids(raw: Tensor, k: int, reader: TileReader) -> Integer[Tensor, "rows k"]:
    """The k largest columns of each row of raw logits, as `tile_top_ids` orders them."""
    token_ids = torch.empty((math.prod(raw.shape[:-1]), k), dtype=torch.int64, device=raw.device)
    for start, stop, tile in reader.tiles(raw):
        token_ids[start:stop] = tile_top_ids(tile[:, : reader.width], k)
    return token_ids


def tile_top_ids(z: Float[Tensor, "rows V"], k: int) -> Integer[Tensor, "rows k"]:
    """The k largest columns of each row, largest first, ties to the lower id."""
    # One more than k shows whether the border is tied; which of the tied ones topk returns is unspecified.
    values, ids = z.topk(min(k + 1, z.shape[1]), dim=1)
    if k < z.shape[1]:
        tied = (values[:, k - 1] == values[:, k]).nonzero().squeeze(1)
        ids = ids[:, :k].index_copy(0, tied, _lowest_at_border(z[tied], values[tied, k - 1 : k], k))
    ids = ids.sort(1).values
    order = z.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _lowest_at_border(z: Tensor, border: Tensor, k: int) -> Tensor:
    """k ids of each row: all above the border value, then the lowest of those equal to it."""
    equal = z == border
    above = ~(z <= border)  # a NaN counts as above, as in topk
    chosen = above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))
    return chosen.nonzero()[:, 1].view(-1, k)
