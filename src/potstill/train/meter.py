"""Means over the optimiser steps between two log rows: masses, throughput, and where the time went."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

MEANS = ("student_mass", "teacher_mass")


class StepMeter:
    """Collects what the steps since the last log row did. Nothing waits for the device but the clock.

    Args:
        device: whose work is waited for when the clock is read.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.began: float | None = None
        self._reset()

    def _reset(self) -> None:
        self.steps = 0
        self.tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        self.sums = torch.zeros(len(MEANS), device=self.device)
        self.seconds = {"step": 0.0, "rollout": 0.0, "teacher": 0.0, "loss": 0.0}

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def begin_step(self) -> None:
        """Start the clock of an optimiser step, and stop that of the step before."""
        self.end_step()
        self.began = self._now()

    def end_step(self) -> None:
        """Stop the clock, so that what follows (a log, an evaluation, a checkpoint) counts for no step."""
        if self.began is not None:
            self.seconds["step"] += self._now() - self.began
            self.steps += 1
            self.began = None

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the time within the block as "rollout", "teacher" or "loss"; the rest of a step is the student's.

        The loss runs in the middle of the student's forward: away from a CPU, reading the clock there would make the
        device wait, so it counts as the student's.
        """
        if part == "loss" and self.device.type != "cpu":
            yield
            return
        began = self._now()
        yield
        self.seconds[part] += self._now() - began

    def count_tokens(self, num_tokens: Tensor) -> None:
        """Add a step's scored tokens, over all ranks."""
        self.tokens += num_tokens

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add a micro-batch's metrics, which are already divided by the step's number of tokens."""
        self.sums += torch.stack([metrics[name] for name in MEANS])

    def means(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Means per step, and start anew.

        Args:
            reduce: sums a tensor over ranks.
        """
        self.end_step()
        steps = max(self.steps, 1)
        masses = dict(zip(MEANS, (reduce(self.sums) / steps).tolist(), strict=True))
        seconds = {part: total / steps for part, total in self.seconds.items()}
        seconds["student"] = seconds["step"] - seconds["rollout"] - seconds["teacher"] - seconds["loss"]
        tokens_per_second = self.tokens.item() / max(self.seconds["step"], 1e-9)
        self._reset()
        return {
            **masses,
            "tokens_per_second": tokens_per_second,
            **{f"{part}_seconds": seconds[part] for part in ("rollout", "teacher", "student", "loss")},
        }
