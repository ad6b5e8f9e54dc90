"""What a run shows and records: one line on a terminal, plain lines elsewhere, metrics.jsonl always."""

import contextlib
import json
import math
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

METRICS_FILE = "metrics.jsonl"


class ProgressLine(TrainerCallback):
    """Write every log row to `metrics.jsonl` in the output folder, and show where training is.

    Args:
        phase: shown first, and recorded with every row.
    """

    def __init__(self, phase: str):
        self.phase = phase
        self.latest = ""
        self.began, self.first_step = time.perf_counter(), 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock that the remaining time is estimated by; forget rows that a resumed run will write again."""
        self.began, self.first_step = time.perf_counter(), state.global_step
        if state.global_step and state.is_world_process_zero:
            drop_rows_after(Path(args.output_dir or ".") / METRICS_FILE, self.phase, state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record the row; show it if it is one of training or of the held-out prompts."""
        if not state.is_world_process_zero or not logs:
            return
        numbers = {name: value if math.isfinite(value) else None for name, value in logs.items()}
        path = Path(args.output_dir or ".") / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"phase": self.phase, "step": state.global_step, **numbers}) + "\n")
        if "loss" in logs:
            mass = f"student mass {logs['student_mass']:.3f}  " if "student_mass" in logs else ""
            self.latest = f"loss {logs['loss']:.4f}  {mass}{logs['tokens_per_second']:,.0f} tok/s"
            self._show(state)
        elif "eval_kl" in logs:
            grade = f"  exact match {logs['eval_exact_match']:.1%}" if "eval_exact_match" in logs else ""
            show(f"held-out  KL {logs['eval_kl']:.4f}{grade}")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep the terminal's step count and remaining time up to date between logs."""
        if state.is_world_process_zero and sys.stdout.isatty() and self.latest:
            self._show(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the terminal's line standing."""
        if state.is_world_process_zero and sys.stdout.isatty():
            print()

    def _show(self, state: TrainerState) -> None:
        done = state.global_step - self.first_step
        left = (time.perf_counter() - self.began) / max(done, 1) * (state.max_steps - state.global_step)
        remaining = str(timedelta(seconds=round(left))).removeprefix("0:")
        line = f"{self.phase} step {state.global_step}/{state.max_steps}  {self.latest}  {remaining} left"
        show(line, replaceable=True)


def drop_rows_after(metrics: Path, phase: str, step: int) -> None:
    """Leave out of metrics.jsonl the phase's rows of later steps, its summary, and a last line that was cut short."""
    if not metrics.exists():
        return
    kept = []
    for line in metrics.read_text(encoding="utf-8").splitlines(keepends=True):
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            if row["phase"] != phase or (row["step"] <= step and "train_runtime" not in row):
                kept.append(line)
    new = metrics.with_suffix(".new")
    new.write_text("".join(kept), encoding="utf-8")
    new.replace(metrics)


def show(line: str, *, replaceable: bool = False) -> None:
    """Print a line on the first rank; on a terminal it takes the place of a replaceable one that stands there."""
    if not PartialState().is_main_process:
        return
    if not sys.stdout.isatty():
        print(line, flush=True)
    elif replaceable:  # a line that wraps could not be replaced
        print(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
    else:
        print(f"\r\033[K{line}", flush=True)
