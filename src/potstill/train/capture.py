"""`potstill cache`: what a recipe's teacher says of completions, written to a folder that `teacher.cache` replays.

The completions are those of a training that stands still: block by block the prompts of an optimiser step, in the
order of the data, completed and scored as the trainer does. What is drawn in a block depends on its place alone, so
that a capture which goes on after a kill repeats the block that it was killed in, and adds what is missing of it.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import set_seed

from potstill import TeacherTopK
from potstill.rollouts.transformers import stop_token_ids
from potstill.teachers.cache import INDEX, CacheWriter, read_index
from potstill.teachers.payload import PayloadInfo, Sample, fingerprint
from potstill.train.load import build_trainer, naming, teachers_of, training_arguments
from potstill.train.progress import show
from potstill.train.recipe import Recipe
from potstill.train.run import warm_up
from potstill.train.strict import RecipeError
from potstill.train.trainer import DistillationTrainer


def capture(recipe: Recipe, *, resume: bool = False) -> Path:
    """Score the recipe's prompts, completed, and store what its teacher says of them.

    Args:
        recipe: its student, after the warm-up, samples; with rollout.lmbda below 1 the data's completions are taken.
        resume: go on with what the folder has.

    Returns:
        The folder of the cache.

    Raises:
        RecipeError: the recipe has no teacher to ask, what it names cannot be loaded or does not fit together, or
            the folder has a cache already, or one of another recipe.
    """
    folder = Path(recipe.cache.folder or f"caches/{recipe.name}")
    _check(recipe, folder, resume)
    with TemporaryDirectory() as temporary:  # nothing is measured, and no model comes of it
        training = {**recipe.training, "output_dir": temporary, "report_to": "none", "push_to_hub": False}
        recipe = replace(recipe, data=replace(recipe.data, heldout=None), training=training)
        args = training_arguments(recipe)
        if args.world_size > 1:
            raise RecipeError(f"`potstill cache` is one process, and this is one of {args.world_size}; start it alone")
        set_seed(args.seed)
        trainer = build_trainer(recipe, args)
        with naming(f"cache.folder={str(folder)!r}"), _writer(recipe, trainer, folder) as writer:
            prompts: Any = trainer.train_dataset
            total = len(prompts) * recipe.cache.samples_per_prompt
            if writer.done < total and recipe.warmup.steps and recipe.rollout.lmbda > 0:
                warm_up(recipe, trainer)
            for number, sample in enumerate(_samples(recipe, trainer, start=writer.done), start=writer.done + 1):
                safe = writer.done
                writer.add(sample)
                if sys.stdout.isatty() or writer.done > safe:
                    show(f"{number:,} of {total:,} samples", replaceable=True)
    rows = sum(shard.rows for shard in writer.shards)
    show(f"cache: {folder}, {writer.done:,} samples with {rows:,} rows, in {len(writer.shards)} files")
    return folder


def _check(recipe: Recipe, folder: Path, resume: bool) -> None:
    """Refuse what will not do, before anything is loaded."""
    if recipe.teacher.cache is not None:
        raise RecipeError(
            f"teacher.cache={recipe.teacher.cache!r} is a cache already; leave it out to ask the teacher"
        )
    if recipe.teacher.ema is not None:
        raise RecipeError("teacher.ema follows a student that is trained, and here none is; name another teacher")
    if recipe.loss.estimator is not None:
        raise RecipeError(
            f"loss.estimator={recipe.loss.estimator} scores what is sampled as training goes on; there is nothing to "
            "cache"
        )
    for name, spec in teachers_of(recipe).items():
        if spec.weight != 1:
            raise RecipeError(
                f"teachers.{name}.weight is {spec.weight:g}, which a cache does not keep; leave it out"
                if name
                else f"teacher.weight is {spec.weight:g}, which a cache does not keep; give it where the cache is read"
            )
    if not resume and (folder / INDEX).exists():
        with naming(f"cache.folder={str(folder)!r}"):
            _, shards = read_index(folder)
        if shards:
            done = sum(shard.samples for shard in shards)
            raise RecipeError(
                f"cache.folder: {folder} has {done:,} samples; go on with --resume, delete it, or choose another one"
            )


def _writer(recipe: Recipe, trainer: DistillationTrainer, folder: Path) -> CacheWriter:
    loss, options = recipe.loss, recipe.cache
    info = PayloadInfo(
        vocab_size=trainer.student.transform.vocab_size or trainer.student.head.out_features,
        tokenizer=fingerprint(trainer.tokenizer.get_vocab()),
        teacher=", ".join(spec.model for spec in teachers_of(recipe).values()),
        top_k=loss.top_k,
        temperature=loss.temperature,
        chosen=loss.targets,
        bits=options.bits,
        eos_token_ids=tuple(stop_token_ids(trainer.student.model, trainer.tokenizer)),
    )
    about = {
        "student": asdict(recipe.student),
        "warmup": asdict(recipe.warmup),
        "rollout": asdict(recipe.rollout),
        "seed": trainer.args.seed,
        "prompts_per_block": _prompts_per_block(trainer),
        "samples_per_prompt": options.samples_per_prompt,
        "prompts": _digest(trainer.train_dataset),
    }
    return CacheWriter(folder, info, about, rows_per_shard=options.rows_per_shard)


def _digest(rows: Any) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _samples(recipe: Recipe, trainer: DistillationTrainer, start: int) -> Iterator[Sample]:
    """The samples from number `start` on: every prompt once, then all of them again."""
    prompts: Any = trainer.train_dataset
    total = len(prompts) * recipe.cache.samples_per_prompt
    micro = trainer.args.per_device_train_batch_size
    block = _prompts_per_block(trainer)
    for first in range(start - start % block, total, block):
        numbers = range(first, min(first + block, total))
        rows = [prompts[number % len(prompts)] for number in numbers]
        torch.manual_seed(trainer.seed_of(f"targets {first}"))  # sampled targets draw from the global generator
        batches = trainer.complete_and_score([rows[i : i + micro] for i in range(0, len(rows), micro)], step=first)
        for number, sample in zip(numbers, _taken_apart(batches), strict=True):
            if number >= start:
                turn, row = divmod(number, len(prompts))
                yield sample._replace(sample_id=f"{row}.{turn}")


def _prompts_per_block(trainer: DistillationTrainer) -> int:
    return trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps


def _taken_apart(batches: Sequence[dict[str, Any]]) -> Iterator[Sample]:
    for batch in batches:
        scores = batch["teacher"]
        scores = scores.with_rest() if isinstance(scores, TeacherTopK) else scores
        lengths = [len(completion) for completion in batch["completions"]]
        parts = {name: x.cpu().split(lengths) for name, x in vars(scores).items() if isinstance(x, Tensor)}
        for i, (row, completion) in enumerate(zip(batch["rows"], batch["completions"], strict=True)):
            rows = replace(scores, **{name: part[i] for name, part in parts.items()})
            yield Sample("", row["prompt_ids"], completion, rows)
