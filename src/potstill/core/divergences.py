"""Divergences between two categorical distributions, one term per category. A closed list, each with its source.

A term is a function f(log q, log p) of one category: q the student, p the teacher. The same function serves the
K + 1 categories of coarse logits and all V of full logits. Each divergence also states one number, its mass slope
s = -df/dq at q = p: f + s (q - p) is then >= 0 for every category, with its minimum at q = p, which is what the
"generalized" tail needs. Terms take -inf (probability 0) on either side, and are 0 where both are.

To add one: at most six lines here with a `Source:`, its closed-form gradient in docs/math.md, and its two rows in
tests/test_divergences.py (CONTRIBUTING.md shows one being added).
"""

import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from potstill.core.numerics import INF, LOG_PROB_FLOOR, logaddexp, p_log_p_over_q

LogProbs = Float[Tensor, "... categories"]


class Divergence(NamedTuple):
    """terms(student_log_probs, teacher_log_probs, **options) -> nats per category; mass_slope(**options) -> s."""

    terms: Callable[..., Tensor]
    mass_slope: Callable[..., float]


def forward_kl(student: LogProbs, teacher: LogProbs) -> LogProbs:
    """p log(p / q). Source: Hinton et al. (2015), arXiv:1503.02531."""
    return p_log_p_over_q(teacher, student)


def reverse_kl(student: LogProbs, teacher: LogProbs) -> LogProbs:
    """q log(q / p), log p floored at -87. Source: Gu et al. (2024), MiniLLM, arXiv:2306.08543."""
    return p_log_p_over_q(student, teacher.clamp(min=LOG_PROB_FLOOR))


def jeffreys(student: LogProbs, teacher: LogProbs) -> LogProbs:
    """(p - q) log(p / q): forward plus reverse KL. Source: Jeffreys (1946), doi:10.1098/rspa.1946.0056."""
    return forward_kl(student, teacher) + reverse_kl(student, teacher)


def jsd(student: LogProbs, teacher: LogProbs, beta: float = 0.5) -> LogProbs:
    """beta p log(p / m) + (1 - beta) q log(q / m), m = beta p + (1 - beta) q. Source: GKD, arXiv:2306.13649."""
    _inside_unit("jsd: beta", beta, at_zero="forward_kl", at_one="reverse_kl")
    mixture = _mix(teacher, student, beta)
    return beta * p_log_p_over_q(teacher, mixture) + (1 - beta) * p_log_p_over_q(student, mixture)


def skew_kl(student: LogProbs, teacher: LogProbs, alpha: float = 0.1) -> LogProbs:
    """p log(p / (alpha p + (1 - alpha) q)). Source: Ko et al. (2024), DistiLLM, arXiv:2402.03898."""
    _inside_unit("skew_kl: alpha", alpha, at_zero="forward_kl")
    return p_log_p_over_q(teacher, _mix(teacher, student, alpha))


def skew_reverse_kl(student: LogProbs, teacher: LogProbs, alpha: float = 0.1) -> LogProbs:
    """q log(q / (alpha q + (1 - alpha) p)). Source: Ko et al. (2024), DistiLLM, arXiv:2402.03898."""
    _inside_unit("skew_reverse_kl: alpha", alpha, at_zero="reverse_kl")
    return p_log_p_over_q(student, _mix(student, teacher, alpha))


def total_variation(student: LogProbs, teacher: LogProbs) -> LogProbs:
    """|q - p| / 2. Source: Wen et al. (2023), arXiv:2307.15190."""
    return (student.exp() - teacher.exp()).abs() / 2


def alpha_beta(student: LogProbs, teacher: LogProbs, alpha: float = 0.2, beta: float = 0.7) -> LogProbs:
    """-(p^a q^b - a/(a+b) p^(a+b) - b/(a+b) q^(a+b)) / (a b). Source: Wang et al. (2025), ABKD, arXiv:2505.04560."""
    a, b = alpha, beta
    if a == 0 or b == 0 or a + b == 0:
        raise ValueError(
            f"alpha_beta: alpha, beta and alpha + beta must not be 0, got {a} and {b}; use another divergence"
        )
    nothing = (student == -INF) & (teacher == -INF)
    q, p = student.masked_fill(nothing, 0.0), teacher.masked_fill(nothing, 0.0)
    pure = (a * ((a + b) * p).exp() + b * ((a + b) * q).exp()) / (a + b)
    return ((pure - (a * p + b * q).exp()) / (a * b)).masked_fill(nothing, 0.0)


def _mix(x: LogProbs, y: LogProbs, weight: float) -> LogProbs:
    """log(weight exp(x) + (1 - weight) exp(y))."""
    return logaddexp(x + math.log(weight), y + math.log1p(-weight))


def _inside_unit(name: str, value: float, *, at_zero: str, at_one: str | None = None) -> None:
    if not 0 < value < 1:
        one = f" and at 1 it would be {at_one}" if at_one else ""
        raise ValueError(
            f"{name} must be in (0, 1), got {value}; at 0 it would be {at_zero}{one}: ask for that by name"
        )


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": Divergence(forward_kl, lambda: 1.0),
    "reverse_kl": Divergence(reverse_kl, lambda: -1.0),
    "jeffreys": Divergence(jeffreys, lambda: 0.0),
    "jsd": Divergence(jsd, lambda beta=0.5: 0.0),
    "skew_kl": Divergence(skew_kl, lambda alpha=0.1: 1.0 - alpha),
    "skew_reverse_kl": Divergence(skew_reverse_kl, lambda alpha=0.1: alpha - 1.0),
    "total_variation": Divergence(total_variation, lambda: 0.0),
    "alpha_beta": Divergence(alpha_beta, lambda alpha=0.2, beta=0.7: 0.0),
}


def check_divergence(name: str, options: dict[str, float]) -> None:
    """Refuse an unknown divergence, an option it does not take, or a value outside the option's range."""
    if name not in DIVERGENCES:
        raise ValueError(f"divergence must be one of {', '.join(DIVERGENCES)}, got {name!r}")
    terms = DIVERGENCES[name].terms
    known = list(inspect.signature(terms).parameters)[2:]
    unknown = [option for option in options if option not in known]
    if unknown:
        takes = f"takes {', '.join(known)}" if known else "takes no options"
        raise ValueError(f"divergence {name!r} {takes}, got {', '.join(unknown)}")
    for option, value in options.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"divergence {name!r}: {option} must be a finite number, got {value!r}")
    terms(torch.zeros(1), torch.zeros(1), **options)  # its own range checks
