"""The real losses of verl 0.9.1 against this library's, in one run: peak memory, then time.

    scripts/integrations.sh && .venvs/verl/bin/python -m potstill.bench.packages

Memory is counted as `potstill bench memory` does, on fake tensors; the process group of Megatron's loss is a fake one
too, of one rank. Time is taken as `potstill bench speed` does: ratios of paired runs, and none for a loss whose
gradient fails the check there.
"""

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from potstill.bench.baselines import truncated_kl, verl_like
from potstill.bench.memory import GIB, TOP_K, VOCAB_SIZE
from potstill.bench.peak import WAYS, Shape, Way, full_logits, peak_bytes
from potstill.bench.report import parser, table, write_json_lines
from potstill.bench.speed import VOCAB, passes, ratio, seconds, step_of
from potstill.core.losses import topk_distillation_loss
from potstill.core.teacher import TeacherTopK


def fsdp(logits: Tensor, token_ids: Tensor, log_probs: Tensor, *, chunked: bool) -> Tensor:
    """verl's top-k forward KL of its FSDP engines."""
    from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
    from verl.workers.config import DistillationConfig, DistillationLossConfig

    block = DistillationLossConfig(
        loss_mode="forward_kl_topk", use_policy_gradient=False, log_prob_min_clamp=None, use_chunked_topk=chunked
    )
    # It only asks nested tensors for their values; there are no fake ones.
    nested = [SimpleNamespace(is_nested=True, values=lambda x=x: x) for x in (log_probs, token_ids)]
    rows = compute_forward_kl_topk(logits.unsqueeze(0), *nested, DistillationConfig(distillation_loss=block), "thd")
    return rows["distillation_losses"].mean()


def megatron(logits: Tensor, token_ids: Tensor, log_probs: Tensor) -> Tensor:
    """verl's top-k forward KL over Megatron's tensor-parallel group."""
    from verl.trainer.distillation.megatron.losses import _VocabParallelKLDivergence

    rows = [x.unsqueeze(0) for x in (logits, log_probs, token_ids)]
    return _VocabParallelKLDivergence.apply(*rows, None)[0].mean()


def stand_in(logits: Tensor, token_ids: Tensor, log_probs: Tensor) -> Tensor:
    """What stands for Megatron's in `potstill bench`."""
    return truncated_kl(verl_like(logits, token_ids)[0], log_probs).mean()


def ours(logits: Tensor, token_ids: Tensor, log_probs: Tensor) -> Tensor:
    """The same loss by this library."""
    return topk_distillation_loss(logits, TeacherTopK(token_ids, log_probs), tail="drop", check=False).loss


THEIRS: dict[str, Callable[..., Tensor]] = {
    "verl, FSDP": lambda *rows: fsdp(*rows, chunked=False),
    "verl, FSDP, use_chunked_topk": lambda *rows: fsdp(*rows, chunked=True),
    "verl, Megatron": megatron,
    "verl-like": stand_in,
}


def one_rank() -> None:
    """Megatron's groups, of this process alone, for fake and for real tensors."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)


def peaks(rows: int, vocab_size: int) -> dict[str, int]:
    """Peak bytes of each of THEIRS and each of ours."""
    ways = {name: Way(full_logits, loss) for name, loss in THEIRS.items()} | WAYS
    names = [*THEIRS, "logits kept", "logits reused", "fused, single_pass", "fused, recompute"]
    return {name: peak_bytes(ways[name], Shape(rows, vocab_size, TOP_K, hidden_size=2_560)) for name in names}


def times(rows: int, vocab_size: int, top_k: int, repetitions: int) -> dict[str, list[float]]:
    """Seconds of forward and backward on the same bfloat16 logits, of each loss that passes its check."""
    torch.manual_seed(0)
    logits = (2 * torch.randn(rows, vocab_size)).bfloat16().requires_grad_()
    teacher = TeacherTopK.from_logits(3 * torch.randn(rows, vocab_size), top_k)

    def over_payload(loss):
        return lambda z, rows: loss(z, rows.token_ids, rows.log_probs)

    losses = {name: over_payload(loss) for name, loss in ({"potstill": ours} | THEIRS).items()}
    steps = {name: step_of(loss, logits, teacher) for name, loss in losses.items() if passes(loss, logits, teacher)}
    return seconds(steps, repetitions)


def main(argv: Sequence[str]) -> int:
    """Print both tables."""
    options = parser("packages", "The losses of installed packages against this library's.")
    options.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    arguments = options.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    one_rank()
    quick = arguments.quick
    memory = {n: peaks(n, VOCAB_SIZE) for n in ((64,) if quick else (4_096, 16_384))}
    print(f"Peak, GiB: V = {VOCAB_SIZE:,}, K = {TOP_K}, H = 2,560, bfloat16\n")
    names = next(iter(memory.values()))
    print(table([{"": name, **{f"N = {n:,}": f"{x[name] / GIB:.2f}" for n, x in memory.items()}} for name in names]))
    timed = {n: times(n, *((499, 8, 1) if quick else (VOCAB, 64, 3))) for n in ((32,) if quick else (64, 1_024))}
    print('\n"failed": its gradient is not float64\'s to bfloat16 rounding (log-probabilities in bfloat16).')
    print("How many times longer than this library's, forward and backward, bfloat16 logits, K = 64\n")
    ratios = {n: {name: ratio(x, name, "potstill") for name in THEIRS} for n, x in timed.items()}
    print(table([{"": name, **{f"{n:,} rows": ratios[n][name] for n in ratios}} for name in THEIRS]))
    if arguments.json:
        lines = [{"rows": n, "way": name, "peak_bytes": x} for n, found in memory.items() for name, x in found.items()]
        lines += [{"rows": n, "way": name, "seconds": x} for n, found in timed.items() for name, x in found.items()]
        write_json_lines(arguments.json, "packages", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
