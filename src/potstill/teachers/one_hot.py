"""A teacher that is certain of the data's own tokens: with it, distillation is supervised training."""

from collections.abc import Mapping
from typing import Any

import torch

from potstill import TeacherTopK


def one_hot_teacher(batch: Mapping[str, Any]) -> TeacherTopK:
    """Probability 1 on the token that follows each scored row.

    The forward KL to it is the cross-entropy of that token, so that a warm-up needs no second loss.

    Args:
        batch: see `potstill.train.batch.Batch`.
    """
    token_ids = batch["target_ids"].unsqueeze(1)
    log_probs = torch.zeros(token_ids.shape, device=token_ids.device)
    return TeacherTopK(token_ids, log_probs, rest_log_prob=log_probs[:, 0] - torch.inf)
