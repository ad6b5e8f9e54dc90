"""What must hold on every rank of a tensor-parallel group: python shard_checks.py RANK SIZE FOLDER.

Each `check_...` compares a rank's share with the unsharded public function. A failure is written to FOLDER, where
test_vocab_parallel.py reads it; ranks stay together because a check that fails on one is compared on all.
"""

import functools
import json
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from potstill import (
    TAILS,
    LinearLogits,
    LogitTransform,
    SampledTargets,
    TeacherTopK,
    VocabShard,
    coarse_logits,
    full_vocab_distillation_loss,
    global_num_tokens,
    student_topk,
    topk_distillation_loss,
)
from potstill.core.vocab_parallel import combine

INF = float("inf")
V, H, K, N = 13, 5, 4, 6
BOUNDS = {1: [0, 13], 2: [0, 7, 13], 3: [0, 4, 4, 13], 4: [0, 5, 5, 11, 13]}  # uneven, and with empty ranks
FORMS = ("logits", "recompute", "single_pass")


def shard_of(**options) -> VocabShard:
    bounds = BOUNDS[dist.get_world_size()]
    return VocabShard(bounds[dist.get_rank()], bounds[dist.get_rank() + 1], dist.group.WORLD, **options)


def same(actual, expected, what=""):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")


class Inputs:
    """A student and a teacher, alike on every rank, with ids on both sides of every border."""

    def __init__(self, k=K, seed=0, dtype=torch.float64):
        torch.manual_seed(seed)
        self.hidden = torch.randn(2, N // 2, H, dtype=dtype)
        self.weight, self.bias = torch.randn(V, H, dtype=dtype), torch.randn(V, dtype=dtype)
        self.teacher_logits = 2 * torch.randn(2, N // 2, V, dtype=dtype)
        self.teacher = TeacherTopK.from_logits(self.teacher_logits, k)
        self.mask = torch.tensor([[True, True, False], [True, True, True]])
        self.token_weights = torch.rand(2, N // 2, dtype=dtype)

    def leaves(self, form, shard=None):
        cut = slice(None) if shard is None else slice(shard.start, shard.stop)
        if form == "logits":
            z = self.hidden @ self.weight.T + self.bias
            return [z[..., cut].clone().requires_grad_()]
        return [x.clone().requires_grad_() for x in (self.hidden, self.weight[cut], self.bias[cut])]

    def both(self, form, call, shard, **options):
        """The outputs and gradients of the sharded and the unsharded call, each cut to this rank's part."""
        found = []
        for own in (shard, None):
            leaves = self.leaves(form, own)
            student = leaves[0] if form == "logits" else LinearLogits(*leaves)
            memory = {} if form == "logits" or call is not topk_distillation_loss else {"memory": form}
            out = call(student, **options, **memory, **({} if own is None else {"shard": own}))
            out.loss.backward()
            grads = [leaf.grad for leaf in leaves]
            if own is None:
                cut = slice(shard.start, shard.stop)
                grads = [grads[0][..., cut]] if form == "logits" else [grads[0], *(x[cut] for x in grads[1:])]
            found.append((out, grads))
        return found

    def compare(self, form, call, shard, what, **options):
        (out, grads), (want, expected) = self.both(form, call, shard, **options)
        same(out.loss, want.loss, f"{what}: loss")
        same(out.per_token, want.per_token, f"{what}: per_token")
        assert out.metrics.keys() == want.metrics.keys()
        for name, value in want.metrics.items():
            same(out.metrics[name], value, f"{what}: {name}")
        for i, (grad, wanted) in enumerate(zip(grads, expected, strict=True)):
            same(grad, wanted, f"{what}: gradient {i}")


def check_every_tail_and_form(shard):
    for k in (1, K, V - 1, V):
        x = Inputs(k)
        for form in FORMS:
            for tail in TAILS:
                if tail == "renormalize" and k == 1:
                    continue
                for divergence in ("forward_kl", "reverse_kl", "jsd"):
                    x.compare(
                        form,
                        topk_distillation_loss,
                        shard,
                        f"K={k} {form} {tail} {divergence}",
                        teacher=x.teacher,
                        tail=tail,
                        divergence=divergence,
                        mask=x.mask,
                        token_weights=x.token_weights,
                        num_tokens=7,
                    )


def check_options(shard):
    x = Inputs()
    for form in FORMS:
        for options in (
            {"diagnostics": True, "entropy": form != "single_pass"},
            {"temperature": 1.5, "temperature_squared": True},
            {"transform": LogitTransform(scale=0.5, softcap=3.0)},
            {"log_prob_min_clamp": -3.0, "tail": "drop"},
            {"chunk_size": 2 if form == "logits" else 4},
        ):
            temperature = options.get("temperature", 1.0)
            teacher = TeacherTopK.from_logits(x.teacher_logits, K, temperature=temperature)
            x.compare(form, topk_distillation_loss, shard, f"{form} {options}", teacher=teacher, **options)


def check_padded_vocabulary(shard):
    x = Inputs()
    padded = LogitTransform(vocab_size=10)
    x.weight[10:], x.bias[10:] = float("nan"), float("nan")
    teacher = TeacherTopK.from_logits(x.teacher_logits, K, transform=padded)
    for form in FORMS:
        x.compare(form, topk_distillation_loss, shard, form, teacher=teacher, transform=padded, diagnostics=True)


def check_empty_slots_and_masked_rows(shard):
    x = Inputs()
    ids, log_probs = x.teacher.token_ids.clone(), x.teacher.log_probs.clone()
    ids[0, 0, 1], log_probs[1, 0, 2] = -1, -INF
    ids[0, 2], log_probs[0, 2] = -100, float("nan")  # the row that is not scored
    x.hidden[0, 2] = float("nan")
    for form in FORMS:
        x.compare(form, topk_distillation_loss, shard, form, teacher=TeacherTopK(ids, log_probs), mask=x.mask)


def check_nothing_scored(shard):
    x = Inputs()
    for form in FORMS:
        (out, grads), _ = x.both(form, topk_distillation_loss, shard, teacher=x.teacher, mask=torch.zeros(2, 3).bool())
        assert out.loss == 0
        assert all((grad == 0).all() for grad in grads)


def check_coarse_logits(shard):
    x = Inputs()
    for k in (0, 1, K, V):
        ids = torch.stack([torch.randperm(V)[:k] for _ in range(N)]).view(2, 3, k)
        dist.broadcast(ids, 0)
        if k == K:
            ids[0, 0, 1] = -1
        for form in ("logits", "recompute"):
            grads = []
            for own in (shard, None):
                leaves = x.leaves(form, own)
                student = leaves[0] if form == "logits" else LinearLogits(*leaves)
                coarse = coarse_logits(student, ids, entropy=True, shard=own)
                found = coarse.log_probs, coarse.rest_log_prob, coarse.lse, coarse.entropy
                total = sum((i + 1) * part[part > -INF].square().sum() for i, part in enumerate(found))
                grads.append((found, torch.autograd.grad(total, leaves)))
            (found, ours), (wanted, theirs) = grads
            for a, b in zip(found, wanted, strict=True):
                same(a, b, f"K={k} {form}")
            cut = slice(shard.start, shard.stop)
            theirs = [theirs[0][..., cut]] if form == "logits" else [theirs[0], *(g[cut] for g in theirs[1:])]
            for a, b in zip(ours, theirs, strict=True):
                same(a, b, f"K={k} {form} gradient")


def check_gradcheck(shard):
    x = Inputs()
    ids = x.teacher.token_ids

    def loss(z):
        # Every rank moves its own columns in turn; numerically each sees what the sum of all sees.
        own = combine(shard, ids, *local(z), None)
        return torch.cat([own[0], own[1].unsqueeze(-1)], -1).log_softmax(-1).square().sum()

    def local(z):
        coarse = coarse_logits(z, torch.where(shard.owns(ids), ids - shard.start, -1))
        return coarse.selected, coarse.rest

    for rank in range(shard.size):
        width = torch.tensor(shard.bounds[rank])
        z = x.leaves("logits", shard)[0]
        analytic = torch.autograd.grad(loss(z), z)[0]
        for column in range(int(width[1] - width[0])):
            step = torch.zeros_like(z)
            if rank == shard.rank:
                step[..., column] = 1e-6
            with torch.no_grad():
                slope = (loss(z + step) - loss(z - step)) / 2e-6
            if rank == shard.rank:
                torch.testing.assert_close(analytic[..., column].sum(), slope, rtol=1e-6, atol=1e-7)


def check_top_k_and_ties(shard):
    torch.manual_seed(1)
    z = torch.randn(N, V, dtype=torch.float64)
    z[1] = 0.5  # everything is tied: the lowest ids, across the borders
    z[2, ::2] = 3.0
    z[3, :9] = -INF
    for k in (1, 3, V):
        for got, want in zip(
            student_topk(z[:, shard.start : shard.stop], k, shard=shard), student_topk(z, k), strict=True
        ):
            same(got, want, f"k={k}")
        got = TeacherTopK.from_logits(z[:, shard.start : shard.stop], k, shard=shard, temperature=1.3)
        want = TeacherTopK.from_logits(z, k, temperature=1.3)
        same(got.token_ids, want.token_ids)
        same(got.log_probs, want.log_probs)
        same(got.rest_log_prob.exp(), want.rest_log_prob.exp())
    ids = torch.tensor([[0, 12, 5, -1]] * N)
    got = TeacherTopK.from_logits(z[:, shard.start : shard.stop], token_ids=ids, shard=shard)
    want = TeacherTopK.from_logits(z, token_ids=ids)
    same(got.log_probs, want.log_probs)
    same(got.rest_log_prob, want.rest_log_prob)
    x = Inputs()
    linear = LinearLogits(x.hidden, x.weight[shard.start : shard.stop], x.bias[shard.start : shard.stop])
    for got, want in zip(
        student_topk(linear, K, shard=shard, chunk_size=2),
        student_topk(LinearLogits(x.hidden, x.weight, x.bias), K),
        strict=True,
    ):
        same(got, want, "linear")


def check_sampled_targets(shard):
    x = Inputs()
    z = x.teacher_logits * 2
    z[0, 1, 3:] = -INF  # fewer ids than slots
    for k, options in ((K, {}), (K, {"method": "top_h", "top_h": 2}), (K, {"method": "random"}), (V, {}), (1, {})):
        for seed in range(5):
            draw = functools.partial(SampledTargets.from_logits, k=k, temperature=1.2, **options)
            # Only the first rank's random numbers count.
            got = draw(z[..., shard.start : shard.stop], shard=shard, generator=generator(seed + 100 * shard.rank))
            want = draw(z, generator=generator(seed))
            same(got.token_ids, want.token_ids, f"{k} {options}")
            same(got.weights, want.weights, f"{k} {options}")
    targets = SampledTargets.from_logits(z, K, generator=generator(0))
    for form in FORMS:
        x.compare(form, topk_distillation_loss, shard, form, teacher=targets)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def check_full_vocabulary(shard):
    x = Inputs()
    x.hidden[0, 2], x.teacher_logits[0, 2] = float("nan"), float("nan")  # not scored
    teacher_hidden, teacher_weight = torch.randn(2, 3, 7, dtype=torch.float64), torch.randn(V, 7, dtype=torch.float64)
    cut = slice(shard.start, shard.stop)
    for form in ("logits", "linear"):
        for options in (
            {},
            {"divergence": "reverse_kl"},
            {"divergence": "jsd", "beta": 0.3, "chunk_size": 2},
            {"divergence": "total_variation", "temperature": 1.5, "temperature_squared": True},
            {"k": 3, "shape_weight": 0.4},
            {"student_transform": LogitTransform(softcap=3.0), "teacher_transform": LogitTransform(scale=0.5)},
            {"student_transform": LogitTransform(vocab_size=10), "teacher_transform": LogitTransform(vocab_size=10)},
        ):
            for linear_teacher in (False, True):

                def call(student, shard=None, linear=linear_teacher, **options):
                    rows = slice(None) if shard is None else cut
                    teacher = x.teacher_logits[..., rows]
                    if linear:
                        teacher = LinearLogits(teacher_hidden, teacher_weight[rows])
                    return full_vocab_distillation_loss(student, teacher, shard=shard, **options)

                given = {"mask": x.mask, "token_weights": x.token_weights, **options}
                x.compare(form, call, shard, f"{form} {options} {linear_teacher}", **given)


def check_other_dtypes(shard):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        x = Inputs(dtype=dtype)
        for form in FORMS:
            (out, grads), (want, expected) = x.both(form, topk_distillation_loss, shard, teacher=x.teacher)
            for a, b in zip((out.loss, *grads), (want.loss, *expected), strict=True):
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def check_reused_logits(shard):
    x = Inputs()
    (leaf,), (other,) = x.leaves("logits", shard), x.leaves("logits", shard)
    z = leaf * 1.0
    topk_distillation_loss(z, x.teacher, shard=shard, reuse_logits=True).loss.backward()
    topk_distillation_loss(other, x.teacher, shard=shard).loss.backward()
    same(leaf.grad, other.grad)


@contextmanager
def counted():
    """Names and bytes of the collectives within."""
    calls, originals = [], {}
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        originals[name] = getattr(dist, name)

        def count(*args, _name=name, **options):
            tensor = args[0][0] if isinstance(args[0], list) else args[0]
            calls.append((_name, tensor.numel() * tensor.element_size()))
            return originals[_name](*args, **options)

        setattr(dist, name, count)
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def check_collectives(shard):
    x = Inputs(dtype=torch.float32)
    reduced = [("all_reduce", 4 * N * (K + shard.size))]
    d_hidden = [("all_reduce", 4 * N * H)]
    for tail in TAILS:
        for chunk_size in (1, None):
            (z,) = x.leaves("logits", shard)
            with counted() as calls:
                out = topk_distillation_loss(z, x.teacher, shard=shard, tail=tail, chunk_size=chunk_size)
                assert calls == reduced, calls
                out.loss.backward()
                assert calls == reduced, calls
    leaves = x.leaves("recompute", shard)
    with counted() as calls:
        topk_distillation_loss(LinearLogits(*leaves), x.teacher, shard=shard, memory="recompute").loss.backward()
    assert calls == reduced + d_hidden, calls
    leaves = x.leaves("single_pass", shard)
    with counted() as calls:
        options = {"memory": "single_pass", "chunk_size": 2}
        topk_distillation_loss(LinearLogits(*leaves), x.teacher, shard=shard, **options).loss.backward()
    assert calls == [("all_reduce", 4 * 2 * (K + shard.size))] * 3 + d_hidden, calls
    with counted() as calls:
        topk_distillation_loss(x.leaves("logits", shard)[0], x.teacher, shard=shard, diagnostics=True)
    assert calls == [*reduced, ("all_gather", 8 * N * (2 * K + 1))], calls
    (z,) = x.leaves("logits", shard)
    with counted() as calls:
        teacher_logits = x.teacher_logits[..., shard.start : shard.stop]
        full_vocab_distillation_loss(z, teacher_logits, shard=shard).loss.backward()
    assert calls == [("all_gather", 4 * 2 * N), ("all_reduce", 4 * 2 * N)], calls
    with counted() as calls:
        VocabShard.even(V, dist.group.WORLD)
    assert calls == []


def check_single_pass_pieces(shard):
    x = Inputs()
    linear = LinearLogits(
        x.hidden.repeat(1, 6, 1).requires_grad_(), x.weight[shard.start : shard.stop].requires_grad_()
    )
    teacher = TeacherTopK(x.teacher.token_ids.repeat(1, 6, 1), x.teacher.log_probs.repeat(1, 6, 1))
    refused = expect_error(
        ValueError, topk_distillation_loss, linear, teacher, shard=shard, memory="single_pass", chunk_size=2
    )
    assert "recompute" in refused or shard.size == 1, refused
    topk_distillation_loss(linear, teacher, shard=shard, memory="single_pass", chunk_size=5)
    if shard.size > 1:  # auto recomputes: single_pass refuses a gradient that arrives for per_token
        topk_distillation_loss(linear, teacher, shard=shard).per_token.sum().backward()


def expect_error(kind, call, *args, **options):
    try:
        call(*args, **options)
    except kind as error:
        return str(error)
    return ""


def check_refusals(shard):
    x = Inputs()
    (whole,) = x.leaves("logits")
    refused = expect_error(ValueError, topk_distillation_loss, whole, x.teacher, shard=shard)
    assert shard.size == 1 or "gathered" in refused, refused
    (z,) = x.leaves("logits", shard)
    refused = expect_error(
        ValueError, topk_distillation_loss, z, TeacherTopK(x.teacher.token_ids + V, x.teacher.log_probs), shard=shard
    )
    assert "13" in refused, refused
    bounds = BOUNDS[shard.size]
    gap = expect_error(ValueError, VocabShard, bounds[shard.rank] + shard.rank, bounds[shard.rank + 1] + shard.rank)
    assert shard.size == 1 or "without gap" in gap, gap
    wrong = expect_error(ValueError, shard_of, vocab_size=V + 1)
    assert "14" in wrong, wrong


def check_a_group_of_others(shard):
    if shard.size == 1:
        return
    others = dist.new_group([1])
    if shard.rank == 1:
        assert VocabShard.even(V, others).stop == V
        return
    for make in (lambda: VocabShard.even(V, others), lambda: VocabShard(0, V, others)):
        assert "not in the shard's group" in expect_error(ValueError, make)


def check_sequence_parallel(shard):
    torch.manual_seed(3)
    rows = 2 * shard.size
    hidden, weight = torch.randn(rows, 3, H, dtype=torch.float64), torch.randn(V, H, dtype=torch.float64)
    teacher = TeacherTopK.from_logits(torch.randn(rows, 3, V, dtype=torch.float64), K)
    parallel = VocabShard(shard.start, shard.stop, shard.group, vocab_size=V, sequence_parallel=True)
    mine = slice(2 * shard.rank, 2 * shard.rank + 2)
    for memory in ("recompute", "single_pass"):
        whole = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        want = topk_distillation_loss(LinearLogits(*whole), teacher, memory=memory)
        want.loss.backward()
        part = [hidden[mine].clone().requires_grad_(), weight[shard.start : shard.stop].clone().requires_grad_()]
        with counted() as calls:
            out = topk_distillation_loss(LinearLogits(*part), teacher, memory=memory, shard=parallel)
            out.loss.backward()
        names = [name for name, _ in calls]
        assert names[0] == "all_gather" and names[-1] == "reduce_scatter", names
        same(out.per_token, want.per_token, memory)
        same(part[0].grad, whole[0].grad[mine], f"{memory} d hidden")
        same(part[1].grad, whole[1].grad[shard.start : shard.stop], f"{memory} d weight")


def check_surroundings(shard):
    """no_grad, activation checkpointing, torch.compile of the rest, and the caller's tensors left alone."""
    x = Inputs()
    (z,) = x.leaves("logits", shard)
    before = z.detach().clone()
    want = topk_distillation_loss(z, x.teacher, shard=shard)
    (grad,) = torch.autograd.grad(want.loss, z)
    with torch.no_grad():
        same(topk_distillation_loss(z, x.teacher, shard=shard).loss, want.loss.detach())
    checkpointed = checkpoint(lambda z: topk_distillation_loss(z, x.teacher, shard=shard).loss, z, use_reentrant=False)
    same(torch.autograd.grad(checkpointed, z)[0], grad, "checkpoint")

    @torch.compile(backend="aot_eager")
    def step(z):
        return topk_distillation_loss(z * 1.0, x.teacher, shard=shard, check=False).loss * 1.0

    compiled = step(z)
    same(compiled, want.loss, "compiled")
    same(torch.autograd.grad(compiled, z)[0], grad, "compiled gradient")
    same(z.detach(), before, "the caller's logits")


def check_without_a_gradient(shard):
    """Under no_grad and inference_mode, and with a teacher made in inference mode, the values are the same."""
    x = Inputs()
    cut = slice(shard.start, shard.stop)
    for form in ("logits", "linear"):
        leaves, whole = x.leaves(form, shard), x.leaves(form)
        own, student = (y[0] if form == "logits" else LinearLogits(*y) for y in (leaves, whole))
        want = [topk_distillation_loss(student, x.teacher), full_vocab_distillation_loss(student, x.teacher_logits)]
        for without in (torch.no_grad, torch.inference_mode):
            with without():
                teacher_logits = x.teacher_logits[..., cut].clone()
                found = [
                    topk_distillation_loss(own, x.teacher, shard=shard),
                    full_vocab_distillation_loss(own, teacher_logits, shard=shard),
                ]
            for out, wanted in zip(found, want, strict=True):
                same(out.loss, wanted.loss.detach(), f"{form} {without.__name__}")
        out = full_vocab_distillation_loss(own, teacher_logits, shard=shard)
        grad, expected = (torch.autograd.grad(y.loss, z[0])[0] for y, z in ((out, leaves), (want[1], whole)))
        same(grad, expected[..., cut] if form == "logits" else expected, f"{form} teacher of inference mode")


def check_dtensor(shard):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (shard.size,))
    x = Inputs()
    (whole,) = x.leaves("logits")
    want = topk_distillation_loss(whole, x.teacher)
    want.loss.backward()
    z = distribute_tensor(whole.detach(), mesh, [Shard(2)]).requires_grad_()
    out = topk_distillation_loss(z, x.teacher)
    out.loss.backward()
    same(out.loss, want.loss, "logits")
    same(z.grad.full_tensor(), whole.grad, "d logits")

    leaves = x.leaves("recompute")
    topk_distillation_loss(LinearLogits(*leaves), x.teacher, memory="recompute").loss.backward()
    hidden = distribute_tensor(x.hidden, mesh, [Replicate()]).requires_grad_()
    weight = distribute_tensor(x.weight, mesh, [Shard(0)]).requires_grad_()
    bias = distribute_tensor(x.bias, mesh, [Shard(0)]).requires_grad_()
    topk_distillation_loss(LinearLogits(hidden, weight, bias), x.teacher).loss.backward()
    for part, wanted in zip((hidden, weight, bias), leaves, strict=True):
        same(part.grad.full_tensor(), wanted.grad, "linear")

    refused = expect_error(TypeError, topk_distillation_loss, LinearLogits(x.hidden, weight), x.teacher)
    assert "to_local()" in refused and "FSDP" in refused, refused
    topk_distillation_loss(LinearLogits(x.hidden, distribute_tensor(x.weight, mesh, [Replicate()])), x.teacher)
    partial = DTensor.from_local(whole.detach(), mesh, [Partial()])
    assert "partial" in expect_error(TypeError, topk_distillation_loss, partial, x.teacher)
    assert "leave shard out" in expect_error(TypeError, topk_distillation_loss, z, x.teacher, shard=shard)


def check_data_and_tensor_parallel(shard):
    """2 x 2 ranks, uneven numbers of scored rows and one rank with none: equal to one process after one step."""
    if shard.size != 4:
        return
    tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, tensor_rank = divmod(shard.rank, 2)
    data_group = data_groups[tensor_rank]
    cut = VocabShard.even(V, tensor_groups[replica])
    for mask in (torch.tensor([[1, 1, 0], [0, 0, 0]]), torch.tensor([[1, 0, 0], [1, 1, 1]])):
        for form in FORMS:
            x = Inputs()
            whole = x.leaves(form)
            student = whole[0] if form == "logits" else LinearLogits(*whole)
            memory = {} if form == "logits" else {"memory": form}
            topk_distillation_loss(student, x.teacher, mask=mask, **memory).loss.backward()

            rows, cols = slice(replica, replica + 1), slice(cut.start, cut.stop)
            part = [leaf.detach() for leaf in whole]
            if form == "logits":
                part = [part[0][rows, :, cols].clone()]
            else:
                part = [part[0][rows].clone(), part[1][cols].clone(), part[2][cols].clone()]
            for leaf in part:
                leaf.requires_grad_()
            teacher = TeacherTopK(
                *(t[rows] for t in (x.teacher.token_ids, x.teacher.log_probs, x.teacher.rest_log_prob))
            )
            num_tokens = global_num_tokens([mask[rows]], data_group)
            assert num_tokens == mask.sum()
            student = part[0] if form == "logits" else LinearLogits(*part)
            out = topk_distillation_loss(student, teacher, mask=mask[rows], num_tokens=num_tokens, shard=cut, **memory)
            out.loss.backward()
            if form == "logits":
                same(part[0].grad, whole[0].grad[rows, :, cols], form)
                continue
            same(part[0].grad, whole[0].grad[rows], f"{form} d hidden")
            for own, leaf in zip(part[1:], whole[1:], strict=True):
                dist.all_reduce(own.grad, group=data_group)  # a sum: num_tokens is already that of both
                same(own.detach() - 0.1 * own.grad, (leaf - 0.1 * leaf.grad)[cols].detach(), f"{form} step")


def check_context_parallel(shard):
    """Rows may be cut anywhere, together with their teacher rows: the ranks' losses and gradients add up."""
    x = Inputs()
    (z,) = x.leaves("logits")
    want = topk_distillation_loss(z, x.teacher, mask=x.mask)
    want.loss.backward()
    mine = slice(shard.rank, None, shard.size)  # rows of one sequence, dealt out
    flat = TeacherTopK(x.teacher.token_ids.flatten(0, 1)[mine], x.teacher.log_probs.flatten(0, 1)[mine])
    part = z.detach().flatten(0, 1)[mine].clone().requires_grad_()
    mask = x.mask.flatten()[mine]
    out = topk_distillation_loss(part, flat, mask=mask, num_tokens=global_num_tokens([mask]))
    out.loss.backward()
    same(part.grad, z.grad.flatten(0, 1)[mine], "gradient")
    total = torch.stack([out.loss.detach(), out.metrics["student_mass"]])
    dist.all_reduce(total)
    same(total, torch.stack([want.loss.detach(), want.metrics["student_mass"]]), "sums")


def main(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    shard = shard_of()
    failures = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            failures[name] = ""
            try:
                check(shard)
            except Exception:
                failures[name] = traceback.format_exc()
            ok = torch.tensor(float(not failures[name]))
            dist.all_reduce(ok, op=dist.ReduceOp.MIN)
            failures[name] = failures[name] or ("" if ok else "failed on another rank")
    Path(folder, f"rank{rank}.json").write_text(json.dumps(failures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
