"""A `distillation_loss` block of a verl 0.9.1 configuration, in the words of our `loss` section.

    distillation_loss:          loss:
      loss_mode: forward_kl_topk   {divergence: forward_kl, tail: drop, loss_min_clamp: 0.0}: verl's floor
                 forward_kl_topk_tail   {divergence: forward_kl, tail: bucket}
                 k1, kl            {estimator: k1}
                 k2, mse           {estimator: k2}
                 k3, low_var_kl    {estimator: k3, loss_max_clamp: 10 at most}: where verl's k3 stops
                 abs               {estimator: abs}
      topk: 64                     top_k: 64, in the two top-k modes
      loss_max_clamp: 10.0         the same
      log_prob_min_clamp: -10.0    the same, for forward_kl_topk; verl ignores it in the estimators
      use_policy_gradient: true    policy_gradient: true, and clip_ratio_low and clip_ratio_high the same
      chunked_topk_chunk_size: 512 chunk_size: 512, with use_chunked_topk: true

What a block leaves out has the value of verl's YAML, from which every run of verl starts (its Python class has other
defaults), in all but two places: use_task_rewards is false, since there is no reward loop here, and rows always meet
the vocabulary in chunks, of a size that comes from a budget of bytes where none is given.
"""

from dataclasses import dataclass
from typing import Any, Literal

from potstill.train.strict import RecipeError, build, nearest

TOP_K_MODES = {"forward_kl_topk": "drop", "forward_kl_topk_tail": "bucket"}  # and the tail of each
ESTIMATOR_MODES = {
    **{"k1": "k1", "kl": "k1", "k2": "k2", "mse": "k2"},
    **{"k3": "k3", "low_var_kl": "k3", "abs": "abs"},
}
K3_MAX = 10.0


@dataclass(frozen=True)
class DistillationLoss:
    """verl's keys, with the defaults that hold here."""

    _target_: str = ""
    loss_mode: str = "k3"
    topk: int = 32
    use_task_rewards: bool = False
    distillation_loss_coef: float = 1.0
    loss_max_clamp: float | None = None
    log_prob_min_clamp: float | None = None
    tail_mass_eps: float | None = None
    use_chunked_topk: bool = True
    chunked_topk_chunk_size: int | None = None
    use_policy_gradient: bool = False
    policy_loss_mode: Literal["vanilla"] = "vanilla"
    clip_ratio: float = 0.2
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2


def loss_section(block: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The `loss` section that a `distillation_loss` block means, and what is to be said about it.

    Raises:
        RecipeError: an unknown key or loss_mode, with the nearest known one; a value of another type or out of
            range; a pair of settings without a meaning, naming both.
    """
    prefix = "distillation_loss."
    # verl reads clip_ratio only where the other two are null.
    sides = {side for side in ("clip_ratio_low", "clip_ratio_high") if side in block and block[side] is None}
    given = build(DistillationLoss, block | dict.fromkeys(sides, block.get("clip_ratio")), prefix)
    mode = given.loss_mode
    if mode not in {**TOP_K_MODES, **ESTIMATOR_MODES}:
        raise RecipeError(f"{prefix}loss_mode is {mode!r}; {nearest(mode, [*TOP_K_MODES, *ESTIMATOR_MODES])}")
    if given.use_task_rewards:
        raise RecipeError(f"{prefix}use_task_rewards is true, but there is no reward loop here; set it to false")
    if given.tail_mass_eps is not None and not 0 < given.tail_mass_eps < 1:
        raise RecipeError(f"{prefix}tail_mass_eps is {given.tail_mass_eps:g}; expected a number between 0 and 1")
    notes = []
    if block.get("use_chunked_topk") is False:
        notes.append("use_chunked_topk: false has no effect: rows always meet the vocabulary in chunks, exactly")
    if given.tail_mass_eps is not None:
        notes.append("tail_mass_eps has no effect: the mass of the tail is exact and needs none")
    if given.distillation_loss_coef != 1:
        notes.append("distillation_loss_coef has no effect without task rewards, as in verl")

    shared = {"loss_max_clamp": given.loss_max_clamp}
    if given.use_chunked_topk:
        shared["chunk_size"] = given.chunked_topk_chunk_size
    if mode in TOP_K_MODES:
        if given.use_policy_gradient:
            raise RecipeError(
                f"{prefix}loss_mode {mode} with use_policy_gradient: true would use one number of each teacher's row; "
                "set use_policy_gradient to false, or loss_mode to k1"
            )
        if mode == "forward_kl_topk_tail" and given.log_prob_min_clamp is not None:
            raise RecipeError(
                f"{prefix}log_prob_min_clamp changes the masses that loss_mode {mode} accounts for; set "
                "log_prob_min_clamp to null, or loss_mode to forward_kl_topk"
            )
        section = {"divergence": "forward_kl", "tail": TOP_K_MODES[mode], "top_k": given.topk, **shared}
        if mode == "forward_kl_topk":
            section |= {"log_prob_min_clamp": given.log_prob_min_clamp, "loss_min_clamp": 0.0}
        return section, notes

    estimator = ESTIMATOR_MODES[mode]
    if estimator == "k1" and not given.use_policy_gradient:
        raise RecipeError(
            f"{prefix}loss_mode {mode} with use_policy_gradient: false has no learning signal (its gradient has mean "
            "zero); set use_policy_gradient to true, or loss_mode to k2, which has the same aim"
        )
    if given.log_prob_min_clamp is not None:
        notes.append(f"log_prob_min_clamp has no effect on loss_mode {mode}, as in verl")
    if estimator == "k3":
        shared["loss_max_clamp"] = K3_MAX if given.loss_max_clamp is None else min(given.loss_max_clamp, K3_MAX)
    section = {"estimator": estimator, "policy_gradient": given.use_policy_gradient, **shared}
    if given.use_policy_gradient:
        section |= {"clip_ratio_low": given.clip_ratio_low, "clip_ratio_high": given.clip_ratio_high}
    return section, notes
