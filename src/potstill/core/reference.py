"""Dense, obvious versions of the core: the root the tests compare with. Not for training.

Row by row, on all V columns, in the dtype of the inputs (float64 for a truth) and differentiated by autograd. They
are written from the formulas and share no arithmetic with the code they check; only the input types are imported.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from potstill.core.teacher import SampledTargets, TeacherTopK
from potstill.core.tiles import LinearLogits
from potstill.core.transform import LogitTransform

INF = math.inf


def dense_logits(
    logits: Tensor | LinearLogits, temperature: float = 1.0, transform: LogitTransform | None = None
) -> Tensor:
    """All logits [..., V] as the softmax sees them: transformed, tempered, -inf in the padded columns."""
    transform = transform or LogitTransform()
    if isinstance(logits, LinearLogits):
        hidden, weight, bias = logits
        raw = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    else:
        raw = logits
    z = raw[..., : transform.vocab_size] * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    padding = z.new_full((*z.shape[:-1], raw.shape[-1] - z.shape[-1]), -INF)
    return torch.cat([z / temperature, padding], -1)


class Coarse(NamedTuple):
    """log q at the ids [..., K] (-inf in empty slots), log of the mass elsewhere, logsumexp and entropy [...]."""

    log_probs: Tensor
    rest_log_prob: Tensor
    lse: Tensor
    entropy: Tensor


def coarse(z: Tensor, token_ids: Tensor) -> Coarse:
    """The coarse numbers of dense logits z [..., V] at token_ids [..., K]."""
    rows, n_rows = [], z.shape[:-1].numel()
    for z_row, ids in zip(z.reshape(n_rows, z.shape[-1]), token_ids.reshape(n_rows, token_ids.shape[-1]), strict=True):
        log_q = z_row - torch.logsumexp(z_row, 0)
        slots = [log_q[i] if i >= 0 else log_q.new_tensor(-INF) for i in ids.tolist()]
        possible = log_q[log_q > -INF]
        entropy = -(possible.exp() * possible).sum()
        selected = torch.stack(slots) if slots else log_q.new_zeros(0)
        rows.append((selected, _rest(log_q, ids), torch.logsumexp(z_row, 0), entropy))
    if not rows:
        nothing = z.sum(-1)
        return Coarse(z.new_zeros(token_ids.shape), nothing, nothing, nothing)
    log_probs, *numbers = (torch.stack(column) for column in zip(*rows, strict=True))
    return Coarse(log_probs.reshape(token_ids.shape), *(x.reshape(z.shape[:-1]) for x in numbers))


def _rest(log_q: Tensor, ids: Tensor) -> Tensor:
    """log of the mass of one row's columns outside ids; -inf, without gradient, where they have none."""
    outside = torch.ones(len(log_q), dtype=torch.bool)
    outside[ids[ids >= 0].to(torch.int64)] = False
    others = log_q[outside & (log_q > -INF)]
    return torch.logsumexp(others, 0) if len(others) else log_q.new_tensor(-INF)


def _x_log_x_over_y(log_x: Tensor, log_y: Tensor) -> Tensor:
    """x log(x / y) per category; categories with x = 0 are left out of the arithmetic."""
    there = log_x > -INF
    out = torch.zeros_like(log_x)
    out[there] = log_x[there].exp() * (log_x[there] - log_y[there])
    return out


def _mixture(log_x: Tensor, log_y: Tensor, weight: float) -> Tensor:
    return torch.logaddexp(log_x + math.log(weight), log_y + math.log(1 - weight))


def _jsd(log_q: Tensor, log_p: Tensor, beta: float = 0.5) -> Tensor:
    log_m = _mixture(log_p, log_q, beta)
    return beta * _x_log_x_over_y(log_p, log_m) + (1 - beta) * _x_log_x_over_y(log_q, log_m)


def _alpha_beta(log_q: Tensor, log_p: Tensor, alpha: float = 0.2, beta: float = 0.7) -> Tensor:
    total = alpha + beta
    own = (alpha * (total * log_p).exp() + beta * (total * log_q).exp()) / total
    return (own - (alpha * log_p).exp() * (beta * log_q).exp()) / (alpha * beta)


# Terms of one category from (log q, log p), q the student, and -df/dq at q = p.
TERMS: dict[str, Callable[..., Tensor]] = {
    "forward_kl": lambda q, p: _x_log_x_over_y(p, q),
    "reverse_kl": lambda q, p: _x_log_x_over_y(q, p.clamp(min=-87)),
    "jeffreys": lambda q, p: _x_log_x_over_y(p, q) + _x_log_x_over_y(q, p.clamp(min=-87)),
    "jsd": _jsd,
    "skew_kl": lambda q, p, alpha=0.1: _x_log_x_over_y(p, _mixture(p, q, alpha)),
    "skew_reverse_kl": lambda q, p, alpha=0.1: _x_log_x_over_y(q, _mixture(q, p, alpha)),
    "total_variation": lambda q, p: (q.exp() - p.exp()).abs() / 2,
    "alpha_beta": _alpha_beta,
}
MASS_SLOPES: dict[str, Callable[..., float]] = {
    "forward_kl": lambda: 1.0,
    "reverse_kl": lambda: -1.0,
    "jeffreys": lambda: 0.0,
    "jsd": lambda beta=0.5: 0.0,
    "skew_kl": lambda alpha=0.1: 1 - alpha,
    "skew_reverse_kl": lambda alpha=0.1: alpha - 1,
    "total_variation": lambda: 0.0,
    "alpha_beta": lambda alpha=0.2, beta=0.7: 0.0,
}


def full_divergence(student: Tensor, teacher: Tensor, divergence: str, **options: float) -> Tensor:
    """The divergence over all V categories [...], from dense logits [..., V]."""
    q, p = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    there = (q > -INF) | (p > -INF)
    out = torch.zeros_like(q)
    out[there] = TERMS[divergence](q[there], p[there], **options)
    return out.sum(-1)


class Row(NamedTuple):
    """One scored row: its loss before and after the clamps, and what the metrics are made of."""

    head: Tensor
    tail: Tensor
    raw: Tensor
    loss: Tensor
    student_mass: Tensor
    teacher_mass: Tensor
    student_tail_mass: Tensor
    teacher_tail_mass: Tensor
    entropy: Tensor
    clamped: bool


class Loss(NamedTuple):
    """As DistillationOutput."""

    loss: Tensor
    per_token: Tensor
    metrics: dict[str, Tensor]


def tail_terms(
    log_q: Tensor, ids: Tensor, p: Tensor, rest_p: Tensor, divergence: str, tail: str, options: dict[str, float]
) -> tuple[Tensor, Tensor]:
    """One row's loss on its live ids, and what its tail adds; log_q [V], p [live ids] and rest_p [] are in nats."""
    terms, q, nothing = TERMS[divergence], log_q[ids], log_q.new_zeros(())
    if tail == "bucket":
        rest_q = _rest(log_q, ids)
        if rest_q > -INF:
            q, p = torch.cat([q, rest_q[None]]), torch.cat([p, rest_p[None]])
        value = terms(q, p - torch.logsumexp(p, 0), **options)
        return value[: len(ids)].sum(), value[len(ids) :].sum()
    if tail == "generalized":
        return terms(q, p, **options).sum(), MASS_SLOPES[divergence](**options) * (q.exp().sum() - p.exp().sum())
    if tail == "renormalize":
        value = terms(q - torch.logsumexp(q, 0), p - torch.logsumexp(p, 0), **options).sum()
        return value if len(ids) >= 2 else nothing, nothing
    return terms(q, p, **options).sum(), nothing


def topk_loss(
    logits: Tensor | LinearLogits,
    teacher: TeacherTopK | SampledTargets,
    *,
    divergence: str = "forward_kl",
    tail: str | None = None,
    mask: Tensor | None = None,
    token_weights: Tensor | None = None,
    num_tokens: int | float | Tensor | None = None,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    transform: LogitTransform | None = None,
    log_prob_min_clamp: float | None = None,
    loss_min_clamp: float | None = None,
    loss_max_clamp: float | None = None,
    **options: float,
) -> Loss:
    """topk_distillation_loss, plainly; its metrics always include student_entropy and never the student's top k."""
    z = dense_logits(logits, temperature, transform)
    shape, scale = z.shape[:-1], temperature**2 if temperature_squared else 1.0
    n_rows, k = math.prod(shape), teacher.token_ids.shape[-1]
    scored = [True] * n_rows if mask is None else [x != 0 for x in mask.flatten().tolist()]
    weights = [1.0] * n_rows if token_weights is None else token_weights.flatten().tolist()
    count = float(sum(scored) if num_tokens is None else num_tokens)

    sampled = isinstance(teacher, SampledTargets)
    values = (teacher.weights.log() if isinstance(teacher, SampledTargets) else teacher.log_probs).reshape(n_rows, k)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    delivered = None if isinstance(teacher, SampledTargets) else teacher.rest_log_prob
    rows: list[Row | None] = []
    for n in range(n_rows):
        if not scored[n]:
            rows.append(None)
            continue
        ids = teacher.token_ids.reshape(n_rows, k)[n].to(torch.int64)
        live = (ids >= 0) & (values[n] > -INF)
        ids, p = ids[live], values[n][live]
        mass = p.exp().sum()
        eps = 2.0**-53 if p.dtype == torch.float64 else 2.0**-24
        rest_p = (1 - mass).clamp(min=eps).log() if delivered is None else delivered.reshape(n_rows)[n]
        p, rest_p = p.to(z.dtype), rest_p.to(z.dtype)
        log_q = z.reshape(n_rows, z.shape[-1])[n].log_softmax(0)
        q, clamped = log_q[ids], False
        if sampled:
            head, rest = -(p.exp() * q).sum(), log_q.new_zeros(())
        elif log_prob_min_clamp is not None:
            clamped = bool((q < log_prob_min_clamp).any() or (p < log_prob_min_clamp).any())
            head, rest = verl_forward_kl_topk(q, p, log_prob_min_clamp), log_q.new_zeros(())
        else:
            head, rest = tail_terms(log_q, ids, p, rest_p, divergence, tail or "bucket", options)
        head, rest = scale * head, scale * rest
        raw = head + rest
        loss = raw if loss_min_clamp is None else raw.clamp(min=loss_min_clamp)
        loss = loss if loss_max_clamp is None else loss.clamp(-loss_max_clamp, loss_max_clamp)
        rows.append(
            Row(
                head=head,
                tail=rest,
                raw=raw,
                loss=loss,
                student_mass=q.exp().sum(),
                teacher_mass=mass.to(z.dtype),
                student_tail_mass=_rest(log_q, ids).exp(),
                teacher_tail_mass=rest_p.exp(),
                entropy=-torch.special.xlogy(log_q.exp(), log_q.exp()).sum(),
                clamped=clamped or bool(loss != raw),
            )
        )
    zero = torch.where(torch.isfinite(z), z, 0.0).sum() * 0.0  # a graph, for a call without a scored row
    per_token = torch.stack([zero if row is None else row.loss for row in rows]) if rows else z.new_zeros(0)
    loss = zero
    for row, weight in zip(rows, weights, strict=True):
        if row is not None and count > 0:
            loss = loss + weight * row.loss / count
    return Loss(loss, per_token.reshape(shape), _metrics([row for row in rows if row is not None], count, zero))


def _metrics(rows: list[Row], count: float, zero: Tensor) -> dict[str, Tensor]:
    """Sums over the scored rows divided by count, and extremes."""
    zero = zero.detach()

    def mean(field: Callable[[Row], Tensor | bool]) -> Tensor:
        total = sum((field(row) + zero for row in rows), zero).detach()
        return total / count if count > 0 else zero

    def extremes(name: str, field: Callable[[Row], Tensor]) -> dict[str, Tensor]:
        of_rows = [field(row).item() for row in rows]
        low, high = min(of_rows, default=INF), max(of_rows, default=-INF)
        return {f"{name}_min": zero.new_tensor(low), f"{name}_max": zero.new_tensor(high)}

    return {
        "head_loss": mean(lambda row: row.head),
        "topk_loss": mean(lambda row: row.head),
        "tail_loss": mean(lambda row: row.tail),
        "student_mass": mean(lambda row: row.student_mass),
        "teacher_mass": mean(lambda row: row.teacher_mass),
        "student_tail_mass": mean(lambda row: row.student_tail_mass),
        "teacher_tail_mass": mean(lambda row: row.teacher_tail_mass),
        "student_entropy": mean(lambda row: row.entropy),
        "clamped_fraction": mean(lambda row: row.clamped),
        "negative_fraction": mean(lambda row: row.raw < 0),
        **extremes("student_mass", lambda row: row.student_mass),
        **extremes("teacher_mass", lambda row: row.teacher_mass),
        **extremes("loss", lambda row: row.loss),
    }


def verl_forward_kl_topk(
    student: Tensor, teacher: Tensor, log_prob_min_clamp: float | None = None, *, floor: bool = False
) -> Tensor:
    """verl's forward_kl_topk of [..., K] log-probabilities: both clamped, sum p (log p - log q), floored at 0 or not.

    Source: verl 0.9.1, verl/trainer/distillation (fsdp/losses.py, losses.py).
    """
    if log_prob_min_clamp is not None:
        student, teacher = student.clamp_min(log_prob_min_clamp), teacher.clamp_min(log_prob_min_clamp)
    loss = (teacher.exp() * (teacher - student)).sum(-1)
    return loss.clamp_min(0.0) if floor else loss


def verl_forward_kl_topk_tail(student: Tensor, teacher: Tensor, tail_mass_eps: float = 1e-6) -> Tensor:
    """verl's forward_kl_topk_tail of [..., K] log-probabilities, with its guard on the student's tail mass.

    Source: verl pull request 7855.
    """
    teacher_tail = (1 - teacher.exp().sum(-1)).clamp(0.0, 1.0)
    student_tail = (1 - student.exp().sum(-1)).clamp(tail_mass_eps, 1.0)
    tail = torch.xlogy(teacher_tail, teacher_tail) - teacher_tail * student_tail.log()
    return verl_forward_kl_topk(student, teacher) + tail
