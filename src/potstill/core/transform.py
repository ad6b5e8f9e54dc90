"""What a model does to its logits after the head: scale, softcap and padded vocabulary; and the temperature."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    """The model's own logits: z = softcap * tanh(scale * raw / softcap), over the first `vocab_size` columns.

    Args:
        scale: factor of the raw logits (Cohere's logit_scale, 1 / Granite's logits_scaling).
        softcap: bound of |z| (Gemma 2 and 3: final_logit_softcapping), or None.
        vocab_size: number of real tokens; later columns are padding, outside the softmax. None: all are real.

    Raises:
        ValueError: for a scale of 0, a softcap that is not positive, or a vocab_size below 1.
    """

    scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.scale == 0:
            raise ValueError("LogitTransform: scale is 0, which makes every logit equal; leave it out for 1.0")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"LogitTransform: softcap must be > 0, got {self.softcap}; use None for no softcap")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"LogitTransform: vocab_size must be >= 1, got {self.vocab_size}; use None for all")

    def apply_(self, raw: Tensor, temperature: float) -> Tensor:
        """Turn raw logits into z / temperature, in place and in the tensor's own dtype."""
        if self.scale != 1.0:
            raw.mul_(self.scale)
        if self.softcap is not None:
            raw.div_(self.softcap).tanh_().mul_(self.softcap)
        if temperature != 1.0:
            raw.div_(temperature)
        return raw

    def derivative(self, z: Tensor, temperature: float) -> Tensor | float:
        """d z / d raw at the z that `apply_` returned: a number, or a tensor like z where there is a softcap."""
        slope = self.scale / temperature
        if self.softcap is None:
            return slope
        tanh_squared = (z * (temperature / self.softcap)).square_()
        return tanh_squared.neg_().add_(1.0).mul_(slope)
