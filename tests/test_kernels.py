"""The compiled body against the eager one, and what happens where it cannot run."""

import warnings

import pytest
import torch

from potstill import LinearLogits, LogitTransform, TeacherTopK, coarse_logits, topk_distillation_loss
from potstill.core import kernel_choice, reference
from potstill.kernels import compiled

N, V, K = 40, 5003, 16


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [1.0, 1.5])
@pytest.mark.parametrize("form", ["logits", "recompute", "single_pass"])
def test_compiled_is_as_exact_as_eager(dtype, temperature, form):
    hidden, weight = (torch.randn(n, 8).to(dtype) for n in (N, V))
    hidden[5] = torch.nan  # an unscored row
    mask = torch.arange(N) != 5
    teacher = TeacherTopK.from_logits(torch.randn(N, V) * 3, K, temperature=temperature)
    teacher.token_ids[3, 2] = -1
    options = dict(mask=mask, temperature=temperature, transform=LogitTransform(scale=0.5, vocab_size=V - 3))
    losses, grads = [], []
    for kernel in ("eager", "compiled"):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logits = (hidden @ weight.T).requires_grad_() if form == "logits" else LinearLogits(h, w)
        memory = {} if form == "logits" else {"memory": form}
        out = topk_distillation_loss(logits, teacher, kernel=kernel, chunk_size=7, check=False, **memory, **options)
        inputs = [logits] if form == "logits" else [h, w]
        losses.append(out.loss)
        grads.append([x.float() for x in torch.autograd.grad(out.loss, inputs)])
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    ulp = torch.finfo(dtype).eps
    for eager, fused in zip(*grads, strict=True):
        assert fused.isfinite().all()
        torch.testing.assert_close(fused, eager, rtol=2 * ulp, atol=16 * ulp * eager.abs().max().item())
        assert fused.shape[0] != N or (fused[5] == 0).all()


@pytest.mark.slow
def test_compiled_against_float64():
    z = (torch.randn(N, V) * 5).bfloat16()
    ids = torch.stack([torch.randperm(V)[:K] for _ in range(N)])
    want = reference.coarse(z.double(), ids)
    for kernel in ("eager", "compiled"):
        got = coarse_logits(z, ids, kernel=kernel)
        torch.testing.assert_close(got.rest_log_prob.double(), want.rest_log_prob, rtol=1e-6, atol=1e-6)


def test_small_calls_never_compile(monkeypatch):
    monkeypatch.setattr(compiled, "why_not", lambda *_: pytest.fail("compiled for a small call"))
    coarse_logits(torch.zeros(3, 7), torch.zeros(3, 1, dtype=torch.long))


def test_auto_warns_once_and_goes_on_where_nothing_compiles(monkeypatch):
    monkeypatch.setattr(compiled, "why_not", lambda *_: "RuntimeError: no C++ compiler")
    monkeypatch.setattr(kernel_choice, "WORTH_COMPILING", 0)
    kernel_choice._warn_once.cache_clear()
    z, ids = torch.randn(3, 7), torch.zeros(3, 1, dtype=torch.long)
    with pytest.warns(UserWarning, match=r"no C\+\+ compiler.*eager"):
        first = coarse_logits(z, ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(coarse_logits(z, ids).rest, first.rest)
        coarse_logits(z.double(), ids)  # what the body does not cover is no failure


@pytest.mark.parametrize(
    ("z", "options"),
    [
        (torch.zeros(3, 7), {}),
        (torch.zeros(3, 7, dtype=torch.float64), {}),
        (torch.zeros(3, 7), {"transform": LogitTransform(softcap=30.0)}),
        (torch.zeros(3, 7), {"transform": LogitTransform(scale=-1.0)}),
    ],
    ids=["no compiler", "float64", "softcap", "negative scale"],
)
def test_a_named_kernel_that_cannot_run_raises(monkeypatch, z, options):
    monkeypatch.setattr(compiled, "why_not", lambda *_: "RuntimeError: no C++ compiler")
    with pytest.raises(ValueError, match="kernel='compiled' cannot run here"):
        coarse_logits(z, torch.zeros(3, 1, dtype=torch.long), kernel="compiled", **options)
