"""Distil a large language model into a small one, with losses that fit in memory."""

from potstill.core.coarse import CoarseLogits, coarse_logits
from potstill.core.divergences import DIVERGENCES, Divergence
from potstill.core.full_vocab import full_vocab_distillation_loss
from potstill.core.head import PotstillHead
from potstill.core.losses import DistillationOutput, topk_distillation_loss
from potstill.core.objective import TAILS
from potstill.core.rows import global_num_tokens
from potstill.core.sampled import sampled_token_loss
from potstill.core.teacher import SampledTargets, TeacherTopK
from potstill.core.tiles import LinearLogits
from potstill.core.topk import student_topk
from potstill.core.transform import LogitTransform
from potstill.core.vocab_parallel import VocabShard

__version__ = "0.1.0"

__all__ = [
    "DIVERGENCES",
    "TAILS",
    "CoarseLogits",
    "DistillationOutput",
    "Divergence",
    "LinearLogits",
    "LogitTransform",
    "PotstillHead",
    "SampledTargets",
    "TeacherTopK",
    "VocabShard",
    "coarse_logits",
    "full_vocab_distillation_loss",
    "global_num_tokens",
    "sampled_token_loss",
    "student_topk",
    "topk_distillation_loss",
]
