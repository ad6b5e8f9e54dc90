"""Losses on the sampled token alone: estimators of the reverse KL, and the gradient each of them truly has.

Only log q(y) and log p(y) of the token y ~ q that the student sampled are needed, so any server that returns the
log-probability of a given token is teacher enough. An estimator's value and its gradient are two different things:
E[d value] is not d E[value], because the student also moves what is sampled. `sampled_token_loss` says which gradient
each estimator has; tests/test_sampled.py checks all of them by exact expectation.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor

from potstill.core.losses import DistillationOutput
from potstill.core.metrics import summarise_losses
from potstill.core.numerics import LOG_PROB_FLOOR, compute_dtype
from potstill.core.rows import RowWeights

LOG_RATIO_MAX = 20.0  # |log(q / q_old)| beyond which a ratio is no longer followed
DUAL_CLIP = 3.0  # a punished token costs at most this many times its value. Source: Ye et al., arXiv:1912.09729


def k1(log_r: Tensor) -> Tensor:
    """-log r."""
    return -log_r


def k2(log_r: Tensor) -> Tensor:
    """(log r)^2 / 2."""
    return log_r.square() / 2


def k3(log_r: Tensor) -> Tensor:
    """r - 1 - log r, >= 0."""
    return torch.expm1(log_r) - log_r


def straight_through(value: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The estimator with this value and the gradient of k2."""

    def estimator(log_r: Tensor) -> Tensor:
        carrier = k2(log_r)
        return value(log_r).detach() + (carrier - carrier.detach())

    return estimator


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": torch.abs,
    "k1_straight_through": straight_through(k1),
    "k3_straight_through": straight_through(k3),
}


def sampled_token_loss(
    student_log_probs: Shaped[Tensor, "..."],
    teacher_log_probs: Shaped[Tensor, "..."],
    *,
    estimator: str,
    policy_gradient: bool = False,
    old_log_probs: Shaped[Tensor, "..."] | None = None,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    mask: Shaped[Tensor, "..."] | None = None,
    token_weights: Shaped[Tensor, "..."] | None = None,
    num_tokens: int | float | Tensor | None = None,
) -> DistillationOutput:
    """Sum over scored rows of token_weights * estimator(log p(y) - log q(y)) / num_tokens, y sampled by the student.

    With r = p / q at y (p teacher, q student) and dq_i the change of q at token i, in expectation over y ~ q:

        estimator            value           expectation  gradient as a loss            with policy_gradient
        k1                   -log r          reverse KL   0 (refused)                   reverse KL
        k2                   (log r)^2 / 2   -            reverse KL                    sum_i (log r_i)^2 / 2 dq_i
        k3                   r - 1 - log r   reverse KL   forward KL (q - p at logits)  reverse KL minus forward KL
        abs                  |log r|         -            twice the total variation     sum_i |log r_i| dq_i
        k1_straight_through  -log r          reverse KL   reverse KL (that of k2)       as k1
        k3_straight_through  r - 1 - log r   reverse KL   reverse KL (that of k2)       as k3

    So "k1" with policy_gradient, and "k2" without, follow the reverse KL without bias. With policy_gradient k2, k3 and
    abs punish a token that is too rare as well as one that is too frequent; they are here because verl offers them
    (whose k3 also stops at 10, without gradient above).

    With policy_gradient the value is a cost without a gradient of its own, and the loss is the clipped policy loss of
    PPO with the advantage A = -value:

        max(-A ratio, -A clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)),   ratio = q(y) / q_old(y),

    and at most 3 value where value > 0. On-policy (ratio 1) its gradient is value * d log q(y).

    Args:
        student_log_probs: [...] log q(y) of the sampled token, e.g.
            `coarse_logits(logits, y[..., None]).log_probs[..., 0]`.
        teacher_log_probs: [...] log p(y) of the same token at the same temperature; no gradient.
        estimator: "k1", "k2", "k3", "abs", "k1_straight_through" or "k3_straight_through".
        policy_gradient: use the estimator as a reward instead of differentiating it.
        old_log_probs: [...] log-probabilities under the policy that sampled y; None: this one (ratio 1).
        clip_ratio_low: how far below 1 the ratio is followed, 0 to 1.
        clip_ratio_high: how far above 1 the ratio is followed, >= 0.
        mask: [...] bool or integer, non-zero = scored. Unscored rows may hold anything.
        token_weights: [...] float weights of the rows (importance weights, say), default 1; no gradient.
        num_tokens: the global number of scored tokens, over micro-batches and data-parallel ranks; default: the
            scored rows of this call. <= 0 gives a loss of 0.

    Log-probabilities below -87 (-inf among them) count as -87, without gradient; `clamped_fraction` reports them.

    Returns:
        DistillationOutput in float32 (float64 for float64 student_log_probs). Metrics: abs_loss, loss_min, loss_max
        and negative_fraction, all of the estimator's value, and clamped_fraction; with policy_gradient also
        pg_clipfrac, pg_clipfrac_lower and ppo_kl. A call without a scored row gives loss 0 with a graph and
        gradients exactly 0.

    Raises:
        TypeError: for log-probabilities or weights that are no floats, or a float mask (use token_weights).
        ValueError: for rows that do not match, an unknown estimator, "k1" without policy_gradient (its gradient has
            mean zero), old_log_probs without policy_gradient, or clip ratios out of range.

    Source: k1, k2, k3: Schulman (2020), http://joschu.net/blog/kl-approx.html; as a reward: Lu and Thinking Machines
        Lab (2025), "On-Policy Distillation"; the clipped loss: PPO, arXiv:1707.06347, and dual clip, arXiv:1912.09729.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")
    if estimator == "k1" and not policy_gradient:
        raise ValueError(
            "estimator='k1' has no learning signal as a loss (its gradient has mean zero): pass policy_gradient=True, "
            "or estimator='k2' or 'k1_straight_through', which have the reverse KL's gradient"
        )
    if old_log_probs is not None and not policy_gradient:
        raise ValueError(
            "old_log_probs is only used with policy_gradient=True; without it, put importance weights in token_weights"
        )
    if not (0 <= clip_ratio_low <= 1 and clip_ratio_high >= 0):
        raise ValueError(
            f"clip_ratio_low must be in [0, 1] and clip_ratio_high >= 0, got {clip_ratio_low} and {clip_ratio_high}; "
            "the ratio is followed from 1 - low to 1 + high"
        )
    shape = student_log_probs.shape
    for name, x in (
        ("student_log_probs", student_log_probs),
        ("teacher_log_probs", teacher_log_probs),
        ("old_log_probs", old_log_probs),
    ):
        if x is not None and not x.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {x.dtype}")
        if x is not None and x.shape != shape:
            raise ValueError(
                f"{name} must have the rows of student_log_probs, {list(shape)}, got {list(x.shape)}; "
                "entry n of both is the log-probability of the same token"
            )
    dtype = compute_dtype(student_log_probs.dtype)
    weights = RowWeights.of(shape, mask, token_weights, num_tokens, dtype, student_log_probs.device)

    student, below = scored(student_log_probs, weights.mask, dtype)
    teacher, teacher_below = scored(teacher_log_probs.detach(), weights.mask, dtype)
    per_token = ESTIMATORS[estimator](teacher - student)
    cost = per_token.detach()
    metrics = summarise_losses(cost, cost, weights)
    numbers = {"abs_loss": cost.abs(), "clamped_fraction": below | teacher_below}
    if policy_gradient:
        old = student if old_log_probs is None else scored(old_log_probs, weights.mask, dtype)[0]
        policy = clipped_policy_loss(cost, student - old.detach(), clip_ratio_low, clip_ratio_high)
        per_token = policy.per_token
        numbers |= {"pg_clipfrac": policy.clipped, "pg_clipfrac_lower": policy.capped, "ppo_kl": policy.kl}
    metrics |= {name: weights.mean(x) for name, x in numbers.items()}
    return DistillationOutput(weights.total(per_token), per_token.view(shape), metrics)


def scored(log_probs: Tensor, mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """log_probs [N] floored at -87, and which were below; 0 at unscored rows, whatever they hold, with gradient 0."""
    rows = torch.where(mask, log_probs.reshape(-1).to(dtype), 0.0)
    return rows.clamp(min=LOG_PROB_FLOOR), rows < LOG_PROB_FLOOR


class PolicyLoss(NamedTuple):
    """per_token [N] with a graph, which rows were clipped or capped, and log(q_old / q) per row."""

    per_token: Tensor
    clipped: Tensor
    capped: Tensor
    kl: Tensor


def clipped_policy_loss(cost: Tensor, log_ratio: Tensor, low: float, high: float) -> PolicyLoss:
    """PPO's clipped loss with the advantage -cost [N], capped at 3 cost where the token is punished (cost > 0)."""
    log_ratio = log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    ratio = log_ratio.exp()
    free, clipped = cost * ratio, cost * ratio.clamp(1 - low, 1 + high)
    worse = torch.maximum(free, clipped)
    cap = torch.where(cost > 0, DUAL_CLIP * cost, torch.inf)
    return PolicyLoss(torch.minimum(worse, cap), clipped > free, worse > cap, -log_ratio.detach())
