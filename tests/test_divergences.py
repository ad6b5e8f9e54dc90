"""Every divergence has two rows here: its gradient in closed form, and what always holds for it.

To add a divergence, add one row to CLOSED_FORMS and one to INVARIANTS; the tests below take it from there. A closed
form and a zero at q = p determine the value, so nothing else has to be written.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

import shapes
from potstill import DIVERGENCES, TAILS, TeacherTopK, topk_distillation_loss
from potstill.core import reference
from shapes import INF, assert_same


class ClosedForm(NamedTuple):
    """Value at P and Q below (in nats, default options, with its derivation), and g = df / d log q from q and p."""

    value: float
    gradient: Callable
    options: tuple[dict[str, float], ...] = ({},)  # further settings that the gradient is checked at


class Invariants(NamedTuple):
    """What holds for a divergence, at each of its settings."""

    options: tuple[dict[str, float], ...] = ({},)
    lower_bound: Callable[..., bool] = lambda **options: True  # is bucket <= the full divergence?


KINK = "its slope is 1 or -1 on either side of its minimum, and rounding decides which side"
P = (0.6, 0.3, 0.1)  # teacher
Q = (0.2, 0.3, 0.5)  # student


def _mixture(q, p, weight):
    return weight * q + (1 - weight) * p


CLOSED_FORMS = {
    # .6 log 3 + .3 log 1 + .1 log .2 = .6591674 - .1609438
    "forward_kl": ClosedForm(0.4982236, lambda q, p: -p),
    # .2 log(1/3) + .5 log 5 = -.2197225 + .8047190
    "reverse_kl": ClosedForm(0.5849965, lambda q, p: q * ((q / p).log() + 1)),
    # (p - q) log(p / q): .4 log 3 + .4 log 5
    "jeffreys": ClosedForm(1.0832201, lambda q, p: -p + q * ((q / p).log() + 1)),
    # m = (.4, .3, .3): (.6 log 1.5 + .1 log(1/3) + .2 log .5 + .5 log(5/3)) / 2
    "jsd": ClosedForm(
        0.1251006,
        lambda q, p, beta=0.5: (1 - beta) * q * (q / _mixture(p, q, beta)).log(),
        ({}, {"beta": 0.25}, {"beta": 0.9}),
    ),
    # m = .1 p + .9 q = (.24, .3, .46): .6 log 2.5 + .1 log(.1/.46) = .5497744 - .1526056
    "skew_kl": ClosedForm(
        0.3971688,
        lambda q, p, alpha=0.1: -(1 - alpha) * p * q / _mixture(p, q, alpha),
        ({}, {"alpha": 0.5}),
    ),
    # m = .1 q + .9 p = (.56, .3, .14): .2 log(.2/.56) + .5 log(.5/.14) = -.2059239 + .6364828
    "skew_reverse_kl": ClosedForm(
        0.4305589,
        lambda q, p, alpha=0.1: q * ((q / _mixture(q, p, alpha)).log() + 1 - alpha * q / _mixture(q, p, alpha)),
        ({}, {"alpha": 0.5}),
    ),
    # (|.2 - .6| + |.3 - .3| + |.5 - .1|) / 2
    "total_variation": ClosedForm(0.4, lambda q, p: q * (q - p).sign() / 2),
    # a = .2, b = .7: per category (2/9 p^.9 + 7/9 q^.9 - p^.2 q^.7) / .14 = .2170570, 0, .4026936
    "alpha_beta": ClosedForm(
        0.6197506,
        lambda q, p, alpha=0.2, beta=0.7: q**beta * (q**alpha - p**alpha) / alpha,
        ({}, {"alpha": 0.5, "beta": 0.5}, {"alpha": -0.3, "beta": 0.8}, {"alpha": 1.5, "beta": -0.4}),
    ),
}
INVARIANTS = {
    "forward_kl": Invariants(),
    "reverse_kl": Invariants(),
    "jeffreys": Invariants(),
    "jsd": Invariants(options=({}, {"beta": 0.1}, {"beta": 0.8})),
    "skew_kl": Invariants(options=({}, {"alpha": 0.7})),
    "skew_reverse_kl": Invariants(options=({}, {"alpha": 0.7})),
    "total_variation": Invariants(),
    "alpha_beta": Invariants(
        options=({}, {"alpha": 0.4, "beta": 0.6}, {"alpha": 1.2, "beta": -0.2}, {"alpha": -0.5, "beta": 0.9}),
        lower_bound=lambda alpha=0.2, beta=0.7: alpha + beta == 1,
    ),
}


def settings(table):
    """Parametrise over (divergence, options) of a table."""
    rows = [(name, options) for name, row in table.items() for options in row.options]
    return pytest.mark.parametrize("name, options", [pytest.param(n, o, id=f"{n}-{o}") for n, o in rows])


def random_pair(n=9, scale=2.0):
    """Log-probabilities of two distributions of n categories, student first."""
    return (scale * torch.randn(2, n, dtype=torch.float64)).log_softmax(-1)


def total(name, student, teacher, **options):
    return DIVERGENCES[name].terms(student, teacher, **options).sum(-1)


def coarsen(log_probs, k):
    """The first k categories and the rest as one."""
    return torch.cat([log_probs[..., :k], log_probs[..., k:].logsumexp(-1, keepdim=True)], -1)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_every_divergence_has_both_rows_and_a_source(name):
    assert name in CLOSED_FORMS, "add its closed form to CLOSED_FORMS"
    assert name in INVARIANTS, "add its invariants to INVARIANTS"
    assert "Source:" in (DIVERGENCES[name].terms.__doc__ or ""), "name the published source in its docstring"
    assert DIVERGENCES[name].terms.__name__ == name


def test_no_row_is_left_over():
    assert set(CLOSED_FORMS) == set(INVARIANTS) == set(DIVERGENCES)
    assert set(reference.TERMS) <= set(DIVERGENCES)


# Closed forms.


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_value_by_hand(name):
    q, p = (torch.tensor(x, dtype=torch.float64).log() for x in (Q, P))
    assert total(name, q, p).item() == pytest.approx(CLOSED_FORMS[name].value, abs=1e-7)


@settings(CLOSED_FORMS)
def test_gradient_of_each_term(name, options):
    student, teacher = random_pair()
    student = student.clone().requires_grad_()
    (actual,) = torch.autograd.grad(total(name, student, teacher, **options), student)
    expected = CLOSED_FORMS[name].gradient(student.detach().exp(), teacher.exp(), **options)
    assert_same(actual, expected)


@pytest.mark.parametrize("tail", TAILS)
@settings(CLOSED_FORMS)
def test_gradient_by_the_logits(name, options, tail):
    """dz = g - q sum(g) over the categories that a tail has, with the rest's share spread as q_j / q_rest."""
    n, k = 9, 4
    z = (2 * torch.randn(1, n, dtype=torch.float64)).requires_grad_()
    teacher_z = 2 * torch.randn(1, n, dtype=torch.float64)
    payload = TeacherTopK(torch.arange(k)[None], teacher_z.log_softmax(-1)[:, :k])
    out = topk_distillation_loss(z, payload, divergence=name, tail=tail, **options)
    (actual,) = torch.autograd.grad(out.loss, z)

    g = CLOSED_FORMS[name].gradient
    q, p = z.detach().softmax(-1)[0], teacher_z.softmax(-1)[0]
    on, rest = slice(0, k), slice(k, n)
    expected = torch.zeros(n, dtype=torch.float64)
    if tail == "renormalize":
        q_on, p_on = q[on] / q[on].sum(), p[on] / p[on].sum()
        g_on = g(q_on, p_on, **options)
        expected[on] = g_on - q_on * g_on.sum()
    else:
        g_on, g_rest = g(q[on], p[on], **options), torch.zeros((), dtype=torch.float64)
        if tail == "generalized":
            g_on = g_on + DIVERGENCES[name].mass_slope(**options) * q[on]
        if tail == "bucket":
            g_rest = g(q[rest].sum(), p[rest].sum(), **options)
        expected = -q * (g_on.sum() + g_rest)
        expected[on] += g_on
        expected[rest] += g_rest * q[rest] / q[rest].sum()
    assert_same(actual[0], expected)


# objectives.md gives g_i as the derivative by log q_i where q_t = 1 - Q is a function of the q_i, and with it
# dL/dz_j = g_j [j in T] - q_j sum(g). P, Q, p_t and q_t are masses, l = log q - log p.
OBJECTIVES = {
    ("forward_kl", "drop"): lambda q, p: -p,
    ("forward_kl", "generalized"): lambda q, p: q - p,
    ("forward_kl", "bucket"): lambda q, p: -p + (1 - p.sum()) / (1 - q.sum()) * q,
    ("reverse_kl", "drop"): lambda q, p: q * ((q / p).log() + 1),
    ("reverse_kl", "generalized"): lambda q, p: q * (q / p).log(),
    ("reverse_kl", "bucket"): lambda q, p: q * ((q / p).log() - ((1 - q.sum()) / (1 - p.sum())).log()),
    ("forward_kl", "renormalize"): lambda q, p: q / q.sum() - p / p.sum(),
}


@pytest.mark.parametrize("name, tail", OBJECTIVES)
def test_gradient_as_the_literature_writes_it(name, tail):
    n, k = 9, 4
    z = torch.randn(1, n, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(1, n, dtype=torch.float64).log_softmax(-1)
    out = topk_distillation_loss(z, TeacherTopK(torch.arange(k)[None], teacher[:, :k]), divergence=name, tail=tail)
    (actual,) = torch.autograd.grad(out.loss, z)
    q = z.detach().softmax(-1)[0]
    g = OBJECTIVES[name, tail](q[:k], teacher[0, :k].exp())
    expected = -q * g.sum()
    expected[:k] += g
    assert_same(actual[0], expected)
    if (name, tail) == ("forward_kl", "bucket"):  # on T: q - p; off T: q_j (P - Q) / (1 - Q)
        mass_p, mass_q = teacher[0, :k].exp().sum(), q[:k].sum()
        assert_same(actual[0, :k], q[:k] - teacher[0, :k].exp())
        assert_same(actual[0, k:], q[k:] * (mass_p - mass_q) / (1 - mass_q))


# Invariants.


@settings(INVARIANTS)
def test_never_negative_and_zero_where_equal(name, options):
    for scale in (0.01, 1.0, 5.0, 30.0):
        student, teacher = random_pair(scale=scale)
        assert total(name, student, teacher, **options) > 0
        assert total(name, teacher, teacher, **options).item() == pytest.approx(0, abs=1e-14)


@settings(INVARIANTS)
def test_the_gradient_vanishes_where_equal(name, options):
    """Zero and nowhere negative, so q = p is a minimum over distributions: through a softmax the gradient is 0."""
    if name == "total_variation":
        pytest.skip(KINK)
    teacher = random_pair()[0]
    z = teacher.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(name, z.log_softmax(-1), teacher, **options), z)
    assert_same(gradient, torch.zeros_like(gradient), tolerance=1e-14)


@settings(INVARIANTS)
def test_the_mass_slope_makes_every_term_proper(name, options):
    """s = -df/dq at q = p, by finite differences; f + s (q - p) is >= 0 for every q, with its minimum at q = p."""
    terms, mass_slope = DIVERGENCES[name]
    s, h = mass_slope(**options), 1e-5
    p = torch.tensor([1e-4, 0.03, 0.5, 0.97], dtype=torch.float64)
    above, below = (terms((p * (1 + d)).log(), p.log(), **options) for d in (h, -h))
    assert_same((above - below) / (2 * h * p), torch.full_like(p, -s), tolerance=1e-6)
    q = torch.logspace(-12, 0, 400, dtype=torch.float64)
    for one in p:
        proper = terms(q.log(), one.log().expand_as(q), **options) + s * (q - one)
        assert (proper > -1e-16).all()
        assert (proper[(q / one - 1).abs() > 0.01] > 0).all()


@settings(INVARIANTS)
def test_bucket_is_a_lower_bound_of_the_full_divergence(name, options):
    """Folding categories loses information; more ids never show less; all of them show everything."""
    if not INVARIANTS[name].lower_bound(**options):
        pytest.skip("not an f-divergence")
    for _ in range(20):
        student, teacher = random_pair()
        full = total(name, student, teacher, **options).item()
        values = [total(name, coarsen(student, k), coarsen(teacher, k), **options).item() for k in range(8)]
        assert values[0] == pytest.approx(0, abs=1e-14)
        assert all(low <= high + 1e-14 for low, high in zip(values, [*values[1:], full], strict=True))


@settings(INVARIANTS)
def test_every_tail_is_the_full_divergence_at_k_equal_v(name, options):
    z, teacher_z = 2 * torch.randn(2, 3, 7, dtype=torch.float64)
    payload = shapes.top_k(teacher_z, 7)
    full = reference_or_terms(name, z, teacher_z, **options)
    for tail in TAILS:
        out = topk_distillation_loss(z, payload, divergence=name, tail=tail, **options)
        assert_same(out.per_token, full, tail)


def reference_or_terms(name, z, teacher_z, **options):
    """The full divergence, from the reference where it knows the divergence."""
    if name in reference.TERMS:
        return reference.full_divergence(z, teacher_z, name, **options)
    return total(name, z.log_softmax(-1), teacher_z.log_softmax(-1), **options)


@pytest.mark.parametrize("tail", TAILS)
@settings(INVARIANTS)
def test_the_order_of_slots_does_not_matter(name, options, tail):
    case = shapes.make(shapes.EMPTY)
    t, order = case.teacher, torch.randperm(6)
    shuffled = TeacherTopK(t.token_ids[:, order], t.log_probs[:, order], t.rest_log_prob)
    one, other = (topk_distillation_loss(case.logits, x, divergence=name, tail=tail, **options) for x in (t, shuffled))
    assert_same(one.per_token, other.per_token, tolerance=1e-12)
    gradients = [torch.autograd.grad(x.loss, case.logits)[0] for x in (one, other)]
    assert_same(*gradients, tolerance=1e-12)


@pytest.mark.parametrize("tail", ["bucket", "generalized"])
@settings(INVARIANTS)
def test_proper_tails_are_never_negative_and_zero_only_where_equal(name, options, tail):
    case = shapes.make(shapes.Shape((50,), 12, 3, "many rows"))
    out = topk_distillation_loss(case.logits, case.teacher, divergence=name, tail=tail, **options)
    assert (out.per_token > 0).all()
    equal = shapes.top_k(case.logits.detach(), 3)
    out = topk_distillation_loss(case.logits, equal, divergence=name, tail=tail, **options)
    assert_same(out.per_token, torch.zeros_like(out.per_token), tolerance=1e-14)
    (gradient,) = torch.autograd.grad(out.loss, case.logits)
    if name != "total_variation":  # see KINK
        assert_same(gradient, torch.zeros_like(gradient), tolerance=1e-14)


# Probability zero.


@settings(INVARIANTS)
def test_nothing_on_both_sides_is_nothing(name, options):
    """A category that neither has adds 0, with gradient 0, and changes nothing else."""
    student, teacher = random_pair(4)
    padded = [torch.cat([x, torch.tensor([-INF], dtype=torch.float64)]) for x in (student, teacher)]
    q = padded[0].requires_grad_()
    value = total(name, q, padded[1], **options)
    assert_same(value, total(name, student, teacher, **options))
    (gradient,) = torch.autograd.grad(value, q)
    assert gradient[-1] == 0 and gradient.isfinite().all()


@settings(INVARIANTS)
def test_zero_on_one_side_is_no_nan(name, options):
    student, teacher = random_pair(3)
    zero, some = torch.tensor([-INF], dtype=torch.float64), torch.tensor([-3.0], dtype=torch.float64)
    for last_q, last_p in ((some, zero), (zero, some)):
        q = torch.cat([student, last_q]).log_softmax(-1).requires_grad_()
        value = total(name, q, torch.cat([teacher, last_p]).log_softmax(-1), **options)
        (gradient,) = torch.autograd.grad(value, q)
        assert not value.isnan() and value > 0
        if last_q is some and value < INF:  # alpha_beta divides by p where alpha < 0
            assert gradient.isfinite().all()


def test_zeros_have_the_values_they_should():
    """log(1/2) against a teacher or student of probability 0: the limits, or the documented floor."""
    half, zero = torch.tensor([math.log(0.5)], dtype=torch.float64), torch.tensor([-INF], dtype=torch.float64)
    value = {
        # name: (teacher half, student 0), (teacher 0, student half)
        "forward_kl": (INF, 0.0),
        "reverse_kl": (0.0, 0.5 * (math.log(0.5) + 87)),
        "jeffreys": (INF, 0.5 * (math.log(0.5) + 87)),
        "jsd": (0.25 * math.log(2), 0.25 * math.log(2)),
        "skew_kl": (0.5 * math.log(10), 0.0),
        "skew_reverse_kl": (0.0, 0.5 * math.log(10)),
        "total_variation": (0.25, 0.25),
        "alpha_beta": (2 / 9 * 0.5**0.9 / 0.14, 7 / 9 * 0.5**0.9 / 0.14),
    }
    for name, (without_student, without_teacher) in value.items():
        terms = DIVERGENCES[name].terms
        assert terms(zero, half).item() == pytest.approx(without_student), name
        assert terms(half, zero).item() == pytest.approx(without_teacher), name


@pytest.mark.parametrize("name", ["reverse_kl", "jeffreys"])
def test_the_floor_is_at_minus_87_and_has_a_finite_gradient(name):
    """What divides by p counts p below exp(-87) as exp(-87)."""
    student = torch.tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    values = [DIVERGENCES[name].terms(student, torch.tensor([p], dtype=torch.float64)) for p in (-87.0, -200.0, -INF)]
    for value in values:
        assert value.item() == pytest.approx(0.5 * (math.log(0.5) + 87), rel=1e-12)
        assert torch.autograd.grad(value, student)[0].item() == pytest.approx(0.5 * (math.log(0.5) + 88), rel=1e-12)
