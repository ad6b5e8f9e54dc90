"""Megatron-Core: which ids a rank's logits are of.

Megatron cuts the padded vocabulary into equal parts over its tensor-parallel group. That is all a loss needs to know:

    shard = vocab_shard(model.output_layer)
    logits = model(tokens, position_ids, attention_mask)  # [b, s, V / tp]: GPTModel without labels
    loss = topk_distillation_loss(logits, TeacherTopK(ids, log_probs), shard=shard, mask=loss_mask,
                                  transform=LogitTransform(vocab_size=tokenizer_size)).loss

From hidden states, before they meet the output layer, the logits never exist: LinearLogits(hidden, weight) with
hidden [s, b, H], or [s / tp, b, H] where the layer is sequence-parallel; then teacher rows and mask are [s, b] too.
`weight` is the layer's, or model.shared_embedding_or_output_weight() where it is tied to the embedding.
"""

from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from potstill.core.vocab_parallel import VocabShard


def vocab_shard(source: ColumnParallelLinear | Tensor) -> VocabShard:
    """The ids of this rank, by Megatron's equal cut of the padded vocabulary. No collective.

    Args:
        source: the output layer, or this rank's logits [..., V / tp], which are then taken to be cut over the
            tensor-parallel group of parallel_state.

    Returns:
        The shard; sequence-parallel as the layer is, which only matters for LinearLogits. Its vocab_size counts
        the padding; what is real goes into LogitTransform(vocab_size=...).
    """
    if isinstance(source, Tensor):
        group = parallel_state.get_tensor_model_parallel_group()
        return VocabShard.even(source.shape[-1] * group.size(), group)
    return VocabShard.even(source.output_size, source.tp_group, sequence_parallel=source.sequence_parallel)
