"""Recipes: a whole run as one YAML file, checked to the last key before any model is loaded.

One dataclass per section; `training` holds any field of transformers' TrainingArguments.
"""

import os
import re
import typing
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import EnumMeta
from pathlib import Path
from typing import Any, Literal

import torch

from potstill import DIVERGENCES, TAILS, SampledTargets, TeacherTopK
from potstill.core.sampled import ESTIMATORS
from potstill.train.strict import RecipeError, build, check_known, expect, nearest, parse_yaml, to_yaml
from potstill.train.verl_names import loss_section

PACKAGED = "potstill:arithmetic"
GGUF = ".gguf"
SELF = "self"
SHORT_FOR_MODEL = ("student", "teacher")  # sections that may be a text, which is then their `model`
DType = Literal["auto", "float32", "bfloat16", "float16"]

TRAINING_DEFAULTS: dict[str, Any] = {
    "logging_steps": 10,
    "logging_first_step": True,
    "logging_nan_inf_filter": False,  # it waits for the device at every micro-batch
    "save_strategy": "no",  # the model is saved at the end
    "dataloader_pin_memory": False,  # a batch is lists of token ids until the student has completed it
    "disable_tqdm": True,  # there is a progress line of our own
    "use_cache": True,  # of the saved configuration; a training forward never caches
}
REFUSED_TRAINING = {  # what would run another loss or another forward
    "use_liger_kernel": "the student's head computes the distillation loss itself",
    "label_smoothing_factor": "there are no labels to smooth",
    "torch_compile": "the loss inside the head is a new function at every step, compiled anew at every step",
    "deepspeed": "start several processes with torchrun (DDP) instead",
    "fsdp": "start several processes with torchrun (DDP) instead",
}
LEAST_TRAINING = {  # TrainingArguments takes any number, and a run would fail once its models are loaded
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"), 1),
    **dict.fromkeys(("learning_rate", "weight_decay", "max_grad_norm", "dataloader_num_workers", "seed"), 0),
}
PROBE_TOP_K = 8  # tokens of the row that the loss is tried on, whatever its top_k


@dataclass(frozen=True)
class Prune:
    """A copy of the teacher with fewer layers.

    Attributes:
        layers: how many to keep, evenly spaced from the first to the last; or their indices, counted from 0.
    """

    layers: int | list[int]


@dataclass(frozen=True)
class Lora:
    """A low-rank adapter (PEFT) on the student, which alone is trained and saved.

    Attributes:
        r: its rank.
        alpha: its terms are scaled by alpha / r.
        target_modules: names of the layers, or a regular expression; "all-linear" is all but the head.
    """

    r: int = 16
    alpha: int = 32
    target_modules: str | list[str] = "all-linear"


@dataclass(frozen=True)
class Student:
    """The model to train: exactly one of `model`, `prune` and `config`.

    Attributes:
        model: hub id or local folder, or a GGUF file in either. `student: X` is short for `student: {model: X}`.
        lora: train an adapter on `model` instead of its weights.
        prune: a depth-pruned copy of the teacher.
        config: a fresh model, as `model_type` and fields of its transformers configuration; the vocabulary size
            and the special tokens come from the teacher.
        dtype: of the weights. float32 together with `training.bf16` is mixed precision.
    """

    model: str | None = None
    lora: Lora | None = None
    prune: Prune | None = None
    config: dict[str, Any] | None = None
    dtype: DType = "float32"


@dataclass(frozen=True)
class Teacher:
    """What to imitate.

    Attributes:
        model: hub id, local folder, GGUF file in either, or `potstill:arithmetic`. `teacher: X` is short for
            `teacher: {model: X}`. With `student.lora` the default, also called `self`, is the student's own base:
            one model in memory, its adapter switched off while it scores, in the student's dtype. With `cache` or
            `ema` it only names tokenizer and configuration, and by default is `student.model`.
        dtype: of the weights; "auto" is the one they were saved in.
        cache: a folder that `potstill cache` wrote: samples and the teacher's rows come from there, and no teacher is
            loaded but to measure held-out prompts.
        ema: the teacher is a moving average of the student: after each step, ema * average + (1 - ema) * student.
        prompt_column: a column of the data, text or messages, that the teacher reads in place of the prompt: it may
            know more than the student, such as the answer.
        weight: of the loss of its tokens.
    """

    model: str
    dtype: DType = "auto"
    cache: str | None = None
    ema: float | None = None
    prompt_column: str | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Source:
    """A Hugging Face dataset, or a file.

    Attributes:
        path: id on the hub, or a folder or file, relative to the recipe.
        name: of the configuration.
        split: may be left out where there is only one.
    """

    path: str
    name: str | None = None
    split: str | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, (self.path, self.name, self.split)))


@dataclass(frozen=True)
class Data:
    """Prompts: rows with a `prompt` or chat `messages`, and optionally a `completion` and an `answer`.

    Attributes:
        train: JSONL or parquet file, or folder of a dataset, relative to the recipe; id of a dataset on the hub, as
            `{path: ..., name: ..., split: ...}` where it needs them; or `potstill:arithmetic`. With `teacher.cache`
            it is read for the warm-up alone.
        heldout: the same, for prompts that are never trained on and measured before and after. None: no table.
        train_rows: use the first so many rows. None: the whole file, or 20,000 generated problems.
        heldout_rows: use the first so many rows. None: the whole file, or 512 generated problems.
        answer_regex: group 1 of its last match is the answer. None: the whole text, stripped.
        max_prompt_tokens: longer prompts are dealt with as long_prompts says, and counted.
        long_prompts: "drop" them, since a shortened one is another question; "truncate" them on the left; or "refuse".
    """

    train: str | Source | None = None
    heldout: str | Source | None = None
    train_rows: int | None = None
    heldout_rows: int | None = None
    answer_regex: str | None = None
    max_prompt_tokens: int = 1024
    long_prompts: Literal["drop", "truncate", "refuse"] = "drop"


@dataclass(frozen=True)
class Warmup:
    """Supervised steps on the answers of `data.train`, before the distillation.

    Attributes:
        steps: optimiser steps; 0 means no warm-up.
        learning_rate: its peak.
        batch_size: rows per step and process.
    """

    steps: int = 0
    learning_rate: float = 1e-4
    batch_size: int = 32


@dataclass(frozen=True)
class Rollout:
    """How the student samples. Nothing else shapes the samples, whatever its generation_config says.

    Attributes:
        max_new_tokens: a completion that reaches it ends without EOS.
        temperature: of the samples.
        top_p: nucleus sampling; 1.0 samples from every token.
        lmbda: the probability that a row is completed by the student; the others keep the data's own completion.
        batch_size: prompts that are completed at a time. None: all of an optimiser step.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    lmbda: float = 1.0
    batch_size: int | None = None


@dataclass(frozen=True)
class Loss:
    """What the student is held to: the teacher's `top_k` tokens at each position, or with `estimator` the sampled one.

    A `distillation_loss` block of verl in its place is translated (see potstill.train.verl_names).

    Attributes:
        divergence: from the teacher's tokens; see potstill.DIVERGENCES.
        tail: what becomes of all other tokens; see potstill.TAILS.
        top_k: tokens of a teacher's row.
        targets: which tokens those are: the most probable, or weighted draws whose mean is the teacher's whole
            distribution ("threshold" has the least variance, see potstill.SampledTargets), for forward_kl alone.
        alpha: of the divergence, where it has one.
        beta: of the divergence, where it has one.
        estimator: of the reverse KL, from the sampled token alone; see potstill.sampled_token_loss.
        policy_gradient: use the estimator as a reward instead of differentiating it.
        clip_ratio_low: with policy_gradient, see potstill.sampled_token_loss.
        clip_ratio_high: the same.
        temperature: of both models' distributions in the loss.
        log_prob_min_clamp: both log-probabilities are at least this; forward_kl with tail drop only.
        loss_min_clamp: a token's loss is at least this; forward_kl with tail drop only.
        loss_max_clamp: a token's loss stays within plus and minus this.
        chunk_size: rows that meet the whole vocabulary at a time. None: from a budget of bytes.
    """

    divergence: str = "forward_kl"
    tail: str = "bucket"
    top_k: int = 64
    targets: Literal["top_k", "threshold", "random"] = "top_k"
    alpha: float | None = None
    beta: float | None = None
    estimator: str | None = None
    policy_gradient: bool = False
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    temperature: float = 1.0
    log_prob_min_clamp: float | None = None
    loss_min_clamp: float | None = None
    loss_max_clamp: float | None = None
    chunk_size: int | None = None


@dataclass(frozen=True)
class Cache:
    """What `potstill cache` writes.

    Attributes:
        folder: of the cache. None: `caches/` and the recipe's name.
        samples_per_prompt: completions of each prompt.
        bits: 16 or 8, of each log-probability.
        rows_per_shard: tokens in a file, about; what a kill may cost.
    """

    folder: str | None = None
    samples_per_prompt: int = 1
    bits: int = 16
    rows_per_shard: int = 65536


@dataclass(frozen=True)
class Recipe:
    """A checked recipe.

    Attributes:
        teachers: several teachers in place of `teacher`, by the name that rows have in their column `teacher_id`. The
            first one gives tokenizer and configuration.
        max_skipped_steps: training ends when so many steps in a row were skipped, their loss or gradient not finite.
        name: of the file, and by default of the folder under `runs/`.
        folder: where relative data files are looked for.
        source: the mapping that it was made from, overrides included.
        notes: what is to be said about it, once.
    """

    student: Student
    teacher: Teacher
    data: Data
    teachers: dict[str, Teacher] = field(default_factory=dict)
    warmup: Warmup = Warmup()
    rollout: Rollout = Rollout()
    loss: Loss = Loss()
    cache: Cache = Cache()
    training: dict[str, Any] = field(default_factory=dict)
    max_skipped_steps: int = 3
    name: str = "run"
    folder: Path = Path()
    source: dict[str, Any] = field(default_factory=dict, compare=False)
    notes: Sequence[str] = field(default=(), compare=False)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe; loads no model.

    Args:
        path: YAML file, or `potstill:arithmetic` for the packaged one.
        overrides: `section.key=value` with the value in YAML, such as `training.max_steps=5`.

    Raises:
        RecipeError: the file cannot be read, or a key, type or value is wrong; names the file, the key and,
            for an unknown key, the nearest known one.
    """
    packaged = path == PACKAGED
    path = Path(__file__).parent.parent / "arithmetic" / "recipe.yaml" if packaged else Path(path)
    try:
        source = parse_yaml(path.read_text(encoding="utf-8"))
        expect(source, dict, "the recipe")
        for override in overrides:
            _apply_override(source, override)
        name = "arithmetic" if packaged else path.stem
        sections, notes = _in_our_words(source)
        recipe = build(Recipe, sections, name=name, folder=path.parent, source=source, notes=notes)
        _check(recipe)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8"
        raise RecipeError(f"{path}: cannot read the recipe ({reason}); give a YAML file or {PACKAGED}") from None
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    return recipe


def resolved_training(recipe: Recipe) -> dict[str, Any]:
    """The fields of TrainingArguments that a run sets: the recipe's, and our defaults for others."""
    given = {key: value for key, value in recipe.training.items() if value is not None}
    return {"output_dir": f"runs/{recipe.name}", **TRAINING_DEFAULTS, **given}


def dump(recipe: Recipe) -> str:
    """The recipe as YAML with every default filled in, which loads again to the same run.

    Data files stay relative to the recipe's folder; what transformers' TrainingArguments has as its own default is
    left to it.
    """
    sections = asdict(recipe) | {"training": resolved_training(recipe)}
    for name in ("name", "folder", "source", "notes"):  # loading sets them
        del sections[name]
    del sections["teacher" if recipe.teachers else "teachers"]
    comments = [f"data files are looked for in {recipe.folder.resolve()}", *recipe.notes]
    return "".join(f"# {comment}\n" for comment in comments) + to_yaml(sections)


def _in_our_words(source: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The sections with short forms written out and verl's names translated, and what is to be said about it."""
    sections = dict(source)
    for section in SHORT_FOR_MODEL:
        if isinstance(sections.get(section), str):
            sections[section] = {"model": sections[section]}
    _name_teachers(sections)
    if "distillation_loss" not in sections:
        return sections, []
    if "loss" in sections:
        raise RecipeError("loss and distillation_loss are one section under two names; leave one out")
    block = sections.pop("distillation_loss") or {}
    expect(block, dict, "distillation_loss")
    sections["loss"], notes = loss_section(block)
    return sections, notes


def _name_teachers(sections: dict[str, Any]) -> None:
    """Let `teacher` be the first of `teachers`, and its model the student's where it needs none of its own."""
    if teachers := sections.get("teachers"):
        if sections.get("teacher") is not None:
            raise RecipeError("teacher and teachers are one or several of the same; leave one out")
        expect(teachers, dict, "teachers")
        teachers = {name: {"model": spec} if isinstance(spec, str) else spec for name, spec in teachers.items()}
        sections.pop("teacher", None)  # so that a mistake is found where it was made
        sections |= {"teachers": teachers, "teacher": next(iter(teachers.values()))}
    student, teacher = sections.get("student"), sections.get("teacher") or {}
    if not (isinstance(student, dict) and isinstance(teacher, dict)):
        return
    own = isinstance(student.get("lora"), dict) or teacher.get("ema") or teacher.get("cache")
    if own and teacher.get("model") in (None, SELF):
        sections["teacher"] = {**teacher, "model": student.get("model")}


def _apply_override(source: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    *sections, last = key.split(".")
    if not equals:
        raise RecipeError(f"{override!r} is no override; write section.key=value, such as training.max_steps=5")
    target = source
    for section in sections:
        if target.get(section) is None:
            target[section] = {}
        elif target is source and section in SHORT_FOR_MODEL and isinstance(target[section], str):
            target[section] = {"model": target[section]}
        target = target[section]
        expect(target, dict, section)
    target[last] = parse_yaml(value)


def _check(recipe: Recipe) -> None:
    """Refuse the values that types alone do not exclude."""
    student, data, warmup, rollout = recipe.student, recipe.data, recipe.warmup, recipe.rollout
    if recipe.teacher.model == SELF:
        raise RecipeError(
            "teacher: self is the base of a student with an adapter; add student.lora, or name a teacher"
        )
    if student.lora is not None and (student.model is None or student.model.endswith(GGUF)):
        got = student.model or "prune or config"
        raise RecipeError(f"student.lora needs student.model, a hub id or folder to find its base again; got {got}")
    for where, teacher in recipe.teachers.items():
        for key in ("cache", "ema"):
            if getattr(teacher, key) is not None:
                raise RecipeError(f"teachers.{where}.{key}: only a single `teacher` can have it; leave it out")
    if recipe.teacher.cache and recipe.teacher.ema:
        raise RecipeError("teacher.cache and teacher.ema exclude each other: stored rows do not follow the student")
    if recipe.teacher.ema is not None and student.lora is not None:
        raise RecipeError("teacher.ema needs a student without adapter; leave out student.lora, or teacher.ema")
    if data.train is None and (recipe.teacher.cache is None or warmup.steps):
        raise RecipeError("data.train is missing" + (": warmup.steps learns from its answers" if warmup.steps else ""))
    given = [key for key in ("model", "prune", "config") if getattr(student, key) is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise RecipeError(f"student needs exactly one of model, prune and config; got {got}")
    lora = student.lora or Lora()
    for key, value, least in (
        ("data.train_rows", data.train_rows, 1),
        ("data.heldout_rows", data.heldout_rows, 1),
        ("data.max_prompt_tokens", data.max_prompt_tokens, 1),
        ("student.lora.r", lora.r, 1),
        ("student.lora.alpha", lora.alpha, 1),
        ("warmup.steps", warmup.steps, 0),
        ("warmup.batch_size", warmup.batch_size, 1),
        ("rollout.max_new_tokens", rollout.max_new_tokens, 1),
        ("rollout.batch_size", rollout.batch_size, 1),
        ("max_skipped_steps", recipe.max_skipped_steps, 1),
        ("loss.top_k", recipe.loss.top_k, 1),
        ("loss.chunk_size", recipe.loss.chunk_size, 1),
        ("cache.samples_per_prompt", recipe.cache.samples_per_prompt, 1),
        ("cache.rows_per_shard", recipe.cache.rows_per_shard, 1),
    ):
        if value is not None and value < least:
            raise RecipeError(f"{key} is {value}; expected {least} or more")
    for key, number in (
        ("warmup.learning_rate", warmup.learning_rate),
        ("rollout.temperature", rollout.temperature),
        ("rollout.top_p", rollout.top_p),
        ("loss.temperature", recipe.loss.temperature),
        *((f"teachers.{name}.weight", teacher.weight) for name, teacher in recipe.teachers.items()),
        ("teacher.weight", recipe.teacher.weight),
    ):
        if not 0 < number < float("inf"):
            raise RecipeError(f"{key} is {number:g}; expected a number above 0")
    if recipe.teacher.ema is not None and not 0 <= recipe.teacher.ema < 1:
        raise RecipeError(f"teacher.ema is {recipe.teacher.ema:g}; expected 0 to below 1, such as 0.99")
    if recipe.cache.bits not in (8, 16):
        raise RecipeError(f"cache.bits is {recipe.cache.bits}; expected 16 or 8")
    if not 0 <= rollout.lmbda <= 1:
        raise RecipeError(f"rollout.lmbda is {rollout.lmbda}; expected a probability, 0 to 1")
    if rollout.top_p > 1:
        raise RecipeError(f"rollout.top_p is {rollout.top_p}; expected at most 1, which leaves every token in")
    if data.answer_regex is not None:
        try:
            groups = re.compile(data.answer_regex).groups
        except re.error as error:
            raise RecipeError(f"data.answer_regex {data.answer_regex!r} is no regular expression: {error}") from None
        if groups == 0:
            raise RecipeError(f"data.answer_regex {data.answer_regex!r} has no group; put (...) around the answer")
    for key, source in (("data.train", data.train), ("data.heldout", data.heldout)):
        path = source.path if isinstance(source, Source) else source
        if path in (None, PACKAGED) or (recipe.folder / path).exists():
            continue
        if Path(path).suffix in (".jsonl", ".json", ".parquet") or not re.fullmatch(r"[\w-]+/[\w.-]+", path):
            raise RecipeError(f"{key}: no file {recipe.folder / path}; paths are relative to the recipe's folder")
    _check_loss(recipe.loss, rollout)
    if student.config is not None:
        _check_student_config(student.config)
    _check_training(resolved_training(recipe))


def _check_loss(loss: Loss, rollout: Rollout) -> None:
    from potstill.train.losses import loss_function

    known: dict[str, Any] = {"divergence": DIVERGENCES, "tail": TAILS, "estimator": ESTIMATORS}
    for key, names in known.items():
        value = getattr(loss, key)
        if value is not None and value not in names:
            raise RecipeError(f"loss.{key} is {value!r}; {nearest(value, list(names))}")
    for keys, condition, used in (
        (("divergence", "tail", "top_k", "targets", "alpha", "beta"), "without estimator", loss.estimator is None),
        (("divergence", "tail", "alpha", "beta"), "with targets: top_k", loss.targets == "top_k"),
        (("log_prob_min_clamp", "loss_min_clamp"), "with targets: top_k", loss.targets == "top_k"),
        (("log_prob_min_clamp", "loss_min_clamp"), "without estimator", loss.estimator is None),
        (("policy_gradient",), "with estimator", loss.estimator is not None),
        (("clip_ratio_low", "clip_ratio_high"), "with policy_gradient: true", loss.policy_gradient),
    ):
        for key in keys:
            if not used and (value := getattr(loss, key)) != getattr(Loss, key):
                raise RecipeError(f"loss.{key} is {value!r}, which only goes {condition}; leave one of the two out")
    for key, needed in (("temperature", loss.temperature), ("top_p", 1), ("lmbda", 1)):
        if loss.estimator is not None and (value := getattr(rollout, key)) != needed:
            raise RecipeError(
                f"rollout.{key} is {value:g}; expected {needed:g} with loss.estimator, which is a mean over tokens "
                "sampled from the very distribution that the loss compares"
            )
    # The loss knows what else it accepts: it is asked with one row over a vocabulary of a few tokens.
    token_ids = torch.arange(min(loss.top_k, PROBE_TOP_K) if loss.estimator is None else 1).unsqueeze(0)
    logits = torch.zeros(token_ids.shape)
    teacher: TeacherTopK | SampledTargets = TeacherTopK(
        token_ids, logits.log_softmax(-1), temperature=loss.temperature
    )
    if loss.targets != "top_k":
        teacher = SampledTargets(token_ids, logits.softmax(-1), loss.temperature)
    try:
        loss_function(loss)(logits, {"teacher": teacher, "target_ids": token_ids[:, 0]})
    except ValueError as error:
        raise RecipeError(f"loss: {error}") from None


def _check_student_config(config: dict[str, Any]) -> None:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise RecipeError(f"student.config.model_type is {model_type!r}; {nearest(model_type, list(CONFIG_MAPPING))}")
    if taken := sorted(config.keys() & {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"}):
        raise RecipeError(f"student.config.{taken[0]} comes from the teacher; leave it out")
    # A transformers configuration accepts any key, and a misspelt one would do nothing.
    config_class = CONFIG_MAPPING[model_type]
    known = ["model_type", *(spec.name for spec in fields(config_class)), *config_class.attribute_map]
    for key in config:
        check_known(key, known, "student.config.")
    try:
        config_class(**config)
    except (StrictDataclassError, TypeError, ValueError, ArithmeticError) as error:
        raise RecipeError(f"student.config: {error}") from None


def _check_training(training: dict[str, Any]) -> None:
    from transformers import TrainingArguments

    hints = typing.get_type_hints(TrainingArguments)
    hints = {spec.name: hints[spec.name] for spec in fields(TrainingArguments)}
    for key, value in training.items():
        check_known(key, hints, "training.")
        expect(value, hints[key], f"training.{key}")
        if key in REFUSED_TRAINING and value:
            raise RecipeError(f"training.{key} is not supported: {REFUSED_TRAINING[key]}")
        if key in LEAST_TRAINING and not value >= LEAST_TRAINING[key]:
            raise RecipeError(f"training.{key} is {value}; expected {LEAST_TRAINING[key]} or more")
        for hint in (hints[key], *typing.get_args(hints[key])):
            choices: list[str] = [option.value for option in hint] if isinstance(hint, EnumMeta) else []  # type: ignore
            if choices and isinstance(value, str) and value not in choices:
                raise RecipeError(f"training.{key} is {value!r}; {nearest(value, choices)}")
    folder = Path(training.get("output_dir") or ".").absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise RecipeError(
            f"training.output_dir is {str(folder)!r}, but {existing} is no folder that can be written to"
        )
