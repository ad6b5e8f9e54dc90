"""What the trainer's tests share: a word tokenizer, tiny models, prompts, and a recipe on disk."""

import json
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "<bos>", "<eos>", "<end>", *["a", "b", "c", "d", "e", "f", "g", "h"], *map(str, range(10))]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role[:1] | replace('u', 'a') }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}b{% endif %}"
)


def make_tokenizer(words=WORDS, **special) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", words.index("<bos>"))])
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", **special}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def make_model(seed: int = 0, layers: int = 2, hidden: int = 16, **config) -> LlamaForCausalLM:
    """Weights large enough that distributions differ from uniform and between seeds."""
    torch.manual_seed(seed)
    fields = {
        "vocab_size": len(WORDS),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **config,
    }
    return LlamaForCausalLM(LlamaConfig(**fields))


def write_recipe(folder: Path) -> Path:
    """A recipe that runs in a second: prune the teacher, distil, measure."""
    make_model(seed=1, layers=4).save_pretrained(folder / "teacher")
    make_tokenizer().save_pretrained(folder / "teacher")
    rows = [{"prompt": f"a {i % 10} b {i // 10} c", "answer": f"d {i % 10} e"} for i in range(24)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:16]))
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[16:]))
    recipe = {
        "student": {"prune": {"layers": 2}},
        "teacher": {"model": str(folder / "teacher")},
        "data": {"train": "train.jsonl", "heldout": "heldout.jsonl"},
        "rollout": {"max_new_tokens": 5},
        "loss": {"top_k": 4},
        "training": {
            "output_dir": str(folder / "out"),
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
            "use_cpu": True,
        },
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path
