"""What each model family does to its logits after the head, read from the configuration: one table.

The head hands out hidden states, so that code which follows it in a model's forward does not run; the loss
applies the same scale and softcap itself. A family is listed here after its forward was read and a tiny model of
it passed `test_families`: the loss through the head equals the loss on the model's own logits.
"""

from collections.abc import Callable

from transformers import PretrainedConfig

from potstill import LogitTransform


def _plain(config: PretrainedConfig) -> LogitTransform:
    return LogitTransform()


def _softcapped(config: PretrainedConfig) -> LogitTransform:
    return LogitTransform(softcap=config.final_logit_softcapping)


def _granite(config: PretrainedConfig) -> LogitTransform:
    return LogitTransform(scale=1 / config.logits_scaling)  # a divisor, in spite of its name


def _cohere(config: PretrainedConfig) -> LogitTransform:
    return LogitTransform(scale=config.logit_scale)


def _falcon_h1(config: PretrainedConfig) -> LogitTransform:
    return LogitTransform(scale=config.lm_head_multiplier)


FAMILIES: dict[str, Callable[[PretrainedConfig], LogitTransform]] = {
    **dict.fromkeys(
        (
            *("apertus", "arcee", "ernie4_5", "exaone4", "gemma", "glm", "glm4", "gpt2", "gpt_neox", "gpt_oss"),
            *("helium", "hunyuan_v1_dense", "lfm2", "llama", "ministral", "mistral", "mixtral", "olmo", "olmo2"),
            *("olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_5_text"),
            *("seed_oss", "smollm3", "stablelm", "starcoder2"),
        ),
        _plain,
    ),
    **dict.fromkeys(("gemma2", "gemma3_text", "gemma4_text", "nanochat", "vaultgemma"), _softcapped),
    **dict.fromkeys(("granite", "granitemoe"), _granite),
    **dict.fromkeys(("cohere", "cohere2"), _cohere),
    "falcon_h1": _falcon_h1,
}


def logit_transform(config: PretrainedConfig) -> LogitTransform:
    """The scale and softcap of a model, from its configuration.

    Raises:
        ValueError: the family is not in the table; distilling it without its scale would fit other logits.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"model_type {config.model_type!r} is not in the table of families (potstill.train.families): read what "
            "its forward does after lm_head and add a line, or use one of " + ", ".join(sorted(FAMILIES))
        )
    return FAMILIES[config.model_type](config)
