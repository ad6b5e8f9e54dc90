"""A recipe carried out: load, warm up, measure, distil, measure again, save."""

import contextlib
import json
import signal
from pathlib import Path
from typing import Any, NamedTuple

from transformers import TrainingArguments, set_seed

from potstill.rollouts.transformers import stop_token_ids
from potstill.teachers.one_hot import one_hot_teacher
from potstill.train.card import comparison, model_card
from potstill.train.checkpoints import checkpoints_in, newest_checkpoint
from potstill.train.load import build_trainer, naming, read_prompts, training_arguments
from potstill.train.progress import METRICS_FILE, show
from potstill.train.recipe import Recipe
from potstill.train.replay import CachedRows
from potstill.train.strict import RecipeError
from potstill.train.trainer import DistillationTrainer


class RunResult(NamedTuple):
    """Where the model was saved, and the held-out metrics (empty without held-out prompts; see `evaluate`)."""

    folder: Path
    before: dict[str, float]
    after: dict[str, float]


def run(recipe: Recipe, *, resume: bool = False) -> RunResult:
    """Carry out a recipe: one call on every rank.

    Ctrl-C or SIGTERM during the distillation ends the step and saves a checkpoint first.

    Args:
        recipe: what to do.
        resume: go on from the newest whole checkpoint in the output folder.

    Raises:
        RecipeError: what the recipe names cannot be loaded or does not fit together; or `resume` finds no checkpoint,
            or a new run finds one in its output folder.
        KeyboardInterrupt: after Ctrl-C and the checkpoint.
        SystemExit: of code 143, after SIGTERM and the checkpoint.
        FloatingPointError: too many steps in a row were not finite.
    """
    args = training_arguments(recipe)
    folder = Path(args.output_dir or ".")
    metrics = folder / METRICS_FILE
    checkpoint = _checkpoint(args, folder, resume)
    with naming("training.seed"):
        set_seed(args.seed)
    trainer = build_trainer(recipe, args)
    resuming = checkpoint is not None
    if not resuming:
        if args.should_save:
            metrics.unlink(missing_ok=True)
        if recipe.warmup.steps:
            warm_up(recipe, trainer)
    before = after = {}
    if trainer.eval_dataset is not None:
        before = first_measurement(metrics) if resuming else trainer.evaluate()
    with trainer.stop:
        trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.stopped:
        trainer.accelerator.wait_for_everyone()  # each has a part of the checkpoint to write
        whole = newest_checkpoint(folder, args.world_size)
        then = "to go on, give the same command with --resume" if whole else "without an optimiser state to go on from"
        show(f"\nstopped after step {trainer.state.global_step}; {then}")
        raise KeyboardInterrupt if trainer.stop.signum == signal.SIGINT else SystemExit(128 + signal.SIGTERM)
    if trainer.eval_dataset is not None:
        after = (
            trainer.evaluate() if args.load_best_model_at_end else _evaluation_at_end(trainer) or trainer.evaluate()
        )
    if trainer.is_world_process_zero():
        trainer.card = model_card(recipe, before, after)
    trainer.save_model()
    trainer.create_model_card()  # after the model: saving an adapter writes a card of its own
    if args.should_save:
        if after:
            show("\n" + comparison(before, after))
        show(f"\nmodel: {folder}\nmetrics: {metrics}")
    return RunResult(folder, before, after)


def _checkpoint(args: TrainingArguments, folder: Path, resume: bool) -> str | None:
    if args.resume_from_checkpoint is not None:
        return args.resume_from_checkpoint
    if resume:
        if newest := newest_checkpoint(folder, args.world_size):
            show(f"going on from {newest}")
            return str(newest)
        raise RecipeError(
            f"--resume: no whole checkpoint of {args.world_size} process(es) in {folder}; leave --resume out to start "
            "anew, with training.save_strategy=steps and training.save_steps to have some"
        )
    if old := checkpoints_in(folder):
        raise RecipeError(
            f"training.output_dir: {folder} has checkpoints of an earlier run, such as {old[0].name}; go on from them "
            "with --resume, delete them, or choose another folder"
        )
    return None


def _evaluation_at_end(trainer: DistillationTrainer) -> dict[str, float]:
    """The held-out metrics that Trainer took after the last step, if it did."""
    for row in reversed(trainer.state.log_history):
        if "eval_kl" in row and row["step"] == trainer.state.global_step:
            return {name: value for name, value in row.items() if name.startswith("eval_")}
    return {}


def warm_up(recipe: Recipe, trainer: DistillationTrainer) -> None:
    """Supervised steps: the same trainer, on the data's answers, with a teacher that is certain of them."""
    tokenizer = trainer.tokenizer
    eos = tokenizer.eos_token_id
    eos = stop_token_ids(trainer.student.model, tokenizer)[0] if eos is None else eos
    rows: Any = trainer.train_dataset
    if isinstance(rows, CachedRows):
        rows = read_prompts(recipe, "train", tokenizer, trainer.args.seed)
    answers: Any = [
        {
            "prompt_ids": row["prompt_ids"],
            "answer": row["answer"],
            "completion_ids": [*tokenizer(row["answer"], add_special_tokens=False).input_ids, eos],
        }
        for row in rows
        if row["answer"] is not None
    ]
    args = training_arguments(
        recipe,
        max_steps=recipe.warmup.steps,
        learning_rate=recipe.warmup.learning_rate,
        per_device_train_batch_size=recipe.warmup.batch_size,
        gradient_accumulation_steps=1,
        save_strategy="no",
        eval_strategy="no",
        eval_on_start=False,
        load_best_model_at_end=False,
        push_to_hub=False,
        report_to="none",  # its steps would come twice; metrics.jsonl has them all
    )
    warm = DistillationTrainer(
        trainer.student.model,
        args,
        teacher=one_hot_teacher,
        rollouts=trainer.rollouts,
        train_dataset=answers,
        processing_class=tokenizer,
        transform=trainer.student.transform,
        lmbda=0.0,
        max_skipped_steps=recipe.max_skipped_steps,
        phase="warm-up",
    )
    warm.remove_callback(warm.watch)  # a loss of 0 is no trouble here
    warm.train()
    warm.accelerator.unwrap_model(warm.model_wrapped, keep_fp32_wrapper=False)


def first_measurement(metrics: Path) -> dict[str, float]:
    """The held-out metrics that an earlier, interrupted run began with; empty if there are none."""
    with contextlib.suppress(OSError), open(metrics, encoding="utf-8") as lines:
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):  # a last line that was cut short
                if "eval_kl" in (row := json.loads(line)):
                    return {name: value for name, value in row.items() if name.startswith("eval_")}
    return {}
