"""Build the packaged teacher of the arithmetic recipe: `python -m potstill.arithmetic.build OUT`.

A small Llama-type model learns the task's own answers in a fixed number of steps, from one seed and on one
thread, so that one machine with one set of library versions writes the same bytes every time.
"""

import argparse
import hashlib
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from potstill.arithmetic.task import problems, tokenizer

SHA256 = "9d94facb2514ea8e51f1d79387261cb0af94d6a0ff77218f424d041102979db9"  # of the packaged model.safetensors
STEPS = 800
_BATCH_SIZE = 64
_LEARNING_RATE = 3e-3  # at its peak
_WARMUP_STEPS = 50


def build(out: Path, steps: int = STEPS) -> str:
    """Train the teacher and write it as a Hugging Face folder: config, float32 weights, tokenizer.

    Sets torch to one thread and reseeds its global generator.

    Args:
        out: the folder to write.
        steps: optimiser steps of 64 problems each; the learning rate decays to zero over them.

    Returns:
        The SHA-256 of `model.safetensors`.
    """
    torch.set_num_threads(1)  # the order of every sum, and so the last bit, depends on the number of threads
    torch.manual_seed(0)
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98))
    rise_and_fall = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / _WARMUP_STEPS, 1 - step / steps)
    )
    for step in range(steps):
        loss = _loss(model, words, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rise_and_fall.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}/{steps}  loss {loss.item():.3f}", flush=True)
    model.save_pretrained(out)
    words.save_pretrained(out)
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def _loss(model: LlamaForCausalLM, words: PreTrainedTokenizerFast, seed: int) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens, `<eos>` included; prompts are not scored."""
    texts = [f"{p['prompt']} {p['answer']} <eos>" for p in problems("train", _BATCH_SIZE, seed)]
    ids = words(texts, padding=True, padding_side="right", return_tensors="pt").input_ids
    answering = (ids == words.convert_tokens_to_ids("?")).cumsum(1).bool()  # from the question mark on
    scored = answering[:, :-1] & (ids[:, 1:] != words.pad_token_id)
    hidden = model.model(ids).last_hidden_state[:, :-1][scored]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][scored])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Rebuild the packaged teacher of the arithmetic recipe.")
    parser.add_argument("out", type=Path, help="folder to write")
    print(build(parser.parse_args().out), "model.safetensors")
