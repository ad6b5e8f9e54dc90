"""integrations/megatron.py with Megatron-Core's own groups, output layer and losses, on two ranks."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from verl.trainer.distillation.megatron.losses import _VocabParallelKLDivergence

from potstill import LinearLogits, LogitTransform, TeacherTopK, topk_distillation_loss
from potstill.integrations.megatron import vocab_shard

S, B, H, V, K = 6, 2, 8, 32, 5
REAL = 27  # the vocabulary before padding


def output_layer(**options):
    """Megatron's, with the same weights however many ranks share it."""
    torch.manual_seed(3)
    config = ModelParallelConfig(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        use_cpu_initialization=True,
        **options,
    )
    init = torch.nn.init.normal_
    return ColumnParallelLinear(H, V, config=config, init_method=init, bias=False, keep_master_weight_for_test=True)


def hidden_states():
    torch.manual_seed(4)
    return torch.randn(S, B, H, requires_grad=True)


def teacher_rows(k=K):
    torch.manual_seed(5)
    return TeacherTopK.from_logits(2 * torch.randn(S, B, V), k, transform=LogitTransform(vocab_size=REAL))


def own_columns(x):
    """This rank's part of gradients of logits [..., V]."""
    return x.chunk(parallel_state.get_tensor_model_parallel_world_size(), -1)[dist.get_rank()]


def test_one_hot_teacher_is_cross_entropy(on_ranks, same):
    def check():
        layer, hidden = output_layer(), hidden_states()
        labels = torch.randint(V, (S, B), generator=torch.Generator().manual_seed(6))
        theirs, _ = layer(hidden)
        # It works in place on the logits' storage, so that autograd needs a copy of them.
        wanted = vocab_parallel_cross_entropy(theirs.clone(), labels)
        gradients = torch.autograd.grad(wanted.mean(), [theirs, hidden, layer.weight], retain_graph=True)

        teacher = TeacherTopK(labels.unsqueeze(-1), torch.zeros(S, B, 1))
        ours, _ = layer(hidden)
        out = topk_distillation_loss(ours, teacher, shard=vocab_shard(layer), tail="drop")
        same(out.per_token, wanted)
        for found, expected in zip(
            torch.autograd.grad(out.loss, [ours, hidden, layer.weight]), gradients, strict=True
        ):
            same(found, expected)

    on_ranks(check)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("memory", ["recompute", "single_pass"])
def test_hidden_states_as_the_layer_takes_them(on_ranks, same, memory, sequence_parallel):
    """LinearLogits gives the loss and the gradients of the layer's own logits, padded columns left out."""

    def check():
        layer = output_layer(sequence_parallel=sequence_parallel)
        hidden = hidden_states()
        if sequence_parallel:
            hidden = hidden.detach().chunk(2)[dist.get_rank()].requires_grad_()
        options = {"shard": vocab_shard(layer), "transform": LogitTransform(vocab_size=REAL)}
        logits, _ = layer(hidden)
        wanted = topk_distillation_loss(logits, teacher_rows(), **options)
        fused = LinearLogits(hidden, layer.weight)
        out = topk_distillation_loss(fused, teacher_rows(), memory=memory, **options)
        same(out.loss, wanted.loss)
        leaves = [hidden, layer.weight]
        expected = torch.autograd.grad(wanted.loss, leaves)
        for found, gradient in zip(torch.autograd.grad(out.loss, leaves), expected, strict=True):
            same(found, gradient)

    on_ranks(check)


def test_padded_vocabulary_equals_one_process(on_ranks, same):
    def check():
        layer, hidden = output_layer(), hidden_states()
        logits, _ = layer(hidden)
        options = {"transform": LogitTransform(vocab_size=REAL), "diagnostics": True}
        out = topk_distillation_loss(logits, teacher_rows(), shard=vocab_shard(logits), **options)
        whole = (hidden @ layer.master_weight.T).detach().requires_grad_()
        wanted = topk_distillation_loss(whole, teacher_rows(), **options)
        for name, value in wanted.metrics.items():
            same(out.metrics[name], value)
        wanted.loss.backward()
        same(torch.autograd.grad(out.loss, logits)[0], own_columns(whole.grad))

    on_ranks(check)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_page(on_ranks, same, blocks, sequence_parallel):
    class Model:
        def __init__(self):
            self.output_layer, self.hidden = output_layer(sequence_parallel=sequence_parallel), hidden_states()
            if sequence_parallel:
                self.hidden = self.hidden.detach().chunk(2)[dist.get_rank()].requires_grad_()

        def __call__(self, *inputs):
            return self.output_layer(self.hidden)[0].transpose(0, 1).contiguous()

    def check():
        rows, model = teacher_rows(), Model()
        mask = torch.ones(B, S, dtype=torch.int64)
        mask[1, 4:] = 0
        names = {"model": model, "hidden": model.hidden, "tied": False, "loss_mask": mask, "num_tokens": mask.sum()}
        names |= dict.fromkeys(("tokens", "position_ids", "attention_mask")) | {"tokenizer_size": REAL}
        names |= {"teacher_ids": rows.token_ids.transpose(0, 1), "teacher_log_probs": rows.log_probs.transpose(0, 1)}
        losses = []
        for block in blocks("megatron.md"):
            exec(block, names)
            losses.append(names["out"].loss)
        assert len(losses) == 2
        same(losses[0], losses[1])
        options = {"mask": mask.T, "transform": LogitTransform(vocab_size=REAL)}
        whole = hidden_states() @ model.output_layer.master_weight.T
        same(losses[0], topk_distillation_loss(whole, rows, **options).loss)

    on_ranks(check)


def verl_loss(logits, teacher, floor=None):
    """verl's tensor-parallel loss: per token, the student's and the teacher's mass, overlap count and advantage."""
    return _VocabParallelKLDivergence.apply(logits, teacher.log_probs, teacher.token_ids, floor)


@pytest.mark.parametrize("floor", [None, -2.0])
def test_drop_is_what_verl_computes(on_ranks, same, floor):
    def check():
        (logits, _), shard = (layer := output_layer())(hidden_states()), vocab_shard(layer)
        options = {"tail": "drop", "log_prob_min_clamp": floor, "diagnostics": True}
        out = topk_distillation_loss(logits, teacher_rows(), shard=shard, **options)
        per_token, student_mass, teacher_mass, count, advantage = verl_loss(logits, teacher_rows(), floor)
        same(out.per_token, per_token)
        same(out.metrics["overlap_count"], count.float().mean())
        same(out.metrics["overlap_token_advantage_sum"], advantage.sum())
        if floor is None:  # verl takes them of the clamped log-probabilities
            same(out.metrics["student_mass"], student_mass.mean())
            same(out.metrics["teacher_mass"], teacher_mass.mean())
        (ours,) = torch.autograd.grad(out.loss, logits)
        (theirs,) = torch.autograd.grad(per_token.mean(), logits)
        same(ours, theirs)

    on_ranks(check)


@pytest.mark.parametrize("floor", [None, -10.0])
def test_collectives_of_a_loss_and_its_gradient(on_ranks, counted, floor):
    """One sum of K + tp numbers a token, where verl makes seven calls; the overlap, always on there, is one more."""

    def check():
        rows, tp, teacher = S * B, 2, teacher_rows()
        (logits, _), shard = (layer := output_layer())(hidden_states()), vocab_shard(layer)
        options = {"shard": shard, "tail": "drop", "log_prob_min_clamp": floor}
        with counted() as ours:
            torch.autograd.grad(topk_distillation_loss(logits, teacher, **options).loss, logits)
        assert ours == [("all_reduce", 4 * rows * (K + tp))]
        with counted() as with_overlap:
            torch.autograd.grad(topk_distillation_loss(logits, teacher, diagnostics=True, **options).loss, logits)
        assert with_overlap == [*ours, ("all_gather", 8 * rows * (2 * K + 1))]
        with counted() as theirs:
            torch.autograd.grad(verl_loss(logits, teacher, floor)[0].sum(), logits)
        in_rows = [("all_reduce", 4 * rows)] * (4 if floor is None else 5)
        of_overlap = [("all_gather", 4 * rows * K), ("all_gather", 8 * rows * K), ("all_reduce", 4 * rows * K)]
        assert theirs == in_rows + of_overlap

    on_ranks(check)
