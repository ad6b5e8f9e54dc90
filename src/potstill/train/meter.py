"""What optimiser steps did: sums over their tokens, read once per step, and where the time went.

A step's numbers stay tensors on the device until `close_step`, which adds them over ranks and reads them all at once:
the only wait for the device in a step, and the only collective besides the gradient's and the token count's.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

PARTS = ("rollout", "teacher", "student", "loss")


class StepMeter:
    """Collects what the steps since the last log row did.

    Args:
        device: of the tensors, and whose clock times the parts of a step.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.step: dict[str, Tensor | float] = {}
        self.began: float | torch.Event | None = None
        self._reset()

    def _reset(self) -> None:
        self.steps = 0
        self.skipped = 0
        self.totals: dict[str, float] = {}
        self.spans: list[tuple[str, float | torch.Event, float | torch.Event]] = []

    def begin_step(self) -> None:
        """Start the clock of an optimiser step, and stop that of the step before."""
        self.end_step()
        self.step = {}
        self.began = self._moment()

    def end_step(self) -> None:
        """Stop the clock, so that what follows (a log, an evaluation, a checkpoint) counts for no step."""
        if self.began is not None:
            self.spans.append(("step", self.began, self._moment()))
            self.steps += 1
            self.began = None

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the time within the block as "rollout", "teacher" or "loss"; the rest of a step is the student's.

        The loss is its forward, within the student's; what its backward takes counts as the student's.
        """
        began = self._moment()
        yield
        self.spans.append((part, began, self._moment()))

    def add(self, **sums: Tensor | float) -> None:
        """Add numbers of the running step that are sums over micro-batches and ranks."""
        for name, value in sums.items():
            self.step[name] = self.step.get(name, 0.0) + value

    def close_step(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The running step's numbers, summed over ranks, of which every one must have added the same names.

        They enter the means only with `keep`.

        Args:
            reduce: sums a tensor over ranks.
        """
        values = [torch.as_tensor(value, dtype=torch.float32, device=self.device) for value in self.step.values()]
        return dict(zip(self.step, reduce(torch.stack(values)).tolist(), strict=True))

    def keep(self, step: dict[str, float]) -> None:
        """Let a closed step into the means."""
        for name, value in step.items():
            self.totals[name] = self.totals.get(name, 0.0) + value

    def skip(self) -> None:
        """Leave the step out of all means but those of time."""
        self.skipped += 1

    def means(self) -> dict[str, float]:
        """Means since the last call, and start anew.

        Returns:
            Per kept step, what losses gave as means over the step's tokens: `loss`, `student_mass`, `teacher_mass`,
            `zero_loss_share`, `uniform_teacher_share`. Of the completions: their `mean_length` (tokens),
            `on_policy_share`, and of the `sampled` ones the `truncated_share`. `skipped_steps`; `tokens_per_second`
            over all ranks; of each of several teachers `tokens/NAME` and the mean `loss/NAME`; and the seconds of a
            step's parts on this rank.
        """
        self.end_step()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        steps = max(self.steps, 1)
        seconds = dict.fromkeys(("step", *PARTS), 0.0)
        for part, began, ended in self.spans:
            seconds[part] += _seconds_between(began, ended)
        seconds["student"] = seconds["step"] - sum(seconds[part] for part in PARTS)
        counts = {name: self.totals.pop(name, 0.0) for name in ("completions", "sampled", "truncated", "tokens")}
        teachers = [name.removeprefix("tokens/") for name in self.totals if name.startswith("tokens/")]
        for name in teachers:
            tokens, loss = (self.totals.pop(f"{sum_of}/{name}") for sum_of in ("tokens", "loss_sum"))
            counts |= {f"tokens/{name}": tokens, f"loss/{name}": loss / max(tokens, 1)}
        kept = self.steps - self.skipped
        means = {name: total / kept for name, total in self.totals.items()} if kept else {"loss": float("nan")}
        means |= {
            "on_policy_share": counts["sampled"] / max(counts["completions"], 1),
            "sampled": counts["sampled"],
            "truncated_share": counts["truncated"] / max(counts["sampled"], 1),
            "mean_length": counts["tokens"] / max(counts["completions"], 1),
            "skipped_steps": self.skipped,
            "tokens_per_second": counts["tokens"] / max(seconds["step"], 1e-9),
        }
        means |= {name: value for name, value in counts.items() if "/" in name}
        self._reset()
        return means | {f"{part}_seconds": seconds[part] / steps for part in PARTS}

    def _moment(self) -> float | torch.Event:
        """Now: on a CPU the clock; elsewhere an event in the device's stream, for which nothing waits."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event


def _seconds_between(began: float | torch.Event, ended: float | torch.Event) -> float:
    if isinstance(began, float) and isinstance(ended, float):
        return ended - began
    return began.elapsed_time(ended) / 1000  # type: ignore[union-attr, arg-type]  # milliseconds
