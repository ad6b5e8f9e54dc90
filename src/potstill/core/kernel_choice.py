"""Which body a pass over the vocabulary runs: the eager one, or the one that torch.compile fuses."""

import math
import warnings
from functools import cache

import torch

from potstill.core.checks import check_choice, is_fake
from potstill.core.tiles import Logits, TileReader, first_part, row_shape
from potstill.kernels import compiled

WORTH_COMPILING = 1 << 25
"""Logits N * V from which "auto" compiles: about 200 rows of a vocabulary of 152k; below, eager is fast enough."""


def use_compiled(kernel: str, logits: Logits, reader: TileReader) -> bool:
    """Whether `kernel` means the compiled body for these logits.

    Raises:
        ValueError: for an unknown kernel, or "compiled" where it cannot run.
    """
    check_choice("kernel", kernel, ("auto", "eager", "compiled"))
    if kernel == "eager" or torch.compiler.is_compiling():
        return False
    first = first_part(logits)
    small = math.prod(row_shape(logits)) * reader.width < WORTH_COMPILING
    if kernel == "auto" and (small or is_fake(first)):
        return False
    suits = reader.transform.softcap is None and reader.transform.scale > 0 and first.dtype != torch.float64
    reason = compiled.why_not(first.device, first.dtype) if suits else "no softcap, negative scale or float64"
    if reason is None:
        return True
    if kernel == "compiled":
        raise ValueError(f"kernel='compiled' cannot run here: {reason}; use 'eager' or 'auto'")
    if suits:
        _warn_once(reason)
    return False


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"potstill: the compiled body does not work here ({reason}); using the eager one", stacklevel=4)
