"""Teachers in the same process: transformers models that meet their vocabulary on the scored rows only."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from potstill import LinearLogits, LogitTransform, PotstillHead, SampledTargets, TeacherTopK

AVERAGE_FILE = "teacher.safetensors"


class ScoredModel:
    """A causal language model that meets its vocabulary on the scored rows of a batch only.

    Args:
        model: its head is replaced by a PotstillHead on the same weight.
        transform: what the model does to its logits (see `potstill.train.families.logit_transform`).

    Raises:
        TypeError: the head is no plain linear layer.
    """

    def __init__(self, model: PreTrainedModel, transform: LogitTransform):
        self.model = model
        self.transform = transform
        self.head = PotstillHead.install(model)

    @torch.no_grad()
    def logits(self, batch: Mapping[str, Any]) -> LinearLogits:
        """The scored rows' hidden states [N, H] with the head's weight: logits [N, V] that are not formed."""
        scored: list[LinearLogits] = []

        def keep(logits: LinearLogits) -> Tensor:
            scored.append(scored_part(logits, batch))
            return logits.hidden.new_zeros(())

        with self.head.scoring(keep):
            outputs = self.model(**model_inputs(batch))
        self.head.loss_after(outputs.logits)
        return scored[0]


class LocalTeacher(ScoredModel):
    """A frozen ScoredModel that gives the top-k rows of batches, or the sampled tokens' log-probabilities.

    Args:
        model: put in eval mode and frozen, in place.
        transform: what the model does to its logits.
        top_k: how many tokens of each row are kept, with their log-probabilities and the exact rest. None: the one
            token that the batch has there, for losses on the sampled token.
        temperature: of the distributions that are given.
        targets: "top_k", or a method of SampledTargets.from_logits, which draws from torch's global generator.

    Raises:
        TypeError: the head is no plain linear layer.
        ValueError: `top_k` exceeds the vocabulary.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        transform: LogitTransform,
        top_k: int | None,
        temperature: float = 1.0,
        targets: str = "top_k",
    ):
        super().__init__(self._prepared(model), transform)
        width = transform.vocab_size or self.head.out_features
        if top_k is not None and not 1 <= top_k <= width:
            raise ValueError(f"top_k is {top_k}; expected 1 to {width}, the teacher's vocabulary")
        self.top_k = top_k
        self.temperature = temperature
        self.targets = targets

    @staticmethod
    def _prepared(model: PreTrainedModel) -> PreTrainedModel:
        return model.eval().requires_grad_(False)

    def __call__(self, batch: Mapping[str, Any]) -> TeacherTopK | SampledTargets:
        """Log-probabilities [N, K] and rest [N] of the batch's N scored rows, or weights, without a gradient."""
        if self.targets != "top_k":
            assert self.top_k is not None
            return SampledTargets.from_logits(
                self.logits(batch),
                self.top_k,
                method=self.targets,
                temperature=self.temperature,
                transform=self.transform,
            )
        token_ids = batch["target_ids"].unsqueeze(1) if self.top_k is None else None
        return TeacherTopK.from_logits(
            self.logits(batch),
            self.top_k,
            token_ids=token_ids,
            temperature=self.temperature,
            transform=self.transform,
        )


class OwnBase(LocalTeacher):
    """The base of a student with an adapter (PEFT) as its teacher: one model in memory, left as it is.

    Args:
        model: the student. Its adapter is switched off while it scores.
        transform, top_k, temperature, targets: see LocalTeacher.
    """

    @staticmethod
    def _prepared(model: PreTrainedModel) -> PreTrainedModel:
        return model

    def logits(self, batch: Mapping[str, Any]) -> LinearLogits:
        """As the base has them: the scored rows' hidden states [N, H] with the head's weight."""
        was_training = self.model.training
        self.model.eval()
        with self.model.disable_adapter():  # type: ignore[operator]
            logits = super().logits(batch)
        self.model.train(was_training)
        return logits


class MovingAverage(LocalTeacher):
    """A moving average of the student's weights as its teacher: a copy of it, which follows at every `update`.

    The student of s updates ago makes up (1 - rate) * rate^s of the average: half of it is younger than
    ln 2 / (1 - rate) updates, 69 at a rate of 0.99.

    Args:
        model: the student, of which a copy is made.
        transform, top_k, temperature, targets: see LocalTeacher.
        rate: of the old average in the new one, 0 (the student itself) to below 1.

    Source: Tarvainen and Valpola (2017), Mean teachers are better role models, arXiv:1703.01780.
    """

    def __init__(
        self, model: PreTrainedModel, transform: LogitTransform, *args: Any, rate: float, **kwargs: Any
    ) -> None:
        if not 0 <= rate < 1:
            raise ValueError(f"rate is {rate}; expected 0 to below 1, such as 0.99")
        super().__init__(copy.deepcopy(model), transform, *args, **kwargs)
        self.rate = rate

    @torch.no_grad()
    def update(self, student: PreTrainedModel) -> None:
        """average = rate * average + (1 - rate) * student, after an optimiser step."""
        for average, current in zip(self.model.parameters(), student.parameters(), strict=True):
            average.lerp_(current, 1 - self.rate)

    def save(self, folder: Path) -> None:
        """Write the average beside the student of a checkpoint."""
        save_model(self.model, str(folder / AVERAGE_FILE))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote.

        Raises:
            OSError: there is no such file.
        """
        load_model(self.model, folder / AVERAGE_FILE)


def scored_part(logits: LinearLogits, batch: Mapping[str, Any]) -> LinearLogits:
    """The rows of [B, S, H] hidden states that the batch scores, as [N, H]."""
    hidden, weight, bias = logits
    return LinearLogits(hidden.flatten(0, 1)[batch["scored_rows"]], weight, bias)


def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward over a batch (see `potstill.train.batch.Batch`), which has nothing to cache."""
    return {**{name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}, "use_cache": False}


def check_same_tokenizer(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
    """Compare two tokenizers by their token -> id maps: equal sizes mean nothing.

    Raises:
        ValueError: naming the first difference, in order of ids.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if differing := set(ours.items()) ^ set(theirs.items()):
        token, _ = min(differing, key=lambda item: (item[1], item[0]))
        raise ValueError(
            f"the tokenizers differ: token {token!r} has id {ours.get(token)} in the student and "
            f"{theirs.get(token)} in the teacher; choose a student that has the teacher's tokenizer"
        )
