"""Exact divergences over the whole vocabulary, for a teacher whose logits (or hidden states and head) are at hand.

Rows are taken tile by tile through ordinary PyTorch: log-softmax of both sides, the divergence's terms, their sum.
Autograd differentiates one tile at a time, so nothing of size [N, V] exists beyond the caller's own tensors.

A student given as logits keeps nothing: backward reads both inputs again. A student given as LinearLogits forms
its gradients in forward (three GEMMs, one more for a LinearLogits teacher; see single_pass for what that costs).
Hidden states and a head are thus the smallest exact payload of a teacher: H numbers a row.
"""

from functools import partial

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from potstill.core.checks import refuse_double_backward
from potstill.core.divergences import check_divergence
from potstill.core.entry import enter
from potstill.core.full_vocab_parallel import bucket_over_shards, full_vocab_over_shards
from potstill.core.losses import DistillationOutput
from potstill.core.metrics import summarise_losses
from potstill.core.numerics import compute_dtype
from potstill.core.operators import outside_graph
from potstill.core.pairs import Pairs, RowLoss
from potstill.core.rows import RowWeights
from potstill.core.single_pass import LinearGradients, Needs, needs_gradient, single_pass
from potstill.core.tiles import LinearLogits, first_part, from_parts, parts_of, read_as, row_shape
from potstill.core.transform import LogitTransform
from potstill.core.vocab_parallel import VocabShard


def full_vocab_distillation_loss(
    student: Float[Tensor, "... V"] | LinearLogits,
    teacher: Float[Tensor, "... V_teacher"] | LinearLogits,
    *,
    divergence: str = "forward_kl",
    k: int | None = None,
    shape_weight: float | None = None,
    mask: Shaped[Tensor, "..."] | None = None,
    token_weights: Shaped[Tensor, "..."] | None = None,
    num_tokens: int | float | Tensor | None = None,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    student_transform: LogitTransform | None = None,
    teacher_transform: LogitTransform | None = None,
    shard: VocabShard | None = None,
    chunk_size: int | None = None,
    **divergence_options: float,
) -> DistillationOutput:
    """Sum over scored rows of token_weights * D(teacher, student) / num_tokens, over all V categories.

    With `shape_weight` the forward KL is split at the teacher's top k into what a top-k payload shows and what it
    hides: bucket + shape_weight * p_tail * KL(shape of the teacher's tail, shape of the student's). 0 is the bucket
    loss, 1 the full KL.

    Args:
        student: [..., V] logits, or LinearLogits.
        teacher: [..., V'] logits, or LinearLogits; no gradient. V' = V unless both transforms give one vocab_size.
        divergence: a name in DIVERGENCES; its options (beta, alpha) are further keywords.
        k: number of the teacher's ids (ties to the lower id) kept apart, with shape_weight only.
        shape_weight: >= 0, forward_kl only.
        mask: [...] bool or integer, non-zero = scored. Unscored rows may hold anything.
        token_weights: [...] float weights of the rows, default 1; no gradient.
        num_tokens: the global number of scored tokens; default: the scored rows of this call. <= 0 gives loss 0.
        temperature: divides both sides' logits.
        temperature_squared: multiply per_token by temperature ** 2.
        student_transform: the student's own scale, softcap and padded vocabulary.
        teacher_transform: the teacher's.
        shard: the ids that this rank's logits (or weights) of both sides are of. Two collectives in forward, of 2
            numbers a row each; for LinearLogits one of hidden's gradient in backward.
        chunk_size: exact upper bound on the rows of a full-width tile.
        **divergence_options: the divergence's own, e.g. beta for jsd.

    Returns:
        DistillationOutput in float32 (float64 for a float64 student). With a LinearLogits student only `loss` can
        be differentiated, once.

    Peak extra memory: some ten tiles; for LinearLogits one product on each side and the gradients.

    Raises:
        TypeError: for a float mask, or what is no logits.
        ValueError: for rows or vocabularies that do not match, unknown names or options, k or shape_weight alone.
    """
    check_divergence(divergence, divergence_options)
    student, own = enter(student, shard, "student")
    teacher, _ = enter(from_parts([x if x is None else x.detach() for x in parts_of(teacher)]), shard, "teacher")
    pairs = Pairs(
        student,
        teacher,
        read_as(student, student_transform, temperature, chunk_size, own),
        read_as(teacher, teacher_transform, temperature, chunk_size, own),
    )
    _check(pairs, divergence, k, shape_weight)
    row_loss = RowLoss(divergence, divergence_options, k, shape_weight, temperature**2 if temperature_squared else 1.0)
    shape, first = row_shape(student), first_part(student)
    weights = RowWeights.of(shape, mask, token_weights, num_tokens, compute_dtype(first.dtype), first.device)
    if own is not None:
        per_token = full_vocab_over_shards(pairs, row_loss, weights.mask, own)
        if k is not None and shape_weight is not None:
            bucket = bucket_over_shards(pairs, row_loss, weights.mask, k, own)
            per_token = bucket + shape_weight * (per_token - bucket)
        loss = weights.total(per_token)
    elif isinstance(student, LinearLogits) and needs_gradient(student):
        form = partial(form_full, pairs=pairs, row_loss=row_loss, mask=weights.mask)
        loss, (per_token,) = single_pass(form, student, weights)
    else:
        with torch.autocast(first.device.type, enabled=False):
            if isinstance(student, LinearLogits):
                per_token = outside_graph(row_values, pairs, row_loss, weights.mask)
            else:
                given = (student, weights.mask, row_loss, pairs[2:], *parts_of(pairs.teacher))
                per_token = outside_graph(_FullVocab.apply, *given)
        loss = weights.total(per_token)
    return DistillationOutput(loss, per_token.view(shape), summarise_losses(per_token, per_token, weights))


@torch.no_grad()
def row_values(pairs: Pairs, row_loss: RowLoss, mask: Tensor) -> Tensor:
    """per_token [N], without a gradient."""
    dtype = compute_dtype(first_part(pairs.student).dtype)
    per_token = torch.empty(mask.shape, dtype=dtype, device=mask.device)
    for rows, student, teacher in pairs.pieces():
        for tile, student_z, teacher_z in pairs.tiles(student, teacher):
            per_token[rows][tile] = row_loss(student_z, teacher_z, mask[rows][tile])
    return per_token


def form_full(
    linear: LinearLogits, needs: Needs, factor: Tensor, *, pairs: Pairs, row_loss: RowLoss, mask: Tensor
) -> tuple[tuple[Tensor], LinearGradients]:
    """per_token of every row of a LinearLogits student, and the gradients of sum(per_token * factor)."""
    hidden = linear.hidden.reshape(-1, linear.hidden.shape[-1])
    grads = LinearGradients.zeros(linear, needs)
    hidden = hidden.masked_fill(~mask[:, None], 0.0)  # a NaN there would survive the gradient's exact zero
    per_token = torch.empty_like(factor)
    for rows, student, teacher in pairs.pieces():
        for tile, value, d_raw in pairs.gradients(student, teacher, row_loss, mask[rows], factor[rows]):
            per_token[rows][tile] = value
            student[0][tile] = d_raw
        grads.add(student[0], hidden[rows], linear.weight, rows)
    return (per_token,), grads


class _FullVocab(torch.autograd.Function):
    """per_token [N] of a student given as logits; keeps the inputs alone and reads them again in backward."""

    @staticmethod
    def forward(ctx, student, mask, row_loss, readers, *teacher):
        # Autograd cannot save tensors made in inference mode, as a teacher's often are.
        ctx.unsaved = teacher if any(x is not None and x.is_inference() for x in teacher) else ()
        ctx.save_for_backward(student, mask, *(() if ctx.unsaved else teacher))
        ctx.row_loss, ctx.readers = row_loss, readers
        pairs = Pairs(student, from_parts(teacher), *readers)
        return row_values(pairs, row_loss, mask)

    @staticmethod
    def backward(ctx, upstream):
        refuse_double_backward()
        student, mask, *teacher = ctx.saved_tensors
        teacher = ctx.unsaved or teacher
        pairs = Pairs(student, from_parts(teacher), *ctx.readers)
        d_student = torch.empty_like(student, memory_format=torch.contiguous_format)
        out = d_student.view(mask.numel(), student.shape[-1])
        out[:, ctx.readers[0].width :].zero_()
        for rows, student_raw, teacher_raw in pairs.pieces():
            for tile, _, d_raw in pairs.gradients(student_raw, teacher_raw, ctx.row_loss, mask[rows], upstream[rows]):
                out[rows][tile, : d_raw.shape[1]] = d_raw
        return d_student, None, None, None, *[None] * len(teacher)


def _check(pairs: Pairs, divergence: str, k: int | None, shape_weight: float | None) -> None:
    if row_shape(pairs.student) != row_shape(pairs.teacher):
        raise ValueError(
            f"the teacher has rows {list(row_shape(pairs.teacher))} but the student has rows "
            f"{list(row_shape(pairs.student))}; row n of both must describe the same prediction"
        )
    real = pairs.student_reader.real, pairs.teacher_reader.real
    if real[0] != real[1]:
        raise ValueError(
            f"student and teacher have {real[0]} and {real[1]} real tokens; say which are real in both with "
            "student_transform=LogitTransform(vocab_size=...) and teacher_transform=LogitTransform(vocab_size=...)"
        )
    if (k is None) != (shape_weight is None):
        raise ValueError(f"k and shape_weight go together, got k={k} and shape_weight={shape_weight}")
    if k is None or shape_weight is None:
        return
    if divergence != "forward_kl":
        raise ValueError(f"shape_weight splits the forward KL only, got divergence={divergence!r}")
    if not 1 <= k <= real[0]:
        raise ValueError(f"k must be between 1 and the {real[0]} real tokens of the vocabulary, got {k}")
    if not 0 <= shape_weight < float("inf"):
        raise ValueError(
            f"shape_weight must be finite and >= 0 (0 is the bucket loss, 1 the full KL), got {shape_weight}"
        )
