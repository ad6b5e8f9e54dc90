"""Students: pruned copies, fresh models and those from GGUF files are ordinary models."""

import copy
import json

import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, GPT2Config, SmolLM3Config

from potstill.train import load_recipe, run
from potstill.train.models import build_student, kept_layers, load_model, located, prune_layers
from potstill.train.recipe import PACKAGED, Prune, Student
from train_fixtures import make_model, write_recipe

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


# -- models by name -----------------------------------------------------------------------------------------------

GGUF_NAMES = {
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    **{"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
}


def write_gguf(path, model):
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    letters = [chr(ord("a") + index) for index in range(config.vocab_size - 4)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<pad>", "<bos>", "<|endoftext|>", *letters, "ab"])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    for name, weight in model.state_dict().items():
        name = name.removesuffix(".weight")
        block = ""
        if name.startswith("model.layers."):
            index, name = name.removeprefix("model.layers.").split(".", maxsplit=1)
            block = f"blk.{index}."
        if name in ("self_attn.q_proj", "self_attn.k_proj"):  # llama.cpp pairs rotary dimensions in another order
            heads = weight.view(config.num_attention_heads, 2, -1, config.hidden_size)
            weight = heads.transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(f"{block}{GGUF_NAMES[name]}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_a_student_and_a_teacher(tmp_path):
    recipe_file = write_recipe(tmp_path)
    model, path = make_model(), tmp_path / "tiny.gguf"
    write_gguf(path, model)
    ids = torch.tensor([[1, 4, 5, 6]])
    assert torch.equal(load_model(str(path), "float32")(ids).logits, model(ids).logits)
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "abc"}) + "\n")
    names = [f"student={path}", f"teacher={path}", "data.heldout=", "training.learning_rate=0"]
    result = run(load_recipe(recipe_file, names))
    saved = AutoModelForCausalLM.from_pretrained(result.folder)
    assert torch.equal(saved(ids).logits, model(ids).logits)
    assert AutoTokenizer.from_pretrained(result.folder)("abc").input_ids == [21, 5]


def test_where_models_are_found(tmp_path):
    assert located("org/name") == {"pretrained_model_name_or_path": "org/name"}
    assert located("org/name/x.gguf") == {"pretrained_model_name_or_path": "org/name", "gguf_file": "x.gguf"}
    assert load_model(PACKAGED, "auto").config.model_type == "llama"
    with pytest.raises(ValueError, match=f"the folder {tmp_path} has no config.json; expected a model"):
        located(str(tmp_path))
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"the folder {tmp_path} has no tokenizer; save the model's there too"):
        located(str(tmp_path))
    with pytest.raises(ValueError, match=f"the folder {tmp_path} has no x.gguf"):
        located(f"{tmp_path}/x.gguf")
    for name in ("/no/where", "./none", "a/b/c"):
        with pytest.raises(ValueError, match=f"there is no folder {name}; expected one with a model, or an id on"):
            located(name)
