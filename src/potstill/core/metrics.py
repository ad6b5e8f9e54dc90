"""Metrics of a loss call: detached, without host sync, and additive over micro-batches and ranks.

A mean is the sum over scored rows divided by num_tokens (never by token_weights), so partial results add up; one
with a denominator of its own comes as `x_sum` and `x_count`. Minima and maxima over no row are +inf and -inf.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from potstill.core.numerics import INF, p_log_p_over_q
from potstill.core.rows import RowWeights


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
def summarise_losses(per_token: Tensor, raw_loss: Tensor, weights: RowWeights) -> dict[str, Tensor]:
    """What any loss can say of its rows: range, and the share that is negative by more than rounding."""
    low, high = _range(per_token, weights.mask)
    negative = raw_loss < -32 * torch.finfo(raw_loss.dtype).eps
    return {"loss_min": low, "loss_max": high, "negative_fraction": weights.mean(negative)}


@torch.no_grad()
def summarise(rows: RowNumbers, weights: RowWeights, *, entropy: bool) -> dict[str, Tensor]:
    """Metrics of the scored rows of a top-k loss."""
    metrics = {
        "head_loss": weights.mean(rows.head_loss),
        "topk_loss": weights.mean(rows.head_loss),
        "tail_loss": weights.mean(rows.tail_loss),
        "student_tail_mass": weights.mean(rows.student_tail_mass),
        "teacher_tail_mass": weights.mean(rows.teacher_tail_mass),
        "clamped_fraction": weights.mean(rows.clamped),
    }
    for name, x in (("student_mass", rows.student_mass), ("teacher_mass", rows.teacher_mass)):
        metrics[name] = weights.mean(x)
        metrics[f"{name}_min"], metrics[f"{name}_max"] = _range(x, weights.mask)
    if entropy:
        metrics["student_entropy"] = weights.mean(rows.student_entropy)
    return metrics | summarise_losses(rows.per_token, rows.raw_loss, weights)


@torch.no_grad()
def overlap(
    student_ids: Tensor,
    teacher_ids: Tensor,
    student_log_probs: Tensor,
    log_probs: Tensor | None,
    weights: RowWeights,
    floor: float | None,
) -> dict[str, Tensor]:
    """Agreement of the student's own top k [N, k] with the teacher's ids [N, K].

    At the latter are student_log_probs and the teacher's log_probs (None for sampled targets, which have none).
    overlap_token_advantage is the mean, over rows with any overlap, of the row's mean of -p log(p / q) on the shared
    ids (both floored where the loss floors them). Source: "Rethinking On-Policy Distillation of Large Language
    Models", arXiv:2604.13016.
    """
    ordered = student_ids.sort(1).values
    at = torch.searchsorted(ordered, teacher_ids).clamp(max=max(ordered.shape[1] - 1, 0))
    shared = (ordered.gather(1, at) == teacher_ids) & (teacher_ids >= 0) & weights.mask[:, None]
    count = shared.sum(1).to(student_log_probs.dtype)
    metrics = {
        "overlap_count": weights.mean(count),
        "overlap_ratio": weights.mean(count) / max(teacher_ids.shape[1], 1),
    }
    if log_probs is not None:
        q, p = (x if floor is None else x.clamp(min=floor) for x in (student_log_probs, log_probs))
        gain = -p_log_p_over_q(p, q).masked_fill(~shared, 0.0).sum(1)
        metrics["overlap_token_advantage_sum"] = (gain / count.clamp(min=1)).sum()
        metrics["overlap_token_advantage_count"] = (count > 0).to(count.dtype).sum()
    return metrics


def _range(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum over scored rows; +inf and -inf where there are none."""
    if x.numel() == 0:
        return x.new_full((), INF), x.new_full((), -INF)
    return x.masked_fill(~mask, INF).amin(), x.masked_fill(~mask, -INF).amax()
