"""Several teachers: each row of a batch is scored by the one that its `teacher_id` names."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from potstill import SampledTargets, TeacherTopK

T = TypeVar("T", bound=Callable[..., Any])
Rows = TeacherTopK | SampledTargets


class RoutedTeacher(Generic[T]):
    """Sends each row to its teacher and puts what they say in the order of the batch.

    Args:
        teachers: by name, which rows have as their `teacher_id`. All give rows of the same K and kind.
    """

    def __init__(self, teachers: Mapping[str, T]):
        self.teachers = dict(teachers)
        self.waiting = ThreadPoolExecutor(1, thread_name_prefix="potstill-routing")

    def __call__(self, batch: Mapping[str, Any]) -> Rows | Future[Rows]:
        """The teachers' rows for the batch's N scored rows; a Future where one of them gives one.

        Raises:
            KeyError: a row's `teacher_id` names no teacher.
        """
        parts = [(tokens, self.teachers[name](part)) for name, part, tokens in self._parts(batch)]
        if any(isinstance(rows, Future) for _, rows in parts):
            return self.waiting.submit(_joined, parts)
        return _joined(parts)

    def by_teacher(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[T, list[Any]]]:
        """Each teacher that rows name, with its rows."""
        parts = {name: [row for row in rows if row["teacher_id"] == name] for name in self.teachers}
        return [(self.teachers[name], part) for name, part in parts.items() if part]

    def _parts(self, batch: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], Tensor]]:
        """Name, sub-batch and places among the N scored rows of each teacher with rows."""
        names = [row["teacher_id"] for row in batch["rows"]]
        if unknown := set(names) - set(self.teachers):
            raise KeyError(f"no teacher is called {unknown.pop()!r}; there are {', '.join(self.teachers)}")
        sequence = batch["scored_rows"] // batch["score_mask"].shape[1]  # [N]
        parts = []
        for name in self.teachers:
            chosen = [index for index, own in enumerate(names) if own == name]
            if not chosen:
                continue
            index = torch.tensor(chosen, device=sequence.device)
            tokens = torch.isin(sequence, index).nonzero().squeeze(1)
            part: dict[str, Any] = {
                key: batch[key][index] for key in ("input_ids", "attention_mask", "position_ids", "score_mask")
            }
            part |= {key: [batch[key][i] for i in chosen] for key in ("rows", "completions")}
            part["scored_rows"] = part["score_mask"].flatten().nonzero().squeeze(1)
            part["target_ids"] = batch["target_ids"][tokens]
            parts.append((name, part, tokens))
        return parts


def _joined(parts: list[tuple[Tensor, Any]]) -> Rows:
    given = [rows.result() if isinstance(rows, Future) else rows for _, rows in parts]
    if any(isinstance(rows, TeacherTopK) and rows.rest_log_prob is not None for rows in given):
        given = [rows.with_rest() for rows in given]
    order = torch.cat([tokens for tokens, _ in parts]).argsort()
    names = [spec.name for spec in fields(given[0]) if isinstance(getattr(given[0], spec.name), Tensor)]
    return replace(given[0], **{name: torch.cat([getattr(rows, name) for rows in given])[order] for name in names})
