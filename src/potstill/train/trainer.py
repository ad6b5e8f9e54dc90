"""DistillationTrainer: on-policy distillation on Hugging Face's Trainer.

One optimiser step: the student completes the prompts of all its micro-batches at once, the teacher scores the
completions, and the scored tokens are counted over micro-batches and ranks; then each micro-batch runs one forward
and backward of the student alone. `get_batch_samples` is the first part, `compute_loss` the second. Between gradient
and update the step's figures are read, all at once (`_close_step`): if loss or gradient is not finite there is no
update.

    trainer = DistillationTrainer(
        student,
        TrainingArguments("out", max_steps=100),
        teacher=LocalTeacher(teacher, logit_transform(teacher.config), top_k=64),
        rollouts=TransformersRollouts(tokenizer, max_new_tokens=256),
        train_dataset=tokenize([{"prompt": "..."}], tokenizer),
        processing_class=tokenizer,
    )
    trainer.train()
"""

import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import is_dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from potstill import DistillationOutput, LinearLogits, LogitTransform, SampledTargets, TeacherTopK, global_num_tokens
from potstill.rollouts.dataset import PromptRow
from potstill.rollouts.transformers import TransformersRollouts, count_truncated, stop_token_ids
from potstill.teachers.local import LocalTeacher, MovingAverage, ScoredModel, model_inputs, scored_part
from potstill.teachers.routing import RoutedTeacher
from potstill.train.batch import Batch, as_teacher_reads, batch_for
from potstill.train.checkpoints import StopRequest
from potstill.train.families import logit_transform
from potstill.train.heldout import HeldoutSums, measure
from potstill.train.losses import LossFunction, topk_loss
from potstill.train.meter import StepMeter
from potstill.train.progress import ProgressLine, show
from potstill.train.recipe import REFUSED_TRAINING
from potstill.train.replay import CachedRow, CachedRows
from potstill.train.watch import UNIFORM_SPREAD, Watch, eos_mismatch, random_teacher

Scores = TeacherTopK | SampledTargets | Tensor | LinearLogits


class Rollouts(Protocol):
    """Gives each row a completion, as token ids, of which those up to the first EOS are scored."""

    def __call__(self, model: PreTrainedModel, rows: Sequence[PromptRow], *, seed: int) -> list[list[int]]:
        """Complete the rows; the same seed gives the same completions."""


class Teacher(Protocol):
    """Says what a batch's scored rows are held to."""

    def __call__(self, batch: Batch) -> Scores | Future[Scores]:
        """Score the N rows; a Future lets a server work on all micro-batches of a step at a time."""


class DistillationTrainer(Trainer):
    """Train a student to match a teacher on completions that the student sampled itself.

    The loss of an optimiser step is the sum of D(teacher, student) over the scored tokens of all its micro-batches
    and ranks, divided by their number: how the step is cut up changes nothing.

    Args:
        model: the student. Its head is replaced by a PotstillHead on the same weight, which saving does not see.
        args: TrainingArguments; what would run another loss or another forward is refused.
        teacher: what a batch's scored rows are held to: a LocalTeacher, or any function (see Teacher). Top-k rows are
            validated; logits or LinearLogits of the whole vocabulary go with full_vocab_loss.
        rollouts: the completions: TransformersRollouts, or any function.
        train_dataset: prompts as token ids (see `potstill.rollouts.dataset.tokenize`).
        processing_class: the tokenizer; names padding and EOS.
        eval_dataset: held-out prompts for `evaluate`.
        eval_teacher: whom it compares with, where `teacher` is not in this process.
        loss: see `potstill.train.losses`, such as partial(topk_loss, divergence="reverse_kl").
        transform: the student's logit scale and softcap; None: from the table of model families.
        answer_regex: group 1 of its last match is the answer that `evaluate` compares. None: the whole text.
        lmbda: the probability that a row is completed by the student; else its own `completion_ids` are used.
        max_skipped_steps: training ends when so many steps in a row were skipped, their loss or gradient not finite.
        phase: shown on the progress line and recorded in metrics.jsonl.
        callbacks: further callbacks.

    Raises:
        TypeError: the student's head is no plain linear layer.
        ValueError: a refused argument, or a model family without a known transform.
    """

    # compute_loss divides by the token count of the whole step, so nothing is left to divide.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        *,
        teacher: Teacher,
        rollouts: Rollouts,
        train_dataset: Sequence[PromptRow],
        processing_class: PreTrainedTokenizerBase,
        eval_dataset: Sequence[PromptRow] | None = None,
        eval_teacher: LocalTeacher | RoutedTeacher[LocalTeacher] | None = None,
        loss: LossFunction = topk_loss,
        transform: LogitTransform | None = None,
        answer_regex: str | None = None,
        lmbda: float = 1.0,
        max_skipped_steps: int = 3,
        phase: str = "distil",
        callbacks: list[TrainerCallback] | None = None,
    ):
        for name, reason in REFUSED_TRAINING.items():
            if getattr(args, name):
                raise ValueError(f"training.{name}={getattr(args, name)!r} is not supported: {reason}")
        if args.n_gpu > 1:
            raise ValueError(
                f"{args.n_gpu} GPUs in one process would mean torch.nn.DataParallel, which is not supported; use "
                f"`torchrun --nproc-per-node {args.n_gpu}`, or set CUDA_VISIBLE_DEVICES=0"
            )
        if not 0 <= lmbda <= 1:
            raise ValueError(f"lmbda is {lmbda}; expected a probability, 0 to 1")
        if lmbda < 1 and not isinstance(train_dataset, CachedRows):
            _check_completions(train_dataset, lmbda)
        self.tokenizer = processing_class
        self.student = ScoredModel(model, logit_transform(model.config) if transform is None else transform)
        self.teacher = teacher
        self.eval_teacher: Any = teacher if eval_teacher is None else eval_teacher
        self.rollouts = rollouts
        self.loss = loss
        self.answer_regex = answer_regex
        self.lmbda = lmbda
        self.max_skipped_steps = max_skipped_steps
        self.skipped_in_a_row = 0
        self.micro_batches: list[dict[str, Any]] = []
        self.stop = StopRequest()  # train() within `with trainer.stop:` ends after a signal, with a checkpoint
        self.stopped = False
        self.watch = Watch()
        self.card: str | None = None
        super().__init__(
            model=model,
            args=args,
            data_collator=list,  # type: ignore[arg-type]  # a micro-batch is rows until they have completions
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=[ProgressLine(phase), self.watch, _Average(teacher), *(callbacks or [])],
        )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                "accelerate is configured for FSDP or DeepSpeed, which is not supported; use DDP (torchrun)"
            )
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.meter = StepMeter(self.args.device)

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks that have batches of their own, over which DDP averages gradients."""
        return self.accelerator.num_processes // self.get_tp_size()

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns: Any = list(CachedRow.__annotations__)

    def seed_of(self, purpose: str) -> int:
        """A seed of the run, the rank and a purpose alone: a resumed run draws the same, and no two ranks do."""
        return random.Random(f"{self.args.seed} {purpose} {self.args.process_index}").getrandbits(63)

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[PromptRow]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | None]:
        """Complete and score all micro-batches of an optimiser step, and count its scored tokens over all ranks."""
        if 0 < self.state.max_steps <= self.state.global_step:
            return [], None  # Trainer takes a step too many when it resumes from the last one
        self.meter.begin_step()
        micro_batches = list(islice(epoch_iterator, num_batches))
        if not micro_batches:
            return [], None
        batches = self.complete_and_score(micro_batches, self.state.global_step)
        self.micro_batches = batches
        own_tokens = sum(len(batch["scored_rows"]) for batch in batches)
        self.meter.add(tokens=own_tokens)
        num_tokens = global_num_tokens(batch["score_mask"] for batch in batches)
        return batches, num_tokens // self.get_tp_size()

    def complete_and_score(self, micro_batches: Sequence[Sequence[PromptRow]], step: int) -> list[dict[str, Any]]:
        """The rows of an optimiser step, each completed and its completion scored.

        Args:
            micro_batches: rows, of which all are completed at once.
            step: draws the samples: the same step draws the same ones.

        Returns:
            Per micro-batch a Batch that has besides, under "teacher", what its scored tokens are held to.

        Raises:
            FloatingPointError: the teacher says what no teacher can.
        """
        with self.accelerator.autocast():
            with self.meter.timed("rollout"):
                completions = iter(self._complete([row for rows in micro_batches for row in rows], step))
            with self.meter.timed("teacher"):
                scored = [self._batch(rows, list(islice(completions, len(rows)))) for rows in micro_batches]
                asked = [self.teacher(as_teacher_reads(batch)) for batch in scored]
                return [
                    {**batch, "teacher": self._checked(scores)} for batch, scores in zip(scored, asked, strict=True)
                ]

    def _checked(self, scores: Scores | Future[Scores]) -> Scores:
        if isinstance(scores, Future):
            scores = scores.result()
        if not isinstance(scores, TeacherTopK | SampledTargets):
            return scores
        try:
            return scores.validate(self.student.head.out_features)
        except ValueError as error:
            # No step can be skipped for it: the next batch would meet the same teacher.
            raise FloatingPointError(
                f"step {self.state.global_step + 1}: the teacher cannot be right: {error}"
            ) from None

    def _complete(self, rows: Sequence[PromptRow], step: int) -> list[list[int]]:
        """The student's completion of each row, or with probability 1 - lmbda its own."""
        coin = random.Random(self.seed_of(f"coin {step}"))
        on_policy = [coin.random() < self.lmbda for _ in rows]
        prompts = [row for row, sampled in zip(rows, on_policy, strict=True) if sampled]
        samples: list[list[int]] = []
        if prompts:
            samples = self.rollouts(self.student.model, prompts, seed=self.seed_of(f"step {step}"))
        truncated = count_truncated(samples, stop_token_ids(self.student.model, self.tokenizer))
        self.meter.add(completions=len(rows), sampled=len(samples), truncated=truncated)
        rest = iter(samples)
        return [
            next(rest) if sampled else row.get("completion_ids") or []
            for row, sampled in zip(rows, on_policy, strict=True)
        ]

    def _batch(self, rows: Sequence[PromptRow], completions: Sequence[Sequence[int]]) -> Batch:
        return batch_for(self.student.model, self.tokenizer, rows, completions)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The micro-batch's share of the step's loss, times the number of ranks that DDP will divide by.

        The loss runs inside the model's forward, on the scored rows; the outputs' logits are empty.
        """

        def score(logits: LinearLogits) -> Tensor:
            with self.meter.timed("loss"):
                output = self.loss(
                    scored_part(logits, inputs),
                    inputs,
                    num_tokens=num_items_in_batch,
                    transform=self.student.transform,
                )
            self.meter.add(**self._figures(output, inputs, num_items_in_batch))
            return output.loss

        with self.student.head.scoring(score):
            outputs = model(**model_inputs(inputs))
        loss = self.student.head.loss_after(outputs.logits) * self.data_parallel_size
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def _figures(
        self, output: DistillationOutput, batch: dict[str, Any], num_tokens: Tensor | int | None
    ) -> dict[str, Tensor]:
        """A micro-batch's share of the step's loss and means over tokens, and each teacher's tokens and loss."""
        names = ("student_mass", "teacher_mass", "abs_loss")  # those that the loss has
        figures = {"loss": output.loss.detach()}
        figures |= {name: output.metrics[name] for name in names if name in output.metrics}
        num_tokens = len(output.per_token) if num_tokens is None else num_tokens
        num_tokens = torch.as_tensor(num_tokens, device=self.args.device).clamp(min=1)
        figures["zero_loss_share"] = (output.per_token == 0).sum() / num_tokens
        teacher = batch["teacher"]
        if isinstance(teacher, TeacherTopK) and teacher.log_probs.shape[-1] > 1:
            low, high = teacher.log_probs.aminmax(dim=-1)
            figures["uniform_teacher_share"] = (high - low < UNIFORM_SPREAD).sum() / num_tokens
        if isinstance(self.teacher, RoutedTeacher):
            numbers = {name: number for number, name in enumerate(self.teacher.teachers)}
            lengths = zip(batch["rows"], batch["completions"], strict=True)
            owners = [numbers[row["teacher_id"]] for row, completion in lengths for _ in completion]
            owner = torch.tensor(owners, device=output.per_token.device)
            for name, number in numbers.items():
                figures[f"tokens/{name}"] = (owner == number).sum()
                figures[f"loss_sum/{name}"] = output.per_token.where(owner == number, 0.0).sum()
        return figures

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # on the device already

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Forward and backward of a micro-batch; the loss for Trainer's own sum, from which a NaN would never go."""
        return torch.nan_to_num(super().training_step(model, inputs, num_items_in_batch), 0.0, 0.0, 0.0)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        # Trainer calls this once per step, when the gradient is known and the weights have not moved.
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._close_step(model, grad_norm)
        return grad_norm

    def _close_step(self, model: torch.nn.Module, grad_norm: Tensor) -> None:
        """Read the step's figures, skip its update if it is not finite, and obey a request to stop: all ranks alike.

        A skipped step counts like any other for the schedule and the order of the data.
        """
        loss = self.meter.step["loss"]
        finite = torch.isfinite(torch.as_tensor(loss))
        if self.accelerator.scaler is None:  # in float16 the scaler lowers its scale and skips by itself
            finite = finite & torch.isfinite(grad_norm)
        self.meter.add(skip=~finite, stop=float(self.stop.signum is not None))
        step = self.meter.close_step(lambda sums: self.accelerator.reduce(sums, "sum"))
        skip, self.stopped = step.pop("skip") > 0, step.pop("stop") > 0
        if self.stopped:
            self.control.should_log = self.control.should_save = self.control.should_training_stop = True
        if not skip:
            self.skipped_in_a_row = 0
            self.meter.keep(step)
            return
        model.zero_grad()  # an optimiser leaves parameters without gradient as they are, and its state as well
        self.meter.skip()
        self.skipped_in_a_row += 1
        self._report_skip(step["loss"])

    def _report_skip(self, loss: float) -> None:
        number = self.state.global_step + 1
        folder = Path(self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"skipped-step-{number}-rank-{self.args.process_index}.pt"
        kept = [{**batch, "teacher": _plain(batch["teacher"])} for batch in self.micro_batches]
        torch.save([{name: x for name, x in batch.items() if name != "rows"} for batch in kept], file)
        what = "gradient" if math.isfinite(loss) else "loss"
        show(f"step {number} skipped: its {what} is not finite; its micro-batches are in {file}")
        if self.skipped_in_a_row == self.max_skipped_steps:
            raise FloatingPointError(
                f"{self.skipped_in_a_row} steps in a row, up to step {number}, had a loss or gradient that is not "
                f"finite. Their micro-batches are in {folder}/skipped-step-*.pt. Lower training.learning_rate, set "
                "training.max_grad_norm, or train in bfloat16 or float32 instead of float16"
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, after the checks of the teacher that need a forward; see there for the arguments."""
        for teacher, rows in _each_local(self.teacher, self.train_dataset):
            self.watch.warn("eos", eos_mismatch(self.student.model, teacher.model, self.tokenizer))
            self.watch.warn("random teacher", random_teacher(teacher, rows, self.tokenizer))
        return super().train(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if isinstance(self.teacher, MovingAverage):
            self.teacher.load(Path(resume_from_checkpoint))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.meter.end_step()  # writing it is no part of a step
        if self.args.should_save:  # while it is written over one of the same step, it must not look whole
            folder = Path(self.args.output_dir or ".") / f"checkpoint-{self.state.global_step}"
            (folder / "trainer_state.json").unlink(missing_ok=True)
            if isinstance(self.teacher, MovingAverage):
                folder.mkdir(parents=True, exist_ok=True)
                self.teacher.save(folder)
        super()._save_checkpoint(*args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write README.md of the saved model, which push_to_hub uploads: `card`, or Trainer's draft without one."""
        if self.card is None:
            super().create_model_card(*args, **kwargs)
        elif self.is_world_process_zero():
            (Path(self.args.output_dir or ".") / "README.md").write_text(self.card, encoding="utf-8")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to a training row the means over the steps since the last one; its loss is that of the kept ones."""
        if "loss" in logs:
            logs |= self.meter.means()
        super().log(logs, start_time)

    def evaluate(  # type: ignore[override]
        self,
        eval_dataset: Sequence[PromptRow] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Measure the student on held-out prompts.

        Returns:
            Over the tokens of the student's own samples at temperature 1: `eval_kl`, the mean of KL(teacher ||
            student) over the whole vocabulary, `eval_student_entropy`, `eval_teacher_entropy` and their difference
            `eval_entropy_gap` (nats), and their number, `eval_tokens`. Of the samples: `eval_mean_length` in tokens
            and `eval_truncated_share`, those without an end. Where rows have answers, `eval_exact_match` of greedy
            completions (0 to 1).

        Raises:
            ValueError: no rows, or a teacher or rollouts that are not of this process.
        """
        rows: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if not rows:
            raise ValueError("evaluate needs held-out rows: pass eval_dataset")
        parts = _each_local(self.eval_teacher, rows)
        if not (parts and isinstance(self.rollouts, TransformersRollouts)):
            raise ValueError("evaluate needs a LocalTeacher, for the whole vocabulary, and TransformersRollouts")
        self.meter.end_step()
        with self.accelerator.autocast():
            each = [
                measure(
                    self.student,
                    teacher,
                    part[self.args.process_index :: self.args.world_size],
                    self.rollouts,
                    batch_size=self.args.per_device_eval_batch_size,
                    seed=self.seed_of("heldout"),
                    answer_regex=self.answer_regex,
                )
                for teacher, part in parts
            ]
        sums = [sum(values) for values in zip(*each, strict=True)]
        total = self.accelerator.reduce(torch.tensor(sums, device=self.args.device), "sum")
        means = HeldoutSums(*total.tolist()).means()
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in means.items()}
        self.log(dict(metrics))  # log adds the epoch
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class _Average(TrainerCallback):
    """Lets a teacher that is an average of the student follow it."""

    def __init__(self, teacher: Any):
        self.teacher = teacher

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if isinstance(self.teacher, MovingAverage):
            self.teacher.update(model)


def _each_local(teacher: Any, rows: Any) -> list[tuple[LocalTeacher, list[Any]]]:
    """The teachers that are models of this process, each with its rows."""
    if isinstance(teacher, RoutedTeacher):
        return [(own, part) for own, part in teacher.by_teacher(rows) if isinstance(own, LocalTeacher)]
    return [(teacher, list(rows))] if isinstance(teacher, LocalTeacher) else []


def _plain(teacher: Any) -> Any:
    """What torch.load reads without executing code: tensors, alone or in a dict."""
    if isinstance(teacher, LinearLogits):
        return teacher._asdict()
    return vars(teacher) if is_dataclass(teacher) else teacher


def _check_completions(rows: Sequence[PromptRow], lmbda: float) -> None:
    for index in range(len(rows)):
        if not rows[index].get("completion_ids"):
            raise ValueError(
                f"lmbda is {lmbda}, but row {index} of train_dataset has no completion of its own; give every row "
                "`completion_ids` (in a recipe's data: `completion`), or set lmbda to 1"
            )
