"""The top-k loss: from logits (or a head that was not multiplied out yet) and a teacher to a scalar and its metrics.

The value of a row is the business of objective.py; this file brings rows, weights and gradients together.
"""

from functools import partial
from typing import NamedTuple

from jaxtyping import Float, Shaped
from torch import Tensor

from potstill.core.checks import check_choice, check_reusable
from potstill.core.coarse import coarse_of
from potstill.core.entry import enter
from potstill.core.kernel_choice import use_compiled
from potstill.core.metrics import RowNumbers, overlap, summarise
from potstill.core.numerics import compute_dtype
from potstill.core.objective import Objective
from potstill.core.rows import RowWeights, TeacherRows
from potstill.core.single_pass import form_coarse, single_pass, single_pass_pays
from potstill.core.teacher import SampledTargets, TeacherTopK
from potstill.core.tiles import LinearLogits, first_part, read_as, row_shape, vocab_width
from potstill.core.topk import top_coarse
from potstill.core.transform import LogitTransform
from potstill.core.vocab_parallel import VocabShard


class DistillationOutput(NamedTuple):
    """A loss: `loss` [] to call backward on, `per_token` [...] (nats, unweighted, 0 at unscored rows), metrics."""

    loss: Tensor
    per_token: Tensor
    metrics: dict[str, Tensor]


def topk_distillation_loss(
    logits: Float[Tensor, "... V"] | LinearLogits,
    teacher: TeacherTopK | SampledTargets,
    *,
    divergence: str = "forward_kl",
    tail: str | None = None,
    mask: Shaped[Tensor, "..."] | None = None,
    token_weights: Shaped[Tensor, "..."] | None = None,
    num_tokens: int | float | Tensor | None = None,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    transform: LogitTransform | None = None,
    shard: VocabShard | None = None,
    chunk_size: int | None = None,
    reuse_logits: bool = False,
    memory: str = "auto",
    log_prob_min_clamp: float | None = None,
    loss_min_clamp: float | None = None,
    loss_max_clamp: float | None = None,
    entropy: bool = False,
    diagnostics: bool = False,
    check: bool = True,
    kernel: str = "auto",
    **divergence_options: float,
) -> DistillationOutput:
    """Sum over scored rows of token_weights * D(teacher, student) / num_tokens, on the teacher's K ids and a tail.

    Args:
        logits: the student's [..., V], or LinearLogits. Row n predicts the token that row n of the teacher
            describes: nothing is shifted here.
        teacher: TeacherTopK, or SampledTargets (then the loss is the cross-entropy -sum w log q).
        divergence: a name in DIVERGENCES; its options (beta, alpha) are further keywords.
        tail: a name in TAILS, None for "bucket".
        mask: [...] bool or integer, non-zero = scored. Unscored rows may hold anything.
        token_weights: [...] float weights of the rows, default 1; no gradient.
        num_tokens: the global number of scored tokens, over micro-batches and data-parallel ranks; default: the
            scored rows of this call. <= 0 gives a loss of 0.
        temperature: divides the student's logits; the teacher's payload must carry the same one.
        temperature_squared: multiply per_token by temperature ** 2 (before loss_max_clamp).
        transform: the student's own scale, softcap and padded vocabulary.
        shard: the ids that this rank's logits (or weight) are of. Every rank of the group makes the same call with
            the same rows, global ids and options, and gets the same loss (see coarse_logits for what is exchanged).
        chunk_size: exact upper bound on the rows of a full-width tile.
        reuse_logits: backward overwrites the logits with their gradient (see coarse_logits).
        memory: for LinearLogits "single_pass" (3 GEMMs, gradients formed in forward; only `loss` may be
            differentiated, once), "recompute" (4 GEMMs, no float32 copy of the weight's gradient) or "auto".
        log_prob_min_clamp: forward_kl with drop only: both log-probabilities are clamped from below, without
            gradient, as verl does.
        loss_min_clamp: forward_kl with drop only: per-token floor (verl's is 0.0).
        loss_max_clamp: clamp per_token to [-c, c].
        entropy: also report student_entropy.
        diagnostics: also compare with the student's own top k (costs one more pass).
        check: check the teacher's values (ValueError on CPU, an asynchronous assert on CUDA).
        kernel: "eager", "compiled" or "auto" (see coarse_logits).
        **divergence_options: the divergence's own, e.g. beta for jsd.

    Returns:
        DistillationOutput in float32 (float64 for float64 logits). A call without a scored row gives loss 0 with
        a graph and gradients exactly 0.

    Peak extra memory: see coarse_logits and single_pass; [N, K + 1] numbers besides.

    Raises:
        TypeError: for a float mask (use token_weights), or non-float weights.
        ValueError: for rows that do not match, unknown names or options, pairs that have no learning signal or
            no meaning, a teacher of another temperature, or teacher rows that cannot be.
    """
    if not isinstance(teacher, (TeacherTopK, SampledTargets)):
        raise TypeError(
            f"teacher must be TeacherTopK or SampledTargets, got {type(teacher).__name__}; from logits make one with "
            "TeacherTopK.from_logits, or use full_vocab_distillation_loss"
        )
    objective = Objective(
        divergence=divergence,
        tail=tail,
        options=divergence_options,
        sampled=isinstance(teacher, SampledTargets),
        scale=temperature**2 if temperature_squared else 1.0,
        log_prob_min_clamp=log_prob_min_clamp,
        loss_min_clamp=loss_min_clamp,
        loss_max_clamp=loss_max_clamp,
    )
    logits, shard = enter(logits, shard)
    shape, vocab_size = row_shape(logits), vocab_width(logits) if shard is None else shard.vocab_size
    objective.check_teacher(teacher, shape, temperature)
    dtype = compute_dtype(first_part(logits).dtype)
    weights = RowWeights.of(shape, mask, token_weights, num_tokens, dtype, teacher.token_ids.device)
    if check:
        teacher.validate(vocab_size, weights.mask.view(shape))
    target = TeacherRows.of(teacher, weights.mask, dtype)
    score = partial(objective.score, target=target, mask=weights.mask)

    check_choice("memory", memory, ("auto", "recompute", "single_pass"))
    if reuse_logits:
        check_reusable(logits)
    reader = read_as(logits, transform, temperature, chunk_size, shard)
    reader = reader._replace(fused=use_compiled(kernel, logits, reader))
    if isinstance(logits, LinearLogits) and single_pass_pays(logits, memory, shard):
        form = partial(
            form_coarse,
            token_ids=target.token_ids,
            reader=reader,
            score=score,
            entropy=entropy,
            shard=shard,
        )
        loss, fields = single_pass(form, logits, weights)
        rows = RowNumbers(*fields)
    else:
        ids = target.token_ids.view(teacher.token_ids.shape)
        coarse = coarse_of(logits, ids, reader, shard, entropy=entropy, reuse_logits=reuse_logits)
        rows = score(coarse.flatten(), slice(None))
        loss = weights.total(rows.per_token)

    metrics = summarise(rows, weights, entropy=entropy)
    if objective.sampled:
        # A cross-entropy is no divergence: it must not be read as one.
        metrics = {"cross_entropy": metrics["head_loss"]} | {
            name: x for name, x in metrics.items() if name not in ("head_loss", "topk_loss", "tail_loss")
        }
    k = target.token_ids.shape[1]
    if diagnostics and k:
        top = min(k, reader.real)
        student_ids, _ = top_coarse(logits, top, reader._replace(temperature=1.0, fused=False), shard)
        student_ids = student_ids.reshape(len(target.token_ids), top)
        log_probs = None if objective.sampled else target.values
        metrics |= overlap(
            student_ids, target.token_ids, rows.student_log_probs, log_probs, weights, log_prob_min_clamp
        )
    return DistillationOutput(loss, rows.per_token.view(shape), metrics)
