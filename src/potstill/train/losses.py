"""The trainer's losses: from the student's scored rows and a scored batch to a DistillationOutput.

All of them take `(logits, batch, *, num_tokens, transform)` and heed the batch's `token_weights`; what a recipe sets
is bound by `functools.partial`:

    DistillationTrainer(..., loss=partial(topk_loss, divergence="jsd", beta=0.3))
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from potstill import (
    DistillationOutput,
    LinearLogits,
    LogitTransform,
    coarse_logits,
    full_vocab_distillation_loss,
    sampled_token_loss,
    topk_distillation_loss,
)
from potstill.train.recipe import Loss


class LossFunction(Protocol):
    """The loss of a micro-batch: logits of its N scored rows, held to `batch["teacher"]`."""

    def __call__(
        self,
        logits: Tensor | LinearLogits,
        batch: Mapping[str, Any],
        *,
        num_tokens: int | float | Tensor | None = None,
        transform: LogitTransform | None = None,
    ) -> DistillationOutput:
        """The sum over rows, divided by num_tokens."""


def loss_function(spec: Loss) -> LossFunction:
    """The loss that a recipe's `loss` section describes."""
    shared = {name: getattr(spec, name) for name in ("temperature", "loss_max_clamp", "chunk_size")}
    if spec.estimator is not None:
        names = ("estimator", "policy_gradient", "clip_ratio_low", "clip_ratio_high")
        return partial(sampled_loss, **shared, **{name: getattr(spec, name) for name in names})
    if spec.targets != "top_k":
        return partial(topk_loss, **shared)
    names = ("divergence", "tail", "log_prob_min_clamp", "loss_min_clamp")
    options = {name: getattr(spec, name) for name in ("alpha", "beta") if getattr(spec, name) is not None}
    return partial(topk_loss, **shared, **{name: getattr(spec, name) for name in names}, **options)


def topk_loss(
    logits: Tensor | LinearLogits,
    batch: Mapping[str, Any],
    *,
    num_tokens: int | float | Tensor | None = None,
    transform: LogitTransform | None = None,
    **options: Any,
) -> DistillationOutput:
    """topk_distillation_loss on the teacher's rows, which were checked when they arrived.

    Args:
        logits: of the N scored rows.
        batch: its `teacher` is a TeacherTopK, or SampledTargets, of N rows.
        num_tokens: scored tokens of the whole step; None: N.
        transform: the student's own scale and softcap.
        **options: further keywords of topk_distillation_loss.
    """
    return topk_distillation_loss(
        logits,
        batch["teacher"],
        token_weights=batch.get("token_weights"),
        num_tokens=num_tokens,
        transform=transform,
        check=False,
        **options,
    )


def full_vocab_loss(
    logits: Tensor | LinearLogits,
    batch: Mapping[str, Any],
    *,
    num_tokens: int | float | Tensor | None = None,
    transform: LogitTransform | None = None,
    **options: Any,
) -> DistillationOutput:
    """full_vocab_distillation_loss, for a teacher that gives logits, or hidden states with its head.

    Args:
        logits: of the N scored rows.
        batch: its `teacher` is logits [N, V] or LinearLogits of N rows, such as LocalTeacher.logits gives.
        num_tokens: scored tokens of the whole step; None: N.
        transform: the student's own scale and softcap.
        **options: further keywords of full_vocab_distillation_loss.
    """
    return full_vocab_distillation_loss(
        logits,
        batch["teacher"],
        token_weights=batch.get("token_weights"),
        num_tokens=num_tokens,
        student_transform=transform,
        **options,
    )


def sampled_loss(
    logits: Tensor | LinearLogits,
    batch: Mapping[str, Any],
    *,
    estimator: str,
    num_tokens: int | float | Tensor | None = None,
    transform: LogitTransform | None = None,
    temperature: float = 1.0,
    policy_gradient: bool = False,
    loss_max_clamp: float | None = None,
    chunk_size: int | None = None,
    **clip_ratios: Any,
) -> DistillationOutput:
    """sampled_token_loss on the tokens that the student sampled.

    The trainer takes one optimiser step per sample, so that with policy_gradient the ratio to the policy that
    sampled is 1 and the clip ratios do not act.

    Args:
        logits: of the N scored rows.
        batch: `target_ids` [N] are the sampled tokens; `teacher` is a TeacherTopK of them, [N, 1].
        estimator: see sampled_token_loss.
        num_tokens: scored tokens of the whole step; None: N.
        transform: the student's own scale and softcap.
        temperature: of both models; that of the rollouts, since an estimator is a mean over their samples.
        policy_gradient: use the estimator as a reward.
        loss_max_clamp: bound the estimator's value to [-c, c]: without gradient beyond, as a reward bounded.
        chunk_size: exact upper bound on the rows of a full-width tile.
        **clip_ratios: clip_ratio_low and clip_ratio_high.

    Returns:
        As sampled_token_loss.

    Raises:
        ValueError: what sampled_token_loss refuses, or a loss_max_clamp that is not above 0.
    """
    if loss_max_clamp is not None and not loss_max_clamp > 0:
        raise ValueError(f"loss_max_clamp must be > 0, got {loss_max_clamp}; use None for no clamp")
    coarse = coarse_logits(
        logits, batch["target_ids"].unsqueeze(1), temperature=temperature, transform=transform, chunk_size=chunk_size
    )
    student, teacher = coarse.log_probs.squeeze(1), batch["teacher"].log_probs.squeeze(1)
    count = len(student) if num_tokens is None else num_tokens
    weights = batch.get("token_weights")
    loss, per_token, metrics = sampled_token_loss(
        student,
        teacher,
        estimator=estimator,
        policy_gradient=policy_gradient,
        token_weights=weights,
        num_tokens=count,
        **clip_ratios,
    )
    if loss_max_clamp is not None:
        value = per_token.detach()
        bounded = value.clamp(-loss_max_clamp, loss_max_clamp)
        # A reward's gradient is value * d log q: to bound the one is to bound the other.
        reward = per_token * (bounded / value).nan_to_num(1.0)
        per_token = reward if policy_gradient else per_token.clamp(-loss_max_clamp, loss_max_clamp)
        weighted = per_token if weights is None else per_token * weights
        loss = weighted.sum() / torch.as_tensor(count, device=per_token.device).clamp(min=1)
    return DistillationOutput(loss, per_token, metrics)
