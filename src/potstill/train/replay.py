"""Training from a cache: samples and what the teacher said of them, as `potstill cache` wrote them."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from potstill import SampledTargets, TeacherTopK
from potstill.rollouts.dataset import PromptRow
from potstill.teachers.payload import PayloadError, PayloadInfo, fingerprint
from potstill.train.batch import Batch
from potstill.train.progress import show
from potstill.train.recipe import Recipe
from potstill.train.strict import RecipeError

if TYPE_CHECKING:
    from potstill.teachers.cache import CachedSamples


class CachedRow(PromptRow):
    """A sample of a cache: its completion, and the teacher's row for each of its tokens."""

    teacher_rows: TeacherTopK | SampledTargets


class CachedRows(Sequence[CachedRow]):
    """The samples of a cache as rows of a dataset, read from disk when they are asked for."""

    def __init__(self, samples: "CachedSamples"):
        self.samples = samples

    @property
    def info(self) -> PayloadInfo:
        """What all samples have in common."""
        return self.samples.info

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        sample = self.samples[index]
        return CachedRow(
            prompt_ids=list(sample.prompt_ids),
            answer=None,
            completion_ids=list(sample.completion_ids),
            teacher_rows=sample.rows,
        )


def cached_rows_of(batch: Batch) -> TeacherTopK | SampledTargets:
    """The stored rows of the batch's scored tokens, on its device: a teacher that computes nothing."""
    rows: Any = batch["rows"]
    # A student with more stop tokens than the one that sampled scores no further than its own first.
    lengths = [len(completion) for completion in batch["completions"]]
    first = rows[0]["teacher_rows"]
    device = batch["input_ids"].device

    def joined(name: str) -> Tensor:
        parts = [getattr(row["teacher_rows"], name)[:length] for row, length in zip(rows, lengths, strict=True)]
        return torch.cat(parts).to(device)

    names = [spec.name for spec in fields(first) if isinstance(getattr(first, spec.name), Tensor)]
    return replace(first, **{name: joined(name) for name in names})


def open_cache(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> CachedRows:
    """The recipe's cache, if its rows are what the recipe's loss is about.

    Raises:
        RecipeError: it cannot be read, or was made with another tokenizer, temperature, top_k or kind of targets.
    """
    from potstill.teachers.cache import CachedSamples

    loss, folder = recipe.loss, str(recipe.teacher.cache)
    try:
        samples = CachedSamples(folder)
    except (PayloadError, OSError) as error:
        raise RecipeError(f"teacher.cache={folder!r}: {error}") from error
    info = samples.info
    if info.tokenizer != fingerprint(tokenizer.get_vocab()):
        raise RecipeError(
            f"teacher.cache={folder!r} was made with another tokenizer than {recipe.teacher.model}'s; name the "
            "teacher's own model or a student of the same tokenizer"
        )
    if loss.estimator is not None:
        raise RecipeError(f"loss.estimator={loss.estimator} needs a teacher that scores sampled tokens, not a cache")
    for key, ours, theirs in (
        ("top_k", loss.top_k, info.top_k),
        ("temperature", loss.temperature, info.temperature),
        ("targets", loss.targets, info.chosen),
    ):
        if ours != theirs:
            raise RecipeError(
                f"loss.{key} is {ours} but teacher.cache={folder!r} has {theirs}; set loss.{key}={theirs}, or make a "
                "new cache"
            )
    show(f"train samples: {len(samples):,} with their teacher's rows, from {folder}")
    return CachedRows(samples)
