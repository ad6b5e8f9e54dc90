"""A teacher in the same process: a transformers model that meets its vocabulary on the scored rows only."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from potstill import LinearLogits, LogitTransform, PotstillHead, TeacherTopK


class LocalTeacher:
    """Scores batches with a frozen model.

    Args:
        model: put in eval mode and frozen, in place; its head is replaced by a PotstillHead on the same weight.
        top_k: the number of tokens of each row that are kept, with their log-probabilities and the exact rest.
        transform: what the model does to its logits (see `potstill.train.families.logit_transform`).

    Raises:
        TypeError: the head is no plain linear layer.
        ValueError: `top_k` exceeds the vocabulary.
    """

    def __init__(self, model: PreTrainedModel, top_k: int, transform: LogitTransform | None = None):
        width = model.get_output_embeddings().weight.shape[0]
        if not 1 <= top_k <= width:
            raise ValueError(f"top_k is {top_k}; expected 1 to {width}, the teacher's vocabulary")
        self.model = model.eval().requires_grad_(False)
        self.top_k = top_k
        self.transform = transform
        self.head = PotstillHead.install(model)

    def __call__(self, batch: Mapping[str, Tensor]) -> TeacherTopK:
        """Top-k log-probabilities [N, K] and rest [N] of the batch's N scored rows, without a gradient."""
        logits = scored_logits(self.model, self.head, batch)
        return TeacherTopK.from_logits(logits, self.top_k, transform=self.transform)


@torch.no_grad()
def scored_logits(model: PreTrainedModel, head: PotstillHead, batch: Mapping[str, Tensor]) -> LinearLogits:
    """The scored rows' hidden states [N, H] with the head's weight: logits [N, V] that are not formed.

    Args:
        model: a model with `head` in its lm_head slot.
        head: the installed head.
        batch: see `potstill.train.batch.Batch`, on the model's device.
    """
    scored: list[LinearLogits] = []

    def keep(logits: LinearLogits) -> Tensor:
        scored.append(scored_part(logits, batch))
        return logits.hidden.new_zeros(())

    with head.scoring(keep):
        outputs = model(**model_inputs(batch))
    head.loss_after(outputs.logits)
    return scored[0]


def scored_part(logits: LinearLogits, batch: Mapping[str, Tensor]) -> LinearLogits:
    """The rows of [B, S, H] hidden states that the batch scores, as [N, H]."""
    hidden, weight, bias = logits
    return LinearLogits(hidden.flatten(0, 1)[batch["scored_rows"]], weight, bias)


def model_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor | bool]:
    """The arguments of a forward over a batch; there is nothing to cache, every token is there."""
    names = ("input_ids", "attention_mask", "position_ids")
    return {**{name: batch[name] for name in names}, "use_cache": False}


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
