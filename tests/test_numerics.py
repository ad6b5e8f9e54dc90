"""The helpers at their edges, and how close float32 comes to float64 truth."""

import math

import pytest
import torch

from potstill import LinearLogits, TeacherTopK, coarse_logits, topk_distillation_loss
from potstill.core import reference
from potstill.core.numerics import (
    LOG_PROB_FLOOR,
    compute_dtype,
    log1mexp,
    logaddexp,
    logsumexp,
    normalise,
    p_log_p_over_q,
)
from shapes import INF, assert_same

NAN = float("nan")


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def value_and_gradient(function, *inputs):
    out = function(*inputs)
    gradients = torch.autograd.grad(out.sum(), inputs, allow_unused=True)
    return out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True))


# Helpers.


def test_compute_dtype_is_at_least_float32():
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float32}
    for dtype, expected in {**wide, torch.float64: torch.float64}.items():
        assert compute_dtype(dtype) == expected


@pytest.mark.parametrize(
    "x, value, gradient",
    [
        ((0.0, 0.0), math.log(2), (0.5, 0.5)),
        ((math.log(3), 0.0, -INF), math.log(4), (0.75, 0.25, 0.0)),
        ((1000.0, -1000.0), 1000.0, (1.0, 0.0)),
        ((-1e5, -1e5), -1e5 + math.log(2), (0.5, 0.5)),
        ((-INF, -INF), -INF, (0.0, 0.0)),  # nothing to add up
        ((-INF,), -INF, (0.0,)),
        ((), -INF, ()),
        ((INF, 0.0), INF, None),
        ((NAN, 0.0), NAN, None),
    ],
)
def test_logsumexp(x, value, gradient):
    out, grad = value_and_gradient(logsumexp, tensor(*x))
    torch.testing.assert_close(out, torch.tensor(value, dtype=torch.float64), equal_nan=True)
    if gradient is not None:
        assert_same(grad, torch.tensor(gradient, dtype=torch.float64))


def test_logsumexp_over_another_dimension():
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    x[:, 1] = -INF
    assert_same(logsumexp(x, 1), torch.logsumexp(x, 1))
    assert_same(logsumexp(x, 0)[1], torch.full((5,), -INF, dtype=torch.float64))


@pytest.mark.parametrize(
    "x, y, value, gradient",
    [
        (0.0, 0.0, math.log(2), (0.5, 0.5)),
        (math.log(3), 0.0, math.log(4), (0.75, 0.25)),
        (-INF, -1.0, -1.0, (0.0, 1.0)),
        (-1.0, -INF, -1.0, (1.0, 0.0)),
        (-INF, -INF, -INF, (0.0, 0.0)),
        (-1000.0, 0.0, 0.0, (0.0, 1.0)),
        (-1e4, -1e4, -1e4 + math.log(2), (0.5, 0.5)),
    ],
)
def test_logaddexp(x, y, value, gradient):
    out, gx, gy = value_and_gradient(logaddexp, tensor(x), tensor(y))
    assert_same(out, tensor(value).detach())
    assert_same(torch.stack([gx[0], gy[0]]), torch.tensor(gradient, dtype=torch.float64))


@pytest.mark.parametrize(
    "p, q, value, gradient",
    [
        # p log(p/q): d/dlog p = p (log(p/q) + 1), d/dlog q = -p
        (0.5, 0.25, 0.5 * math.log(2), (0.5 * (math.log(2) + 1), -0.5)),
        (1.0, 1.0, 0.0, (1.0, -1.0)),
        (0.0, 0.5, 0.0, (0.0, 0.0)),
        (0.0, 0.0, 0.0, (0.0, 0.0)),
        (0.5, 0.0, INF, None),
    ],
)
def test_p_log_p_over_q(p, q, value, gradient):
    log = [math.log(x) if x else -INF for x in (p, q)]
    out, gp, gq = value_and_gradient(p_log_p_over_q, tensor(log[0]), tensor(log[1]))
    assert_same(out, tensor(value).detach())
    if gradient is not None:
        assert_same(torch.stack([gp[0], gq[0]]), torch.tensor(gradient, dtype=torch.float64))


def test_p_log_p_over_q_where_only_q_is_zero_has_a_finite_gradient_for_q():
    log_p, log_q = torch.tensor([math.log(0.5)], dtype=torch.float64), tensor(-INF)
    value = p_log_p_over_q(log_p, log_q)
    assert value == INF and torch.autograd.grad(value, log_q)[0].item() == -0.5


@pytest.mark.parametrize(
    "x, value, gradient",
    [
        ((0.0, 0.0), (-math.log(2), -math.log(2)), (0.0, 0.0)),
        ((5.0, -INF), (0.0, -INF), (0.0, 0.0)),
        ((-INF, -INF), (-INF, -INF), (0.0, 0.0)),
        ((1000.0, 0.0), (0.0, -1000.0), None),
    ],
)
def test_normalise(x, value, gradient):
    x = tensor(*x)
    out = normalise(x)
    assert_same(out.detach(), torch.tensor(value, dtype=torch.float64))
    if gradient is not None:
        finite = out[out > -INF].sum() if (out > -INF).any() else out.masked_fill(out == -INF, 0.0).sum()
        assert_same(torch.autograd.grad(finite, x)[0], torch.tensor(gradient, dtype=torch.float64))


def test_normalise_of_nothing():
    assert normalise(torch.zeros(3, 0)).shape == (3, 0)


# log(1 - exp(x)) to 20 digits.
LOG1MEXP = {
    -1e-30: -6.90775527898213704372e1,
    -1e-10: -2.30258509299904568037e1,
    -1e-3: -6.90825523731547071180,
    -0.5: -9.32752129567188571895e-1,
    -0.6931471805599453: -6.93147180559945332608e-1,
    -0.7: -6.86341002808385153499e-1,
    -2.0: -1.45413457868859056973e-1,
    -40.0: -4.24835425529158900435e-18,
    -700.0: -9.85967654375977085671e-305,
}


@pytest.mark.parametrize("x", LOG1MEXP)
def test_log1mexp(x):
    out, grad = value_and_gradient(log1mexp, tensor(x))
    assert out.item() == pytest.approx(LOG1MEXP[x], rel=1e-14, abs=0)
    assert grad.item() == pytest.approx(-1 / math.expm1(-x), rel=1e-12, abs=0)  # -e^x / (1 - e^x)


def test_log1mexp_at_its_ends():
    out, grad = value_and_gradient(log1mexp, tensor(-INF))
    assert out == 0 and grad == 0
    assert log1mexp(torch.zeros(1)) == -INF


@pytest.mark.parametrize("helper", [logaddexp, p_log_p_over_q], ids=lambda f: f.__name__)
def test_gradcheck_of_two_arguments(helper):
    assert torch.autograd.gradcheck(helper, (tensor(-0.3, -2.0, -30.0), tensor(-1.0, -0.1, -31.0)))


@pytest.mark.parametrize("helper", [logsumexp, normalise, log1mexp], ids=lambda f: f.__name__)
def test_gradcheck_of_one_argument(helper):
    assert torch.autograd.gradcheck(helper, tensor(-0.3, -2.0, -20.0, -0.7))


def test_the_floor_is_float32s_smallest_normal_number():
    tiny = torch.finfo(torch.float32).tiny
    assert LOG_PROB_FLOOR == -87 and math.exp(-88) < tiny < math.exp(-87)


# Accuracy against float64.

V, K = 1000, 8


def peaked(mass):
    """Logits of 40 rows whose K most probable ids leave `mass` to the others."""
    z = torch.randn(40, V, dtype=torch.float64)
    top = z.topk(K, -1).indices
    head = z.gather(-1, top).logsumexp(-1, keepdim=True)
    rest = z.scatter(-1, top, -INF).logsumexp(-1, keepdim=True)
    lift = math.log1p(-mass) - math.log(mass) + rest - head
    return z.scatter_add(-1, top, lift.expand(-1, K).contiguous())


def with_holes():
    z = 3 * torch.randn(40, V, dtype=torch.float64)
    z[:, ::3] = -INF
    return z


ROWS = {
    "normal": lambda: torch.randn(40, V, dtype=torch.float64),
    "x10": lambda: 10 * torch.randn(40, V, dtype=torch.float64),
    "x1000": lambda: 1000 * torch.randn(40, V, dtype=torch.float64),
    "shifted": lambda: torch.randn(40, V, dtype=torch.float64) + 100.0,
    "tail 1e-3": lambda: peaked(1e-3),
    "tail 1e-6": lambda: peaked(1e-6),
    "P = 1 - 1e-10": lambda: peaked(1e-10),
    "tail 1e-30": lambda: peaked(1e-30),
    "one-hot": lambda: torch.nn.functional.one_hot(torch.arange(40), V).double() * 200.0,
    "uniform": lambda: torch.zeros(40, V, dtype=torch.float64),
    "-inf columns": with_holes,
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
rows = pytest.mark.parametrize("name", ROWS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def ulp(x):
    """The spacing of float32 numbers at |x|."""
    x = x.abs().float()
    return (torch.nextafter(x, torch.full_like(x, INF)) - x).double()


def measured(name, dtype):
    """Logits of a dtype, ids (the most probable and some others), and the largest |z| of each row."""
    logits = ROWS[name]().to(dtype)
    ids = torch.cat([logits.float().topk(K // 2, -1).indices, torch.full((40, 1), -1), torch.full((40, 1), 1)], -1)
    ids[:, -1] = torch.where((ids[:, :-1] == 1).any(-1), -1, 1)  # ids of a row differ
    size = logits.double().masked_fill(logits == -INF, 0.0).abs().amax(-1)
    return logits, ids, size


@dtypes
@rows
def test_log_probs_are_as_exact_as_gather_minus_logsumexp(name, dtype):
    """Within a few ulp of the row's largest |z|, and within one of the textbook's own float32 error."""
    logits, ids, size = measured(name, dtype)
    truth = reference.coarse(logits.double(), ids)
    ours = coarse_logits(logits, ids)
    live = (ids >= 0) & (truth.log_probs > -INF)
    z = logits.float()
    textbook = z.gather(-1, ids.clamp(min=0)) - z.logsumexp(-1, keepdim=True)
    allowed = 4 * ulp(size)[:, None].expand_as(truth.log_probs)[live]
    error = (ours.log_probs.double() - truth.log_probs)[live].abs()
    theirs = (textbook.double() - truth.log_probs)[live].abs()
    floor = ulp(truth.log_probs[live])  # the answer itself has to be rounded
    assert (error <= allowed + floor).all()
    assert error.max() <= 1.25 * theirs.max() + floor.max()
    assert (ours.log_probs[(ids >= 0) & (truth.log_probs == -INF)] == -INF).all()
    assert ((ours.lse.double() - truth.lse).abs() <= 4 * ulp(torch.maximum(size, truth.lse.abs()))).all()


@dtypes
@pytest.mark.parametrize(
    "name", [name for name in ROWS if name not in ("x10", "x1000", "shifted", "one-hot", "tail 1e-30")]
)
def test_log_probs_are_as_exact_as_log_softmax_where_logits_are_small(name, dtype):
    """Where max |z| <= 16: no further from the truth than log_softmax, to one ulp."""
    logits, ids, size = measured(name, dtype)
    logits, size = (logits, size) if size.max() <= 16 else (logits * (16 / size.max()).to(dtype), size)
    truth = reference.coarse(logits.double(), ids)
    live = (ids >= 0) & (truth.log_probs > -INF)
    theirs = torch.log_softmax(logits.float(), -1).gather(-1, ids.clamp(min=0)).double()
    error = (coarse_logits(logits, ids).log_probs.double() - truth.log_probs)[live].abs()
    bound = (theirs - truth.log_probs)[live].abs()
    assert error.max() <= bound.max() + ulp(truth.log_probs[live]).max()


@dtypes
@pytest.mark.parametrize("mass", [1e-3, 1e-6, 1e-10, 1e-20, 1e-30])
def test_the_mass_of_the_rest_is_exact_however_small(mass, dtype):
    """log of the tail's mass itself: to 1e-6 relative at 1e-6, and never through 1 - Q."""
    logits = peaked(mass).to(dtype)
    ids = logits.float().topk(K, -1).indices
    truth = reference.coarse(logits.double(), ids).rest_log_prob
    ours = coarse_logits(logits, ids).rest_log_prob.double()
    assert ((ours - truth).abs() <= 1e-6 * truth.abs()).all()
    assert truth.mean().item() == pytest.approx(math.log(mass), rel=0.05)
    naive = torch.log1p(-coarse_logits(logits, ids).log_probs.exp().sum(-1))
    if mass <= 1e-10:
        assert not torch.allclose(naive.double(), truth, rtol=1e-2)


@rows
def test_linear_logits_are_as_exact(name):
    """float32 heads that multiply out to the same logits: an identity times the logits."""
    logits, ids, size = measured(name, torch.float32)
    if (logits == -INF).any():
        pytest.skip("0 * -inf in the product")
    linear = LinearLogits(torch.eye(40), logits.t().contiguous())
    truth = reference.coarse(logits.double(), ids)
    ours = coarse_logits(linear, ids).log_probs.double()
    live = ids >= 0
    allowed = (4 * ulp(size)[:, None] + ulp(truth.log_probs))[live]
    assert ((ours - truth.log_probs)[live].abs() <= allowed).all()


@rows
@pytest.mark.parametrize("tail", ["bucket", "generalized", "drop", "renormalize"])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_losses_and_gradients_in_float32(divergence, tail, name):
    """Loss to a few ulp of |z|, gradient to float32's resolution of probabilities; never NaN."""
    logits, _, size = (x[:8] for x in measured(name, torch.float32))
    logits = logits.clone().requires_grad_()
    near = logits.detach().double() + 0.3 * torch.randn(8, V, dtype=torch.float64)
    ids = logits.detach().topk(K, -1).indices
    payload = reference.coarse(near, ids)
    teacher = TeacherTopK(ids, payload.log_probs, payload.rest_log_prob)
    exact = logits.detach().double().requires_grad_()
    out = topk_distillation_loss(logits, teacher, divergence=divergence, tail=tail, num_tokens=1.0)
    want = reference.topk_loss(exact, teacher, divergence=divergence, tail=tail, num_tokens=1.0)
    assert (
        (out.per_token.double() - want.per_token).abs() <= 8 * ulp(size.clamp(min=1)) + 1e-6 * want.per_token.abs()
    ).all()
    (actual,), (expected,) = torch.autograd.grad(out.loss, logits), torch.autograd.grad(want.loss, exact)
    error = (actual.double() - expected).abs().amax(-1)
    assert (error <= 8 * ulp(size.clamp(min=1))).all()


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0, 1000.0])
def test_entropy_in_float32(scale):
    logits = scale * torch.randn(40, V)
    ids = logits.topk(K, -1).indices
    truth = reference.coarse(logits.double(), ids).entropy
    ours = coarse_logits(logits, ids, entropy=True).entropy.double()
    assert ((ours - truth).abs() <= 8 * ulp(logits.abs().amax(-1))).all()
    assert (ours >= 0).all()
