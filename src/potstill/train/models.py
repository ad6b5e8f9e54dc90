"""Models: found by name, and the student made from what the recipe says: loaded, pruned, fresh or with an adapter."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, PreTrainedConfig, PreTrainedModel

from potstill.train.recipe import GGUF, PACKAGED, Lora, Student


def located(model: str) -> dict[str, str]:
    """The arguments with which `from_pretrained` finds a hub id, a folder, a GGUF file in either, or the packaged one.

    Raises:
        ValueError: the name is that of a folder or file which does not exist or holds no model.
    """
    if model == PACKAGED:
        return {"pretrained_model_name_or_path": str(Path(__file__).parent.parent / "arithmetic" / "teacher")}
    folder, _, file = model.rpartition("/") if model.endswith(GGUF) else (model, "", "")
    folder, needed = folder or ".", file or "config.json"
    if Path(folder).is_dir():
        if not (Path(folder) / needed).is_file():
            raise ValueError(f"the folder {folder} has no {needed}; expected a model that save_pretrained wrote")
        if not file and not any((*Path(folder).glob("tokenizer*"), *Path(folder).glob("vocab*"))):
            raise ValueError(f"the folder {folder} has no tokenizer; save the model's there too, with save_pretrained")
    elif Path(folder).is_absolute() or folder.startswith((".", "~")) or folder.count("/") > 1:
        raise ValueError(f"there is no folder {folder}; expected one with a model, or an id on the hub")
    return {"pretrained_model_name_or_path": folder} | ({"gguf_file": file} if file else {})


def load_model(model: str, dtype: str) -> PreTrainedModel:
    """Load a causal language model; weights from a GGUF file become ordinary ones.

    Raises:
        OSError, ValueError, ImportError: it cannot be found or read.
    """
    if not model.endswith(GGUF):
        return AutoModelForCausalLM.from_pretrained(**located(model), dtype=dtype)
    loaded = AutoModelForCausalLM.from_pretrained(
        **located(model), dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    )
    # transformers neither trains nor saves what it knows as quantised: the same weights in a model of their own.
    config = copy.deepcopy(loaded.config)
    vars(config).pop("quantization_config", None)  # a file of floats has none
    plain = AutoModelForCausalLM.from_config(config, dtype=loaded.dtype)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    return plain


def build_student(spec: Student, teacher: PreTrainedModel | None) -> PreTrainedModel:
    """Load or make the student; a fresh one, and an adapter, is drawn from torch's global generator.

    Args:
        spec: what the recipe says.
        teacher: needed for `prune` and `config`.

    Raises:
        OSError, ValueError, ImportError: the model cannot be loaded, the layers cannot be kept, or the adapter does
            not fit.
    """
    if spec.model is not None:
        model = load_model(spec.model, spec.dtype)
        return model if spec.lora is None else add_adapter(model, spec.lora)
    assert teacher is not None
    dtype = teacher.dtype if spec.dtype == "auto" else getattr(torch, spec.dtype)
    if spec.prune is not None:
        return prune_layers(teacher, kept_layers(spec.prune.layers, teacher.config), dtype)
    assert spec.config is not None
    fields: dict[str, Any] = dict(spec.config)
    ours = teacher.config
    specials = {name: getattr(ours, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(fields.pop("model_type"), vocab_size=ours.vocab_size, **specials, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config = copy.deepcopy(teacher.generation_config)  # it may name more ends than the config
    return model


def add_adapter(model: PreTrainedModel, spec: Lora) -> PreTrainedModel:
    """A PeftModel around the model: its own weights are frozen, and low-rank terms beside them are trained.

    Raises:
        ImportError: peft is not installed.
        ValueError: no layer is of that name, or the head is among them, whose extra term the loss would not see.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError:
        raise ImportError("lora needs peft: pip install 'potstill[lora]'") from None
    config = LoraConfig(
        r=spec.r, lora_alpha=spec.alpha, target_modules=spec.target_modules, bias="none", task_type="CAUSAL_LM"
    )
    head = model.get_output_embeddings()
    adapted = get_peft_model(model, config)
    if adapted.get_output_embeddings() is not head:
        raise ValueError(
            f"lora.target_modules {spec.target_modules!r} include the head, whose adapter the loss would not see; "
            "leave it out, or merge an adapter on the head into its weight first"
        )
    return adapted  # type: ignore[return-value]  # it forwards what a PreTrainedModel has


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
