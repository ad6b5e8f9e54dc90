"""Every family in the table: the loss through the head equals the loss on the model's own logits."""

from dataclasses import fields

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig

from potstill import PotstillHead, TeacherTopK, topk_distillation_loss
from potstill.train.families import FAMILIES, logit_transform

V = 97
TINY = {
    **{"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    # experts
    **{"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    **{"shared_expert_intermediate_size": 16},
    # mixers that are no attention
    **{"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    **{"mamba_chunk_size": 8, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "hidden_size_per_layer_input": 0, "global_head_dim": 16},
    # what the table is about
    **{"final_logit_softcapping": 2.0, "logits_scaling": 3.0, "logit_scale": 0.3, "lm_head_multiplier": 0.3},
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_loss_through_the_head_equals_loss_on_the_models_own_logits(family):
    config_class = CONFIG_MAPPING[family]
    known = {spec.name for spec in fields(config_class)} | set(config_class.attribute_map)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config_class(**{name: value for name, value in TINY.items() if name in known}), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # a softcap or a scale left out must be seen
    ids = torch.randint(3, V, (2, 7))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(7).expand(2, 7)}
    teacher = TeacherTopK.from_logits(torch.randn(2, 7, V) * 3, k=8)
    with torch.no_grad():
        expected = topk_distillation_loss(model(**inputs, use_cache=False).logits, teacher).loss
        head = PotstillHead.install(model)
        transform = logit_transform(model.config)
        with head.scoring(lambda logits: topk_distillation_loss(logits, teacher, transform=transform).loss):
            outputs = model(**inputs, use_cache=False)
        got = head.loss_after(outputs.logits)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_an_unknown_family_is_refused():
    config = LlamaConfig()
    config.model_type = "brand_new"
    with pytest.raises(ValueError, match=r"model_type 'brand_new' is not in the table .* add a line"):
        logit_transform(config)
