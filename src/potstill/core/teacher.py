"""What a teacher says of each row: its top-k log-probabilities, or sampled targets. Construct and validate.

The rules of the whole library, stated once: a slot with id -1 or log-probability -inf is empty. It selects
nothing, and the student's mass on it belongs to the rest. Rows are aligned with the student's logits: row n of
both describes the same prediction.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from potstill.core.checks import refuse_where
from potstill.core.coarse import coarse_logits
from potstill.core.entry import enter
from potstill.core.numerics import INF, compute_dtype, estimated_rest
from potstill.core.targets import sample_targets
from potstill.core.tiles import LinearLogits, read_as
from potstill.core.topk import top_coarse
from potstill.core.transform import LogitTransform
from potstill.core.vocab_parallel import VocabShard


@dataclass(frozen=True, eq=False)
class TeacherTopK:
    """A teacher's log-probabilities (nats) at K ids of each row, over its whole vocabulary.

    Args:
        token_ids: [..., K] integers; -1 is an empty slot. Ids of a row differ.
        log_probs: [..., K] in any float dtype; -inf is an empty slot.
        rest_log_prob: [...] log of the mass on every other id, or None: then log(max(1 - P, eps)), P summed in
            float32 (float64 for float64) with eps 2^-24 (2^-53). 16-bit payloads need it for the bucket tail.
        temperature: the temperature the log-probabilities were taken at.

    Raises:
        TypeError: for ids that are no integers, or log-probabilities that are no floats.
        ValueError: for shapes that do not match.
    """

    token_ids: Tensor
    log_probs: Tensor
    rest_log_prob: Tensor | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_pair("TeacherTopK", self.token_ids, "log_probs", self.log_probs)
        rest = self.rest_log_prob
        if rest is not None and (rest.shape != self.token_ids.shape[:-1] or not rest.is_floating_point()):
            raise ValueError(
                f"TeacherTopK: rest_log_prob must be floating point with the rows of token_ids "
                f"{list(self.token_ids.shape[:-1])}, got {rest.dtype} {list(rest.shape)}"
            )

    @classmethod
    def from_logits(
        cls,
        logits: Float[Tensor, "... V"] | LinearLogits,
        k: int | None = None,
        *,
        token_ids: Integer[Tensor, "... K"] | None = None,
        temperature: float = 1.0,
        transform: LogitTransform | None = None,
        shard: VocabShard | None = None,
        chunk_size: int | None = None,
    ) -> "TeacherTopK":
        """The top k ids (ties to the lower id), or the given ids, with an exact rest. No gradient.

        Args:
            logits: the teacher's [..., V], or LinearLogits (one GEMM).
            k: how many ids, 1 <= k <= V; exactly one of k and token_ids.
            token_ids: [..., K] ids to score instead, e.g. the student's own; -1 is an empty slot.
            temperature: divides the logits.
            transform: the model's own scale, softcap and padded vocabulary.
            shard: the ids that this rank's logits (or weight) are of; every rank gets the same rows.
            chunk_size: upper bound on the rows of a full-width tile.

        Peak extra memory: one tile (for LinearLogits also one product).

        Raises:
            ValueError: for both or neither of k and token_ids, or a k outside 1 to V.
        """
        if (k is None) == (token_ids is None):
            raise ValueError(f"from_logits needs exactly one of k and token_ids, got k={k} and token_ids={token_ids}")
        with torch.no_grad():
            if k is not None:
                logits, shard = enter(logits, shard)
                reader = read_as(logits, transform, temperature, chunk_size, shard)
                token_ids, coarse = top_coarse(logits, k, reader, shard)
            else:
                assert token_ids is not None
                coarse = coarse_logits(
                    logits,
                    token_ids,
                    temperature=temperature,
                    transform=transform,
                    shard=shard,
                    chunk_size=chunk_size,
                )
        log_probs = coarse.all_log_probs
        return cls(token_ids, log_probs[..., :-1], log_probs[..., -1], temperature)

    def with_rest(self) -> "TeacherTopK":
        """Itself, or with the rest that the losses take where none was given: log(max(1 - P, eps)), in float32."""
        if self.rest_log_prob is not None:
            return self
        log_probs = self.log_probs.to(compute_dtype(self.log_probs.dtype)).masked_fill(self.token_ids < 0, -INF)
        return replace(self, rest_log_prob=estimated_rest(log_probs.exp().sum(-1)))

    def validate(self, vocab_size: int, mask: Bool[Tensor, "..."] | None = None) -> "TeacherTopK":
        """Refuse rows that no teacher can have said; return self.

        Args:
            vocab_size: V, the width of the student's head.
            mask: [...] rows that are scored (default all); other rows may hold anything.

        Raises:
            ValueError: naming the row, the value and the remedy: K > V, an id outside [-1, V), an id twice in a
                row, NaN, a log-probability above 1e-3, or a mass above 1 + 1e-3 (16-bit payloads: 1e-2).
                On CUDA the value checks are one asynchronous assert.
        """
        refuse = partial(_refuse, mask, self.token_ids.ndim - 1)
        ids = _check_ids("TeacherTopK", self.token_ids, self.log_probs != -INF, vocab_size, refuse)
        slack = 1e-2 if self.log_probs.element_size() == 2 else 1e-3
        log_probs = self.log_probs.to(compute_dtype(self.log_probs.dtype)).masked_fill(ids < 0, -INF)
        natural = "log-probabilities are natural logarithms, at most 0"
        refuse(log_probs.isnan(), "has a log-probability that is NaN", log_probs, "score it again")
        refuse(log_probs > slack, f"has a log-probability above {slack}", log_probs, natural)
        mass = log_probs.exp().sum(-1)
        hint = "are these logits, or log-probabilities of another temperature?"
        refuse(mass > 1 + slack, f"has mass above 1 + {slack}", mass, hint)
        if self.rest_log_prob is not None:
            rest = self.rest_log_prob
            refuse(~(rest <= slack), f"has a rest_log_prob that is NaN or above {slack}", rest, natural)
        return self


@dataclass(frozen=True, eq=False)
class SampledTargets:
    """Soft labels on K ids of each row, unbiased for the gradient of the full forward KL.

    Args:
        token_ids: [..., K] integers; -1 is an empty slot. Ids of a row differ.
        weights: [..., K] floats >= 0; each row sums to 1 within 1e-3.
        temperature: the temperature of the teacher they were drawn from.

    Raises:
        TypeError: for ids that are no integers, or weights that are no floats.
        ValueError: for shapes that do not match.
    """

    token_ids: Tensor
    weights: Tensor
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_pair("SampledTargets", self.token_ids, "weights", self.weights)

    @classmethod
    def from_logits(
        cls,
        logits: Float[Tensor, "... V"] | LinearLogits,
        k: int,
        *,
        method: str = "threshold",
        top_h: int | None = None,
        generator: torch.Generator | None = None,
        temperature: float = 1.0,
        transform: LogitTransform | None = None,
        shard: VocabShard | None = None,
        chunk_size: int | None = None,
    ) -> "SampledTargets":
        """K weighted ids of each row, random, with the teacher's distribution as their mean. No gradient.

        Args:
            logits: the teacher's [..., V], or LinearLogits (one GEMM).
            k: slots of a row, 1 <= k <= V.
            method: "threshold" (least squared error) and "top_h" fill k slots with distinct ids; where no more than
                k ids have any probability, the row is exact and further slots are -1. "random" makes k draws,
                repeats merged at weight count / k; slots left over are -1 with weight 0. See core/targets.py.
            top_h: for "top_h" alone: how many of the most probable ids at least are exact, 0 < top_h < k.
            generator: source of the random numbers; the same seed gives the same targets at any chunk_size, and,
                for a CPU generator, on any device.
            temperature: divides the logits.
            transform: the model's own scale, softcap and padded vocabulary.
            shard: the ids that this rank's logits (or weight) are of. Every rank gets the same rows, drawn with the
                random numbers of the group's first rank.
            chunk_size: upper bound on the rows of a full-width tile.

        Returns:
            SampledTargets with int64 ids and float32 weights (float64 for float64 logits), each row summing to 1.

        Peak extra memory: about five tiles (for LinearLogits also one product).

        Raises:
            ValueError: for a k outside 1 to V, an unknown method, or a top_h that is out of range or not used.
        """
        token_ids, weights = sample_targets(
            logits,
            k,
            method=method,
            top_h=top_h,
            generator=generator,
            temperature=temperature,
            transform=transform,
            shard=shard,
            chunk_size=chunk_size,
        )
        return cls(token_ids, weights, temperature)

    def validate(self, vocab_size: int, mask: Bool[Tensor, "..."] | None = None) -> "SampledTargets":
        """Refuse rows that are no distribution; return self.

        Args:
            vocab_size: V, the width of the student's head.
            mask: [...] rows that are scored (default all); other rows may hold anything.

        Raises:
            ValueError: naming the row, the value and the remedy: K > V, an id outside [-1, V), an id twice in a
                row, a negative or NaN weight, or a sum other than 1.
        """
        refuse = partial(_refuse, mask, self.token_ids.ndim - 1)
        ids = _check_ids("SampledTargets", self.token_ids, self.weights != 0, vocab_size, refuse)
        weights = self.weights.to(compute_dtype(self.weights.dtype)).masked_fill(ids < 0, 0.0)
        refuse(~(weights >= 0), "has a weight that is negative or NaN", weights, "weights are probabilities")
        total = weights.sum(-1)
        slack = 1e-2 if self.weights.element_size() == 2 else 1e-3
        hint = "divide by their sum, or use TeacherTopK for truncated probabilities"
        refuse(~((total - 1).abs() <= slack), "has weights that do not sum to 1 but to", total, hint)
        return self


def _check_pair(owner: str, token_ids: Tensor, name: str, values: Tensor) -> None:
    if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool:
        raise TypeError(f"{owner}: token_ids must be integers, got {token_ids.dtype}")
    if not values.is_floating_point():
        raise TypeError(f"{owner}: {name} must be floating point, got {values.dtype}")
    if token_ids.ndim == 0 or token_ids.shape != values.shape:
        raise ValueError(
            f"{owner}: token_ids and {name} must both be [..., K], got {list(token_ids.shape)} "
            f"and {list(values.shape)}"
        )


def _check_ids(owner: str, token_ids: Tensor, live: Tensor, vocab_size: int, refuse: Callable) -> Tensor:
    """Refuse ids outside [-1, V) and ids twice in a row; return them as int64."""
    k = token_ids.shape[-1]
    if k > vocab_size:
        raise ValueError(
            f"{owner}: K is {k} but the vocabulary has only {vocab_size} tokens; ask for at most that many"
        )
    ids = token_ids.to(torch.int64)
    hint = "do teacher and student share a tokenizer? -1 marks an empty slot"
    refuse((ids < -1) | (ids >= vocab_size), f"has a token id outside [-1, {vocab_size})", ids, hint)
    ordered = torch.where(live, ids, -1).sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    refuse(twice, "has a token id twice", ordered[..., 1:], "merge the two slots, or mark one -1")
    return ids


def _refuse(mask: Tensor | None, n_leading: int, bad: Tensor, what: str, values: Tensor, remedy: str) -> None:
    """ValueError naming the row of the first bad entry and its value, for `bad` [...] or [..., K], unless masked."""
    if mask is not None:
        bad = bad & (mask if bad.ndim == n_leading else mask.unsqueeze(-1)).bool()

    def message() -> str:
        first = tuple(bad.nonzero()[0].tolist())
        row = first[:n_leading]
        name = row[0] if n_leading == 1 else row
        value = values[first].item()
        return f"teacher row {name} {what}: {value if isinstance(value, int) else f'{value:.6g}'}; {remedy}"

    refuse_where(bad, message)
