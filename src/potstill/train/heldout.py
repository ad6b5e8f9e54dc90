"""How good the student is on held-out prompts: exact KL and entropies on its own samples, and exact match."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from potstill import LinearLogits, LogitTransform, coarse_logits, full_vocab_distillation_loss
from potstill.rollouts.dataset import PromptRow
from potstill.rollouts.transformers import TransformersRollouts, count_truncated, stop_token_ids
from potstill.teachers.local import ScoredModel
from potstill.train.batch import as_teacher_reads, batch_for


class HeldoutSums(NamedTuple):
    """Sums over held-out rows, which add over ranks. KL and entropies in nats, over the scored tokens."""

    tokens: float = 0.0
    kl: float = 0.0
    student_entropy: float = 0.0
    teacher_entropy: float = 0.0
    completions: float = 0.0
    truncated: float = 0.0  # completions that reached max_new_tokens without an EOS
    answers: float = 0.0
    right_answers: float = 0.0

    def means(self) -> dict[str, float]:
        """Means per token and per completion, and the share of right answers where there are any."""
        names = ("kl", "student_entropy", "teacher_entropy")
        means = {name: getattr(self, name) / max(self.tokens, 1) for name in names}
        means["entropy_gap"] = means["student_entropy"] - means["teacher_entropy"]
        means["mean_length"] = self.tokens / max(self.completions, 1)
        means["truncated_share"] = self.truncated / max(self.completions, 1)
        if self.answers:
            means["exact_match"] = self.right_answers / self.answers
        return means | {"tokens": self.tokens}


@torch.no_grad()
def measure(
    student: ScoredModel,
    teacher: ScoredModel,
    rows: Sequence[PromptRow],
    rollouts: TransformersRollouts,
    *,
    batch_size: int,
    seed: int,
    answer_regex: str | None = None,
) -> HeldoutSums:
    """Sample from the student at temperature 1, compare every next-token distribution, and grade greedy answers.

    Args:
        student: sampled from and measured.
        teacher: what it is compared with.
        rows: prompts; those with an answer are also completed greedily.
        rollouts: gives max_new_tokens and the tokenizer; its temperature and top_p are not used.
        batch_size: prompts at a time.
        seed: of the samples; batch i uses seed + i.
        answer_regex: see `extract_answer`.
    """
    sampled = replace(rollouts, temperature=1.0, top_p=1.0)
    greedy = replace(rollouts, temperature=0.0)
    eos_token_ids = stop_token_ids(student.model, rollouts.tokenizer)
    was_training = student.model.training
    student.model.eval()
    total = torch.zeros(len(HeldoutSums._fields), dtype=torch.float64)
    for index, start in enumerate(range(0, len(rows), batch_size)):
        part = rows[start : start + batch_size]
        completions = sampled(student.model, part, seed=seed + index)
        batch = batch_for(student.model, rollouts.tokenizer, part, completions)
        logits = teacher.logits(as_teacher_reads(batch))
        sums = divergence_sums(student.logits(batch), student.transform, logits, teacher.transform)
        graded = [row for row in part if row["answer"] is not None]
        right = 0
        if graded:
            texts = rollouts.tokenizer.batch_decode(greedy(student.model, graded, seed=seed), skip_special_tokens=True)
            right = sum(
                extract_answer(text, answer_regex) == extract_answer(row["answer"] or "", answer_regex)
                for text, row in zip(texts, graded, strict=True)
            )
        truncated = count_truncated(completions, eos_token_ids)
        counts = [len(completions), truncated, len(graded), right]
        total += torch.tensor([len(batch["scored_rows"]), *sums, *counts], dtype=torch.float64)
    student.model.train(was_training)
    return HeldoutSums(*total.tolist())


def divergence_sums(
    student: LinearLogits, student_transform: LogitTransform, teacher: LinearLogits, teacher_transform: LogitTransform
) -> list[float]:
    """Sums over rows: KL(teacher || student), entropy of the student, entropy of the teacher, in nats.

    Exact, over the whole vocabulary, which is met in tiles of rows.
    """
    kl = full_vocab_distillation_loss(
        student, teacher, student_transform=student_transform, teacher_transform=teacher_transform
    ).per_token
    nothing = torch.empty((*kl.shape, 0), dtype=torch.int64, device=kl.device)
    sides = ((student, student_transform), (teacher, teacher_transform))
    entropies = [coarse_logits(side, nothing, transform=transform, entropy=True).entropy for side, transform in sides]
    return [row_values.sum().item() for row_values in (kl, *entropies)]


def extract_answer(text: str, answer_regex: str | None) -> str:
    """Group 1 of the regex's last match, stripped; without a regex or a match the whole text, stripped."""
    matches = list(re.finditer(answer_regex, text)) if answer_regex else []
    return (matches[-1].group(1) if matches else text).strip()
