"""The sampled-token losses: each gradient against its closed form by exact expectation, the policy loss, the edges.

An expectation over y ~ q is exact here: one row per token, weighted by its own probability (token_weights = q,
num_tokens = 1), so no test draws anything.
"""

import math
import subprocess
import sys

import pytest
import torch

from potstill import LinearLogits, coarse_logits, sampled_token_loss
from potstill.core.sampled import ESTIMATORS

INF = math.inf
LOSSES = [name for name in ESTIMATORS if name != "k1"]  # k1 is a reward only
CALLS = [(name, False) for name in LOSSES] + [(name, True) for name in ESTIMATORS]


def expected_gradient(q, p, **options):
    """Value of E_y[loss] and its gradient at the logits, y ~ q held fixed."""
    z = q.log().requires_grad_()
    output = sampled_token_loss(torch.log_softmax(z, 0), p.log(), token_weights=q, num_tokens=1, **options)
    output.loss.backward()
    return output, z.grad


def along(weights, q):
    """Gradient at the logits of sum_i weights_i dq_i: q_i (weights_i - sum q weights)."""
    return q * (weights - (q * weights).sum())


def random_pair(n=7):
    return torch.randn(n, dtype=torch.float64).softmax(0), torch.randn(n, dtype=torch.float64).softmax(0)


# --- the table in the docstring ----------------------------------------------------------------------------------

# q = (.3, .7), p = (.6, .4). d KL(q|p) / dz_i = q_i (l_i - KL), l = log(q/p) = (log .5, log 1.75):
# KL = .3 log .5 + .7 log 1.75 = 0.1837869, so .3 (-.6931472 - .1837869) = -0.2630802.
REVERSE_KL = [-0.2630802, 0.2630802]


@pytest.mark.parametrize(
    "estimator, policy_gradient, expected",
    [
        ("k2", False, REVERSE_KL),
        ("k1_straight_through", False, REVERSE_KL),
        ("k3_straight_through", False, REVERSE_KL),
        ("k3", False, [-0.3, 0.3]),  # q - p: the forward KL's
        ("abs", False, [-0.42, 0.42]),  # sign(l) = (-1, 1): q_i (sign_i - .4) = .3 (-1.4), .7 (.6)
        ("k1", True, REVERSE_KL),
        ("k1_straight_through", True, REVERSE_KL),
        ("k3", True, [0.0369198, -0.0369198]),  # REVERSE_KL - (q - p): the wrong way here
    ],
)
def test_expected_gradients_on_two_tokens(estimator, policy_gradient, expected):
    q, p = torch.tensor([0.3, 0.7], dtype=torch.float64), torch.tensor([0.6, 0.4], dtype=torch.float64)
    _, grad = expected_gradient(q, p, estimator=estimator, policy_gradient=policy_gradient)
    torch.testing.assert_close(grad, torch.tensor(expected, dtype=torch.float64), atol=1e-7, rtol=0)


def test_k1_differentiated_has_mean_zero():
    """Why it is refused: sum_i q_i d log q_i = sum_i dq_i = 0."""
    q, p = random_pair()
    z = q.log().requires_grad_()
    (q * ESTIMATORS["k1"](p.log() - torch.log_softmax(z, 0))).sum().backward()
    torch.testing.assert_close(z.grad, torch.zeros_like(q), atol=1e-16, rtol=0)


@pytest.mark.parametrize("estimator, policy_gradient", CALLS)
def test_expected_gradients_on_any_distribution(estimator, policy_gradient):
    q, p = random_pair()
    log_ratio = q.log() - p.log()
    reverse, forward = along(log_ratio, q), q - p
    rewards = {
        "k1": reverse,
        "k2": along(log_ratio**2 / 2, q),
        "k3": reverse - forward,
        "abs": along(log_ratio.abs(), q),
    }
    if policy_gradient:
        expected = rewards[estimator.removesuffix("_straight_through")]
    else:
        expected = {"k3": forward, "abs": along(log_ratio.sign(), q)}.get(estimator, reverse)
    _, grad = expected_gradient(q, p, estimator=estimator, policy_gradient=policy_gradient)
    torch.testing.assert_close(grad, expected, atol=1e-14, rtol=0)


def test_abs_follows_twice_the_total_variation():
    q, p = random_pair()
    z = q.log().requires_grad_()
    (torch.softmax(z, 0) - p).abs().sum().backward()
    _, grad = expected_gradient(q, p, estimator="abs")
    torch.testing.assert_close(grad, z.grad, atol=1e-14, rtol=0)


@pytest.mark.parametrize("estimator", ["k1_straight_through", "k3", "k3_straight_through"])
def test_expected_value_is_the_reverse_kl(estimator):
    q, p = random_pair()
    output, _ = expected_gradient(q, p, estimator=estimator)
    torch.testing.assert_close(output.loss, (q * (q / p).log()).sum())


@pytest.mark.parametrize("estimator", LOSSES)
def test_values(estimator):
    """log q - log p = -.5 and 1, so r = e^.5 and e^-1."""
    student, teacher = torch.tensor([-1.5, -1.0]), torch.tensor([-1.0, -2.0])
    expected = {
        "k1": [-0.5, 1.0],
        "k2": [0.125, 0.5],
        "k3": [math.exp(0.5) - 1.5, math.exp(-1)],
        "abs": [0.5, 1.0],
    }[estimator.removesuffix("_straight_through")]
    output = sampled_token_loss(student, teacher, estimator=estimator)
    torch.testing.assert_close(output.per_token, torch.tensor(expected))
    torch.testing.assert_close(output.loss, torch.tensor(expected).mean())


def test_k3_keeps_its_digits_where_student_and_teacher_nearly_agree():
    """r - 1 - log r is x^2 / 2 - x^3 / 6 of x = log(q / p); as written it would be 0 or negative in float32."""
    student = torch.tensor([-1.0]) + 1e-3
    x = student.double() + 1.0
    value = sampled_token_loss(student, torch.tensor([-1.0]), estimator="k3").per_token.double()
    torch.testing.assert_close(value, x**2 / 2 - x**3 / 6, rtol=1e-3, atol=0)


# --- the policy loss --------------------------------------------------------------------------------------------


def policy_loss_by_hand(value, ratio, low, high):
    """One token at a time, from the definition: PPO's clip, and at most 3 times the value of a punished token."""
    advantage = -value
    clipped = min(max(ratio, 1 - low), 1 + high)
    loss = max(-advantage * ratio, -advantage * clipped)
    return min(loss, -advantage * 3.0) if advantage < 0 else loss


@pytest.mark.parametrize("low, high", [(0.2, 0.2), (0.2, 0.28), (0.0, 0.0), (1.0, 5.0)])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_clipped_policy_loss(estimator, low, high):
    ratios = torch.tensor([0.01, 0.5, 0.79, 0.81, 1.0, 1.19, 1.25, 1.5, 2.9, 3.1, 50.0], dtype=torch.float64)
    differences = torch.tensor([-2.0, -0.1, 0.0, 0.1, 2.0], dtype=torch.float64)  # log q - log p
    student = torch.full((5, 11), -3.0, dtype=torch.float64, requires_grad=True)
    old = student.detach() - ratios.log()
    teacher = student.detach() - differences[:, None]
    output = sampled_token_loss(
        student,
        teacher,
        estimator=estimator,
        policy_gradient=True,
        old_log_probs=old,
        clip_ratio_low=low,
        clip_ratio_high=high,
    )
    value = ESTIMATORS[estimator](-differences)
    pairs = [[(v, r) for r in ratios.tolist()] for v in value.tolist()]
    expected = torch.tensor([[policy_loss_by_hand(v, r, low, high) for v, r in row] for row in pairs])
    torch.testing.assert_close(output.per_token, expected.double(), rtol=1e-6, atol=1e-7)

    # Its gradient is value * ratio where the ratio is followed, and 0 where it was clipped or capped.
    def slope(v, r):
        pushed = r < 1 - low if v > 0 else r > 1 + high  # beyond the clip already, in the direction of the push
        return 0.0 if pushed or (v > 0 and r > 3) else v * r

    output.per_token.sum().backward()
    slopes = torch.tensor([[slope(v, r) for v, r in row] for row in pairs])
    torch.testing.assert_close(student.grad, slopes.double(), rtol=1e-6, atol=1e-7)

    clipped = torch.tensor([[(r < 1 - low if v > 0 else r > 1 + high) and v != 0 for v, r in row] for row in pairs])
    capped = torch.tensor([[v > 0 and r > 3 for v, r in row] for row in pairs])
    torch.testing.assert_close(output.metrics["pg_clipfrac"], clipped.double().mean())
    torch.testing.assert_close(output.metrics["pg_clipfrac_lower"], capped.double().mean())
    torch.testing.assert_close(output.metrics["ppo_kl"], -ratios.log().mean())


def test_on_policy_is_the_ratio_one():
    student, teacher = torch.randn(6).sub(3).requires_grad_(), torch.randn(6) - 3
    implicit = sampled_token_loss(student, teacher, estimator="k1", policy_gradient=True)
    explicit = sampled_token_loss(
        student, teacher, estimator="k1", policy_gradient=True, old_log_probs=student.detach()
    )
    torch.testing.assert_close(implicit.loss, explicit.loss)
    torch.testing.assert_close(implicit.per_token, student.detach() - teacher)
    first, second = (torch.autograd.grad(x.loss, student)[0] for x in (implicit, explicit))
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first, (student.detach() - teacher) / 6)
    assert implicit.metrics["pg_clipfrac"] == 0 and implicit.metrics["ppo_kl"] == 0


def test_no_ratio_overflows():
    """log ratios of 400 and -400, rewards of both signs: finite values and gradients."""
    student = torch.tensor([-1.0, -1.0, -80.0, -80.0], requires_grad=True)
    old = torch.tensor([-INF, -401.0, -1.0, -1.0])
    teacher = torch.tensor([-2.0, -0.5, -81.0, -79.0])
    output = sampled_token_loss(student, teacher, estimator="k1", policy_gradient=True, old_log_probs=old)
    output.loss.backward()
    assert output.per_token.isfinite().all() and student.grad.isfinite().all()


# --- rows, masks and normalisation ------------------------------------------------------------------------------


def test_fault_25_padding_is_masked_before_the_exponential():
    """Student -1e10 and teacher 0 at a pad: exp overflows, and inf * 0 is NaN. The other row is e^-.5 - .5."""
    student = torch.tensor([-1.0, -1e10], requires_grad=True)
    teacher = torch.tensor([-1.5, 0.0])
    output = sampled_token_loss(student, teacher, estimator="k3", mask=torch.tensor([1, 0]))
    assert output.loss.item() == pytest.approx(0.1065307, abs=1e-7)
    output.loss.backward()
    assert student.grad[1] == 0 and student.grad[0].item() == pytest.approx(1 - math.exp(-0.5), abs=1e-6)
    assert all(x.isfinite() for x in output.metrics.values())


@pytest.mark.parametrize("poison", [math.nan, INF, -1e10])
@pytest.mark.parametrize("estimator, policy_gradient", CALLS)
def test_unscored_rows_may_hold_anything(estimator, policy_gradient, poison):
    clean = torch.randn(3, 5) - 3
    mask = torch.tensor([1, 1, 0, 1, 0]).expand(3, 5)
    options = {"estimator": estimator, "policy_gradient": policy_gradient}
    results = []
    for filler in (0.0, poison):
        student, teacher, old, weights = (
            torch.where(mask != 0, x, filler) for x in (clean, clean.sin() - 3, clean - 0.3, clean.cos())
        )
        student.requires_grad_()
        old = {"old_log_probs": old} if policy_gradient else {}
        output = sampled_token_loss(student, teacher, mask=mask, token_weights=weights, **old, **options)
        output.loss.backward()
        assert (student.grad[:, [2, 4]] == 0).all() and (output.per_token[:, [2, 4]] == 0).all()
        results.append((output.loss, output.per_token, student.grad, output.metrics))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("estimator, policy_gradient", CALLS)
@pytest.mark.parametrize("shape", [(0,), (2, 0), (3,), (2, 2)])
def test_no_scored_row(shape, estimator, policy_gradient):
    """Empty and all-masked batches: loss 0 with a graph, gradients exactly 0."""
    student = torch.full(shape, math.nan, requires_grad=True)
    output = sampled_token_loss(
        student,
        torch.full(shape, -INF),
        estimator=estimator,
        policy_gradient=policy_gradient,
        mask=torch.zeros(shape, dtype=torch.bool),
    )
    assert output.loss == 0 and output.loss.requires_grad and output.per_token.shape == shape
    output.loss.backward()
    assert student.grad.shape == shape and (student.grad == 0).all()
    assert output.metrics.pop("loss_min") == INF and output.metrics.pop("loss_max") == -INF
    assert all(x == 0 for x in output.metrics.values())


@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[0], [1, 2, 3]], [[0, 1], [2, 3]], [[3], [2], [1], [0]]])
def test_fault_34_global_token_mean(split):
    """One token of value 1.0 and three of .2: 0.4 at any cut into micro-batches, given the global count."""
    student = torch.tensor([-1.0, -1.8, -1.8, -1.8], requires_grad=True)
    teacher = torch.full((4,), -2.0)
    options = {"estimator": "k1", "policy_gradient": True, "num_tokens": torch.tensor(4)}
    outputs = [sampled_token_loss(student[rows], teacher[rows], **options) for rows in split]
    total = sum(x.loss for x in outputs)
    assert total.item() == pytest.approx(0.4, abs=1e-6)
    assert sum(x.metrics["abs_loss"] for x in outputs).item() == pytest.approx(0.4, abs=1e-6)
    total.backward()
    torch.testing.assert_close(student.grad, torch.tensor([0.25, 0.05, 0.05, 0.05]))


@pytest.mark.parametrize("num_tokens", [0, -1, torch.tensor(0)])
def test_no_tokens_at_all_gives_zero(num_tokens):
    student = torch.randn(3).sub(2).requires_grad_()
    output = sampled_token_loss(student, torch.randn(3) - 2, estimator="k2", num_tokens=num_tokens)
    output.loss.backward()
    assert output.loss == 0 and (student.grad == 0).all()


def test_token_weights_weigh_the_loss_alone():
    student, teacher, weights = torch.randn(4).sub(3).requires_grad_(), torch.randn(4) - 3, torch.rand(4)
    plain = sampled_token_loss(student, teacher, estimator="k2")
    weighted = sampled_token_loss(student, teacher, estimator="k2", token_weights=weights.requires_grad_())
    torch.testing.assert_close(weighted.per_token, plain.per_token)
    torch.testing.assert_close(weighted.metrics, plain.metrics)
    torch.testing.assert_close(weighted.loss, (weights * plain.per_token).sum() / 4)
    weighted.loss.backward()
    assert weights.grad is None


def test_metrics():
    """Values 1, -.5, .25; the fourth row is floored at -87 (value -86) and the fifth is not scored."""
    student = torch.tensor([-1.0, -2.5, -1.0, -INF, 5.0])
    teacher = torch.tensor([-2.0, -2.0, -1.25, -1.0, math.nan])
    mask = torch.tensor([True, True, True, True, False])
    metrics = sampled_token_loss(student, teacher, estimator="k1_straight_through", mask=mask, num_tokens=8).metrics
    expected = {
        "abs_loss": (1 + 0.5 + 0.25 + 86) / 8,
        "negative_fraction": 2 / 8,
        "clamped_fraction": 1 / 8,
        "loss_min": -86.0,
        "loss_max": 1.0,
    }
    assert {name: x.item() for name, x in metrics.items()} == pytest.approx(expected)


@pytest.mark.parametrize("estimator, policy_gradient", CALLS)
def test_metrics_are_detached(estimator, policy_gradient):
    student = torch.randn(3).sub(2).requires_grad_()
    metrics = sampled_token_loss(
        student, torch.randn(3) - 2, estimator=estimator, policy_gradient=policy_gradient
    ).metrics
    assert not any(x.requires_grad for x in metrics.values())


# --- gradients, dtypes and strides ------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator, policy_gradient", [("k2", False), ("k3", False), ("abs", False)])
def test_gradcheck(estimator, policy_gradient):
    """Of the losses whose value and gradient belong together; the others differ by design."""
    student = (torch.randn(2, 3, dtype=torch.float64) - 3).requires_grad_()
    teacher = torch.randn(2, 3, dtype=torch.float64) - 3
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]])

    def loss(x):
        output = sampled_token_loss(x, teacher, estimator=estimator, policy_gradient=policy_gradient, mask=mask)
        return output.loss, output.per_token

    assert torch.autograd.gradcheck(loss, (student,))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradcheck_of_the_policy_loss(estimator):
    """As a function of the ratio alone: the value is a constant, so the student enters through old_log_probs."""
    constant = torch.randn(6, dtype=torch.float64) - 3
    teacher = torch.randn(6, dtype=torch.float64) - 3
    shift = torch.tensor([-0.5, -0.1, -0.01, 0.02, 0.1, 0.5], dtype=torch.float64, requires_grad=True)
    value = ESTIMATORS[estimator](teacher - constant)

    def by_public_function(x):
        student = constant + (x - x.detach())
        return sampled_token_loss(
            student, teacher, estimator=estimator, policy_gradient=True, old_log_probs=constant - x.detach()
        ).per_token

    def by_definition(x):
        ratio = x.exp()
        loss = torch.maximum(value * ratio, value * ratio.clamp(0.8, 1.2))
        return torch.where(value > 0, torch.minimum(loss, 3 * value), loss)

    torch.testing.assert_close(by_public_function(shift), by_definition(shift))
    gradients = [torch.autograd.grad(f(shift).sum(), shift)[0] for f in (by_public_function, by_definition)]
    torch.testing.assert_close(*gradients)
    assert torch.autograd.gradcheck(by_definition, (shift,))


@pytest.mark.parametrize("estimator, policy_gradient", CALLS)
def test_every_upstream_is_honoured(estimator, policy_gradient):
    teacher = torch.randn(4, 3, dtype=torch.float64) - 3
    student = (torch.randn(4, 3, dtype=torch.float64) - 3).requires_grad_()
    weights = torch.randn(4, 3, dtype=torch.float64)

    def output():
        return sampled_token_loss(student, teacher, estimator=estimator, policy_gradient=policy_gradient)

    (row,) = torch.autograd.grad(output().per_token, student, torch.ones(4, 3, dtype=torch.float64))
    for upstream in (weights, weights.t().contiguous().t(), torch.tensor(2.0, dtype=torch.float64).expand(4, 3)):
        (grad,) = torch.autograd.grad(output().per_token, student, upstream)
        torch.testing.assert_close(grad, row * upstream)
    both = output()
    (grad,) = torch.autograd.grad(3 * both.loss + both.per_token.sum(), student)
    torch.testing.assert_close(grad, row * (3 / 12 + 1))


@pytest.mark.parametrize("estimator, policy_gradient", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype, estimator, policy_gradient):
    student, teacher = (torch.randn(50).sub(3).to(dtype) for _ in range(2))
    student.requires_grad_()
    exact = student.detach().float().requires_grad_()
    options = {"estimator": estimator, "policy_gradient": policy_gradient}
    output, expected = (sampled_token_loss(x, teacher, **options) for x in (student, exact))
    assert output.loss.dtype == output.per_token.dtype == torch.float32
    torch.testing.assert_close(output.per_token, expected.per_token, rtol=0, atol=0)
    output.per_token.sum().backward()
    expected.per_token.sum().backward()
    assert student.grad.dtype == dtype
    torch.testing.assert_close(student.grad, exact.grad.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("estimator, policy_gradient", CALLS)
@pytest.mark.parametrize("student, teacher", [(-1.0, -INF), (-INF, -1.0), (-INF, -INF), (-1e10, 0.0), (0.0, -1e10)])
def test_a_probability_of_zero_stays_finite(student, teacher, estimator, policy_gradient):
    """Floored at -87 on both sides; the floor passes no gradient, and is reported."""
    x = torch.tensor([student, -2.0], requires_grad=True)
    options = {"estimator": estimator, "policy_gradient": policy_gradient}
    output = sampled_token_loss(x, torch.tensor([teacher, -2.5]), **options)
    floored = sampled_token_loss(
        torch.tensor([max(student, -87.0), -2.0]), torch.tensor([max(teacher, -87.0), -2.5]), **options
    )
    torch.testing.assert_close(output.per_token, floored.per_token, rtol=0, atol=0)
    output.loss.backward()
    assert output.per_token.isfinite().all() and x.grad.isfinite().all()
    assert x.grad[0] == 0 if student < -87 else True
    assert output.metrics["clamped_fraction"] == 0.5


def test_no_gradient_reaches_the_teacher_or_the_old_policy():
    student, teacher, old = (torch.randn(3).sub(3).requires_grad_() for _ in range(3))
    sampled_token_loss(student, teacher, estimator="k1", policy_gradient=True, old_log_probs=old).loss.backward()
    assert student.grad is not None and teacher.grad is None and old.grad is None


@pytest.mark.parametrize("estimator, policy_gradient", CALLS)
def test_strides_do_not_matter(estimator, policy_gradient):
    base = torch.randn(3, 8) - 3
    options = {"estimator": estimator, "policy_gradient": policy_gradient}
    student, teacher, mask = base.t()[::2], base[0, 0].expand(4, 3), (base > -3).t()[::2]
    views = sampled_token_loss(student, teacher, mask=mask, **options)
    copies = sampled_token_loss(student.contiguous(), teacher.contiguous(), mask=mask.contiguous(), **options)
    torch.testing.assert_close(views.per_token, copies.per_token, rtol=0, atol=0)
    torch.testing.assert_close(views.loss, copies.loss, rtol=0, atol=0)


@pytest.mark.parametrize("estimator, policy_gradient", CALLS)
def test_value_without_gradient(estimator, policy_gradient):
    student, teacher = torch.randn(3) - 3, torch.randn(3) - 3
    options = {"estimator": estimator, "policy_gradient": policy_gradient}
    expected = sampled_token_loss(student.clone().requires_grad_(), teacher, **options).loss.detach()
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with context:
            assert sampled_token_loss(student, teacher, **options).loss == expected


COMPILED = """
import torch
from potstill import sampled_token_loss

for estimator, policy_gradient in (("k3_straight_through", False), ("k1", True)):
    compiled = torch.compile(sampled_token_loss, fullgraph=True, backend="aot_eager")
    for n in (5, 7, 5):
        student, teacher = torch.randn(n).sub(3).requires_grad_(), torch.randn(n) - 3
        options = dict(estimator=estimator, policy_gradient=policy_gradient, mask=torch.arange(n) % 2)
        outputs = [loss(student, teacher, **options) for loss in (compiled, sampled_token_loss)]
        torch.testing.assert_close(outputs[0].metrics, outputs[1].metrics)
        torch.testing.assert_close(*(torch.autograd.grad(x.loss, student)[0] for x in outputs))
"""


@pytest.mark.slow
def test_compiles_without_a_graph_break():
    """In a process of its own: dynamo cannot trace the checks of shape types that run under pytest."""
    subprocess.run([sys.executable, "-c", COMPILED], check=True)


def test_from_hidden_states():
    """k2 on `coarse_logits(LinearLogits(...), y)`: the reverse KL's gradient down to the hidden states."""
    hidden = torch.randn(1, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 4, dtype=torch.float64)
    p = torch.randn(9, dtype=torch.float64).softmax(0)
    q = (hidden @ weight.t()).softmax(-1)[0]
    (q * (q.log() - p.log())).sum().backward()
    expected, hidden.grad = hidden.grad, None
    every = torch.arange(9)[:, None]
    log_probs = coarse_logits(LinearLogits(hidden.expand(9, 4), weight), every).log_probs[..., 0]
    sampled_token_loss(log_probs, p.log(), estimator="k2", token_weights=q.detach(), num_tokens=1).loss.backward()
    torch.testing.assert_close(hidden.grad, expected)


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, message, options",
    [
        (ValueError, r"k1.*no learning signal.*policy_gradient=True.*k1_straight_through", {"estimator": "k1"}),
        (ValueError, "estimator must be one of k1, k2, k3, abs.*got 'kl'", {"estimator": "kl"}),
        (ValueError, "old_log_probs.*policy_gradient=True", {"old_log_probs": torch.zeros(3)}),
        (ValueError, r"clip_ratio_low.*got -0.1", {"clip_ratio_low": -0.1}),
        (ValueError, r"clip_ratio_low.*got 1.5", {"clip_ratio_low": 1.5}),
        (ValueError, r"clip_ratio_high.*got 0.2 and -1", {"clip_ratio_high": -1.0}),
        (ValueError, r"teacher_log_probs.*\[3\], got \[2\]", {"teacher_log_probs": torch.zeros(2)}),
        (ValueError, r"teacher_log_probs.*\[3\], got \[1, 3\]", {"teacher_log_probs": torch.zeros(1, 3)}),
        (
            ValueError,
            r"old_log_probs.*\[3\], got \[1\]",
            {"old_log_probs": torch.zeros(1), "policy_gradient": True},
        ),
        (
            TypeError,
            "teacher_log_probs must be floating point, got torch.int64",
            {"teacher_log_probs": torch.arange(3)},
        ),
        (TypeError, "student_log_probs must be floating point", {"student_log_probs": torch.arange(3)}),
        (TypeError, "mask.*token_weights", {"mask": torch.ones(3)}),
        (TypeError, "token_weights.*mask", {"token_weights": torch.ones(3, dtype=torch.bool)}),
        (ValueError, r"mask.*\[3\], got \[4\]", {"mask": torch.ones(4, dtype=torch.bool)}),
        (ValueError, "num_tokens", {"num_tokens": torch.ones(2)}),
    ],
)
def test_refusals(error, message, options):
    options = {
        "student_log_probs": torch.zeros(3),
        "teacher_log_probs": torch.zeros(3),
        "estimator": "k2",
    } | options
    with pytest.raises(error, match=message):
        sampled_token_loss(**options)
