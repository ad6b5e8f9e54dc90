"""coarse_logits: values and gradients against dense autograd, and what they cost."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from memory import LargestTensor, bytes_kept
from potstill import LinearLogits, LogitTransform, TeacherTopK, coarse_logits, topk_distillation_loss

N, V, H = 6, 13, 5
FORMS = ["logits", "linear"]


def dense(z, ids, transform, temperature):
    """log q at the ids, log of the rest, entropy: from one dense log-softmax."""
    z = z[..., : transform.vocab_size or z.shape[-1]] * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    log_q = (z / temperature).log_softmax(-1)
    chosen = torch.zeros(z.shape, dtype=torch.bool).scatter(-1, ids.clamp(min=0), ids >= 0)
    selected = torch.where(ids >= 0, log_q.gather(-1, ids.clamp(min=0)), -torch.inf)
    rest = log_q.masked_fill(chosen, -torch.inf).logsumexp(-1)
    return selected, rest, -(log_q.exp() * log_q).sum(-1)


def parts(n=N, v=V, h=H, dtype=torch.float64):
    shapes = ((n, h), (v, h), (v,))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def logits_of(form, hidden, weight, bias):
    return hidden @ weight.T + bias if form == "logits" else LinearLogits(hidden, weight, bias)


def distinct_ids(n, v, k):
    return torch.stack([torch.randperm(v)[:k] for _ in range(n)]) if n else torch.empty(0, k, dtype=torch.long)


TRANSFORMS = [LogitTransform(), LogitTransform(scale=0.7, softcap=3.0, vocab_size=11)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=["plain", "softcap and padding"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("k", [0, 1, 3, 10])
@pytest.mark.parametrize("chunk_size", [None, 1, 4])
def test_equals_dense_in_value_and_every_gradient(form, transform, temperature, k, chunk_size):
    inputs = parts()
    ids = distinct_ids(N, 11, k)
    if k == 3:
        ids[1, 0] = -1  # an empty slot
    weights = torch.randn(N, k, dtype=torch.float64), *torch.randn(2, N, dtype=torch.float64)

    def total(numbers):
        return sum((x.masked_fill(x == -torch.inf, 0) * w).sum() for x, w in zip(numbers, weights, strict=True))

    want = dense(logits_of("logits", *inputs), ids, transform, temperature)
    coarse = coarse_logits(
        logits_of(form, *inputs),
        ids,
        temperature=temperature,
        transform=transform,
        entropy=True,
        chunk_size=chunk_size,
    )
    got = coarse.log_probs, coarse.rest_log_prob, coarse.entropy
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)
    for mine, theirs in zip(
        torch.autograd.grad(total(got), inputs), torch.autograd.grad(total(want), inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k", [0, 1, 3, V - 1])
def test_gradcheck(form, k):
    ids = distinct_ids(N, V, k)

    def numbers(*inputs):
        coarse = coarse_logits(logits_of(form, *inputs), ids, entropy=True, chunk_size=2, temperature=1.3)
        return coarse.selected, coarse.rest, coarse.rest_mean

    assert torch.autograd.gradcheck(numbers, parts(), fast_mode=form == "linear")


@pytest.mark.parametrize("form", FORMS)
def test_all_ids_selected_leaves_no_rest(form):
    inputs = parts()
    coarse = coarse_logits(logits_of(form, *inputs), distinct_ids(N, V, V), entropy=True)
    assert (coarse.rest == -torch.inf).all() and (coarse.rest_mean == 0).all()
    want = dense(logits_of("logits", *inputs), torch.empty(N, 0, dtype=torch.long), LogitTransform(), 1.0)[2]
    torch.testing.assert_close(coarse.entropy, want, rtol=0, atol=1e-14)
    grads = torch.autograd.grad(coarse.entropy.sum() + coarse.log_probs.sum(), inputs)
    assert all(grad.isfinite().all() for grad in grads)


def test_no_id_selected_gives_the_logsumexp():
    z = torch.randn(N, V, dtype=torch.float64)
    coarse = coarse_logits(z, torch.empty(N, 0, dtype=torch.long))
    torch.testing.assert_close(coarse.lse, z.logsumexp(1))
    assert (coarse.rest_log_prob == 0).all()


def test_an_idle_row_has_zero_gradient_whatever_it_holds():
    z = torch.randn(N, V, dtype=torch.float64)
    z[2] = torch.nan
    z[3, 4] = torch.inf
    for transform in TRANSFORMS:
        leaf = z.clone().requires_grad_()
        coarse = coarse_logits(leaf, distinct_ids(N, 11, 3), transform=transform, entropy=True)
        kept = torch.tensor([0, 1, 4, 5])
        loss = sum(x[kept].sum() for x in coarse)  # before any arithmetic of PyTorch's could spread a NaN
        (grad,) = torch.autograd.grad(loss, leaf)
        assert grad.isfinite().all() and (grad[2:4] == 0).all() and (grad[0] != 0).any()


STRIDES = {
    "transposed rows": lambda: torch.randn(3, 2, V, dtype=torch.float64).transpose(0, 1),
    "shifted rows": lambda: torch.randn(2, 4, V, dtype=torch.float64)[:, :-1],
    "every second column": lambda: torch.randn(2, 3, 2 * V, dtype=torch.float64)[..., ::2],
    "expanded rows": lambda: torch.randn(1, 3, V, dtype=torch.float64).expand(2, 3, V),
    "vocabulary first": lambda: torch.randn(V, 6, dtype=torch.float64).T,
    "one row without leading dimensions": lambda: torch.randn(V, dtype=torch.float64),
}


@pytest.mark.parametrize("make", STRIDES.values(), ids=STRIDES.keys())
def test_any_strides_without_a_copy(make):
    z = make().requires_grad_()
    plain = z.detach().contiguous().requires_grad_()
    ids = distinct_ids(z.shape[:-1].numel(), V, 3).view(*z.shape[:-1], 3)
    grads = []
    for logits in (z, plain):
        coarse = coarse_logits(logits, ids, chunk_size=2)
        grads.append(torch.autograd.grad((coarse.log_probs * torch.arange(3)).sum(), logits)[0])
    assert torch.equal(*grads)
    with LargestTensor() as made:
        coarse_logits(z, ids, chunk_size=1)
    assert made.largest <= max(V + 1, ids.numel())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunking_is_invisible_bit_for_bit(dtype):
    z = (torch.randn(48, 301) * 4).to(dtype)
    ids = distinct_ids(48, 301, 7)
    seen = []
    for chunk_size in (48, 17, 5, 2):
        leaf = z.clone().requires_grad_()
        coarse = coarse_logits(leaf, ids, chunk_size=chunk_size, entropy=True)
        (grad,) = torch.autograd.grad(coarse.log_probs.sum() + coarse.entropy.sum(), leaf)
        seen.append((coarse.selected, coarse.rest, coarse.rest_mean, grad))
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


class TestCost:
    """Bytes and GEMMs, at sizes where a whole [N, V] could not hide."""

    n, v, h, k = 64, 999, 8, 4

    def inputs(self, dtype=torch.float32):
        return parts(self.n, self.v, self.h, dtype)[:2], distinct_ids(self.n, self.v, self.k)

    @pytest.mark.parametrize("form", FORMS)
    def test_bytes_kept_for_backward(self, form):
        (hidden, weight), ids = self.inputs()
        logits = (hidden @ weight.T).detach().requires_grad_()
        given = (logits, ids) if form == "logits" else (hidden, weight, ids)
        with bytes_kept(*given) as kept:
            teacher = TeacherTopK(ids, torch.full(ids.shape, -3.0), torch.full((self.n,), -0.2))
            topk_distillation_loss(
                logits if form == "logits" else LinearLogits(hidden, weight), teacher, memory="recompute", check=False
            )
        assert 0 < kept[0] <= 16 * self.n * (self.k + 3)

    @pytest.mark.parametrize("chunk_size", [2, 7])
    def test_logits_allocate_their_gradient_and_tiles(self, chunk_size):
        (hidden, weight), ids = self.inputs()
        logits = (hidden @ weight.T).detach().requires_grad_()
        with LargestTensor() as made:
            coarse = coarse_logits(logits, ids, chunk_size=chunk_size)
        tile = chunk_size * (self.v + 1)
        assert made.largest <= tile
        with LargestTensor() as made:
            coarse.log_probs.sum().backward()
        assert sorted(size for size in made.sizes if size > tile) == [self.n * self.v]

    @pytest.mark.parametrize("chunk_size", [2, 7])
    @pytest.mark.parametrize("memory", ["recompute", "single_pass"])
    def test_linear_logits_never_make_the_logits(self, memory, chunk_size):
        (hidden, weight), ids = self.inputs()
        teacher = TeacherTopK(ids, torch.full(ids.shape, -3.0))
        with LargestTensor() as made:
            out = topk_distillation_loss(
                LinearLogits(hidden, weight), teacher, chunk_size=chunk_size, memory=memory, check=False
            )
            out.loss.backward()
        tile = max(chunk_size * (self.v + 1), self.n + chunk_size)
        assert made.largest <= max(tile, weight.numel())

    @pytest.mark.parametrize(("memory", "gemms"), [("recompute", 4), ("single_pass", 3)])
    def test_gemms(self, memory, gemms):
        (hidden, weight), ids = self.inputs()
        with FlopCounterMode(display=False) as counter:
            teacher = TeacherTopK(ids, torch.full(ids.shape, -3.0))
            topk_distillation_loss(LinearLogits(hidden, weight), teacher, chunk_size=16, memory=memory).loss.backward()
        assert counter.get_total_flops() == gemms * 2 * self.n * self.v * self.h

    def test_frozen_inputs_cost_no_gemm(self):
        (hidden, weight), ids = self.inputs()
        teacher = TeacherTopK(ids, torch.full(ids.shape, -3.0))
        for frozen in (hidden, weight):
            frozen.requires_grad_(False)
            for memory, gemms in (("recompute", 3), ("single_pass", 2)):
                with FlopCounterMode(display=False) as counter:
                    topk_distillation_loss(LinearLogits(hidden, weight), teacher, memory=memory).loss.backward()
                assert counter.get_total_flops() == gemms * 2 * self.n * self.v * self.h
            assert frozen.grad is None
            hidden.grad = weight.grad = None
            frozen.requires_grad_(True)


class TestReuse:
    """reuse_logits: the gradient is written into the logits, and autograd knows."""

    def setup_method(self):
        self.hidden = torch.randn(N, V, dtype=torch.float64, requires_grad=True)
        self.ids = distinct_ids(N, V, 3)

    def loss(self, logits, reuse):
        return coarse_logits(logits, self.ids, reuse_logits=reuse).log_probs.sum()

    def test_same_gradient_in_the_logits_own_memory(self):
        (want,) = torch.autograd.grad(self.loss(self.hidden * 2, False), self.hidden)
        logits = self.hidden * 2
        (got,) = torch.autograd.grad(self.loss(logits, True), self.hidden)
        assert torch.equal(got, want)
        with LargestTensor() as made:
            self.loss(self.hidden * 2, True).backward()
        assert made.sizes.count(N * V) <= 2  # hidden * 2, and its own backward

    def test_a_second_consumer_raises(self):
        logits = self.hidden * 2
        loss = logits.square().sum() + self.loss(logits, True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_a_second_backward_raises(self):
        loss = self.loss(self.hidden * 2, True)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    @pytest.mark.parametrize(
        ("make", "why"),
        [
            (lambda x: x, "leaf"),
            (lambda x: x[1:], "leaf"),
            (lambda x: (x[:1] * 1).expand(N, V), "expanded"),
            (lambda x: LinearLogits(x, torch.randn(V, V, dtype=torch.float64)), "LinearLogits"),
        ],
    )
    def test_refused(self, make, why):
        logits = make(self.hidden)
        n = logits.hidden.shape[0] if isinstance(logits, LinearLogits) else logits.shape[0]
        with pytest.raises(ValueError, match=f"reuse_logits.*{why}"):
            coarse_logits(logits, self.ids[:n], reuse_logits=True)

    def test_inference_tensors_are_refused(self):
        with torch.inference_mode():
            logits = torch.randn(N, V)
            with pytest.raises(ValueError, match="inference"):
                coarse_logits(logits, self.ids, reuse_logits=True)


class TestAutograd:
    @pytest.mark.parametrize("form", FORMS)
    def test_double_backward_is_an_error(self, form):
        inputs = parts()
        coarse = coarse_logits(logits_of(form, *inputs), distinct_ids(N, V, 3))
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            torch.autograd.grad(coarse.log_probs.sum(), inputs, create_graph=True)

    @pytest.mark.parametrize("form", FORMS)
    def test_checkpointing_around_it_changes_nothing(self, form):
        inputs, ids = parts(), distinct_ids(N, V, 3)

        def loss(*inputs):
            return coarse_logits(logits_of(form, *inputs), ids).log_probs.sum()

        want = torch.autograd.grad(loss(*inputs), inputs)
        got = torch.autograd.grad(checkpoint(loss, *inputs, use_reentrant=False), inputs)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    @pytest.mark.parametrize("form", FORMS)
    def test_autocast_changes_nothing_but_mixed_dtypes(self, form):
        inputs, ids = parts(dtype=torch.float32), distinct_ids(N, V, 3)
        logits = logits_of(form, *inputs)
        want = coarse_logits(logits, ids).rest
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(coarse_logits(logits, ids).rest, want)

    def test_mixed_dtypes_take_the_autocast_dtype_or_are_refused(self):
        hidden, weight, _ = parts(dtype=torch.float32)
        mixed = LinearLogits(hidden.bfloat16(), weight)
        ids = distinct_ids(N, V, 3)
        with pytest.raises(TypeError, match="one dtype"):
            coarse_logits(mixed, ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            coarse = coarse_logits(mixed, ids)
            want = coarse_logits(LinearLogits(hidden.bfloat16(), weight.bfloat16()), ids)
        assert torch.equal(coarse.rest, want.rest)
        coarse.rest.sum().backward()
        assert weight.grad.dtype == torch.float32 and hidden.grad.dtype == torch.float32


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(logits=torch.zeros(N, V, dtype=torch.long)), TypeError, "floating-point"),
        (dict(token_ids=torch.zeros(N, 2)), TypeError, "integers"),
        (dict(token_ids=torch.zeros(N + 1, 2, dtype=torch.long)), ValueError, r"\[7, 2\].*\[6, 13\]"),
        (dict(token_ids=torch.full((N, 1), V)), ValueError, r"13 is outside \[-1, 13\)"),
        (dict(token_ids=torch.full((N, 1), -2)), ValueError, r"-2 is outside"),
        (dict(temperature=0.0), ValueError, "temperature"),
        (dict(temperature=float("nan")), ValueError, "temperature"),
        (dict(chunk_size=0), ValueError, "chunk_size"),
        (dict(memory="single_pass"), ValueError, "memory"),
        (dict(kernel="triton"), ValueError, "kernel"),
        (dict(transform=LogitTransform(vocab_size=V + 1)), ValueError, "vocab_size is 14"),
    ],
)
def test_refusals_name_the_argument_and_the_value(change, error, message):
    given = dict(logits=torch.zeros(N, V), token_ids=torch.zeros(N, 1, dtype=torch.long)) | change
    with pytest.raises(error, match=message):
        coarse_logits(given.pop("logits"), given.pop("token_ids"), **given)


def test_entropy_must_be_asked_for():
    with pytest.raises(ValueError, match="entropy=True"):
        _ = coarse_logits(torch.zeros(N, V), torch.zeros(N, 1, dtype=torch.long)).entropy
