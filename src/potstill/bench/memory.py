"""`potstill bench memory`: peak memory of the loss at the sizes of the seed's table, in every way to compute it."""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from potstill.bench.peak import CPU, WAYS, Shape, Way, linear_logits, our_loss, peak_bytes, profiled_peak_bytes
from potstill.bench.report import parser, table, write_json_lines

GIB, MIB = 2**30, 2**20
VOCAB_SIZE, TOP_K, HIDDEN_SIZE = 248_320, 128, 2_560

Case = tuple[int, int]
"""Degree of tensor parallelism, which divides the vocabulary, and rows."""

CASES = [(1, 4_096), (1, 8_192), (1, 16_384), (1, 24_576), (4, 16_384), (4, 32_768), (4, 49_152)]
PUBLISHED = {  # GiB, by case
    "verl-like": (13.28, 26.56, 53.12, 79.68, 13.33, 26.67, 40.00),
    "the seed's chunked path": (13.29, 18.97, 30.36, 45.54, 7.63, 15.25, 22.88),
}
LIMITS = {  # GiB at tp 1 and 4,096 and 16,384 rows; the fused ones at 4,096 are 32 and 25 % of the published baseline
    "logits kept": (4.0, 15.5),
    "logits reused": (2.1, 7.9),
    "fused, single_pass": (0.32 * 13.28, 4.4),
    "fused, recompute": (0.25 * 13.28, 3.2),
}
SLOPES = {  # bytes a row
    "single_pass": 4 * HIDDEN_SIZE + 32 * TOP_K,
    "recompute": 8 * HIDDEN_SIZE + 64 * TOP_K,
}


class Promise(NamedTuple):
    """A measured figure and what it must not exceed."""

    figure: str
    measured: float
    limit: float
    unit: str


def main(argv: Sequence[str]) -> int:
    """Print the peaks, what is promised of them, and how the tracker compares with the profiler; 1 if one fails."""
    arguments = parser("memory", "Peak memory of one forward and backward of the loss.").parse_args(argv)
    peaks: dict[Case, dict[str, int]] = {}
    for tp, rows in [(8, 512)] if arguments.quick else CASES:
        print(f"tp {tp}, {rows:,} tokens ...", file=sys.stderr)
        shape = Shape(rows, VOCAB_SIZE // tp, TOP_K, HIDDEN_SIZE)
        peaks[tp, rows] = {name: peak_bytes(way, shape) for name, way in WAYS.items()}
    promises = [] if arguments.quick else list(_promises(peaks))
    small = Shape(rows=128, vocab_size=8_192, top_k=32, hidden_size=128)
    checked = {name: (peak_bytes(way, small, CPU), profiled_peak_bytes(way, small)) for name, way in WAYS.items()}

    print(f"Peak, GiB (a rank): V = {VOCAB_SIZE:,}, K = {TOP_K}, H = {HIDDEN_SIZE:,}, bfloat16\n")
    print(table(list(_rows(peaks))))
    if promises:
        print("\nPromised of these\n")
        print(table([_promise_row(promise) for promise in promises]))
    print("\nTracker and profiler, MiB: N = 128, V = 8,192, K = 32, H = 128, bfloat16, on a CPU\n")
    print(
        table(
            [{"": name, "tracker": f"{a / MIB:.2f}", "profiler": f"{b / MIB:.2f}"} for name, (a, b) in checked.items()]
        )
    )
    if arguments.json:
        write_json_lines(
            arguments.json,
            "memory",
            [
                {"tp": tp, "rows": rows, "way": way, "peak_bytes": x}
                for (tp, rows), peak in peaks.items()
                for way, x in peak.items()
            ],
        )
    return int(any(promise.measured > promise.limit for promise in promises))


def _rows(peaks: dict[Case, dict[str, int]]) -> Iterator[dict[str, str]]:
    """The table: ways down, cases across, with the published figures after those they belong to."""

    def row(name: str, values: Sequence[float]) -> dict[str, str]:
        heads = (f"tp {tp}, N = {rows:,}" for tp, rows in peaks)
        return {"": name, **{head: f"{x:.2f}" for head, x in zip(heads, values, strict=True)}}

    yield row("logits alone", [rows * (VOCAB_SIZE // tp) * 2 / GIB for tp, rows in peaks])
    for name in WAYS:
        yield row(name, [peak[name] / GIB for peak in peaks.values()])
        if name in PUBLISHED and list(peaks) == CASES:
            yield row(f"{name}, as published", PUBLISHED[name])


def _promises(peaks: dict[Case, dict[str, int]]) -> Iterator[Promise]:
    for name, figures in PUBLISHED.items():
        measured = [peaks[case][name] / GIB for case in CASES]
        difference = max(abs(x / y - 1) for x, y in zip(measured, figures, strict=True))
        yield Promise(f"{name}: difference from the published figures", 100 * difference, 1, "%")
    for name, limits in LIMITS.items():
        for rows, limit in zip((4_096, 16_384), limits, strict=True):
            yield Promise(f"{name}, tp 1, N = {rows:,}", peaks[1, rows][name] / GIB, limit, "GiB")
    for memory, limit in SLOPES.items():
        # In products of one height, which would differ a little from one N to another.
        way = Way(linear_logits, partial(our_loss, {"memory": memory, "chunk_size": 512}))
        low, high = (peak_bytes(way, Shape(rows, VOCAB_SIZE, TOP_K, HIDDEN_SIZE)) for rows in (4_096, 8_192))
        yield Promise(f"fused, {memory}, each further token", (high - low) / 4_096 / 1024, limit / 1024, "KiB")


def _promise_row(promise: Promise) -> dict[str, str]:
    figure, measured, limit, unit = promise
    return {"figure": figure, "measured": f"{measured:.2f} {unit}", "at most": f"{limit:.2f} {unit}"}
