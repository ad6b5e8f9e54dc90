"""Completions sampled by transformers' own `generate`, from exactly the distribution that was asked for."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.random import fork_rng
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from potstill.rollouts.dataset import PromptRow


@dataclass(frozen=True)
class TransformersRollouts:
    """Sample one completion per prompt, in left-padded batches of prompts of similar lengths, with a key-value cache.

    Args:
        tokenizer: names the padding and, together with the model's generation_config, the EOS tokens.
        max_new_tokens: a completion that reaches it ends without EOS.
        temperature: above 0; or 0 for greedy decoding.
        top_p: nucleus sampling; 1.0 samples from every token.
        vocab_size: the number of real tokens, where the model's head is padded to more; None: it is not.
        batch_size: prompts in one call of `generate`; None: all of them. Fewer need less memory and less padding.

    Raises:
        ValueError: a value out of its range.
    """

    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    vocab_size: int | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be > 0, or 0 for greedy decoding, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}; 1.0 samples from every token")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, or None for all prompts at once, got {self.batch_size}")

    def __call__(self, model: PreTrainedModel, rows: Sequence[PromptRow], *, seed: int) -> list[list[int]]:
        """Complete the prompts.

        Args:
            model: put in eval mode for the time being, and back.
            rows: prompts of at least one token each.
            seed: with the same rows it gives the same samples; the global generators are left as they were.

        Returns:
            Token ids per prompt, without the prompt; the first EOS, where there is one, is the last of them.

        Raises:
            FloatingPointError: on a CPU, the model's logits are not finite, so that nothing can be sampled.
        """
        prompts = [row["prompt_ids"] for row in rows]
        eos_token_ids = stop_token_ids(model, self.tokenizer)
        pad_token_id = pad_id(self.tokenizer, eos_token_ids)
        width = model.get_output_embeddings().weight.shape[0]
        sampling: dict[str, Any] = {"do_sample": False}
        if self.temperature > 0:
            sampling = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        config = GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            use_cache=True,
            eos_token_id=eos_token_ids,
            pad_token_id=pad_token_id,
            suppress_tokens=list(range(self.vocab_size or width, width)) or None,
            **sampling,
        )
        completions: dict[int, list[int]] = {}
        device = model.device
        forked = fork_rng([]) if device.type == "cpu" else fork_rng([device], device_type=device.type)
        # `generate` takes what a config leaves open, such as a repetition penalty, from the model's own.
        own_config, was_training = model.generation_config, model.training
        model.generation_config = config
        model.eval()
        try:
            with torch.no_grad(), forked:
                torch.manual_seed(seed)
                # The longest come first: what fits them fits all others.
                order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]), reverse=True)
                for start in range(0, len(order), self.batch_size or len(order)):
                    part = order[start : start + (self.batch_size or len(order))]
                    length = len(prompts[part[0]])
                    padding = [length - len(prompts[index]) for index in part]
                    ids = [[pad_token_id] * n + prompts[index] for n, index in zip(padding, part, strict=True)]
                    output = model.generate(  # type: ignore[operator]
                        input_ids=torch.tensor(ids, device=device),
                        attention_mask=torch.tensor([[0] * n + [1] * (length - n) for n in padding], device=device),
                        generation_config=config,
                    )
                    for index, completion in zip(part, output[:, length:].tolist(), strict=True):
                        completions[index] = cut_after_eos(completion, eos_token_ids)
        except RuntimeError as error:
            if "probability tensor contains" not in str(error):
                raise
            raise FloatingPointError(
                "the student's logits are not finite, so that nothing can be sampled from them: its weights are "
                "broken, or training has diverged. Lower training.learning_rate, and go on from an earlier checkpoint"
            ) from error
        finally:
            model.generation_config = own_config
            model.train(was_training)
        return [completions[index] for index in range(len(prompts))]


def cut_after_eos(token_ids: Sequence[int], eos_token_ids: Collection[int]) -> list[int]:
    """Keep a completion up to its first EOS, that one included: after it there is padding, whatever its id."""
    for position, token_id in enumerate(token_ids):
        if token_id in eos_token_ids:
            return list(token_ids[: position + 1])
    return list(token_ids)


def count_truncated(completions: Sequence[Sequence[int]], eos_token_ids: Collection[int]) -> int:
    """How many completions came to no end: the last of their tokens is no EOS."""
    return sum(bool(completion) and completion[-1] not in eos_token_ids for completion in completions)


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a completion: those of the model's generation_config, which may be several, and the
    tokenizer's.

    Raises:
        ValueError: neither names one.
    """
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise ValueError("neither the tokenizer nor generation_config has an EOS token; set tokenizer.eos_token")
    return ids


def pad_id(tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]) -> int:
    """The id to fill batches with: the tokenizer's padding token, or an EOS where it has none."""
    return eos_token_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
