"""The two elementwise bodies of a pass over the vocabulary, fused by torch.compile.

Each reads a tile of raw logits once, in its own dtype, where the eager bodies make several trips over a float32 copy.
Works wherever inductor does (C++ on a CPU, Triton on CUDA). The first use in a process compiles, which takes seconds
with a warm cache and up to a minute or so without; other sizes and temperatures reuse it.
"""

from functools import cache

import torch
from torch import Tensor


def peak_and_total(raw: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Of z = factor * raw [C, v]: a shift [C] near the largest z, and the sum of exp(z - shift) [C], in float32."""
    return _compiled(_peak_and_total)(raw, factor)


def weigh_(raw: Tensor, shift: Tensor, upstream: Tensor, factor: Tensor) -> None:
    """Overwrite raw [C, v] with factor * upstream * exp(factor * raw - shift), rounded once; shift, upstream [C]."""
    _compiled(_weigh_)(raw, shift, upstream, factor)


@cache
def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """None if the bodies compile and run here, else the reason. Compiles, once for each device and dtype."""
    try:
        raw = torch.zeros(4, 35, dtype=dtype, device=device)
        rows, factor = raw.new_zeros(4, dtype=torch.float32), raw.new_ones((), dtype=torch.float32)
        peak_and_total(raw, factor)
        weigh_(raw, rows, rows, factor)
    except Exception as error:  # whatever a missing or broken compiler raises
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return None


@cache
def _compiled(body):
    return torch.compile(body, dynamic=True)


def _peak_and_total(raw: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    z = raw.float() * factor
    peak = z.amax(1)
    shift = torch.where(peak == -torch.inf, 0.0, peak)
    return shift, (z - shift[:, None]).exp().sum(1)


def _weigh_(raw: Tensor, shift: Tensor, upstream: Tensor, factor: Tensor) -> None:
    raw.copy_((raw.float() * factor - shift[:, None]).exp() * (upstream * factor)[:, None])
