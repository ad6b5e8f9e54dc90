"""What is refused before any arithmetic, and in which words."""

from collections.abc import Callable

import torch
from torch import Tensor

from potstill.core.tiles import LinearLogits, Logits


def check_logits(logits: Logits, name: str = "logits") -> Logits:
    """Refuse what is no logits; bring the parts of a LinearLogits to one dtype under autocast.

    Raises:
        TypeError: for a non-float dtype, or parts of differing dtype outside autocast.
        ValueError: for parts whose shapes do not fit.
    """
    if not isinstance(logits, LinearLogits):
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
            raise TypeError(f"{name} must be a floating-point tensor [..., V] or LinearLogits, got {got}")
        if logits.ndim == 0:
            raise ValueError(f"{name} must have a vocabulary dimension [..., V], got a 0-dim tensor")
        return logits
    hidden, weight, bias = logits
    if hidden.ndim < 1 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name}: hidden must be [..., H] and weight [V, H], got {list(hidden.shape)} and {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: bias must be [V] = [{weight.shape[0]}], got {list(bias.shape)}")
    devices = {str(part.device) for part in logits if part is not None}
    if len(devices) > 1:
        raise ValueError(f"{name}: hidden, weight and bias must be on one device, got {', '.join(sorted(devices))}")
    dtypes = {part.dtype for part in logits if part is not None}
    if len(dtypes) > 1:
        if not torch.is_autocast_enabled(hidden.device.type):
            raise TypeError(
                f"{name}: hidden and weight (and bias) must have one dtype, got {sorted(map(str, dtypes))}; "
                "cast one of them, or call under torch.autocast"
            )
        dtype = torch.get_autocast_dtype(hidden.device.type)
        return LinearLogits(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    if not hidden.is_floating_point():
        raise TypeError(f"{name}: hidden and weight must be floating point, got {hidden.dtype}")
    return logits


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))} here, got {value!r}")


def check_token_ids(token_ids: Tensor, shape: torch.Size, vocab_size: int) -> None:
    """Refuse ids that are no integers, do not match the rows of the logits, or lie outside [-1, V)."""
    if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool:
        raise TypeError(f"token_ids must be integers, got {token_ids.dtype}")
    if token_ids.shape[:-1] != shape:
        raise ValueError(
            f"token_ids must have the rows of the logits: got token_ids {list(token_ids.shape)} for logits "
            f"{[*shape, vocab_size]}; row n of both describes the same prediction"
        )
    signed = token_ids.to(torch.int64)
    outside = (signed < -1) | (signed >= vocab_size)
    refuse_where(
        outside,
        lambda: f"token id {int(signed[outside][0])} is outside [-1, {vocab_size}); -1 is an empty slot",
    )


def is_fake(x: Tensor) -> bool:
    """Whether x has no values, as under FakeTensorMode."""
    return isinstance(x, torch._subclasses.FakeTensor)


def refuse_where(bad: Tensor, message: Callable[[], str]) -> None:
    """ValueError with `message()` if any entry is bad.

    On CUDA, and while compiling, an assert inside the graph without a host sync: it cannot say which entry.
    """
    if bad.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(~bad.any(), "potstill: a value is out of range; run the call eagerly on CPU for which")
    elif not is_fake(bad) and bool(bad.any()):
        raise ValueError(message())


def refuse_double_backward() -> None:
    """RuntimeError inside a backward that is being recorded: the hand-written gradients have none of their own."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "potstill's losses cannot be differentiated twice (create_graph=True); use core/reference.py for that"
        )


def check_reusable(logits: Logits) -> None:
    """Refuse to overwrite logits that are not the caller's own scratch.

    Raises:
        ValueError: for LinearLogits, a leaf (or a view of one), an inference tensor, expanded strides, or under
            torch.compile.
    """
    remedy = "; leave reuse_logits=False"
    if isinstance(logits, LinearLogits):
        raise ValueError("reuse_logits: LinearLogits have no logits to reuse" + remedy)
    root = logits._base if logits._is_view() and logits._base is not None else logits
    if root.is_leaf and root.requires_grad:
        raise ValueError("reuse_logits: the logits are a leaf tensor, which backward must not overwrite" + remedy)
    if logits.is_inference():
        raise ValueError("reuse_logits: the logits are an inference tensor" + remedy)
    if any(stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)):
        raise ValueError("reuse_logits: the logits are expanded (stride 0), so rows share memory" + remedy)
    if torch.compiler.is_compiling():
        raise ValueError("reuse_logits: not available under torch.compile" + remedy)
