"""One table of shapes, each with the reason it is there, and the inputs that the tests make from it."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from potstill import LinearLogits, LogitTransform, TeacherTopK
from potstill.core import reference

INF = float("inf")


class Shape(NamedTuple):
    rows: tuple[int, ...]
    vocab: int
    k: int
    reason: str
    hidden: int = 5
    chunk: int | None = None
    real: int | None = None  # LogitTransform.vocab_size; the columns after it hold NaN
    empty: bool = False  # some slots are empty
    holes: int = 0  # so many columns are -inf, in student and teacher

    @property
    def transform(self) -> LogitTransform | None:
        return None if self.real is None else LogitTransform(vocab_size=self.real)


SHAPES = (
    Shape((5,), 13, 4, "5 rows in chunks of 2: a ragged cut, and a prime vocabulary", chunk=2),
    Shape((3,), 13, 4, "one row per chunk", chunk=1),
    Shape((2, 3), 16, 5, "two leading dimensions, a chunk across their border", chunk=4),
    Shape((2, 1, 2), 8, 2, "three leading dimensions, one of them 1"),
    Shape((), 9, 3, "no leading dimension: a single row"),
    Shape((4,), 11, 1, "K = 1"),
    Shape((4,), 11, 10, "K = V - 1: the rest is one token"),
    Shape((4,), 11, 11, "K = V: there is no rest"),
    Shape((3,), 11, 0, "K = 0: nothing but a rest"),
    Shape((0,), 11, 3, "N = 0"),
    Shape((0, 2), 11, 0, "N = 0 with leading dimensions and K = 0"),
    Shape((4,), 16, 4, "padded vocabulary: 16 columns, 12 tokens", real=12),
    Shape((4,), 16, 12, "K = every real token of a padded vocabulary", real=12),
    Shape((6,), 12, 6, "empty slots: id -1 with any log-probability, and -inf with any id", empty=True),
    Shape((4,), 12, 3, "columns at -inf", holes=5),
    Shape((4,), 12, 7, "K = every column that is not -inf", holes=5),
    Shape((4,), 12, 6, "K = all but one of the columns that are not -inf", holes=5),
    Shape((4,), 2, 1, "the smallest vocabulary"),
    Shape((3,), 1, 1, "one token: nothing to learn", hidden=2),
    Shape((4,), 11, 3, "hidden size 1", hidden=1),
)
PLAIN = SHAPES[0]
EMPTY = next(s for s in SHAPES if s.empty)
# One of each kind of row that a term can meet: the rest of the shapes are about layout.
KINDS = (PLAIN, EMPTY, *(s for s in SHAPES if s.k == s.vocab - s.holes and s.vocab > 1))
FORMS = ("logits", "recompute", "single_pass")


def over(*shapes: Shape):
    """Parametrise over `shape`; without arguments over the whole table."""
    return pytest.mark.parametrize("shape", [pytest.param(s, id=s.reason) for s in shapes or SHAPES])


class Case(NamedTuple):
    """A student and a teacher in float64. `logits` are what `linear` multiplies out to; all of them require grad."""

    shape: Shape
    logits: Tensor
    linear: LinearLogits
    teacher: TeacherTopK

    def student(self, form: str) -> tuple[Tensor | LinearLogits, dict[str, str]]:
        """The student in one of FORMS, and the keywords that go with it."""
        return (self.logits, {}) if form == "logits" else (self.linear, {"memory": form})

    def leaves(self, form: str) -> dict[str, Tensor]:
        """What the student in one of FORMS is differentiated by."""
        if form == "logits":
            return {"logits": self.logits}
        return {name: part for name, part in self.linear._asdict().items() if part is not None}


def top_k(z: Tensor, k: int, *, rest: bool = True) -> TeacherTopK:
    """The k most probable ids of dense logits, in shuffled order, without the code under test."""
    values, ids = z.log_softmax(-1).topk(k, -1)
    order = torch.randperm(k)
    rest_log_prob = reference.coarse(z, ids).rest_log_prob if rest else None
    return TeacherTopK(ids[..., order], values[..., order], rest_log_prob)


def make(shape: Shape = PLAIN, *, seed: int = 0, scale: float = 2.0, bias: bool = True, rest: bool = True) -> Case:
    """A random student and teacher of a shape, with the trouble that the shape asks for."""
    torch.manual_seed(seed)
    hidden = torch.randn(*shape.rows, shape.hidden, dtype=torch.float64)
    weight = torch.randn(shape.vocab, shape.hidden, dtype=torch.float64) * scale / shape.hidden**0.5
    b = torch.randn(shape.vocab, dtype=torch.float64) if bias or shape.real or shape.holes else None
    teacher_logits = scale * torch.randn(*shape.rows, shape.vocab, dtype=torch.float64)
    if b is not None:
        b[: shape.holes] = teacher_logits[..., : shape.holes] = -INF
    if b is not None and shape.real is not None:
        b[shape.real :] = float("nan")  # padding is never read
    teacher = top_k(reference.dense_logits(teacher_logits, transform=shape.transform), shape.k, rest=rest)
    if shape.empty:
        ids, log_probs = teacher.token_ids.clone(), teacher.log_probs.clone()
        ids[..., 1], log_probs[..., 3] = -1, -INF
        ids[0], log_probs[1] = -1, -INF  # rows without a live slot
        ids[2, 1:] = -1  # a row with one
        live = torch.where(log_probs > -INF, ids, -1)
        teacher = TeacherTopK(ids, log_probs, reference.coarse(teacher_logits, live).rest_log_prob if rest else None)
    linear = LinearLogits(hidden, weight, b)
    logits = hidden @ weight.T if b is None else hidden @ weight.T + b
    for leaf in (logits, *linear):
        if leaf is not None:
            leaf.requires_grad_()
    return Case(shape, logits, linear, teacher)


def assert_same(actual: Tensor, expected: Tensor, what: str = "", tolerance: float = 1e-12) -> None:
    """Equal to `tolerance`, absolute and relative; infinities and dtypes must match."""
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}" if what else text
    )
