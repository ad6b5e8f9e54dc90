"""What a top-k loss computes per row: a divergence on K + 1 categories, and what it does about the tail.

    tail          value of one row                                            keep in mind
    bucket        sum of f over the K ids and "anything else"                 >= 0, 0 iff equal; a lower bound of the
                                                                              full divergence; equal to it at K = V
    generalized   sum over the ids of f + s (q - p), s the mass slope         every term >= 0, minimum q = p on the ids
    drop          sum over the ids of f                                       no divergence where s != 0: forward KL
                                                                              drifts to Q = 1, reverse to Q = P / e
    renormalize   f on both, renormalised over the ids                        conditional only; the mass Q is free

P and Q are the teacher's and the student's mass on the ids. `drop` is what verl calls forward_kl_topk and `bucket`
its forward_kl_topk_tail, with the tail exact. Derivations: docs/math.md.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from potstill.core.coarse import CoarseLogits
from potstill.core.divergences import DIVERGENCES, check_divergence
from potstill.core.metrics import RowNumbers
from potstill.core.numerics import INF, normalise
from potstill.core.rows import TeacherRows
from potstill.core.teacher import SampledTargets, TeacherTopK

TAILS = ("bucket", "generalized", "renormalize", "drop")


@dataclass(frozen=True)
class Objective:
    """What is computed per row: the divergence, its tail and its clamps, checked once.

    Raises:
        ValueError: for unknown names or options, and for pairs without a meaning or a learning signal.
    """

    divergence: str
    tail: str | None
    options: dict[str, float]
    sampled: bool
    scale: float
    log_prob_min_clamp: float | None
    loss_min_clamp: float | None
    loss_max_clamp: float | None

    def __post_init__(self) -> None:
        check_divergence(self.divergence, self.options)
        if self.tail is not None and self.tail not in TAILS:
            raise ValueError(f"tail must be one of {', '.join(TAILS)}, got {self.tail!r}")
        if self.sampled and (self.divergence != "forward_kl" or self.tail is not None):
            raise ValueError(
                "SampledTargets are soft labels for forward_kl with tail=None, got "
                f"divergence={self.divergence!r}, tail={self.tail!r}; use TeacherTopK for those"
            )
        truncated = self.divergence == "forward_kl" and self.tail == "drop" and not self.sampled
        for name in ("log_prob_min_clamp", "loss_min_clamp"):
            if getattr(self, name) is not None and not truncated:
                raise ValueError(
                    f"{name} only goes with divergence='forward_kl' and tail='drop' (it changes the masses that any "
                    f"other tail accounts for), got {self.divergence!r} and {self.tail or 'bucket'!r}; leave it None"
                )
        floor, least = self.log_prob_min_clamp, self.loss_min_clamp
        if floor is not None and not floor < 0:
            raise ValueError(f"log_prob_min_clamp must be < 0 (a log-probability), got {floor}; use None for no clamp")
        if least is not None and not least < (INF if self.loss_max_clamp is None else self.loss_max_clamp):
            raise ValueError(f"loss_min_clamp must be below loss_max_clamp = {self.loss_max_clamp}, got {least}")
        if self.loss_max_clamp is not None and not self.loss_max_clamp > 0:
            raise ValueError(f"loss_max_clamp must be > 0, got {self.loss_max_clamp}; use None for no clamp")

    def check_teacher(self, teacher: TeacherTopK | SampledTargets, shape: torch.Size, temperature: float) -> None:
        """Refuse a teacher whose rows, temperature or K do not fit the loss."""
        if teacher.token_ids.shape[:-1] != shape:
            raise ValueError(
                f"the teacher has rows {list(teacher.token_ids.shape[:-1])} but the logits have rows {list(shape)}; "
                "row n of both must describe the same prediction (nothing is shifted here)"
            )
        if teacher.temperature != temperature:
            raise ValueError(
                f"the teacher's rows were taken at temperature {teacher.temperature} but the loss asks for "
                f"{temperature}; a top-k row cannot be re-tempered: score the teacher at the loss's temperature"
            )
        if self.tail == "renormalize" and teacher.token_ids.shape[-1] < 2:
            raise ValueError(
                f"tail='renormalize' has no learning signal at K = {teacher.token_ids.shape[-1]}: "
                "one id renormalised is always 1; use tail='bucket'"
            )
        if (
            isinstance(teacher, TeacherTopK)
            and self.tail in (None, "bucket")
            and teacher.rest_log_prob is None
            and teacher.log_probs.element_size() == 2
        ):
            raise ValueError(
                f"tail='bucket' needs the mass outside the ids, which 1 - P cannot give in {teacher.log_probs.dtype}: "
                "pass rest_log_prob in float32, or log_probs in float32"
            )

    def score(self, coarse: CoarseLogits, rows: slice, *, target: TeacherRows, mask: Tensor) -> RowNumbers:
        """The numbers of the given rows from their coarse logits [C, K + 1]."""
        mask, target = mask[rows], TeacherRows(*(x[rows] for x in target))
        coarse = coarse.scored(mask)
        student = coarse.all_log_probs  # [C, K + 1]
        probs = student.detach().exp()
        below = mask.new_zeros(())
        if self.sampled:
            live = target.values > 0
            head = -(target.values * torch.where(live, student[:, :-1], 0.0)).sum(1)
            rest = torch.zeros_like(head)
        else:
            floor = self.log_prob_min_clamp
            if floor is not None:
                below = ((student[:, :-1] < floor) | (target.values < floor)) & (target.values != -INF)
                below = below.any(1)
            head, rest = tail_terms(self.divergence, self.tail or "bucket", self.options, student, target, floor)
        head, rest = head * self.scale, rest * self.scale
        raw = head + rest
        clipped = raw.clamp(min=self.loss_min_clamp) if self.loss_min_clamp is not None else raw
        if self.loss_max_clamp is not None:
            clipped = clipped.clamp(-self.loss_max_clamp, self.loss_max_clamp)
        return RowNumbers(
            per_token=torch.where(mask, clipped, 0.0),
            head_loss=head.detach(),
            tail_loss=rest.detach(),
            raw_loss=raw.detach(),
            clamped=((clipped != raw) | below).to(raw.dtype),
            student_mass=probs[:, :-1].sum(1),
            teacher_mass=target.mass,
            student_tail_mass=probs[:, -1].clone(),  # a view would keep all of probs
            teacher_tail_mass=target.rest.exp(),
            student_log_probs=student[:, :-1].detach(),
            student_entropy=torch.zeros_like(probs[:, -1]) if coarse.rest_mean is None else coarse.entropy.detach(),
        )


def tail_terms(
    divergence: str,
    tail: str,
    options: dict[str, float],
    student: Float[Tensor, "rows categories"],
    target: TeacherRows,
    floor: float | None = None,
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """The part of each row's loss on the ids and the part that accounts for the tail, in nats."""
    terms, mass_slope = DIVERGENCES[divergence]
    q, p = student[:, :-1], target.values
    live = p != -INF
    if tail == "bucket":
        # A rest without a student column is no category: it goes on both sides, and the teacher is renormalised.
        rest = target.rest.masked_fill(student[:, -1] == -INF, -INF)
        value = terms(student, normalise(torch.cat([p, rest[:, None]], 1)), **options)
        return value[:, :-1].sum(1), value[:, -1]
    if tail == "renormalize":
        head = terms(normalise(q), normalise(p), **options).sum(1)
        return torch.where(live.sum(1) >= 2, head, 0.0), torch.zeros_like(head)
    if floor is not None:
        q, p = (torch.where(live, x.clamp(min=floor), -INF) for x in (q, p))
    head = terms(q, p, **options).sum(1)
    if tail == "drop":
        return head, torch.zeros_like(head)
    return head, mass_slope(**options) * (q.exp() - p.exp()).sum(1)
