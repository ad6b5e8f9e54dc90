"""PotstillHead: a loss inside the model's forward, by replacing the module in the lm_head slot.

Outside `scoring` the head is the linear layer it replaced, with the same parameters. Inside, it hands
LinearLogits(hidden, weight, bias) to a function that returns the loss, and gives the model an empty tensor as
"logits", so that whatever the model does to its logits afterwards (a softcap, a scale) alters nothing: pass that
as a LogitTransform to the loss instead. Because the head runs where lm_head runs, DDP and FSDP2 see the loss as
part of the model's forward: their hooks gather the weight and reduce its gradient as for any other layer.

    head = PotstillHead.install(model)
    with head.scoring(lambda logits: topk_distillation_loss(logits, teacher, mask=mask).loss):
        outputs = ddp_or_fsdp_model(input_ids=...)
    head.loss_after(outputs.logits).backward()
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from potstill.core.tiles import LinearLogits


class PotstillHead(nn.Linear):
    """An lm_head that can hand its input to a loss instead of multiplying it out."""

    score: Callable[[LinearLogits], Tensor] | None = None
    loss: Tensor | None = None

    @classmethod
    def install(cls, model: nn.Module) -> "PotstillHead":
        """Put a PotstillHead with the same parameters into the model's lm_head slot and return it.

        Args:
            model: a Hugging Face model (get_output_embeddings / set_output_embeddings). A tied weight stays tied.
                A model that has one already keeps it. Call before the model is wrapped by DDP or FSDP.

        Raises:
            TypeError: for a head that is no plain nn.Linear (an adapter's, say: its extra term would be lost).
        """
        head = model.get_output_embeddings()  # type: ignore[operator]
        if isinstance(head, cls):
            return head
        if type(head) is not nn.Linear:
            raise TypeError(
                f"PotstillHead replaces a plain nn.Linear in the lm_head slot, got {type(head).__name__}; "
                "merge an adapter on the head first, or leave the head out of the adapter's target modules"
            )
        new = cls(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
        new.weight, new.bias = head.weight, head.bias
        new.train(head.training)
        model.set_output_embeddings(new)  # type: ignore[operator]
        return new

    @contextmanager
    def scoring(self, score: Callable[[LinearLogits], Tensor]) -> Iterator[None]:
        """Within the block, forward calls score(LinearLogits) -> scalar loss instead of returning logits."""
        self.score = score
        try:
            yield
        finally:
            self.score = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [..., V]; while scoring an empty tensor [..., 0] that carries the loss's graph."""
        if self.score is None:
            return super().forward(hidden)
        self.loss = self.score(LinearLogits(hidden, self.weight, self.bias))
        return self.loss.reshape(*[1] * hidden.ndim)[..., :0]

    def loss_after(self, logits: Tensor) -> Tensor:
        """The loss of the last forward, downstream of the model's output.

        FSDP hooks a module's backward on its outputs: the empty sum makes backward pass through them.

        Raises:
            RuntimeError: if no forward ran in `scoring` since the last call.
        """
        loss, self.loss = self.loss, None
        if loss is None:
            raise RuntimeError("no loss was computed: run the model's forward inside `with head.scoring(...)`")
        return loss + logits.sum().to(loss.dtype)
