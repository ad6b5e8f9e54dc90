"""Students: pruned copies and fresh models are ordinary models."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, SmolLM3Config

from potstill.train.models import build_student, kept_layers, prune_layers
from potstill.train.recipe import Prune, Student
from train_fixtures import make_model

TINY = {"vocab_size": 22, "num_hidden_layers": 6, "num_attention_heads": 2, "hidden_size": 16}
CONFIGS = {
    "gpt2": lambda: GPT2Config(**TINY, max_position_embeddings=16),  # layers called h, n_layer
    "gemma3_text": lambda: Gemma3TextConfig(  # layer_types: the sixth layer attends globally
        **TINY, num_key_value_heads=2, head_dim=8, intermediate_size=16, sliding_window=2, pad_token_id=0
    ),
    "smollm3": lambda: SmolLM3Config(  # no_rope_layers: the fourth layer has no rotary embedding
        **TINY, num_key_value_heads=2, intermediate_size=16, pad_token_id=0, bos_token_id=1, eos_token_id=2
    ),
}


@pytest.mark.parametrize("family", ["llama", *CONFIGS])
def test_a_pruned_copy_computes_with_the_kept_layers_and_reloads(family, tmp_path):
    torch.manual_seed(0)
    model = make_model(layers=6) if family == "llama" else AutoModelForCausalLM.from_config(CONFIGS[family]())
    model.eval()
    model.generation_config.eos_token_id = [2, 3]
    keep = [0, 3, 5]
    pruned = prune_layers(model, keep, torch.float32).eval()
    assert pruned.config.num_hidden_layers == 3 and model.config.num_hidden_layers == 6
    assert pruned.generation_config.eos_token_id == [2, 3]
    ids = torch.tensor([[1, 4, 5, 6, 7, 8]])
    own = pruned(ids).logits
    # The original with its other layers made the identity: they return what they were given.
    skipping = copy.deepcopy(model)
    stack = skipping.transformer.h if family == "gpt2" else skipping.model.layers
    for index, layer in enumerate(stack):
        if index not in keep:
            layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
    torch.testing.assert_close(own, skipping(ids, use_cache=False).logits, rtol=1e-5, atol=1e-6)
    pruned.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, own)
    assert next(pruned.parameters()).data_ptr() != next(model.parameters()).data_ptr()


def test_kept_layers():
    config = make_model(layers=6).config
    assert kept_layers(6, config) == [0, 1, 2, 3, 4, 5]
    assert kept_layers(3, config) == [0, 2, 5]
    assert kept_layers(2, config) == [0, 5]
    assert kept_layers(1, config) == [0]
    assert kept_layers([1, 4], config) == [1, 4]
    for layers in (0, 7, [], [4, 1], [1, 1], [-1], [6]):
        with pytest.raises(ValueError, match=r"prune\.layers is"):
            kept_layers(layers, config)


def test_a_fresh_student_takes_vocabulary_and_special_tokens_from_the_teacher():
    teacher = make_model(layers=2, eos_token_id=[2, 3])
    fresh = build_student(Student(config={"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8}), teacher)
    assert fresh.config.model_type == "gpt2"
    assert fresh.lm_head.weight.shape == (22, 8)
    assert (fresh.config.bos_token_id, fresh.config.eos_token_id, fresh.config.pad_token_id) == (1, [2, 3], 0)
    assert fresh.generation_config.eos_token_id == [2, 3]


@pytest.mark.parametrize("dtype, expected", [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_dtype_of_the_student(dtype, expected):
    teacher = make_model().to(torch.bfloat16)
    assert build_student(Student(prune=Prune(1), dtype=dtype), teacher).dtype == expected
