"""The ways others compute selected log-probabilities of full logits, written anew from public descriptions.

Each takes logits [N, V] and ids [N, K] and gives log q at the ids in float32, differentiable, and the student's own
top K ids where it always computes them, else None. The loss on top is the same for all: `truncated_kl`.
L below is the size of the logits in bfloat16, c the rows of a chunk.

    verl_like       Megatron's vocabulary-parallel form, on one rank: 7 L at its peak
    seed_chunked    the same in chunks of rows, multiplied out again in backward: max(1 + 6c/N, 3 + 4c/N, 4) L
    dense           one log-softmax, gathered; autograd
    autograd_loop   `dense` in a Python loop over chunks: saves nothing, autograd keeps every chunk
    checkpointed    that loop with each chunk under activation checkpointing

Sources: verl pull requests 7733 (verl_like, seed_chunked) and 6593 (autograd_loop). Reductions are spelled amax, sub,
exp, sum: torch.logsumexp hides a temporary from the memory tracker.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_SIZE = 4096  # rows; the default of verl's chunked paths

Selected = tuple[Tensor, Tensor | None]
"""log q [N, K] at the given ids, and the student's own top ids [N, K]."""


def verl_like(logits: Tensor, token_ids: Tensor) -> Selected:
    """Shifted logits, their exp and log-probabilities in float32, all of them at once; top k always on."""
    return _VerlLike.apply(logits, token_ids)


def seed_chunked(logits: Tensor, token_ids: Tensor) -> Selected:
    """verl_like in chunks of rows: keeps the logits and log Z, forms a full float32 gradient and casts it."""
    return _SeedChunked.apply(logits, token_ids)


def dense(logits: Tensor, token_ids: Tensor) -> Selected:
    """log_softmax of everything, then gather."""
    return _dense(logits, token_ids), None


def autograd_loop(logits: Tensor, token_ids: Tensor) -> Selected:
    """`dense`, one chunk of rows after another."""
    return torch.cat([_dense(*chunk) for chunk in _chunks(logits, token_ids)]), None


def checkpointed(logits: Tensor, token_ids: Tensor) -> Selected:
    """`autograd_loop`, each chunk computed again in backward."""
    chunks = _chunks(logits, token_ids)
    return torch.cat([checkpoint(_dense, *chunk, use_reentrant=False) for chunk in chunks]), None


BASELINES: dict[str, Callable[[Tensor, Tensor], Selected]] = {
    "verl-like": verl_like,
    "the seed's chunked path": seed_chunked,
    "dense log-softmax": dense,
    "chunk loop under autograd": autograd_loop,
    "checkpoint per chunk": checkpointed,
}


def truncated_kl(student_log_probs: Tensor, teacher_log_probs: Tensor, floor: float | None = None) -> Tensor:
    """sum over the K ids of p (log p - log q) [N], both floored: verl's forward_kl_topk before its clamp at 0."""
    if floor is not None:
        student_log_probs, teacher_log_probs = (x.clamp(min=floor) for x in (student_log_probs, teacher_log_probs))
    return (teacher_log_probs.exp() * (teacher_log_probs - student_log_probs)).sum(-1)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.split(CHUNK_SIZE) for x in tensors), strict=True)


def _dense(logits: Tensor, token_ids: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, token_ids)


def _forward(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log q at the ids, top ids, log Z [N, 1] and probabilities [N, V]; three float32 tensors [N, V] at its peak.

    One new tensor for each step, as there: a float32 copy, the shifted logits, their exp, the log-probabilities, and
    the exp of those.
    """
    z = logits.to(torch.float32, copy=True)
    peak = z.amax(-1, keepdim=True)
    shifted = z - peak
    del z
    exp = shifted.exp()
    log_total = exp.sum(-1, keepdim=True).log()
    log_probs = shifted - log_total
    del shifted, exp
    probs = log_probs.exp()
    top_ids = log_probs.topk(token_ids.shape[1], dim=-1).indices
    return log_probs.gather(-1, token_ids), top_ids, log_total + peak, probs


def _backward(probs: Tensor, token_ids: Tensor, upstream: Tensor) -> Tensor:
    """dL/dz = g at the ids - q sum(g), beside the probabilities."""
    return (probs * -upstream.sum(-1, keepdim=True)).scatter_add_(-1, token_ids, upstream)


class _VerlLike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, token_ids):
        selected, top_ids, _, probs = _forward(logits, token_ids)
        ctx.save_for_backward(probs, token_ids)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(top_ids)
        return selected, top_ids

    @staticmethod
    def backward(ctx, upstream, _):
        probs, token_ids = ctx.saved_tensors
        return _backward(probs, token_ids, upstream).to(ctx.dtype), None


class _SeedChunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, token_ids):
        pieces = [_forward(*chunk)[:3] for chunk in _chunks(logits, token_ids)]
        selected, top_ids, log_z = (torch.cat(x) for x in zip(*pieces, strict=True))
        ctx.save_for_backward(logits, token_ids, log_z)
        ctx.mark_non_differentiable(top_ids)
        return selected, top_ids

    @staticmethod
    def backward(ctx, upstream, _):
        logits, *rest = ctx.saved_tensors
        grad = torch.empty_like(logits, dtype=torch.float32)
        for out, z, token_ids, log_z, g in _chunks(grad, logits, *rest, upstream):
            out.copy_(_backward((z.float() - log_z).exp(), token_ids, g))
        return grad.to(logits.dtype), None
