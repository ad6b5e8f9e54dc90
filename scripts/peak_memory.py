"""Peak memory of README's two versions of the loss: forward and backward, gradients included, inputs not.

Runs on fake tensors, which have shapes and no storage: seconds on any machine, whatever the sizes.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from potstill import LinearLogits, TeacherTopK, topk_distillation_loss

VOCAB_SIZE, HIDDEN_SIZE, K = 248_320, 2_560, 64


def before(hidden, weight, teacher_ids, teacher_log_probs):  # noqa: D103
    logits = (hidden @ weight.T).float()
    log_q = logits.log_softmax(-1).gather(-1, teacher_ids)
    (teacher_log_probs.exp() * (teacher_log_probs - log_q)).sum(-1).mean().backward()


def after(hidden, weight, teacher_ids, teacher_log_probs):  # noqa: D103
    teacher_rows = TeacherTopK(teacher_ids, teacher_log_probs)
    # check=False: fake tensors have no values to check.
    topk_distillation_loss(LinearLogits(hidden, weight), teacher_rows, check=False).loss.backward()


def peak_gib(version, tokens: int) -> float:
    """The most that one forward and backward holds beyond its inputs, GiB, in bfloat16."""
    with FakeTensorMode():
        hidden = torch.empty(tokens, HIDDEN_SIZE, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(VOCAB_SIZE, HIDDEN_SIZE, dtype=torch.bfloat16, requires_grad=True)
        inputs = (hidden, weight, torch.empty(tokens, K, dtype=torch.long), torch.empty(tokens, K))
        tracker = MemTracker()
        tracker.track_external(*inputs)
        with tracker:
            version(*inputs)
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    return (peak["Total"] - sum(x.nbytes for x in inputs)) / 2**30


if __name__ == "__main__":
    for tokens in (4_096, 16_384):
        peaks = [peak_gib(version, tokens) for version in (before, after)]
        print(f"{tokens:6d} tokens: {peaks[0]:5.2f} GiB before, {peaks[1]:4.2f} GiB after")
