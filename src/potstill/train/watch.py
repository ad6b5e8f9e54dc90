"""Warnings in words, each once per run, when the figures of a log row say that something is wrong.

Each threshold stands beside its reason. They are meant to be silent in a healthy run: most are shares of many tokens.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from potstill import coarse_logits
from potstill.rollouts.dataset import PromptRow
from potstill.rollouts.transformers import pad_id, stop_token_ids
from potstill.teachers.local import LocalTeacher
from potstill.train.batch import make_batch
from potstill.train.progress import show

# The student leaves other tokens less than a quarter of what the teacher leaves them. The teacher's share must be 1 %
# at least: below, a quarter of it is within what a good student is off by.
TAIL_RATIO, LEAST_TEACHER_TAIL = 0.25, 0.01
# At equal truth the shares of two readings of 100 completions differ by 0.07 (one standard deviation) at most.
TRUNCATION_RISE, LEAST_COMPLETIONS = 0.25, 100
# Tokens that both models are certain of have a loss of exactly 0 in float32, and may be many; not most.
ZERO_LOSS_SHARE = 0.5
# Two log-probabilities of one row agree within 1e-3 by chance perhaps once in a thousand rows (K = 2), never all 64.
UNIFORM_SPREAD, UNIFORM_SHARE = 1e-3, 0.01
# Guessing costs ln V per token. A trained model of language needs 0.2 to 0.5 of that, on text of its own kind.
RANDOM_NLL = 0.9
ROWS_READ, TOKENS_READ = 8, 256


class Watch(TrainerCallback):
    """Looks at every log row, and warns once of each kind of trouble."""

    def __init__(self) -> None:
        self.given: set[str] = set()
        self.sampled = self.truncated = 0.0  # since the last reading of the truncated share
        self.lowest_share = math.inf

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Warn of what this row shows for the first time."""
        if logs and "loss" in logs:
            self.look(logs)

    def warn(self, kind: str, message: str | None) -> None:
        """Show the message, if there is one, and it is the first of its kind."""
        if message is not None and kind not in self.given:
            self.given.add(kind)
            show(f"warning: {message}")

    def look(self, row: Mapping[str, float]) -> None:
        """Check the row of a log (see StepMeter.means)."""
        self.warn("over-confident", over_confident(row))
        self.warn("zero loss", mostly_zero(row))
        self.warn("uniform teacher", uniform_teacher(row))
        self.warn("truncated", self._truncation(row))

    def _truncation(self, row: Mapping[str, float]) -> str | None:
        self.sampled += row.get("sampled", 0.0)
        self.truncated += row.get("sampled", 0.0) * row.get("truncated_share", 0.0)
        if self.sampled < LEAST_COMPLETIONS:
            return None
        share = self.truncated / self.sampled
        self.sampled = self.truncated = 0.0
        self.lowest_share = min(self.lowest_share, share)
        if share < self.lowest_share + TRUNCATION_RISE:
            return None
        return (
            f"{share:.0%} of the student's completions reach rollout.max_new_tokens without an end, up from "
            f"{self.lowest_share:.0%}: it may be learning to ramble. Look at samples; check that the teacher ends its "
            "answers with the student's EOS; a larger max_new_tokens or some of the data's own completions "
            "(rollout.lmbda below 1) help"
        )


def over_confident(row: Mapping[str, float]) -> str | None:
    """Q well above P: what the student leaves to tokens other than the teacher's ids is far too little."""
    student, teacher = (1 - row.get(f"{name}_mass", 0.0) for name in ("student", "teacher"))
    if not (teacher > LEAST_TEACHER_TAIL and student < TAIL_RATIO * teacher):
        return None
    return (
        f"the student gives {1 - student:.1%} to the tokens that the teacher gives {1 - teacher:.1%}: it is "
        "over-confident on them, and its samples lose all others. A top-k loss with loss.tail=bucket holds the rest "
        "to the teacher's; a larger loss.top_k makes it smaller"
    )


def mostly_zero(row: Mapping[str, float]) -> str | None:
    """The loss is exactly 0 on most tokens, which then teach nothing."""
    share = row.get("zero_loss_share", 0.0)
    if not share > ZERO_LOSS_SHARE:
        return None
    return (
        f"the loss is exactly 0 on {share:.0%} of the tokens, which teach nothing: a clamp (loss.*_clamp) may cut "
        "them off, teacher rows may be empty, or both models are certain of them already"
    )


def uniform_teacher(row: Mapping[str, float]) -> str | None:
    """Teacher rows whose log-probabilities are all the same, which no trained model gives."""
    share = row.get("uniform_teacher_share", 0.0)
    if not share > UNIFORM_SHARE:
        return None
    return (
        f"{share:.1%} of the teacher's rows give all their tokens the same probability: its weights or its "
        "log-probabilities are broken. Check that the teacher loaded completely and writes sensible text"
    )


def eos_mismatch(student: PreTrainedModel, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Student and teacher end their completions with different tokens."""
    ours, theirs = (set(stop_token_ids(model, tokenizer)) for model in (student, teacher))
    if ours == theirs:
        return None
    return (
        f"the student's completions end at {_tokens(ours, tokenizer)}, the teacher's at {_tokens(theirs, tokenizer)}: "
        "the student learns to end with a token that ends nothing, or is stopped in the middle. Set eos_token_id in "
        "the student's generation_config to the teacher's"
    )


def _tokens(ids: Collection[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return ", ".join(
        f"{token!r} ({index})" for index in sorted(ids) for token in [tokenizer.convert_ids_to_tokens(index)]
    )


def random_teacher(teacher: LocalTeacher, rows: Sequence[PromptRow], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The teacher finds no text that the data has likelier than a guess among all tokens.

    Reads the prompts and, where there are any, their completions or answers. (The student's samples would say nothing
    of the teacher, who may rightly find them absurd.)
    """
    read = [rows[index] for index in range(min(ROWS_READ, len(rows)))]
    prompts = [(row["prompt_ids"][:1], row["prompt_ids"][1:]) for row in read]
    answers = [
        (
            row["prompt_ids"],
            row.get("completion_ids") or tokenizer(row["answer"] or "", add_special_tokens=False).input_ids,
        )
        for row in read
    ]
    nll = min(_nll(teacher, texts, tokenizer) for texts in (prompts, answers))
    guess = math.log(teacher.transform.vocab_size or teacher.head.out_features)
    if not RANDOM_NLL * guess < nll < math.inf:
        return None
    return (
        f"the teacher needs {nll:.2f} nats per token for the data's own text, and guessing among all tokens costs "
        f"{guess:.2f}: its weights may be random, or this is no text of its kind. Check that teacher.model is the "
        "folder of the trained model"
    )


def _nll(
    teacher: LocalTeacher, texts: Sequence[tuple[list[int], list[int]]], tokenizer: PreTrainedTokenizerBase
) -> float:
    """Nats per token of the texts, each after its prompt; infinite if there is no token."""
    prompts, completions = zip(*[(prompt, text[:TOKENS_READ]) for prompt, text in texts], strict=True)
    batch = make_batch(prompts, completions, eos_token_ids=(), pad_token_id=pad_id(tokenizer, [0]))
    if not len(batch["target_ids"]):
        return math.inf
    inputs: dict[str, Any] = {name: tensor.to(teacher.model.device) for name, tensor in batch.items()}  # type: ignore
    token_ids = inputs["target_ids"].unsqueeze(1)
    coarse = coarse_logits(teacher.logits(inputs), token_ids, transform=teacher.transform)
    return -coarse.log_probs.mean().item()
