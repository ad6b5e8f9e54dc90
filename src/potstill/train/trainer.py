"""DistillationTrainer: on-policy distillation on Hugging Face's Trainer.

One optimiser step: the student completes the prompts of all its micro-batches at once, the teacher scores the
completions, and the scored tokens are counted over micro-batches and ranks; then each micro-batch runs one forward
and backward of the student alone. `get_batch_samples` is the first part, `compute_loss` the second.

    trainer = DistillationTrainer(
        student,
        TrainingArguments("out", max_steps=100),
        teacher=LocalTeacher(teacher, logit_transform(teacher.config), top_k=64),
        rollouts=TransformersRollouts(tokenizer, max_new_tokens=256),
        train_dataset=tokenize([{"prompt": "..."}], tokenizer, max_prompt_tokens=1024),
        processing_class=tokenizer,
    )
    trainer.train()
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
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
    TrainingArguments,
)

from potstill import LinearLogits, LogitTransform, TeacherTopK
from potstill.rollouts.dataset import PromptRow
from potstill.rollouts.transformers import TransformersRollouts
from potstill.teachers.local import LocalTeacher, ScoredModel, model_inputs, scored_part
from potstill.train.batch import Batch, batch_for
from potstill.train.families import logit_transform
from potstill.train.heldout import HeldoutSums, measure
from potstill.train.losses import LossFunction, topk_loss
from potstill.train.meter import StepMeter
from potstill.train.progress import ProgressLine
from potstill.train.recipe import REFUSED_TRAINING


class Rollouts(Protocol):
    """Gives each row a completion, as token ids, of which those up to the first EOS are scored."""

    def __call__(self, model: PreTrainedModel, rows: Sequence[PromptRow], *, seed: int) -> list[list[int]]:
        """Complete the rows; the same seed gives the same completions."""


class DistillationTrainer(Trainer):
    """Train a student to match a teacher on completions that the student sampled itself.

    The loss of an optimiser step is the sum of D(teacher, student) over the scored tokens of all its micro-batches
    and ranks, divided by their number: how the step is cut up changes nothing.

    Args:
        model: the student. Its head is replaced by a PotstillHead on the same weight, which saving does not see.
        args: TrainingArguments; what would run another loss or another forward is refused.
        teacher: the top-k rows for a batch: a LocalTeacher, or any function.
        rollouts: the completions: TransformersRollouts, or any function.
        train_dataset: prompts as token ids (see `potstill.rollouts.dataset.tokenize`).
        processing_class: the tokenizer; names padding and EOS.
        eval_dataset: held-out prompts for `evaluate`.
        loss: see `potstill.train.losses`, such as partial(topk_loss, divergence="reverse_kl").
        transform: the student's logit scale and softcap; None: from the table of model families.
        answer_regex: group 1 of its last match is the answer that `evaluate` compares. None: the whole text.
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
        teacher: Callable[[Batch], TeacherTopK],
        rollouts: Rollouts,
        train_dataset: Sequence[PromptRow],
        processing_class: PreTrainedTokenizerBase,
        eval_dataset: Sequence[PromptRow] | None = None,
        loss: LossFunction = topk_loss,
        transform: LogitTransform | None = None,
        answer_regex: str | None = None,
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
        self.tokenizer = processing_class
        self.student = ScoredModel(model, logit_transform(model.config) if transform is None else transform)
        self.teacher = teacher
        self.rollouts = rollouts
        self.loss = loss
        self.answer_regex = answer_regex
        super().__init__(
            model=model,
            args=args,
            data_collator=list,  # type: ignore[arg-type]  # a micro-batch is rows until they have completions
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=[ProgressLine(phase), *(callbacks or [])],
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
        self._signature_columns: Any = list(PromptRow.__annotations__)

    def _seed(self, purpose: str) -> int:
        # Of the step and the rank alone: a resumed run draws the same samples, and no two ranks do.
        return random.Random(f"{self.args.seed} {purpose} {self.args.process_index}").getrandbits(63)

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[PromptRow]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | None]:
        """Complete and score all micro-batches of an optimiser step, and count its scored tokens over all ranks."""
        self.meter.begin_step()
        micro_batches = list(islice(epoch_iterator, num_batches))
        rows = [row for micro_batch in micro_batches for row in micro_batch]
        if not rows:
            return [], None
        with self.accelerator.autocast():
            with self.meter.timed("rollout"):
                seed = self._seed(f"step {self.state.global_step}")
                completions = iter(self.rollouts(self.student.model, rows, seed=seed))
            batches: list[dict[str, Any]] = []
            with self.meter.timed("teacher"):
                for micro_batch in micro_batches:
                    batch = self._batch(micro_batch, list(islice(completions, len(micro_batch))))
                    scores = self.teacher(batch).validate(self.student.head.out_features)
                    batches.append({**batch, "teacher": scores})
        num_tokens = torch.tensor(sum(len(batch["scored_rows"]) for batch in batches), device=device)
        num_tokens = self.accelerator.reduce(num_tokens, "sum") // self.get_tp_size()
        self.meter.count_tokens(num_tokens)
        return batches, num_tokens

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
            self.meter.add(output.metrics)
            return output.loss

        with self.student.head.scoring(score):
            outputs = model(**model_inputs(inputs))
        loss = self.student.head.loss_after(outputs.logits) * self.data_parallel_size
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to a training row the means over the steps since the last one."""
        if "loss" in logs:
            logs |= self.meter.means(lambda sums: self.accelerator.reduce(sums, "sum"))
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
            student) over the whole vocabulary, `eval_student_entropy`, `eval_teacher_entropy` (nats) and their
            number, `eval_tokens`; where rows have answers, `eval_exact_match` of greedy completions (0 to 1).

        Raises:
            ValueError: no rows, or a teacher or rollouts that are not of this process.
        """
        rows: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if not rows:
            raise ValueError("evaluate needs held-out rows: pass eval_dataset")
        if not (isinstance(self.teacher, LocalTeacher) and isinstance(self.rollouts, TransformersRollouts)):
            raise ValueError("evaluate needs a LocalTeacher, for the whole vocabulary, and TransformersRollouts")
        self.meter.end_step()
        with self.accelerator.autocast():
            sums = measure(
                self.student,
                self.teacher,
                list(rows)[self.args.process_index :: self.args.world_size],
                self.rollouts,
                batch_size=self.args.per_device_eval_batch_size,
                seed=self._seed("heldout"),
                answer_regex=self.answer_regex,
            )
        total = self.accelerator.reduce(torch.tensor(sums, device=self.args.device), "sum")
        means = HeldoutSums(*total.tolist()).means()
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in means.items()}
        self.log(dict(metrics))  # log adds the epoch
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
