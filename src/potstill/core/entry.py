"""What every public function does first: from a caller's logits to checked ones of this rank, and their shard."""

from typing import Any

from torch import Tensor

from potstill.core.checks import check_logits
from potstill.core.tiles import LinearLogits, Logits, from_parts, parts_of, vocab_width
from potstill.core.vocab_parallel import VocabShard, to_shards


def enter(logits: Logits, shard: VocabShard | None, name: str = "logits") -> tuple[Logits, VocabShard | None]:
    """Checked logits of this rank and the shard they are: the given one, or a DTensor's own.

    Hidden states come back as every rank needs them, all rows, with a gradient that is the sum over ranks.

    Raises:
        TypeError: as check_logits; for a DTensor whose placement is no shard of the vocabulary here.
        ValueError: as check_logits; for logits of another width than the rank's ids.
    """
    logits, shard = from_dtensor(logits, shard, name)
    logits = check_logits(logits, name)
    if shard is None:
        return logits, None
    shard.check_width(vocab_width(logits), name)
    if isinstance(logits, LinearLogits):
        logits = LinearLogits(to_shards(logits.hidden, shard), *logits[1:])
    return logits, shard


def from_dtensor(logits: Logits, shard: VocabShard | None, name: str) -> tuple[Logits, VocabShard | None]:
    """The local part of DTensors and the shard that they are, if any; plain tensors as they are."""
    parts = parts_of(logits)
    found: list[Any] = [part for part in parts if _is_dtensor(part)]
    if not found:
        return logits, shard
    if shard is not None:
        raise TypeError(f"{name} are a DTensor, which knows its own shard; leave shard out, or pass to_local() of it")
    linear = isinstance(logits, LinearLogits)
    head: Any = logits.weight if isinstance(logits, LinearLogits) else logits
    vocab = 0 if linear else head.ndim - 1
    placements = head.placements if _is_dtensor(head) else ()
    cut = [i for i, placement in enumerate(placements) if placement.is_shard(vocab)]
    told = ", ".join(str(part.placements) for part in found)
    if any(placement.is_partial() for part in found for placement in part.placements):
        raise TypeError(f"{name}: a DTensor of partial sums ({told}); redistribute it to Replicate or Shard first")
    if len(cut) > 1 or (linear and any(placement.is_shard(1) for placement in placements)):
        raise TypeError(f"{name}: expected a head cut along the vocabulary on one dimension of the mesh, got {told}")
    if linear and cut:
        hidden: Any = parts[0]
        if (
            not _is_dtensor(hidden)
            or hidden.device_mesh != head.device_mesh
            or any(x.is_shard() for x in hidden.placements)
        ):
            raise TypeError(
                f"{name}: the weight is a DTensor cut along its first dimension ({told}) but hidden is not a DTensor "
                "replicated on the same mesh. If FSDP cut it, call the loss inside the forward of the module that "
                "owns it (PotstillHead), where it is whole; if tensor parallelism did, pass weight.to_local() "
                "with shard=VocabShard(...)"
            )
    local = from_parts([part.to_local() if _is_dtensor(part) else part for part in parts])  # type: ignore[union-attr]
    if cut:
        shard = VocabShard.even(head.shape[vocab], head.device_mesh.get_group(cut[0]))
    return local, shard


def _is_dtensor(x: object) -> bool:
    return isinstance(x, Tensor) and hasattr(x, "device_mesh")
