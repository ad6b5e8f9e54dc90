"""verl 0.9.1: every divergence and tail as a `loss_mode`, on its FSDP and Megatron engines.

    export VERL_USE_EXTERNAL_MODULES=potstill.integrations.verl   # in the driver and in every worker
    python -m verl.trainer.main_ppo ... distillation.distillation_loss.loss_mode=potstill_forward_kl_bucket

verl computes a top-k loss in two places: row by row beside the logits, where the backend's forward KL is wired in
whatever the mode, and at the end, where a registry knows what to do with the rows. Importing this module, which is
what that variable makes verl do in each process, replaces the first and adds to the second. Other modes stay verl's.

What verl does before and after holds here too: logits divided by the rollout's temperature, loss_max_clamp, task
rewards, policy gradient, aggregation; and the columns with which Megatron pads the vocabulary are in the softmax.
potstill_forward_kl_drop is verl's forward_kl_topk, with its clamp at zero.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import verl
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.distillation import losses
from verl.utils.metric import AggregationType, Metric
from verl.utils.tensordict_utils import get_non_tensor_data
from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size, slice_input_tensor
from verl.workers.config import ActorConfig, DistillationConfig, DistillationLossConfig
from verl.workers.utils.padding import no_padding_2_padding

from potstill.core.coarse import coarse_logits
from potstill.core.divergences import DIVERGENCES
from potstill.core.numerics import compute_dtype, p_log_p_over_q
from potstill.core.objective import TAILS, Objective
from potstill.core.rows import TeacherRows
from potstill.core.teacher import TeacherTopK
from potstill.core.topk import student_topk
from potstill.core.vocab_parallel import VocabShard

VERSION = "0.9.1"
MODES = {f"potstill_{divergence}_{tail}": (divergence, tail) for divergence in DIVERGENCES for tail in TAILS}


@dataclass
class LossConfig(DistillationLossConfig):
    """verl's distillation_loss block with two more keys; its `_target_` names this class.

    Args:
        diagnostics: also report the overlap with the student's own top k, as verl always does: one more pass over
            the logits, and one more collective.
        divergence_options: the divergence's own, e.g. {"beta": 0.9} for jsd.
    """

    diagnostics: bool = False
    divergence_options: dict[str, float] = field(default_factory=dict)


def install() -> None:
    """Register MODES and put the dispatch that knows them in the place of verl's.

    Raises:
        ImportError: for another verl than the one whose internals this file was tested with.
    """
    if verl.__version__ != VERSION:
        raise ImportError(
            f"potstill.integrations.verl replaces a function inside verl {VERSION} and was tested with no other, "
            f"found {verl.__version__}: install verl=={VERSION}, or a potstill that names yours"
        )
    losses.register_distillation_loss(losses.DistillationLossSettings(names=list(MODES), use_topk=True))(collect)
    theirs = losses.compute_topk_loss

    def compute_topk_loss(
        config: ActorConfig,
        distillation_config: DistillationConfig,
        data: TensorDict,
        student_logits: Tensor,
        data_format: str,
    ) -> dict[str, Tensor]:
        if distillation_config.distillation_loss.loss_mode not in MODES:
            return theirs(config, distillation_config, data, student_logits, data_format)
        return score(config.strategy, distillation_config.distillation_loss, data, student_logits, data_format)

    losses.compute_topk_loss = compute_topk_loss


def score(
    strategy: str, config: DistillationLossConfig, data: TensorDict, student_logits: Tensor, data_format: str
) -> dict[str, Tensor]:
    """The rows of a micro-batch, beside its logits: what verl's logits processor returns.

    Args:
        strategy: the actor's; "fsdp", "fsdp2", "veomni" or "megatron".
        config: the distillation_loss block.
        data: the micro-batch, with nested teacher_ids and teacher_logprobs [b, (s), K].
        student_logits: [b, s / cp, V / tp], or packed as [1, total / sp, V].
        data_format: Megatron's "thd" or "bshd".

    Returns:
        distillation_losses (differentiable), student_mass, teacher_mass and, with diagnostics, overlap_count and
        overlap_token_advantage; each [b, s / cp]. The last row of a sequence, which predicts nothing, and padding
        have a loss of 0.

    Raises:
        NotImplementedError: for another strategy.
        ValueError: for clamps, options or payloads that the loss does not take (see topk_distillation_loss).
    """
    shard = None
    if strategy == "megatron":
        from potstill.integrations.megatron import vocab_shard

        shard = vocab_shard(student_logits)
        ids, log_probs, scored = _for_megatron(_teacher_rows(data), data_format)
    elif strategy in ("fsdp", "fsdp2", "veomni"):
        ids, log_probs, scored = _for_fsdp(_teacher_rows(data))
    else:
        raise NotImplementedError(
            f"actor.strategy is {strategy!r}; the potstill_ modes run on fsdp, fsdp2, veomni and megatron"
        )

    divergence, tail = MODES[config.loss_mode]
    floor = config.log_prob_min_clamp
    objective = Objective(
        divergence=divergence,
        tail=tail,
        options=dict(getattr(config, "divergence_options", {})),
        sampled=False,
        scale=1.0,
        log_prob_min_clamp=floor,
        loss_min_clamp=0.0 if (divergence, tail) == ("forward_kl", "drop") else None,
        loss_max_clamp=None,  # verl's own step, later
    )
    teacher = TeacherTopK(ids, log_probs)
    shape, mask = student_logits.shape[:-1], scored.reshape(-1)
    objective.check_teacher(teacher, shape, 1.0)
    target = TeacherRows.of(teacher, mask, compute_dtype(student_logits.dtype))
    # Where verl also takes log-probabilities of them, its cross-entropies work in place on the logits, Flash
    # Attention's in backward and past autograd's notice. Ours then has a copy, and its gradient the copy's memory.
    shared = student_logits.requires_grad and not get_non_tensor_data(data, "distillation_only", False)
    student_logits = student_logits.clone() if shared else student_logits
    chunk_size = config.chunked_topk_chunk_size if config.use_chunked_topk else None
    token_ids = target.token_ids.view(ids.shape)
    coarse = coarse_logits(student_logits, token_ids, shard=shard, chunk_size=chunk_size, reuse_logits=shared)
    rows = objective.score(coarse.flatten(), slice(None), target=target, mask=mask)
    found = {
        "distillation_losses": rows.per_token,
        "student_mass": rows.student_mass,
        "teacher_mass": rows.teacher_mass,
    }
    if getattr(config, "diagnostics", False):
        found |= _overlap(student_logits, rows.student_log_probs, target, floor, shard)
    return {name: x.view(shape) for name, x in found.items()}


def collect(
    config: ActorConfig, distillation_config: DistillationConfig, model_output: dict[str, Tensor], data: TensorDict
) -> tuple[Tensor, dict[str, Any]]:
    """The responses' losses [b, r] and metrics, from the rows of `score`: what verl's registry calls at the end.

    Raises:
        NotImplementedError: with use_fused_kernels, where nothing comes past `score`.
    """
    if config.use_fused_kernels or get_non_tensor_data(data, "use_fused_kernels", False):
        raise NotImplementedError(
            f"loss_mode {distillation_config.distillation_loss.loss_mode} needs the logits, which use_fused_kernels "
            "does not form (VeOmni's fused distillation would be its own forward KL): set "
            "actor_rollout_ref.model.use_fused_kernels=False"
        )
    mask = data["response_mask"].bool()
    mask = mask.to_padded_tensor(False) if mask.is_nested else mask
    names = ("distillation_losses", "student_mass", "teacher_mass", "overlap_count", "overlap_token_advantage")
    rows = {name: no_padding_2_padding(model_output[name], data) for name in names if name in model_output}
    metrics: dict[str, Any] = {}
    for name in ("student_mass", "teacher_mass"):
        x = rows[name][mask]
        metrics[f"distillation/{name}"] = x.mean().item()
        metrics[f"distillation/{name}_min"] = Metric(AggregationType.MIN, x.min())
        metrics[f"distillation/{name}_max"] = Metric(AggregationType.MAX, x.max())
    if "overlap_count" in rows:
        count, advantage = rows["overlap_count"][mask], rows["overlap_token_advantage"][mask]
        some = count > 0
        metrics["distillation/overlap_ratio"] = count.mean().item() / distillation_config.distillation_loss.topk
        metrics["distillation/overlap_token_advantage"] = advantage[some].sum().item() / max(int(some.sum()), 1)
    return rows["distillation_losses"], metrics


def _teacher_rows(data: TensorDict) -> list[Tensor]:
    """Nested ids and log-probabilities [b, (s), K], and which rows predict a token [b, (s)], not so the fillers."""
    ids, log_probs = data["teacher_ids"], data["teacher_logprobs"]
    scored = torch.ones_like(ids.values()[:, 0], dtype=torch.bool)
    scored[ids.offsets()[1:] - 1] = False
    return [ids, log_probs, torch.nested.nested_tensor_from_jagged(scored, ids.offsets())]


def _for_fsdp(rows: list[Tensor]) -> list[Tensor]:
    """Packed as the logits are, and this rank's part of them under Ulysses; zero in padding."""
    packed = [x.values().unsqueeze(0) for x in rows]
    return [slice_input_tensor(x, dim=1) for x in packed] if get_ulysses_sequence_parallel_world_size() > 1 else packed


def _for_megatron(rows: list[Tensor], data_format: str) -> list[Tensor]:
    """Padded and cut over the context-parallel group as verl does with the tokens; zero in padding."""
    from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine

    split = preprocess_thd_engine if data_format == "thd" else preprocess_bshd_engine
    return [split(x)[0] for x in rows]


@torch.no_grad()
def _overlap(
    logits: Tensor, student_log_probs: Tensor, target: TeacherRows, floor: float | None, shard: VocabShard | None
) -> dict[str, Tensor]:
    """How many of the teacher's ids [N, K] are among the student's own top K, and the mean of -p log(p / q) there.

    Source: "Rethinking On-Policy Distillation of Large Language Models", arXiv:2604.13016.
    """
    k = target.token_ids.shape[1]
    top = student_topk(logits, k, shard=shard)[0].view(-1, k).sort(1).values
    at = torch.searchsorted(top, target.token_ids).clamp(max=k - 1)
    shared = (top.gather(1, at) == target.token_ids) & (target.token_ids >= 0)
    q, p = (x if floor is None else x.clamp(min=floor) for x in (student_log_probs, target.values))
    count = shared.sum(1)
    gain = -p_log_p_over_q(p, q).masked_fill(~shared, 0.0).sum(1)
    return {"overlap_count": count.to(gain.dtype), "overlap_token_advantage": gain / count.clamp(min=1)}


install()
