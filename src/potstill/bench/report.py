"""What every benchmark shares: its options, Markdown tables, and JSON lines that say where they were measured."""

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def parser(benchmark: str, description: str) -> argparse.ArgumentParser:
    """The parser of `potstill bench BENCHMARK`, with the options that all of them have."""
    options = argparse.ArgumentParser(prog=f"potstill bench {benchmark}", description=description)
    options.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    options.add_argument(
        "--json", metavar="FILE", type=Path, help="append the results to FILE, one JSON object a line"
    )
    return options


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of rows with the same keys, which head its columns."""
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def write_json_lines(path: Path, benchmark: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append the rows to a file, each with the benchmark's name, machine, torch and commit."""
    where = {"benchmark": benchmark, **machine()}
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**where, **row}) + "\n" for row in rows)


def machine() -> dict[str, Any]:
    """Where and with what a figure was measured."""
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The checked-out commit, "-dirty" where tracked files differ from it; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
