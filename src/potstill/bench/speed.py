"""`potstill bench speed`: forward and backward of the loss against the ways of others, as ratios of one run.

bfloat16, V = 151,936, K = 64; the fused head in float32 on a CPU without bfloat16 products, which torch falls back
to plain loops for. Every repetition runs all methods one after another on the same inputs, and a ratio is
the median over repetitions of (other / this library), so that a machine that changes speed changes both. Before
anything is timed the gradient of every method passes the same check against float64; one that does not has no row.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from potstill.bench.baselines import Selected, dense, truncated_kl, verl_like
from potstill.bench.report import parser, table, write_json_lines
from potstill.core.losses import topk_distillation_loss
from potstill.core.teacher import TeacherTopK
from potstill.core.tiles import LinearLogits

VOCAB, TOP_K, HIDDEN = 151_936, 64, 1_024
HEAD_ROWS = 512
CHECKED_ROWS = 16

Step = Callable[[], None]


def logits_steps(n_rows: int, vocab: int, kernels: Sequence[str]) -> dict[str, Step]:
    """One forward and backward by each method on the same logits; checked first."""
    torch.manual_seed(0)
    logits = torch.empty(n_rows, vocab, dtype=torch.bfloat16)
    parts = []
    for z in logits.split(64):
        z.copy_(2 * torch.randn(z.shape))
        parts.append(TeacherTopK.from_logits(3 * torch.randn(z.shape), TOP_K))
    teacher = TeacherTopK(torch.cat([x.token_ids for x in parts]), torch.cat([x.log_probs for x in parts]))
    logits.requires_grad_()

    def ours(kernel: str, z: Tensor, rows: TeacherTopK) -> Tensor:
        return topk_distillation_loss(z, rows, tail="drop", check=False, kernel=kernel).loss

    def theirs(method: Callable[[Tensor, Tensor], Selected], z: Tensor, rows: TeacherTopK) -> Tensor:
        return truncated_kl(method(z, rows.token_ids)[0], rows.log_probs).mean()

    losses: dict[str, Callable[[Tensor, TeacherTopK], Tensor]] = {
        f"potstill, {kernel}": functools.partial(ours, kernel) for kernel in kernels
    }
    losses |= {"verl-like": functools.partial(theirs, verl_like), "dense": functools.partial(theirs, dense)}
    return {name: step_of(loss, logits, teacher) for name, loss in losses.items() if passes(loss, logits, teacher)}


def step_of(loss: Callable[[Tensor, TeacherTopK], Tensor], logits: Tensor, teacher: TeacherTopK) -> Step:
    """Forward and backward, from no gradient to a new one."""

    def step() -> None:
        logits.grad = None
        loss(logits, teacher).backward()

    return step


def passes(loss: Callable[[Tensor, TeacherTopK], Tensor], logits: Tensor, teacher: TeacherTopK) -> bool:
    """Whether the gradient is float64's to bfloat16 rounding, on the first rows."""
    rows = TeacherTopK(teacher.token_ids[:CHECKED_ROWS], teacher.log_probs[:CHECKED_ROWS])
    z = logits.detach()[:CHECKED_ROWS].clone().requires_grad_()
    exact = z.detach().double().requires_grad_()
    log_probs = exact.log_softmax(-1).gather(-1, rows.token_ids)
    truncated_kl(log_probs, rows.log_probs.double()).mean().backward()
    loss(z, rows).backward()
    assert z.grad is not None and exact.grad is not None
    error = (z.grad.double() - exact.grad).abs()
    return bool((error <= 2.0**-8 * exact.grad.abs() + 1e-9).all())


def head_dtype() -> torch.dtype:
    """bfloat16 where this CPU multiplies in it, else float32."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def head_steps(n_rows: int, vocab: int, hidden_size: int) -> dict[str, Step]:
    """The fused head in both memory modes, and three plain products of its sizes."""
    torch.manual_seed(0)
    hidden = (0.5 * torch.randn(n_rows, hidden_size)).to(head_dtype()).requires_grad_()
    weight = (0.05 * torch.randn(vocab, hidden_size)).to(head_dtype()).requires_grad_()
    with torch.no_grad():
        teacher = TeacherTopK.from_logits(LinearLogits(hidden + 0.3 * torch.randn_like(hidden), weight), TOP_K)

    def fused(memory: str) -> None:
        hidden.grad = weight.grad = None
        topk_distillation_loss(LinearLogits(hidden, weight), teacher, memory=memory, check=False).loss.backward()

    @torch.no_grad()
    def products() -> None:
        z = hidden @ weight.T
        z @ weight, z.T @ hidden

    steps: dict[str, Step] = {memory: functools.partial(fused, memory) for memory in ("single_pass", "recompute")}
    return steps | {"three GEMMs": products}


def scoring_steps(n_rows: int, vocab: int, hidden_size: int) -> dict[str, Step]:
    """from_logits of a LinearLogits, and one product with a plain top k."""
    torch.manual_seed(0)
    hidden = (0.5 * torch.randn(n_rows, hidden_size)).to(head_dtype())
    weight = (0.05 * torch.randn(vocab, hidden_size)).to(head_dtype())
    linear = LinearLogits(hidden, weight)
    return {
        "from_logits": lambda: void(TeacherTopK.from_logits(linear, TOP_K)),
        "GEMM + topk": lambda: void((hidden @ weight.T).topk(TOP_K)),
    }


def void(_: Any) -> None:
    """Forget a result."""


def seconds(steps: dict[str, Step], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each step, in turn, after one run that is not counted."""
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repetitions):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return times


def ratio(times: dict[str, list[float]], one: str, other: str) -> str:
    """Median over repetitions of one / other; "failed" where either did not pass its check."""
    if one not in times or other not in times:
        return "failed"
    return f"{statistics.median(a / b for a, b in zip(times[one], times[other], strict=True)):.2f}"


def main(argv: Sequence[str]) -> int:
    """Print the tables; 1 if a method failed its check."""
    options = parser("speed", "Forward and backward of the loss, as ratios.")
    options.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    options.add_argument("--repetitions", type=int, default=5, help="paired runs (default 5)")
    options.add_argument("--kernel", action="append", help="eager and compiled by default")
    arguments = options.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    kernels = arguments.kernel or ["eager", "compiled"]
    sizes, vocab, hidden = ((16, 64, 256, 1024), VOCAB, HIDDEN) if not arguments.quick else ((16,), 4_999, 32)
    repetitions, head_rows = (1, sizes[0]) if arguments.quick else (arguments.repetitions, HEAD_ROWS)
    rows, lines = [], []
    for n_rows in sizes:
        print(f"logits, {n_rows} rows ...", file=sys.stderr)
        times = seconds(logits_steps(n_rows, vocab, kernels), repetitions)
        for kernel in kernels:
            ours = f"potstill, {kernel}"
            rows.append({"rows": n_rows, "body": kernel, **{x: ratio(times, x, ours) for x in ("dense", "verl-like")}})
        lines += [{"form": "logits", "rows": n_rows, "method": name, "seconds": x} for name, x in times.items()]
    print("Logits: how many times longer the others take, forward and backward\n")
    print(table(rows))

    print("fused head ...", file=sys.stderr)
    times = seconds(head_steps(head_rows, vocab, hidden), min(repetitions, 3))
    scoring = seconds(scoring_steps(head_rows, vocab, hidden), min(repetitions, 3))
    lines += [{"form": "head", "method": name, "seconds": x} for name, x in (times | scoring).items()]
    head = [
        {"": "single_pass / three unchunked GEMMs", "ratio": ratio(times, "single_pass", "three GEMMs")},
        {"": "recompute / three unchunked GEMMs", "ratio": ratio(times, "recompute", "three GEMMs")},
        {"": "from_logits / (GEMM + topk)", "ratio": ratio(scoring, "from_logits", "GEMM + topk")},
    ]
    print(f"\nFused head, {head_rows} rows, hidden size {hidden}, {str(head_dtype()).removeprefix('torch.')}\n")
    print(table(head))
    if arguments.json:
        write_json_lines(arguments.json, "speed", lines)
    return int(any("failed" in row.values() for row in [*rows, *head]))
