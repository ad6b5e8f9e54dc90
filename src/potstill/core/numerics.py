"""The numerical conventions of the library, each a named function with its own tests.

Everything is in nats. A probability of zero is the log-probability -inf, an ordinary input here: sums over
nothing are -inf with gradient 0, and 0 log 0 = 0 in value and in gradient. No other file repeats these.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

INF = math.inf
LOG_PROB_FLOOR = -87.0
"""Smallest log-probability that a division by a probability may meet; exp(-87) is about float32's smallest
normal number."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype arithmetic happens in: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def logsumexp(x: Float[Tensor, "..."], dim: int = -1) -> Float[Tensor, "..."]:
    """log of the sum of exp(x) over `dim`; -inf, with gradient 0, where every entry is -inf or there is none."""
    nothing = (x == -INF).all(dim, keepdim=True)
    total = torch.logsumexp(x.masked_fill(nothing, 0.0), dim, keepdim=True)
    return total.masked_fill(nothing, -INF).squeeze(dim)


def logaddexp(x: Float[Tensor, "..."], y: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """log(exp(x) + exp(y)); -inf, with gradient 0, where both are -inf."""
    nothing = (x == -INF) & (y == -INF)
    total = torch.logaddexp(x.masked_fill(nothing, 0.0), y.masked_fill(nothing, 0.0))
    return total.masked_fill(nothing, -INF)


def normalise(log_weights: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
    """log-probabilities proportional to exp(log_weights) over the last dimension; all -inf stays all -inf."""
    nothing = (log_weights == -INF).all(-1, keepdim=True)
    return torch.log_softmax(log_weights.masked_fill(nothing, 0.0), -1).masked_fill(nothing, -INF)


def p_log_p_over_q(log_p: Float[Tensor, "..."], log_q: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """p log(p / q) per entry, from log-probabilities; 0 in value and gradient where p = 0, +inf where only q = 0."""
    nothing = log_p == -INF
    log_p, log_q = log_p.masked_fill(nothing, 0.0), log_q.masked_fill(nothing, 0.0)
    return log_p.exp() * (log_p - log_q)


def log1mexp(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """log(1 - exp(x)) for x <= 0, accurate at both ends; -inf at x = 0.

    Source: Maechler (2012), "Accurately computing log(1 - exp(-|a|))", equation 7.
    """
    near_zero = x > -math.log(2)
    # Each branch sees only arguments it is finite for, so that no gradient is 0 * inf.
    small = torch.log(-torch.expm1(x.masked_fill(~near_zero, -1.0)))
    large = torch.log1p(-torch.exp(x.masked_fill(near_zero, -1.0)))
    return torch.where(near_zero, small, large)


def estimated_rest(mass: Tensor) -> Tensor:
    """log(1 - mass), in nats, at least that of the last place of 1: where a teacher gave nothing of its rest."""
    return (1 - mass).clamp(min=2.0**-53 if mass.dtype == torch.float64 else 2.0**-24).log()
