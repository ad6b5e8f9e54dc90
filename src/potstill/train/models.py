"""The student, made from what the recipe says: loaded, pruned from the teacher, or fresh."""

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from potstill.train.recipe import Student


def build_student(spec: Student, teacher: PreTrainedModel) -> PreTrainedModel:
    """Load or make the student; a fresh one is drawn from torch's global generator.

    Raises:
        OSError, ValueError: the model cannot be loaded or the layers cannot be kept.
    """
    if spec.model is not None:
        return AutoModelForCausalLM.from_pretrained(spec.model, dtype=spec.dtype)
    dtype = teacher.dtype if spec.dtype == "auto" else getattr(torch, spec.dtype)
    if spec.prune is not None:
        return prune_layers(teacher, kept_layers(spec.prune.layers, teacher.config), dtype)
    assert spec.config is not None
    fields: dict[str, Any] = dict(spec.config)
    ours = teacher.config
    specials = {name: getattr(ours, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(fields.pop("model_type"), vocab_size=ours.vocab_size, **specials, **fields)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def kept_layers(layers: int | list[int], config: PreTrainedConfig) -> list[int]:
    """Indices of the layers to keep: the given ones, or so many, evenly spaced from the first to the last.

    Raises:
        ValueError: more layers than there are, none, or indices that are not ascending within the model.
    """
    total = config.num_hidden_layers
    if isinstance(layers, int):
        if not 1 <= layers <= total:
            raise ValueError(f"prune.layers is {layers}; the teacher has {total} layers to keep from")
        return [round(i * (total - 1) / max(layers - 1, 1)) for i in range(layers)]
    if not layers or layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= total:
        raise ValueError(f"prune.layers is {layers}; expected ascending indices from 0 to {total - 1}")
    return layers


def prune_layers(model: PreTrainedModel, layers: list[int], dtype: torch.dtype) -> PreTrainedModel:
    """A copy of the model with these layers alone.

    The copy is a new model of a smaller configuration with the weights renamed, so that it is an ordinary one:
    layer indices, per-layer settings and the saved folder all agree.
    """
    config, total = copy.deepcopy(model.config), model.config.num_hidden_layers
    for name, value in config.to_dict().items():
        if "layer" in name and isinstance(value, list) and len(value) == total:  # layer_types, no_rope_layers, ...
            setattr(config, name, [value[index] for index in layers])
    config.num_hidden_layers = len(layers)
    pruned = AutoModelForCausalLM.from_config(config, dtype=dtype)
    stack = next(
        name for name, part in model.named_modules() if isinstance(part, torch.nn.ModuleList) and len(part) == total
    )
    position = {str(index): str(new) for new, index in enumerate(layers)}
    state = {}
    for key, value in model.state_dict().items():
        if key.startswith(f"{stack}."):
            index, rest = key.removeprefix(f"{stack}.").split(".", maxsplit=1)
            if index not in position:
                continue
            key = f"{stack}.{position[index]}.{rest}"
        state[key] = value
    pruned.load_state_dict(state)
    pruned.generation_config = copy.deepcopy(model.generation_config)
    return pruned
