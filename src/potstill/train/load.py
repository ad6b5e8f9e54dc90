"""Everything that a recipe names, loaded and checked, the small things first: from a Recipe to a trainer."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

from potstill.rollouts.dataset import PromptRow, fit_prompts, read_rows, tokenize
from potstill.rollouts.transformers import TransformersRollouts
from potstill.teachers.local import LocalTeacher, OwnBase, check_same_tokenizer
from potstill.train.families import logit_transform
from potstill.train.losses import loss_function
from potstill.train.models import build_student, kept_layers, load_model, located
from potstill.train.progress import show
from potstill.train.recipe import PACKAGED, Recipe, Source, Student, resolved_training
from potstill.train.strict import RecipeError
from potstill.train.trainer import DistillationTrainer


def training_arguments(recipe: Recipe, **changes: Any) -> TrainingArguments:
    """The recipe's TrainingArguments, with our defaults.

    Raises:
        RecipeError: transformers refuses them.
    """
    with naming("training"):
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
    with naming(f"teacher.model={teacher_name!r}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**located(teacher_name))
        config = AutoConfig.from_pretrained(**located(teacher_name))
        logit_transform(config)
    if loss.estimator is None and loss.top_k > config.vocab_size:
        raise RecipeError(f"loss.top_k is {loss.top_k}; expected 1 to {config.vocab_size}, the teacher's vocabulary")
    tokenizer = _checked_student(student_spec, tokenizer, config)
    train = read_prompts(recipe, "train", tokenizer, args.seed)
    heldout = None if data.heldout is None else read_prompts(recipe, "heldout", tokenizer, args.seed)
    if recipe.warmup.steps and not any(row["answer"] is not None for row in train):
        raise RecipeError("warmup.steps: no row of data.train has an `answer` to learn from; add some or set it to 0")
    own_base = student_spec.lora is not None and student_spec.model == teacher_name
    teacher_model: PreTrainedModel | None = None
    if not own_base:
        with naming(f"teacher.model={teacher_name!r}"):
            teacher_model = load_model(teacher_name, recipe.teacher.dtype)
            teacher_model.to(args.device)  # type: ignore[arg-type]
    with naming("student"):
        student = build_student(student_spec, teacher_model)
        teacher_model = student if teacher_model is None else teacher_model
        transform, teacher_transform = _transforms(student, teacher_model, tokenizer)
    for split, rows in (("train", train), ("heldout", heldout or [])):
        for name, model in (("teacher", teacher_model), ("student", student)):
            _check_lengths(recipe, split, rows, name, model.config)
    with naming("loss"):
        top_k = loss.top_k if loss.estimator is None else None
        kind = OwnBase if own_base else LocalTeacher
        teacher = kind(teacher_model, teacher_transform, top_k, loss.temperature)
    for name, model in (("teacher", teacher_model), ("student", student)):
        show(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters")
    sampling = {name: value for name, value in vars(recipe.rollout).items() if name != "lmbda"}
    with naming("training"):
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
    with naming("student"):
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


def read_prompts(recipe: Recipe, split: str, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[PromptRow]:
    """The rows of data.train or data.heldout as token ids.

    Raises:
        RecipeError: they cannot be read, or are too long.
    """
    data, limit = recipe.data, getattr(recipe.data, f"{split}_rows")
    source = getattr(data, split)
    source = source if isinstance(source, Source) else Source(source)
    with naming(f"data.{split}"):
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
def naming(key: str) -> Iterator[None]:
    """What goes wrong within concerns this key of the recipe."""
    try:
        yield
    except RecipeError:
        raise
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, SafetensorError) as error:
        raise RecipeError(f"{key}: {error}") from error
