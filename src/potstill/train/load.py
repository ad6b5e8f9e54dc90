"""Everything that a recipe names, loaded and checked, the small things first: from a Recipe to a trainer."""

import contextlib
from collections.abc import Iterator, Sequence
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

from potstill import LogitTransform
from potstill.rollouts.dataset import PromptRow, fit_prompts, read_rows, tokenize, tokenize_prompt
from potstill.rollouts.transformers import TransformersRollouts
from potstill.teachers.local import LocalTeacher, MovingAverage, OwnBase, check_same_tokenizer
from potstill.teachers.routing import RoutedTeacher
from potstill.train.families import logit_transform
from potstill.train.losses import loss_function
from potstill.train.models import build_student, kept_layers, load_model, located
from potstill.train.progress import show
from potstill.train.recipe import PACKAGED, Recipe, Source, Student, Teacher, resolved_training
from potstill.train.replay import CachedRows, cached_rows_of, open_cache
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
    loss, data, spec = recipe.loss, recipe.data, recipe.teacher
    for note in recipe.notes:
        show(f"note: {note}")
    tokenizer, config = _tokenizer_and_config(recipe)
    if loss.estimator is None and loss.top_k > config.vocab_size:
        raise RecipeError(f"loss.top_k is {loss.top_k}; expected 1 to {config.vocab_size}, the teacher's vocabulary")
    tokenizer = _checked_student(recipe.student, tokenizer, config)
    cache = None if spec.cache is None else open_cache(recipe, tokenizer)
    train = read_prompts(recipe, "train", tokenizer, args.seed) if cache is None else cache
    heldout = None if data.heldout is None else read_prompts(recipe, "heldout", tokenizer, args.seed)
    if cache is None and recipe.warmup.steps and not any(row["answer"] is not None for row in train):
        raise RecipeError("warmup.steps: no row of data.train has an `answer` to learn from; add some or set it to 0")
    models = _teacher_models(recipe, args)
    with naming("student"):
        student = build_student(recipe.student, next(iter(models.values()), None))
        widths = [student.get_output_embeddings().weight.shape[0], *([] if cache is None else [cache.info.vocab_size])]
        transform, *transforms = _transforms([student, *models.values()], widths, tokenizer)
    for split, rows in (("train", train), ("heldout", heldout or [])):
        for name, model in (*(("teacher", model) for model in models.values()), ("student", student)):
            _check_lengths(recipe, split, rows, name, model.config)
    with naming("loss"):
        options: dict[str, Any] = {
            "top_k": loss.top_k if loss.estimator is None else None,
            "temperature": loss.temperature,
            "targets": loss.targets,
        }
        local = {
            name: LocalTeacher(model, own, **options)
            for (name, model), own in zip(models.items(), transforms, strict=True)
        }
        teacher: Any = next(iter(local.values()), None)
        if recipe.teachers:
            teacher = RoutedTeacher(local)
        elif spec.ema is not None:
            teacher = MovingAverage(student, transform, **options, rate=spec.ema)
        elif own_base(recipe):
            teacher = OwnBase(student, transform, **options)
    for name, model in (*((f"teacher {name}".strip(), model) for name, model in models.items()), ("student", student)):
        show(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters")
    sampling = {name: value for name, value in vars(recipe.rollout).items() if name != "lmbda"}
    with naming("training"):
        return DistillationTrainer(
            student,
            args,
            teacher=teacher if cache is None else cached_rows_of,
            eval_teacher=teacher,
            rollouts=TransformersRollouts(tokenizer, **sampling, vocab_size=transform.vocab_size),
            train_dataset=train,
            eval_dataset=heldout,
            processing_class=tokenizer,
            loss=loss_function(loss),
            transform=transform,
            answer_regex=data.answer_regex,
            lmbda=recipe.rollout.lmbda if cache is None else 0.0,
            max_skipped_steps=recipe.max_skipped_steps,
        )


def own_base(recipe: Recipe) -> bool:
    """Whether the teacher is the student with its adapter switched off."""
    return recipe.student.lora is not None and recipe.student.model == recipe.teacher.model and not recipe.teachers


def teachers_of(recipe: Recipe) -> dict[str, Teacher]:
    """The teachers by the name that rows call them; a single one has none."""
    return recipe.teachers or {"": recipe.teacher}


def _tokenizer_and_config(recipe: Recipe) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
    """Those of the first teacher, which all others have to share."""
    found: list[tuple[PreTrainedTokenizerBase, PreTrainedConfig]] = []
    for name, spec in teachers_of(recipe).items():
        with naming(f"teachers.{name}.model={spec.model!r}" if name else f"teacher.model={spec.model!r}"):
            tokenizer = AutoTokenizer.from_pretrained(**located(spec.model))
            config = AutoConfig.from_pretrained(**located(spec.model))
            logit_transform(config)
            if found:
                check_same_tokenizer(found[0][0], tokenizer)
            found.append((tokenizer, config))
    return found[0]


def _teacher_models(recipe: Recipe, args: TrainingArguments) -> dict[str, PreTrainedModel]:
    """The teachers' weights by name: none where the student, its average or a cache takes their place."""
    spec, student = recipe.teacher, recipe.student
    if own_base(recipe):
        return {}
    copied = student.model is None  # pruned, or made to the teacher's measure
    measured = spec.ema is None and recipe.data.heldout is not None
    if (spec.cache or spec.ema is not None) and not (copied or measured):
        return {}
    models = {}
    for name, spec in teachers_of(recipe).items():
        with naming(f"teachers.{name}.model={spec.model!r}" if name else f"teacher.model={spec.model!r}"):
            models[name] = load_model(spec.model, spec.dtype)
            models[name].to(args.device)  # type: ignore[arg-type]
    return models


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
            columns = {spec.prompt_column for spec in teachers_of(recipe).values() if spec.prompt_column}
            rows = read_rows(path if path.exists() else source.path, source.name, source.split, limit, columns)
        prompts = tokenize(rows, tokenizer)
        for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True), start=1):
            try:
                prompt.update(_of_its_teacher(recipe, row, tokenizer))
            except ValueError as error:
                raise ValueError(f"row {number}: {error}") from None
        prompts, long = fit_prompts(prompts, data.max_prompt_tokens, data.long_prompts)
    dealt = "cut on the left" if data.long_prompts == "truncate" else "left out"
    note = f" ({long:,} {dealt}: more than {data.max_prompt_tokens} tokens)" if long else ""
    show(f"{split} prompts: {len(prompts):,}{note}")
    return prompts


def _of_its_teacher(recipe: Recipe, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PromptRow:
    """What a row's teacher adds to it."""
    name = row.get("teacher_id") if recipe.teachers else ""
    if name not in teachers_of(recipe):
        raise ValueError(f"teacher_id is {name!r}; expected one of teachers: {', '.join(recipe.teachers)}")
    spec = teachers_of(recipe)[name]
    found: Any = {}
    if spec.weight != 1:
        found["weight"] = spec.weight
    if spec.prompt_column is not None:
        if row.get(spec.prompt_column) is None:
            raise ValueError(f"no column {spec.prompt_column!r}, which teacher.prompt_column names")
        found["teacher_prompt_ids"] = tokenize_prompt(row[spec.prompt_column], tokenizer)
    return found


def _check_lengths(recipe: Recipe, split: str, rows: Sequence[PromptRow], name: str, config: PreTrainedConfig) -> None:
    """Refuse rows that, once completed, are longer than what a model has positions for."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or isinstance(rows, CachedRows):
        return
    mixed = split == "train" and recipe.rollout.lmbda < 1
    for number, row in enumerate(rows, start=1):
        own = len(row["completion_ids"] or []) if mixed else 0
        prompt_ids = row.get("teacher_prompt_ids", row["prompt_ids"]) if name == "teacher" else row["prompt_ids"]
        length = len(prompt_ids) + max(recipe.rollout.max_new_tokens, own)
        if length > positions:
            raise RecipeError(
                f"data.{split}: prompt {number} has {len(prompt_ids)} tokens, up to {length} with its "
                f"completion, but the {name} has positions for {positions}; lower data.max_prompt_tokens or "
                "rollout.max_new_tokens" + (", or shorten the data's completions" if mixed else "")
            )


def _transforms(
    models: Sequence[PreTrainedModel], widths: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> list[LogitTransform]:
    """What each model does to its logits; `widths` are those of further vocabularies in play."""
    transforms = [logit_transform(model.config) for model in models]
    heads = {model.get_output_embeddings().weight.shape[0] for model in models} | set(widths)
    if len(heads) == 1:
        return transforms
    # Heads of one tokenizer that were padded to different widths: only its own tokens are in all softmaxes.
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    if vocab_size > min(heads):
        raise ValueError(f"the tokenizer has {vocab_size} tokens, the heads {' and '.join(map(str, sorted(heads)))}")
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
