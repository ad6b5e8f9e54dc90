"""Metrics of a loss call: detached, without host sync, and additive over micro-batches and ranks.

A mean is the sum over scored rows divided by num_tokens (never by token_weights), so partial results add up; one
with a denominator of its own comes as `x_sum` and `x_count`. Minima and maxima over no row are +inf and -inf.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from potstill.core.numerics import INF, p_log_p_over_q
from potstill.core.rows import RowWeights, TeacherRows


class RowNumbers(NamedTuple):
    """What a loss knows of each row [N], in nats or probabilities; 0 at unscored rows. Only per_token has a graph."""

    per_token: Tensor
    head_loss: Tensor
    tail_loss: Tensor
    raw_loss: Tensor  # before loss_min_clamp and loss_max_clamp
    clamped: Tensor  # 1.0 where a clamp acted on the row
    student_mass: Tensor
    teacher_mass: Tensor
    student_tail_mass: Tensor
    teacher_tail_mass: Tensor
    student_log_probs: Tensor  # [N, K] at the teacher's ids
    student_entropy: Tensor  # 0 where it was not asked for


@torch.no_grad()
def summarise_losses(per_token: Tensor, weights: RowWeights) -> dict[str, Tensor]:
    """What any loss can say of its per_token [N]: range, and the share of rows below 0."""
    low, high = _range(per_token, weights.mask)
    negative = (per_token < 0).sum() * weights.per_row  # unscored rows are 0
    return {"loss_min": low, "loss_max": high, "negative_fraction": negative}


@torch.no_grad()
def summarise(rows: RowNumbers, weights: RowWeights, *, entropy: bool) -> dict[str, Tensor]:
    """Metrics of the scored rows."""
    mask, per_row = weights.mask, weights.per_row

    def mean(x: Tensor) -> Tensor:
        return x.masked_fill(~mask, 0.0).sum() * per_row

    metrics = {
        "head_loss": mean(rows.head_loss),
        "topk_loss": mean(rows.head_loss),
        "tail_loss": mean(rows.tail_loss),
        "student_tail_mass": mean(rows.student_tail_mass),
        "teacher_tail_mass": mean(rows.teacher_tail_mass),
        "clamped_fraction": mean(rows.clamped),
    }
    for name, x in (("student_mass", rows.student_mass), ("teacher_mass", rows.teacher_mass)):
        metrics[name] = mean(x)
        metrics[f"{name}_min"], metrics[f"{name}_max"] = _range(x, mask)
    metrics |= summarise_losses(rows.per_token, weights)
    metrics["negative_fraction"] = mean((rows.raw_loss < 0).to(rows.raw_loss.dtype))
    if entropy:
        metrics["student_entropy"] = mean(rows.student_entropy)
    return metrics


@torch.no_grad()
def overlap(
    student_ids: Tensor, student_log_probs: Tensor, target: TeacherRows, weights: RowWeights, floor: float | None
) -> dict[str, Tensor]:
    """Agreement of the student's own top k [N, k] with the teacher's ids, at which student_log_probs [N, K] are.

    overlap_token_advantage is the mean, over rows with any overlap, of the row's mean of -p log(p / q) on the shared
    ids (both floored where the loss floors them). Source: "Rethinking On-Policy Distillation of Large Language
    Models", arXiv:2604.13016.
    """
    teacher_ids = target.token_ids
    ordered = student_ids.sort(1).values
    at = torch.searchsorted(ordered, teacher_ids).clamp(max=max(ordered.shape[1] - 1, 0))
    shared = (ordered.gather(1, at) == teacher_ids) & (teacher_ids >= 0) & weights.mask[:, None]
    count = shared.sum(1)
    q, p = student_log_probs, target.values
    if floor is not None:
        q, p = q.clamp(min=floor), p.clamp(min=floor)
    gain = -p_log_p_over_q(p, q).masked_fill(~shared, 0.0).sum(1)
    return {
        "overlap_count": count.sum() * weights.per_row,
        "overlap_ratio": count.sum() * weights.per_row / max(teacher_ids.shape[1], 1),
        "overlap_token_advantage_sum": (gain / count.clamp(min=1)).sum(),
        "overlap_token_advantage_count": (count > 0).sum(),
    }


def _range(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum over scored rows; +inf and -inf where there are none."""
    if x.numel() == 0:
        return x.new_full((), INF), x.new_full((), -INF)
    return x.masked_fill(~mask, INF).amin(), x.masked_fill(~mask, -INF).amax()
