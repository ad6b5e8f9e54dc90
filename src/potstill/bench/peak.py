"""How the peak memory of a loss is measured: what its tensors hold, without allocating any.

A forward and backward runs on fake tensors, which have shapes and no storage, under torch's memory tracker. Counted
is what the loss reads and makes, alike for every way to compute it: logits (or hidden states and the head's weight),
their gradients, and every temporary. Not counted: the teacher's payload (12 K bytes a row), the model, the buffers of
collectives, and what a GPU's allocator rounds up.

The tracker sees what operators return, not what they allocate inside; `profiled_peak_bytes` sees both, on real
tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile

from potstill.bench.baselines import BASELINES, Selected, truncated_kl
from potstill.core import tiles
from potstill.core.losses import topk_distillation_loss
from potstill.core.teacher import TeacherTopK
from potstill.core.tiles import Budget, LinearLogits, Logits

GPU, CPU = (tiles.budget(torch.device(name)) for name in ("cuda", "cpu"))


class Shape(NamedTuple):
    """One call of the loss: N rows, V ids (of this rank), K ids in a teacher's row, and the head's hidden size H."""

    rows: int
    vocab_size: int
    top_k: int
    hidden_size: int


class Way(NamedTuple):
    """How a loss is computed: what it starts from, and the loss of that with a teacher's ids and log-probabilities."""

    start: Callable[[Shape], Logits]
    loss: Callable[[Logits, Tensor, Tensor], Tensor]


def full_logits(shape: Shape) -> Tensor:
    """Logits [N, V] in bfloat16 that are no leaf, as a model hands them out."""
    return torch.zeros((), dtype=torch.bfloat16, requires_grad=True).expand(shape.rows, shape.vocab_size).clone()


def linear_logits(shape: Shape) -> LinearLogits:
    """Hidden states [N, H] and a weight [V, H] in bfloat16, both trained."""
    new = partial(torch.zeros, dtype=torch.bfloat16, requires_grad=True)
    return LinearLogits(new(shape.rows, shape.hidden_size), new(shape.vocab_size, shape.hidden_size))


def baseline_loss(
    baseline: Callable[[Tensor, Tensor], Selected], logits: Tensor, token_ids: Tensor, log_probs: Tensor
) -> Tensor:
    """The loss that verl trains on, from a baseline's log-probabilities."""
    return truncated_kl(baseline(logits, token_ids)[0], log_probs).mean()


def our_loss(options: dict[str, Any], logits: Logits, token_ids: Tensor, log_probs: Tensor) -> Tensor:
    """This library's default loss; check=False, as fake tensors have no values to check."""
    return topk_distillation_loss(logits, TeacherTopK(token_ids, log_probs), check=False, **options).loss


OURS = {
    "logits kept": Way(full_logits, partial(our_loss, {})),
    "logits reused": Way(full_logits, partial(our_loss, {"reuse_logits": True})),
    "fused, single_pass": Way(linear_logits, partial(our_loss, {"memory": "single_pass"})),
    "fused, recompute": Way(linear_logits, partial(our_loss, {"memory": "recompute"})),
}
WAYS = {name: Way(full_logits, partial(baseline_loss, way)) for name, way in BASELINES.items()} | OURS


def peak_bytes(way: Way, shape: Shape, budget: Budget = GPU) -> int:
    """The most that the tensors of one forward and backward hold at a time, with tiles cut by `budget`."""
    with FakeTensorMode(), tiles_cut_by(budget):
        payload = _payload(shape)
        tracker = MemTracker()
        tracker.track_external(*payload)
        with tracker:
            way.loss(way.start(shape), *payload).backward()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    return peak["Total"] - sum(x.nbytes for x in payload)


def profiled_peak_bytes(way: Way, shape: Shape) -> int:
    """The same from the memory events of torch.profiler, on a real run on this CPU."""
    payload = _payload(shape)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        way.loss(way.start(shape), *payload).backward()
    assert run.profiler is not None
    events = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextmanager
def tiles_cut_by(budget: Budget) -> Iterator[None]:
    """Cut tiles by these byte budgets, whatever the device: fake CUDA tensors need a CUDA build of torch."""
    own, tiles.budget = tiles.budget, lambda device: budget
    try:
        yield
    finally:
        tiles.budget = own


def _payload(shape: Shape) -> tuple[Tensor, Tensor]:
    token_ids = torch.arange(shape.top_k).repeat(shape.rows, 1)
    return token_ids, torch.full(token_ids.shape, -10.0)
