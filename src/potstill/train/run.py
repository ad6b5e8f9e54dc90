"""A recipe carried out: load, warm up, measure, distil, measure again, save."""

import contextlib
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)

from potstill.rollouts.dataset import PromptRow, fit_prompts, read_rows, tokenize
from potstill.rollouts.transformers import TransformersRollouts, stop_token_ids
from potstill.teachers.local import LocalTeacher, OwnBase, check_same_tokenizer
from potstill.teachers.one_hot import one_hot_teacher
from potstill.train.card import comparison, model_card
from potstill.train.checkpoints import checkpoints_in, newest_checkpoint
from potstill.train.families import logit_transform
from potstill.train.losses import loss_function
from potstill.train.models import build_student, kept_layers, load_model, located
from potstill.train.progress import METRICS_FILE, show
from potstill.train.recipe import PACKAGED, Recipe, Source, Student, resolved_training
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
    with _naming("training.seed"):
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


def training_arguments(recipe: Recipe, **changes: Any) -> TrainingArguments:
    """The recipe's TrainingArguments, with our defaults.

    Raises:
        RecipeError: transformers refuses them.
    """
    with _naming("training"):
        args = TrainingArguments(**{**resolved_training(recipe), **changes})
    if args.metric_for_best_model in ("loss", "eval_loss"):  # what TrainingArguments puts for nothing
        raise RecipeError(
            "training.metric_for_best_model is loss; expected a figure of the held-out prompts, such as kl with "
            "training.greater_is_better: false, or exact_match with true"
        )
    return args


def build_trainer(recipe: Recipe, args: TrainingArguments) -> DistillationTrainer:
    """Load everything that the recipe names, the small things first.

    Raises:
        RecipeError: naming the key whose value cannot be loaded or does not fit.
    """
    student_spec, data = recipe.student, recipe.data
    loss, teacher_name = recipe.loss, recipe.teacher.model
    for note in recipe.notes:
        show(f"note: {note}")
    with _naming(f"teacher.model={teacher_name!r}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**located(teacher_name))
        config = AutoConfig.from_pretrained(**located(teacher_name))
        logit_transform(config)
    if loss.estimator is None and loss.top_k > config.vocab_size:
        raise RecipeError(f"loss.top_k is {loss.top_k}; expected 1 to {config.vocab_size}, the teacher's vocabulary")
    tokenizer = _checked_student(student_spec, tokenizer, config)
    train = _prompts(recipe, "train", tokenizer, args.seed)
    heldout = None if data.heldout is None else _prompts(recipe, "heldout", tokenizer, args.seed)
    if recipe.warmup.steps and not any(row["answer"] is not None for row in train):
        raise RecipeError("warmup.steps: no row of data.train has an `answer` to learn from; add some or set it to 0")
    own_base = student_spec.lora is not None and student_spec.model == teacher_name
    teacher_model: PreTrainedModel | None = None
    if not own_base:
        with _naming(f"teacher.model={teacher_name!r}"):
            teacher_model = load_model(teacher_name, recipe.teacher.dtype)
            teacher_model.to(args.device)  # type: ignore[arg-type]
    with _naming("student"):
        student = build_student(student_spec, teacher_model)
        teacher_model = student if teacher_model is None else teacher_model
        transform, teacher_transform = _transforms(student, teacher_model, tokenizer)
    for split, rows in (("train", train), ("heldout", heldout or [])):
        for name, model in (("teacher", teacher_model), ("student", student)):
            _check_lengths(recipe, split, rows, name, model.config)
    with _naming("loss"):
        top_k = loss.top_k if loss.estimator is None else None
        kind = OwnBase if own_base else LocalTeacher
        teacher = kind(teacher_model, teacher_transform, top_k, loss.temperature)
    for name, model in (("teacher", teacher_model), ("student", student)):
        show(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters")
    sampling = {name: value for name, value in vars(recipe.rollout).items() if name != "lmbda"}
    with _naming("training"):
        return DistillationTrainer(
            student,
            args,
            teacher=teacher,
            rollouts=TransformersRollouts(tokenizer, **sampling, vocab_size=transform.vocab_size),
            train_dataset=train,
            eval_dataset=heldout,
            processing_class=tokenizer,
            loss=loss_function(loss),
            transform=transform,
            answer_regex=data.answer_regex,
            lmbda=recipe.rollout.lmbda,
            max_skipped_steps=recipe.max_skipped_steps,
        )


def _checked_student(
    spec: Student, tokenizer: PreTrainedTokenizerBase, teacher_config: PreTrainedConfig
) -> PreTrainedTokenizerBase:
    """Refuse a student that cannot be, before its weights or the teacher's are loaded; returns its tokenizer."""
    with _naming("student"):
        if spec.prune is not None:
            kept_layers(spec.prune.layers, teacher_config)
        elif spec.config is not None:
            logit_transform(AutoConfig.for_model(**spec.config))
        elif spec.model is not None:
            logit_transform(AutoConfig.from_pretrained(**located(spec.model)))
            own_tokenizer = AutoTokenizer.from_pretrained(**located(spec.model))
            check_same_tokenizer(own_tokenizer, tokenizer)
            return own_tokenizer
    return tokenizer


def warm_up(recipe: Recipe, trainer: DistillationTrainer) -> None:
    """Supervised steps: the same trainer, on the data's answers, with a teacher that is certain of them."""
    tokenizer = trainer.tokenizer
    eos = tokenizer.eos_token_id
    eos = stop_token_ids(trainer.student.model, tokenizer)[0] if eos is None else eos
    rows: Any = trainer.train_dataset
    answers: Any = [
        {**row, "completion_ids": [*tokenizer(row["answer"], add_special_tokens=False).input_ids, eos]}
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


def _prompts(recipe: Recipe, split: str, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[PromptRow]:
    data, limit = recipe.data, getattr(recipe.data, f"{split}_rows")
    source = getattr(data, split)
    source = source if isinstance(source, Source) else Source(source)
    with _naming(f"data.{split}"):
        if source.path == PACKAGED:
            from potstill.arithmetic.task import problems

            default = 20_000 if split == "train" else 512
            rows: list[dict[str, Any]] = problems(split, limit or default, seed)  # type: ignore
        else:
            path = recipe.folder / source.path
            rows = read_rows(path if path.exists() else source.path, source.name, source.split, limit)
        prompts, long = fit_prompts(tokenize(rows, tokenizer), data.max_prompt_tokens, data.long_prompts)
    dealt = "cut on the left" if data.long_prompts == "truncate" else "left out"
    note = f" ({long:,} {dealt}: more than {data.max_prompt_tokens} tokens)" if long else ""
    show(f"{split} prompts: {len(prompts):,}{note}")
    return prompts


def _check_lengths(recipe: Recipe, split: str, rows: list[PromptRow], name: str, config: PreTrainedConfig) -> None:
    """Refuse rows that, once completed, are longer than what a model has positions for."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        return
    mixed = split == "train" and recipe.rollout.lmbda < 1
    for number, row in enumerate(rows, start=1):
        own = len(row["completion_ids"] or []) if mixed else 0
        length = len(row["prompt_ids"]) + max(recipe.rollout.max_new_tokens, own)
        if length > positions:
            raise RecipeError(
                f"data.{split}: prompt {number} has {len(row['prompt_ids'])} tokens, up to {length} with its "
                f"completion, but the {name} has positions for {positions}; lower data.max_prompt_tokens or "
                "rollout.max_new_tokens" + (", or shorten the data's completions" if mixed else "")
            )


def _transforms(student: PreTrainedModel, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
    transforms = [logit_transform(model.config) for model in (student, teacher)]
    widths = [model.get_output_embeddings().weight.shape[0] for model in (student, teacher)]
    if widths[0] == widths[1]:
        return transforms
    # Heads of one tokenizer that were padded to different widths: only its own tokens are in both softmaxes.
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    if vocab_size > min(widths):
        raise ValueError(
            f"the tokenizer has {vocab_size} tokens, student and teacher heads {widths[0]} and {widths[1]}"
        )
    return [replace(transform, vocab_size=vocab_size) for transform in transforms]


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    """What goes wrong within concerns this key of the recipe."""
    try:
        yield
    except RecipeError:
        raise
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, SafetensorError) as error:
        raise RecipeError(f"{key}: {error}") from error
