"""`potstill bench exactness`: the loss in chunks against the loss in one chunk, and against float64.

On the shapes and in the columns of the seed's table. First, chunks: this library at each chunk size against itself in
one chunk. Then, arithmetic: this library and the verl-like baseline, each against a dense float64 truth on the same
logits, which is formed some rows at a time, as every row stands alone.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from potstill.bench.baselines import truncated_kl, verl_like
from potstill.bench.peak import tiles_cut_by
from potstill.bench.report import parser, table, write_json_lines
from potstill.core.coarse import coarse_logits
from potstill.core.losses import topk_distillation_loss
from potstill.core.teacher import TeacherTopK
from potstill.core.tiles import Budget
from potstill.core.topk import student_topk

UNLIMITED = Budget(tile=1 << 62, product=1 << 62, weight_gradient=1 << 62)  # so that chunk_size alone cuts
SLICE = 64  # rows that are compared, or whose truth is formed, at a time


class Setting(NamedTuple):
    """A line of the seed's table: how many rows, of what, and the chunk sizes it was measured at."""

    rows: int
    vocab_size: int
    top_k: int
    dtype: torch.dtype
    clamp: float | None
    chunk_sizes: tuple[int, ...]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.rows:,} x {self.vocab_size:,}, K = {self.top_k}, {dtype}, clamp {self.clamp}"


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
FLOAT32_EPS = torch.finfo(FLOAT32).eps
SMALL = [Setting(2 * 96, 2_048, 32, *x, (7, 64, 4096)) for x in itertools.product((FLOAT32, BFLOAT16), (-10.0, None))]
LARGE = [Setting(4_096, 248_320, 128, dtype, -10.0, (2048, 4096, 8192)) for dtype in (BFLOAT16, FLOAT32)]
PUBLISHED = {  # absolute, between chunked and not; in bfloat16 nothing may differ here
    2_048: {"loss": 1.2e-7, "gradient": 1.3e-9, "student_mass": 1.9e-8, "overlap_count": 0.0},
    248_320: {"loss": 9.31e-10, "gradient": 8.53e-14},
}


class Rows(NamedTuple):
    """What the seed's table compares: numbers of each row [N], and the gradient [N, V] of their mean loss."""

    loss: Tensor
    gradient: Tensor
    student_mass: Tensor
    teacher_mass: Tensor
    overlap_count: Tensor
    overlap_advantage: Tensor


Method = Callable[[Tensor, TeacherTopK, float | None, int], Rows]
"""From logits of some rows, their teacher, the clamp, and the number of all rows."""


def ours(
    logits: Tensor, teacher: TeacherTopK, clamp: float | None, num_tokens: int, chunk_size: int | None = None
) -> Rows:
    """This library's numbers."""
    z = logits.detach().requires_grad_()
    out = topk_distillation_loss(
        z, teacher, tail="drop", log_prob_min_clamp=clamp, num_tokens=num_tokens, chunk_size=chunk_size
    )
    out.loss.backward()
    log_probs = coarse_logits(logits, teacher.token_ids, chunk_size=chunk_size).log_probs
    top_ids, _ = student_topk(logits, teacher.token_ids.shape[1], chunk_size=chunk_size)
    return _rows(out.per_token, z.grad, log_probs, top_ids, teacher, clamp)


def baseline(logits: Tensor, teacher: TeacherTopK, clamp: float | None, num_tokens: int) -> Rows:
    """The verl-like baseline's."""
    z = logits.detach().requires_grad_()
    log_probs, top_ids = verl_like(z, teacher.token_ids)
    loss = truncated_kl(log_probs, teacher.log_probs, clamp)
    (loss.sum() / num_tokens).backward()
    return _rows(loss, z.grad, log_probs, top_ids, teacher, clamp)


def truth(logits: Tensor, teacher: TeacherTopK, clamp: float | None, num_tokens: int) -> Rows:
    """Dense, in float64, by autograd."""
    z = logits.detach().double().requires_grad_()
    teacher = TeacherTopK(teacher.token_ids, teacher.log_probs.double())
    log_probs = z.log_softmax(-1).gather(-1, teacher.token_ids)
    loss = truncated_kl(log_probs, teacher.log_probs, clamp)
    (loss.sum() / num_tokens).backward()
    # Ties to the lower id, by a shift far below the spacing of float32 near the largest logits.
    shift = torch.arange(z.shape[1], dtype=torch.float64) * 1e-14
    top_ids = (z.detach() - shift).topk(teacher.token_ids.shape[1]).indices
    return _rows(loss, z.grad, log_probs, top_ids, teacher, clamp)


def _rows(
    loss: Tensor,
    gradient: Tensor | None,
    log_probs: Tensor,
    top_ids: Tensor | None,
    teacher: TeacherTopK,
    clamp: float | None,
) -> Rows:
    """The metrics that follow from a student's log-probabilities at the teacher's ids and its own top ids."""
    assert gradient is not None and top_ids is not None
    q, p = log_probs.detach(), teacher.log_probs
    student_mass, teacher_mass = q.exp().sum(-1), p.exp().sum(-1)
    shared = torch.cat([(a[:, :, None] == b[:, None]).any(-1) for a, b in _slices(teacher.token_ids, top_ids)])
    count = shared.sum(-1)
    if clamp is not None:
        q, p = q.clamp(min=clamp), p.clamp(min=clamp)
    advantage = (p.exp() * (q - p) * shared).sum(-1) / count.clamp(min=1)
    return Rows(loss.detach(), gradient, student_mass, teacher_mass, count, advantage)


class Error(NamedTuple):
    """Differences of one column: the largest, the largest value beside them, the largest relative one."""

    absolute: float = 0.0
    largest: float = 0.0
    worst: float = 0.0

    @classmethod
    def of(cls, value: Tensor, other: Tensor) -> "Error":
        """The differences of value from other, elementwise."""
        other = other.double()
        gap = (value.double() - other).abs()
        size = other.abs()
        worst = torch.where(gap == 0, 0.0, gap / size)
        return cls(float(gap.max()), float(size.max()), float(worst.max()))

    def join(self, other: "Error") -> "Error":
        """The error of both."""
        return Error(*map(max, self, other))

    def exceeds(self, other: "Error") -> bool:
        """Whether the largest difference is larger by more than half a unit in float32's last place of the values."""
        return self.absolute > other.absolute + FLOAT32_EPS / 2 * self.largest

    def __str__(self) -> str:
        return f"{self.absolute:.1e} / {self.absolute / self.largest:.1e}" if self.absolute else "0"


Errors = dict[str, Error]


def errors(rows: Rows, other: Rows) -> Errors:
    """The error of each column."""
    found = dict.fromkeys(Rows._fields, Error())
    for name, value, truth in zip(Rows._fields, rows, other, strict=True):
        for a, b in _slices(value, truth):
            found[name] = found[name].join(Error.of(a, b))
    return found


def join(parts: Iterator[Errors]) -> Errors:
    """The errors of all parts."""
    found = dict.fromkeys(Rows._fields, Error())
    for part in parts:
        found = {name: error.join(part[name]) for name, error in found.items()}
    return found


def chunk_errors(setting: Setting, logits: Tensor, teacher: TeacherTopK) -> Errors:
    """This library at every chunk size of the setting against one chunk."""
    given = logits, teacher, setting.clamp, setting.rows
    with tiles_cut_by(UNLIMITED):
        whole = ours(*given)
        return join(errors(ours(*given, chunk_size), whole) for chunk_size in setting.chunk_sizes)


def true_errors(method: Method, setting: Setting, logits: Tensor, teacher: TeacherTopK) -> Errors:
    """A method against float64."""
    given = setting.clamp, setting.rows
    slices = _slices(logits, teacher.token_ids, teacher.log_probs)
    parts = [(z, TeacherTopK(token_ids, log_probs)) for z, token_ids, log_probs in slices]
    return join(errors(method(z, rows, *given), truth(z, rows, *given)) for z, rows in parts)


def inputs(setting: Setting) -> tuple[Tensor, TeacherTopK]:
    """Logits of both models, correlated as those of a student and its teacher are; of the latter the top K."""
    torch.manual_seed(0)
    logits = torch.empty(setting.rows, setting.vocab_size, dtype=setting.dtype)
    rows = []
    for (z,) in _slices(logits):
        z.copy_(3 * torch.randn(z.shape))
        rows.append(TeacherTopK.from_logits(0.5 * z.float() + 2 * torch.randn(z.shape), setting.top_k))
    token_ids, log_probs = (torch.cat(x) for x in zip(*((x.token_ids, x.log_probs) for x in rows), strict=True))
    return logits, TeacherTopK(token_ids, log_probs)


def _slices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.split(SLICE) for x in tensors), strict=True)


def rows_that_fit(setting: Setting) -> Setting:
    """The setting with as many rows as a third of this machine's free memory holds, in one chunk."""
    # Logits, two gradients, and a float32 tile with what topk makes of it.
    needed = setting.vocab_size * (3 * setting.dtype.itemsize + 8)
    return setting._replace(rows=min(setting.rows, max(SLICE, _free_bytes() // 3 // needed)))


def _free_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def main(argv: Sequence[str]) -> int:
    """Print both tables; 1 if chunks change more than the seed's, or if the arithmetic errs more than the baseline."""
    arguments = parser("exactness", "What chunks change, and how far from float64 the loss is.").parse_args(argv)
    chunks: list[dict[str, str]] = []
    truths: list[dict[str, str]] = []
    lines: list[dict[str, Any]] = []
    missed = False
    for setting in SMALL if arguments.quick else SMALL + [rows_that_fit(setting) for setting in LARGE]:
        print(f"{setting} ...", file=sys.stderr)
        logits, teacher = inputs(setting)
        found = chunk_errors(setting, logits, teacher)
        by_method = {"potstill": true_errors(ours, setting, logits, teacher)}
        by_method["verl-like"] = true_errors(baseline, setting, logits, teacher)

        published = PUBLISHED[setting.vocab_size] if setting.dtype == FLOAT32 else dict.fromkeys(found, 0.0)
        missed |= any(found[name].absolute > limit for name, limit in published.items())
        missed |= any(error.exceeds(by_method["verl-like"][name]) for name, error in by_method["potstill"].items())

        cut = ", ".join(f"{x:,}" for x in setting.chunk_sizes)
        chunks.append({"rows": str(setting), "chunk sizes": cut, **_cells(found)})
        for method, x in by_method.items():
            truths.append({"rows": str(setting), "": method, **_cells(x)})
        for compared, x in [("chunks", found), *((f"{name}, float64", x) for name, x in by_method.items())]:
            lines.append(
                {"setting": str(setting), "compared": compared, **{name: e._asdict() for name, e in x.items()}}
            )

    print("In chunks against in one chunk: largest difference, absolute / relative to the largest value\n")
    print(table(chunks))
    print("\nAgainst float64, in the same columns\n")
    print(table(truths))
    if arguments.json:
        write_json_lines(arguments.json, "exactness", lines)
    return int(missed)


def _cells(found: Errors) -> dict[str, str]:
    worst = max(error.worst for error in found.values())
    return {**{name.replace("_", " "): str(error) for name, error in found.items()}, "worst rel": f"{worst:.1e}"}
