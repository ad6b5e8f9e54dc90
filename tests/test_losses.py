"""topk_distillation_loss against the dense reference in float64: values, metrics, every gradient; what it refuses."""

import dataclasses
import inspect
import math
from functools import partial

import pytest
import torch
import torch.utils.checkpoint

import shapes
from potstill import (
    DIVERGENCES,
    TAILS,
    LinearLogits,
    LogitTransform,
    SampledTargets,
    TeacherTopK,
    coarse_logits,
    topk_distillation_loss,
)
from potstill.core import reference, single_pass
from shapes import FORMS, INF, KINDS, PLAIN, SHAPES, assert_same, make, over

NAN = float("nan")
GRID = next(s for s in SHAPES if s.rows == (2, 3))


def truth(case, **options):
    """The reference's output, and its gradient by the logits and by every part of the LinearLogits."""
    hidden, weight, bias = case.linear
    raw = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    options.setdefault("transform", case.shape.transform)
    out = reference.topk_loss(raw, options.pop("teacher", case.teacher), **options)
    leaves = {"logits": raw} | case.leaves("linear")
    return out, dict(zip(leaves, torch.autograd.grad(out.loss, list(leaves.values())), strict=True))


def run(case, form, **options):
    """topk_distillation_loss of one form, and its gradients by name."""
    student, memory = case.student(form)
    options = {"transform": case.shape.transform, "chunk_size": case.shape.chunk, "teacher": case.teacher} | options
    out = topk_distillation_loss(student, **memory, **options)
    leaves = case.leaves(form)
    return out, dict(zip(leaves, torch.autograd.grad(out.loss, list(leaves.values())), strict=True))


def check(case, forms=FORMS, **options):
    """One call in every form against the reference."""
    want, expected = truth(case, **options)
    for form in forms:
        out, gradients = run(case, form, entropy=True, **options)
        assert_same(out.per_token, want.per_token, f"{form}: per_token")
        assert_same(out.loss, want.loss, f"{form}: loss")
        check_metrics(out.metrics, want, form)
        for name, gradient in gradients.items():
            assert_same(gradient, expected[name], f"{form}: gradient of {name}")


def check_metrics(metrics, want, form):
    expected = dict(want.metrics)
    if "cross_entropy" in metrics:
        expected["cross_entropy"] = expected.pop("head_loss")
        del expected["topk_loss"], expected["tail_loss"]
    assert set(metrics) == set(expected), form
    if (want.per_token.abs() < 1e-14).any():
        del expected["negative_fraction"]  # the sign of a rounding error
    actual = torch.stack([metrics[name] for name in expected])
    assert not actual.requires_grad
    assert_same(actual, torch.stack(list(expected.values())), f"{form}: {', '.join(expected)}")


# Every divergence and tail, on every shape.

ALL = [(divergence, shape) for divergence in ("forward_kl", "reverse_kl") for shape in SHAPES]
ALL += [(divergence, shape) for divergence in reference.TERMS for shape in KINDS if (divergence, shape) not in ALL]
ALL_TAILS = [(d, shape, tail) for d, shape in ALL for tail in TAILS if tail != "renormalize" or shape.k >= 2]


@pytest.mark.parametrize(
    "divergence, shape, tail", [pytest.param(*x, id=f"{x[0]}-{x[2]}-{x[1].reason}") for x in ALL_TAILS]
)
def test_matches_the_dense_reference(divergence, shape, tail):
    # How gradients get from coarse logits to a head is the same for every divergence: two show all three forms.
    forms = FORMS if divergence in ("forward_kl", "reverse_kl") else ("logits", "single_pass")
    check(make(shape), forms, divergence=divergence, tail=tail)


# Options of the call.

MASK = torch.tensor([True, False, True, True, False])
WEIGHTS = torch.tensor([0.5, 3.0, -2.0, 0.0, 1.0])
CAPPED = LogitTransform(scale=0.7, softcap=3.0, vocab_size=12)
VERL = {"divergence": "forward_kl", "tail": "drop"}
OPTIONS = {
    "bool mask": {"mask": MASK},
    "integer mask, non-zero is scored": {"mask": torch.tensor([1, 0, -100, 7, 0])},
    "token_weights": {"token_weights": WEIGHTS},
    "mask and token_weights": {"mask": MASK, "token_weights": WEIGHTS.double()},
    "num_tokens int": {"num_tokens": 17},
    "num_tokens float": {"num_tokens": 2.5, "mask": MASK},
    "num_tokens tensor": {"num_tokens": torch.tensor(9), "token_weights": WEIGHTS},
    "num_tokens float32 tensor": {"num_tokens": torch.tensor(9.5)},
    "temperature": {"temperature": 1.7},
    "temperature_squared": {"temperature": 2.0, "temperature_squared": True},
    "temperature_squared before loss_max_clamp": {
        "temperature": 2.0,
        "temperature_squared": True,
        "loss_max_clamp": 0.9,
    },
    "scale": {"transform": LogitTransform(scale=0.25)},
    "negative scale": {"transform": LogitTransform(scale=-0.5)},
    "softcap": {"transform": LogitTransform(softcap=2.0)},
    "transform and temperature": {"transform": CAPPED, "temperature": 1.3},
    "loss_max_clamp": {"loss_max_clamp": 0.2},
    "loss_max_clamp of negative losses": VERL | {"loss_max_clamp": 0.05},
    "log_prob_min_clamp": VERL | {"log_prob_min_clamp": -2.0},
    "loss_min_clamp": VERL | {"loss_min_clamp": 0.0},
    "every clamp": VERL | {"log_prob_min_clamp": -3.0, "loss_min_clamp": 0.0, "loss_max_clamp": 0.3, "mask": MASK},
    "divergence option": {"divergence": "jsd", "beta": 0.25},
    "two divergence options": {"divergence": "alpha_beta", "alpha": 0.5, "beta": -0.3, "tail": "renormalize"},
    "no tail is bucket": {"tail": None},
}


@pytest.mark.parametrize("options", [pytest.param(x, id=name) for name, x in OPTIONS.items()])
def test_options_match_the_dense_reference(options):
    case = make()
    check(tempered(case, options.get("temperature", 1.0)), **options)


def tempered(case, temperature):
    """The same case with a payload that says it was taken at `temperature`."""
    return case._replace(teacher=dataclasses.replace(case.teacher, temperature=temperature))


@pytest.mark.parametrize("tail", TAILS)
@over(PLAIN, shapes.EMPTY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rest_that_was_not_delivered_is_one_minus_the_mass(dtype, shape, tail):
    case = make(shape, rest=False)
    teacher = dataclasses.replace(case.teacher, log_probs=case.teacher.log_probs.to(dtype))
    check(case, teacher=teacher, tail=tail)


@pytest.mark.parametrize("divergence", reference.TERMS)
def test_a_rest_without_a_student_column_is_dropped_from_both_sides(divergence):
    """The student has no token outside the ids, the teacher has: what it says of the ids is renormalised."""
    case = make()
    ids = case.teacher.token_ids
    z = torch.full_like(case.logits, -INF).scatter(1, ids, case.logits.detach().gather(1, ids)).requires_grad_()
    for rest in (case.teacher.rest_log_prob, None):
        teacher = TeacherTopK(ids, case.teacher.log_probs, rest)
        out = topk_distillation_loss(z, teacher, divergence=divergence)
        want = reference.topk_loss(z, teacher, divergence=divergence)
        renormalised = topk_distillation_loss(z, teacher, divergence=divergence, tail="renormalize")
        assert_same(out.per_token, want.per_token)
        assert_same(out.per_token, renormalised.per_token)
        actual, expected = (torch.autograd.grad(x.loss, z)[0] for x in (out, want))
        assert_same(actual, expected)
        assert (out.metrics["tail_loss"] == 0) and (out.metrics["teacher_tail_mass"] > 0)


def test_renormalize_of_one_live_slot_is_zero_whatever_the_student_says():
    """Even where the student cannot say it at all; the row still counts."""
    z = torch.tensor([[0.0, -INF, 1.0], [0.0, 1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    teacher = TeacherTopK(torch.tensor([[1, -1], [0, 1]]), torch.tensor([[0.5, 0.5], [0.6, 0.3]]).double().log())
    for divergence in reference.TERMS:
        out = topk_distillation_loss(z, teacher, divergence=divergence, tail="renormalize")
        assert out.per_token[0] == 0 and out.per_token[1] > 0
        assert_same(out.loss, out.per_token[1] / 2)
        (gradient,) = torch.autograd.grad(out.loss, z)
        assert (gradient[0] == 0).all() and (gradient[1] != 0).any()


def test_loss_max_clamp_acts_on_both_sides():
    """drop goes negative where the student has more mass on the ids; beyond the clamp there is no gradient."""
    case = make(shapes.Shape((40,), 31, 6, "many rows"))
    case = case._replace(teacher=shapes.top_k(0.5 * case.logits.detach(), 6))
    plain, _ = run(case, "logits", **VERL)
    for sign in (1, -1):
        assert (sign * plain.per_token > 0.02).any()
    check(case, loss_max_clamp=0.02, **VERL)
    clamped, gradients = run(case, "logits", loss_max_clamp=0.02, **VERL)
    assert clamped.metrics["loss_min"] == -0.02 and clamped.metrics["loss_max"] == 0.02
    assert (gradients["logits"][plain.per_token.abs() > 0.02] == 0).all()


@pytest.mark.parametrize("dtype, eps", [(torch.float32, 2.0**-24), (torch.float64, 2.0**-53)])
def test_a_full_payload_leaves_the_rest_eps(dtype, eps):
    teacher = TeacherTopK(torch.tensor([[0]]), torch.zeros(1, 1, dtype=dtype))  # P = 1, so 1 - P = 0
    out = topk_distillation_loss(torch.zeros(1, 4, dtype=torch.float64), teacher)
    # p = (1, eps), renormalised; q = (1/4, 3/4).
    p = 1 / (1 + eps)
    assert out.loss.item() == pytest.approx(p * math.log(4 * p) + eps * p * math.log(eps * p / 0.75), rel=1e-12)
    assert out.metrics["teacher_tail_mass"].item() == pytest.approx(eps, rel=1e-12)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_unscored_rows_may_hold_anything(divergence, tail):
    """NaN, infinities, impossible ids in unscored rows: the loss is that of clean rows, their gradient exactly 0."""
    clean = make()
    poison = {"logits": [NAN, INF], "hidden": [NAN, INF], "ids": [-100, 10**6], "numbers": [NAN, INF]}
    rows = (~MASK).nonzero().squeeze(1)

    def dirty(x, values):
        x = x.detach().clone()
        for row, value in zip(rows, values, strict=True):
            x[row] = value
        return x

    t = clean.teacher
    teacher = TeacherTopK(
        dirty(t.token_ids, poison["ids"]), dirty(t.log_probs, poison["numbers"]), dirty(t.rest_log_prob, [NAN, INF])
    )
    case = clean._replace(
        logits=dirty(clean.logits, poison["logits"]).requires_grad_(),
        linear=clean.linear._replace(hidden=dirty(clean.linear.hidden, poison["hidden"]).requires_grad_()),
        teacher=teacher,
    )
    options = {"divergence": divergence, "tail": tail, "mask": MASK}
    want, expected = truth(clean, token_weights=WEIGHTS, **options)
    for form in FORMS:
        for chunk_size in (None, 2):
            out, gradients = run(
                case, form, token_weights=dirty(WEIGHTS, [NAN, INF]), entropy=True, chunk_size=chunk_size, **options
            )
            assert_same(out.loss, want.loss, form)
            assert_same(out.per_token, want.per_token, form)
            check_metrics(out.metrics, want, form)
            for name, gradient in gradients.items():
                assert_same(gradient, expected[name], f"{form}: gradient of {name}")
                if name in ("logits", "hidden"):
                    assert (gradient[rows] == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_no_scored_row_gives_a_zero_with_a_graph(form):
    out, gradients = run(make(), form, mask=torch.zeros(5, dtype=torch.bool), entropy=True)
    assert out.loss.item() == 0 and out.loss.requires_grad
    assert (out.per_token == 0).all()
    for name, gradient in gradients.items():
        assert (gradient == 0).all(), name
    for name, x in out.metrics.items():
        assert x.item() == (INF if name.endswith("_min") else -INF if name.endswith("_max") else 0), name


@pytest.mark.parametrize("num_tokens", [0, -3, 0.0, torch.tensor(0), torch.tensor(-1.0)])
@pytest.mark.parametrize("form", FORMS)
def test_num_tokens_of_zero_or_less_gives_zero(form, num_tokens):
    case = make()
    log_probs = case.teacher.log_probs.clone()
    out, gradients = run(case, form, num_tokens=num_tokens)
    assert out.loss.item() == 0
    for name, gradient in gradients.items():
        assert (gradient == 0).all(), name
    assert (out.per_token != 0).any()
    assert out.metrics["student_mass"].item() == 0 and out.metrics["loss_max"].item() > 0
    # An infinite loss is no exception.
    bias = case.linear.bias.detach().clone()
    bias[case.teacher.token_ids[0, 0]] = -INF
    logits = case.logits.detach().clone()
    logits[0, case.teacher.token_ids[0, 0]] = -INF
    student = logits if form == "logits" else case.linear._replace(bias=bias)
    out = topk_distillation_loss(student, case.teacher, num_tokens=num_tokens)
    assert out.per_token[0] == INF
    assert out.loss.item() == 0 and out.metrics["head_loss"].item() == 0
    assert (case.teacher.log_probs == log_probs).all()


@pytest.mark.parametrize("tail", TAILS)
def test_a_live_id_without_a_column_is_honestly_infinite(tail):
    """Forward KL of a token the student cannot say is +inf; the finite gradient pulls on the others as always."""
    z = torch.tensor([[0.0, 1.0, -INF, 2.0]], dtype=torch.float64, requires_grad=True)
    teacher = TeacherTopK(torch.tensor([[0, 2]]), torch.tensor([[0.5, 0.3]], dtype=torch.float64).log())
    out = topk_distillation_loss(z, teacher, tail=tail)
    assert out.loss.item() == INF
    (gradient,) = torch.autograd.grad(out.loss, z)
    assert gradient.isfinite().all()
    for divergence in ("reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "total_variation", "alpha_beta"):
        case = make()._replace(logits=z, teacher=teacher)
        want = reference.topk_loss(z, teacher, divergence=divergence, tail=tail)
        out = topk_distillation_loss(case.logits, teacher, divergence=divergence, tail=tail)
        assert_same(out.loss, want.loss, divergence)
        assert out.loss.isfinite()
        assert_same(torch.autograd.grad(out.loss, z)[0], torch.autograd.grad(want.loss, z)[0], divergence)


# Sampled targets.


def sampled(case):
    """Soft labels on the teacher's ids, with empty slots."""
    weights = torch.rand(case.teacher.log_probs.shape, dtype=torch.float64)
    ids = case.teacher.token_ids.clone()
    weights[..., -1] = 0.0
    ids[..., 0] = -1
    live = weights.masked_fill(ids < 0, 0.0)
    return SampledTargets(ids, torch.where(ids < 0, weights, live / live.sum(-1, keepdim=True)))


@pytest.mark.parametrize(
    "options", [{}, {"mask": MASK}, {"loss_max_clamp": 2.0}, {"num_tokens": 11}, {"token_weights": WEIGHTS}], ids=str
)
def test_sampled_targets_are_a_cross_entropy(options):
    case = make()
    check(case, teacher=sampled(case), **options)


def test_sampled_targets_of_other_shapes():
    for shape in (GRID, *KINDS[2:]):
        case = make(shape)
        check(case, teacher=sampled(case))


def test_sampled_targets_gradient_is_q_minus_w():
    case = make()
    teacher = sampled(case)
    _, gradients = run(case, "logits", teacher=teacher, num_tokens=1)
    live = teacher.token_ids >= 0
    w = torch.zeros(5, 14, dtype=torch.float64)
    w.scatter_(1, torch.where(live, teacher.token_ids, 13), torch.where(live, teacher.weights, 0.0))
    assert_same(gradients["logits"], case.logits.softmax(-1) - w[:, :13])


def test_sampled_targets_report_a_cross_entropy_and_no_divergence():
    case = make()
    out, _ = run(case, "logits", teacher=sampled(case))
    assert out.metrics["cross_entropy"] == out.loss
    assert not {"head_loss", "topk_loss", "tail_loss"} & set(out.metrics)


# Autograd.

UPSTREAM = {
    "dense": lambda: torch.randn(2, 3, dtype=torch.float64),
    "non-contiguous": lambda: torch.randn(3, 2, dtype=torch.float64).t(),
    "step 2": lambda: torch.randn(2, 6, dtype=torch.float64)[:, ::2],
    "expanded scalar": lambda: torch.tensor(0.3, dtype=torch.float64).expand(2, 3),
    "expanded row": lambda: torch.randn(3, dtype=torch.float64).expand(2, 3),
    "zero rows": lambda: torch.tensor([[0.0, 1, 0], [2, 0, 0]], dtype=torch.float64),
}


@pytest.mark.parametrize("upstream", UPSTREAM)
@pytest.mark.parametrize("form", ["logits", "recompute"])
def test_upstream_gradients_of_per_token_are_honoured(form, upstream):
    case, g = make(GRID), UPSTREAM[upstream]()
    student, memory = case.student(form)
    leaves = list(case.leaves(form).values())
    out = topk_distillation_loss(student, case.teacher, chunk_size=4, **memory)
    actual = torch.autograd.grad(out.per_token, leaves, g)
    want = reference.topk_loss(student, case.teacher)
    for a, e in zip(actual, torch.autograd.grad(want.per_token, leaves, g), strict=True):
        assert_same(a, e)


@pytest.mark.parametrize("form", FORMS)
def test_upstream_gradient_of_the_loss_is_honoured(form):
    case = make(GRID)
    _, expected = truth(case)
    student, memory = case.student(form)
    out = topk_distillation_loss(student, case.teacher, **memory)
    leaves = case.leaves(form)
    gradients = torch.autograd.grad((out.loss * 3).expand(2).sum() * -0.5, list(leaves.values()))
    for name, gradient in zip(leaves, gradients, strict=True):
        assert_same(gradient, -3 * expected[name], name)


@pytest.mark.parametrize("form", ["logits", "recompute"])
def test_loss_and_per_token_together(form):
    case = make(GRID)
    student, memory = case.student(form)
    leaves = list(case.leaves(form).values())
    out = topk_distillation_loss(student, case.teacher, **memory)
    want = reference.topk_loss(student, case.teacher)
    actual = torch.autograd.grad(out.loss - out.per_token.square().sum(), leaves)
    expected = torch.autograd.grad(want.loss - want.per_token.square().sum(), leaves)
    for a, e in zip(actual, expected, strict=True):
        assert_same(a, e)


@pytest.mark.parametrize(
    "divergence, tail", [(d, "bucket") for d in DIVERGENCES] + [("forward_kl", t) for t in TAILS if t != "bucket"]
)
def test_gradcheck(divergence, tail):
    case = make(shapes.Shape((2,), 6, 3, "small", hidden=2))
    hidden, weight, bias = case.linear
    mask = torch.tensor([1, 0])
    call = partial(topk_distillation_loss, teacher=case.teacher, divergence=divergence, tail=tail, mask=mask)
    assert torch.autograd.gradcheck(lambda z: call(z).per_token, case.logits, fast_mode=True)

    def linear(hidden, weight, bias):
        return call(LinearLogits(hidden, weight, bias), memory="recompute", chunk_size=1).per_token

    if divergence == "forward_kl":
        assert torch.autograd.gradcheck(linear, (hidden, weight, bias), fast_mode=True)


@pytest.mark.parametrize("form", FORMS)
def test_double_backward_is_a_clear_error(form):
    """Not even a second order that is one term among others is dropped silently."""
    case = make()
    student, memory = case.student(form)
    leaf = next(iter(case.leaves(form).values()))
    out = topk_distillation_loss(student, case.teacher, **memory)
    with pytest.raises(RuntimeError, match=r"once_differentiable|create_graph|differentiate.* twice"):
        (gradient,) = torch.autograd.grad(out.loss, leaf, create_graph=True)
        (gradient.square().sum() + leaf.square().sum()).backward()


@pytest.mark.parametrize("form", FORMS)
def test_values_do_not_depend_on_whether_gradients_are_taken(form):
    case = make()
    student, memory = case.student(form)
    call = partial(topk_distillation_loss, teacher=case.teacher, entropy=True, **memory)
    expected = call(student)
    detached = LinearLogits(*(x.detach() for x in student)) if isinstance(student, LinearLogits) else student.detach()
    with torch.no_grad():
        outputs = [call(student)]
    with torch.inference_mode():
        outputs.append(call(student))
        outputs.append(call(LinearLogits(*(x + 0 for x in student)) if form != "logits" else student + 0))
    outputs.append(call(detached))
    for out in outputs:
        assert not out.loss.requires_grad
        assert_same(out.loss.clone(), expected.loss.detach())
        assert_same(out.per_token.clone(), expected.per_token.detach())
        for name, x in expected.metrics.items():
            assert_same(out.metrics[name].clone(), x, name)


@pytest.mark.parametrize("form", ["recompute", "single_pass"])
@pytest.mark.parametrize(
    "frozen", [("hidden",), ("weight",), ("bias",), ("weight", "bias"), ("hidden", "weight")], ids=str
)
def test_frozen_parts_get_no_gradient_and_cost_none(frozen, form):
    case = make(shapes.Shape((4,), 997, 3, "a weight much larger than everything else", hidden=4))
    _, expected = truth(case)
    linear = case.linear._replace(**{name: getattr(case.linear, name).detach() for name in frozen})
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = topk_distillation_loss(linear, case.teacher, memory=form)
    out.loss.backward()
    for name, part in linear._asdict().items():
        if name in frozen:
            assert part.grad is None
        else:
            assert_same(part.grad, expected[name], name)
    own = {x.data_ptr() for x in linear}
    extra = sum(x.numel() for x in kept if x.data_ptr() not in own)
    room = 4 * (3 + 5) * 4 + sum(getattr(linear, name).numel() for name in linear._fields if name not in frozen)
    assert extra <= room


@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_the_callers_is_written_to(form):
    case = make()
    student, memory = case.student(form)
    mask, weights = MASK.clone(), WEIGHTS.clone()
    t = case.teacher
    tensors = [*case.leaves(form).values(), t.token_ids, t.log_probs, t.rest_log_prob, mask, weights]
    before = [(x.detach().clone(), x._version) for x in tensors]
    out = topk_distillation_loss(
        student, t, mask=mask, token_weights=weights, transform=CAPPED, entropy=True, diagnostics=True, **memory
    )
    out.loss.backward()
    for x, (copy, version) in zip(tensors, before, strict=True):
        assert torch.equal(x, copy)
        assert x._version == version


@pytest.mark.parametrize("form", FORMS)
def test_teacher_and_weights_get_no_gradient(form):
    case = make()
    student, memory = case.student(form)
    t = case.teacher
    log_probs, rest = t.log_probs.clone().requires_grad_(), t.rest_log_prob.clone().requires_grad_()
    weights = WEIGHTS.clone().requires_grad_()
    num_tokens = torch.tensor(5.0, requires_grad=True)
    teacher = TeacherTopK(t.token_ids, log_probs, rest)
    topk_distillation_loss(student, teacher, token_weights=weights, num_tokens=num_tokens, **memory).loss.backward()
    assert log_probs.grad is None and rest.grad is None and weights.grad is None and num_tokens.grad is None


@pytest.mark.parametrize("form", FORMS)
def test_teacher_from_inference_mode(form):
    """A teacher that was scored in inference mode trains a student."""
    case = make()
    t = case.teacher
    with torch.inference_mode():
        teacher = TeacherTopK(t.token_ids.clone(), t.log_probs.clone(), t.rest_log_prob.clone())
        mask = torch.ones(5, dtype=torch.bool)
    _, expected = truth(case)
    _, gradients = run(case, form, teacher=teacher, mask=mask)
    for name, gradient in gradients.items():
        assert_same(gradient, expected[name], name)
    if form != "single_pass":
        coarse = coarse_logits(case.student(form)[0], teacher.token_ids)
        coarse.log_probs.sum().backward()


@pytest.mark.parametrize("form", FORMS)
def test_activation_checkpointing_around_the_loss(form):
    case = make()
    _, expected = truth(case)
    student, memory = case.student(form)

    def loss(*parts):
        logits = LinearLogits(*parts) if len(parts) > 1 else parts[0]
        return topk_distillation_loss(logits, case.teacher, **memory).loss

    parts = tuple(student) if isinstance(student, LinearLogits) else (student,)
    leaves = case.leaves(form)
    out = torch.utils.checkpoint.checkpoint(loss, *parts, use_reentrant=False)
    for name, gradient in zip(leaves, torch.autograd.grad(out, list(leaves.values())), strict=True):
        assert_same(gradient, expected[name], name)


def test_single_pass_differentiates_the_loss_alone_and_once():
    case = make()
    for use in (lambda out: out.per_token.sum(), lambda out: out.loss + out.per_token[0]):
        out = topk_distillation_loss(case.linear, case.teacher, memory="single_pass")
        with pytest.raises(RuntimeError, match=r'per_token.*memory="recompute"'):
            use(out).backward()
    # float64, for checking gradients, may be asked again; what trains keeps one set of gradients for one backward.
    out = topk_distillation_loss(case.linear, case.teacher, memory="single_pass")
    first, second = (torch.autograd.grad(out.loss, case.linear.weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    hidden, weight = (x.detach().float().requires_grad_() for x in case.linear[:2])
    out = topk_distillation_loss(LinearLogits(hidden, weight), case.teacher, memory="single_pass")
    out.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='memory="recompute"'):
        out.loss.backward()


@pytest.mark.parametrize("form", ["logits", "recompute"])
def test_a_second_backward_is_allowed_elsewhere(form):
    case = make()
    student, memory = case.student(form)
    leaf = next(iter(case.leaves(form).values()))
    out = topk_distillation_loss(student, case.teacher, **memory)
    (first,) = torch.autograd.grad(out.loss, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(out.loss, leaf)
    assert torch.equal(first, second)


def test_auto_memory_recomputes_where_the_weights_gradient_does_not_fit(monkeypatch):
    case = make()
    weight = case.linear.weight
    n_bytes = 6 * weight.numel()

    def is_single_pass(linear, budget):
        rule = single_pass.budget(torch.device("cpu"))._replace(weight_gradient=budget)
        with monkeypatch.context() as patch:
            patch.setattr(single_pass, "budget", lambda device: rule)
            out = topk_distillation_loss(linear, case.teacher)
        try:
            out.per_token.sum().backward()
        except RuntimeError:
            return True
        return False

    assert is_single_pass(case.linear, n_bytes)
    assert not is_single_pass(case.linear, n_bytes - 1)
    assert is_single_pass(case.linear._replace(weight=weight.detach()), n_bytes - 1)  # no dW is needed


# Reused logits.


def reused(case, **options):
    """A loss on logits that are not the caller's leaf, with reuse_logits=True."""
    logits = case.logits * 1.0
    return logits, topk_distillation_loss(logits, case.teacher, reuse_logits=True, **options)


def test_reused_logits_become_their_gradient():
    case = make()
    _, expected = truth(case, mask=MASK)
    logits, out = reused(case, mask=MASK, chunk_size=2)
    assert torch.equal(logits, case.logits)
    version = logits._version
    out.loss.backward()
    assert_same(case.logits.grad, expected["logits"])
    assert_same(logits.detach(), expected["logits"])
    assert logits._version > version


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, ::2],
        lambda x: x.t().contiguous().t(),
        lambda x: x[1:],
        lambda x: x.unflatten(0, (2, 3)).transpose(0, 1),
    ],
    ids=["step 2", "transposed", "slice", "swapped leading dimensions"],
)
def test_reused_logits_of_any_strides(view):
    x = torch.randn(6, 26, dtype=torch.float64, requires_grad=True)
    teacher = shapes.top_k(view(torch.randn(6, 26, dtype=torch.float64)), 3)
    whole = x * 1.0
    out = topk_distillation_loss(view(whole), teacher, reuse_logits=True)
    (actual,) = torch.autograd.grad(out.loss, x)
    (expected,) = torch.autograd.grad(reference.topk_loss(view(x), teacher).loss, x)
    assert_same(actual, expected)


def test_reused_logits_refuse_a_second_backward_and_an_earlier_consumer():
    case = make()
    _, out = reused(case)
    out.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()
    logits = case.logits * 1.0
    other = logits.square().sum()
    loss = topk_distillation_loss(logits, case.teacher, reuse_logits=True).loss
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + other).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of_reused_then_read(case)


def loss_of_reused_then_read(case):
    logits, out = reused(case)
    other = logits.square().sum()
    out.loss.backward(retain_graph=True)
    other.backward()


def test_reused_logits_in_coarse_logits():
    case = make()
    logits = case.logits * 1.0
    coarse = coarse_logits(logits, case.teacher.token_ids, reuse_logits=True, entropy=True)
    (actual,) = torch.autograd.grad(coarse.log_probs.sum() + coarse.entropy.sum(), case.logits)
    want = reference.coarse(case.logits, case.teacher.token_ids)
    (expected,) = torch.autograd.grad(want.log_probs.sum() + want.entropy.sum(), case.logits)
    assert_same(actual, expected)
    assert_same(logits.detach(), expected)


# Layout and dtypes.

STRIDES = {
    "transposed rows": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "step 2": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "vocabulary first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", STRIDES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_strides(form, dtype, layout):
    """Any strides of any input give what contiguous copies give."""
    case, stride = make(GRID), STRIDES[layout]
    t = case.teacher
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    weights = torch.rand(2, 3)

    def call(change):
        student, memory = case.student(form)
        parts = [x.detach().to(dtype) for x in (student if isinstance(student, LinearLogits) else [student])]
        leaves = [change(stride(x) if x.ndim > 1 else x).requires_grad_() for x in parts]
        logits = LinearLogits(*leaves) if len(leaves) > 1 else leaves[0]
        # token ids must differ within a row, so an expanded one repeats the first row of the batch.
        teacher = TeacherTopK(*(change(stride(x)) for x in (t.token_ids, t.log_probs, t.rest_log_prob)))
        out = topk_distillation_loss(
            logits, teacher, mask=change(stride(mask)), token_weights=change(stride(weights)), chunk_size=4, **memory
        )
        return [out.loss, out.per_token, *torch.autograd.grad(out.loss, leaves)]

    strided, contiguous = call(lambda x: x), call(lambda x: x.contiguous())
    for actual, expected in zip(strided, contiguous, strict=True):
        assert actual.dtype == expected.dtype
        tolerance = 1e-12 if actual.dtype == torch.float64 else 1e-6 if actual.dtype == torch.float32 else 2.0**-8
        assert_same(actual, expected, layout, tolerance)


@pytest.mark.parametrize("layout", ["transposed", "step 2", "sliced"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["recompute", "single_pass"])
def test_weight_strides(form, dtype, layout):
    change = {
        "transposed": lambda w: w.t().contiguous().t(),
        "step 2": lambda w: w.repeat_interleave(2, 0)[::2],
        "sliced": lambda w: torch.cat([w, w], 1)[:, : w.shape[1]],
    }[layout]
    case = make()
    hidden, weight, bias = (x.detach().to(dtype) for x in case.linear)

    def gradient(w):
        out = topk_distillation_loss(LinearLogits(hidden, w.requires_grad_(), bias), case.teacher, memory=form)
        return torch.autograd.grad(out.loss, w)[0]

    strided = change(weight)
    assert not strided.is_contiguous()
    assert_same(gradient(strided), gradient(weight), layout, 1e-12 if dtype == torch.float64 else 2.0**-8)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_integer_ids(dtype):
    case = make()
    expected, _ = run(case, "logits")
    ids = case.teacher.token_ids.to(getattr(torch, dtype))
    teacher = TeacherTopK(ids, case.teacher.log_probs, case.teacher.rest_log_prob)
    assert torch.equal(run(case, "logits", teacher=teacher)[0].loss, expected.loss)
    weights = torch.full(ids.shape, 1 / 4)
    topk_distillation_loss(case.logits, SampledTargets(ids, weights))
    with pytest.raises(ValueError, match="token id"):
        topk_distillation_loss(case.logits[:, :5], teacher)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_dtypes(form, dtype):
    """Loss and metrics in promote_types(dtype, float32), gradients in the inputs' dtype."""
    case = make()
    student, memory = case.student(form)
    leaves = [
        x.detach().to(dtype).requires_grad_() for x in (student if isinstance(student, LinearLogits) else [student])
    ]
    logits = LinearLogits(*leaves) if len(leaves) > 1 else leaves[0]
    out = topk_distillation_loss(logits, case.teacher, entropy=True, diagnostics=True, **memory)
    wide = torch.promote_types(dtype, torch.float32)
    for name, x in {"loss": out.loss, "per_token": out.per_token, **out.metrics}.items():
        assert x.dtype == wide, name
    for leaf, gradient in zip(leaves, torch.autograd.grad(out.loss, leaves), strict=True):
        assert gradient.dtype == dtype and gradient.shape == leaf.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.7}, {"transform": CAPPED}], ids=str)
def test_16_bit_logits_are_exact_but_for_the_gradients_rounding(options, dtype):
    """Everything after the read is float32, temperature and transform too; the gradient is rounded once."""
    case = tempered(make(scale=6.0), options.get("temperature", 1.0))
    logits = case.logits.detach().to(dtype).requires_grad_()
    out = topk_distillation_loss(logits, case.teacher, **options)
    exact = logits.detach().double().requires_grad_()
    want = reference.topk_loss(exact, case.teacher, **options)
    assert_same(out.loss.double(), want.loss, tolerance=1e-6)
    (actual,), (expected,) = torch.autograd.grad(out.loss, logits), torch.autograd.grad(want.loss, exact)
    ulp = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=ulp, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["recompute", "single_pass"])
def test_16_bit_linear_logits_are_as_good_as_plain_pytorch(form, dtype):
    case = make(shapes.Shape((64,), 301, 8, "many rows", hidden=32, chunk=20))
    parts = [x.detach().to(dtype).requires_grad_() for x in case.linear]
    exact = [x.detach().double().requires_grad_() for x in parts]
    truth = torch.autograd.grad(reference.topk_loss(LinearLogits(*exact), case.teacher).loss, exact)
    plain_logits = torch.nn.functional.linear(*parts)
    plain = torch.autograd.grad(reference.topk_loss(plain_logits.float(), case.teacher).loss, parts)
    out = topk_distillation_loss(LinearLogits(*parts), case.teacher, memory=form, chunk_size=20)
    for name, actual, low, high in zip(
        LinearLogits._fields, torch.autograd.grad(out.loss, parts), plain, truth, strict=True
    ):
        error, allowed = (actual.double() - high).norm(), (low.double() - high).norm()
        assert error <= 1.2 * allowed, f"{name}: {error} against {allowed}"


@pytest.mark.parametrize("form", ["recompute", "single_pass"])
def test_float16_with_a_loss_scale(form):
    """Scaled losses (GradScaler) keep small gradients out of float16's underflow; a large num_tokens makes them."""
    case = make(shapes.Shape((32,), 301, 8, "many rows", hidden=32))
    num_tokens, scale = 100_000, 2.0**16
    parts = [x.detach().half().requires_grad_() for x in case.linear]
    exact = [x.detach().double().requires_grad_() for x in parts]
    want = reference.topk_loss(LinearLogits(*exact), case.teacher, num_tokens=num_tokens).loss * scale
    out = topk_distillation_loss(LinearLogits(*parts), case.teacher, num_tokens=num_tokens, memory=form)
    gradients = torch.autograd.grad(out.loss * scale, parts)
    for name, actual, expected in zip(LinearLogits._fields, gradients, torch.autograd.grad(want, exact), strict=True):
        assert (actual.double() - expected).norm() <= 4e-3 * expected.norm(), name


def test_autocast_brings_hidden_and_weight_to_its_dtype():
    case = make()
    hidden, weight = case.linear.hidden.detach().bfloat16(), case.linear.weight.detach().float()
    for part in (hidden, weight):
        part.requires_grad_()
    for memory in ("recompute", "single_pass"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = topk_distillation_loss(LinearLogits(hidden, weight), case.teacher, memory=memory)
        expected = topk_distillation_loss(LinearLogits(hidden, weight.bfloat16()), case.teacher, memory=memory)
        assert torch.equal(out.loss, expected.loss) and out.loss.dtype == torch.float32
        gradients = torch.autograd.grad(out.loss, (hidden, weight))
        assert [g.dtype for g in gradients] == [torch.bfloat16, torch.float32]
        with torch.autocast("cpu", dtype=torch.bfloat16):  # one dtype is left as it is
            out = topk_distillation_loss(LinearLogits(hidden.float(), weight), case.teacher, memory=memory)
        assert torch.equal(out.loss, topk_distillation_loss(LinearLogits(hidden.float(), weight), case.teacher).loss)


def test_autocast_does_not_touch_the_arithmetic():
    case = make()
    logits = case.logits.detach().float().requires_grad_()
    plain = topk_distillation_loss(logits, case.teacher)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = topk_distillation_loss(logits, case.teacher)
    assert torch.equal(out.loss, plain.loss) and out.loss.dtype == torch.float32


@pytest.mark.parametrize("form", FORMS)
def test_chunking_is_invisible(form):
    case = make(shapes.Shape((12,), 50, 6, "12 rows", hidden=8))
    case = case._replace(
        logits=case.logits.detach().float().requires_grad_(),
        linear=LinearLogits(*(x.detach().float().requires_grad_() for x in case.linear)),
    )
    options = {"transform": LogitTransform(softcap=5.0), "entropy": True}
    whole, expected = run(case, form, chunk_size=None, **options)
    for chunk_size in (1, 2, 3, 5, 7, 11, 12, 100):
        out, gradients = run(case, form, chunk_size=chunk_size, **options)
        # Bitwise for logits where every chunk has at least 2 rows: 12 rows in ceil(12 / c) nearly equal chunks.
        bitwise = form == "logits" and chunk_size >= 2
        same = torch.equal if bitwise else partial(torch.allclose, rtol=1e-5, atol=1e-6)
        assert same(out.loss, whole.loss) and same(out.per_token, whole.per_token), chunk_size
        assert all(same(out.metrics[name], x) for name, x in whole.metrics.items()), chunk_size
        assert all(same(gradients[name], x) for name, x in expected.items()), chunk_size


# Metrics of the student's own top k.


@over()
def test_diagnostics_on_every_shape(shape):
    """Overlap with the student's top k, by sets; means per num_tokens, the advantage with its own denominator."""
    case = make(shape)
    out, _ = run(case, "logits", diagnostics=True)
    z = reference.dense_logits(case.logits, transform=shape.transform).detach()
    log_q, n_rows, k = z.log_softmax(-1).reshape(-1, shape.vocab), z[..., 0].numel(), shape.k
    ids, log_p = (x.reshape(n_rows, k).tolist() for x in (case.teacher.token_ids, case.teacher.log_probs))
    count = advantage = rows = 0
    for n in range(n_rows):
        own = set(log_q[n].topk(min(k, shape.real or shape.vocab)).indices.tolist())
        shared = [i for i in range(k) if ids[n][i] in own and log_p[n][i] > -INF]
        gains = [math.exp(log_p[n][i]) * (log_q[n][ids[n][i]].item() - log_p[n][i]) for i in shared]
        count += len(shared)
        rows += bool(shared)
        advantage += sum(gains) / max(len(gains), 1)
    metrics = {name: x.item() for name, x in out.metrics.items()}
    if k == 0 and "overlap_count" not in metrics:
        return
    assert metrics["overlap_count"] == pytest.approx(count / max(n_rows, 1))
    assert metrics["overlap_ratio"] == pytest.approx(count / max(n_rows, 1) / max(k, 1))
    assert metrics["overlap_token_advantage_count"] == rows
    assert metrics["overlap_token_advantage_sum"] == pytest.approx(advantage, abs=1e-12)


def test_the_overlap_is_floored_where_the_loss_is():
    case, floor = make(), -2.0
    out, _ = run(case, "logits", diagnostics=True, log_prob_min_clamp=floor, **VERL)
    ids, p = case.teacher.token_ids, case.teacher.log_probs.clamp(min=floor)
    log_q = case.logits.detach().log_softmax(-1)
    shared = (ids[:, :, None] == log_q.topk(4).indices[:, None, :]).any(-1)
    gain = -(p.exp() * (p - log_q.gather(1, ids).clamp(min=floor))) * shared
    advantage = (gain.sum(-1) / shared.sum(-1).clamp(min=1)).sum()
    assert_same(out.metrics["overlap_token_advantage_sum"], advantage)
    unfloored, _ = run(case, "logits", diagnostics=True, **VERL)
    assert unfloored.metrics["overlap_token_advantage_sum"] != advantage


def test_diagnostics_only_on_demand_and_of_scored_rows():
    case = make()
    assert not any(name.startswith("overlap") for name in run(case, "logits")[0].metrics)
    masked, _ = run(case, "logits", diagnostics=True, mask=MASK)
    rows = MASK.nonzero().squeeze(1)
    t = case.teacher
    alone = topk_distillation_loss(
        case.logits[rows], TeacherTopK(t.token_ids[rows], t.log_probs[rows], t.rest_log_prob[rows]), diagnostics=True
    )
    for name, x in alone.metrics.items():
        assert_same(masked.metrics[name], x, name)


def test_sampled_targets_diagnostics():
    """The weights of sampled targets are probabilities, not log-probabilities."""
    case = make()
    teacher = sampled(case)
    out, _ = run(case, "logits", teacher=teacher, diagnostics=True)
    same = TeacherTopK(teacher.token_ids, teacher.weights.log())
    want, _ = run(case, "logits", teacher=same, diagnostics=True)
    for name in ("overlap_count", "overlap_ratio", "overlap_token_advantage_sum", "overlap_token_advantage_count"):
        if name in out.metrics:
            assert_same(out.metrics[name], want.metrics[name], name)


def test_masses_are_taken_before_any_clamp():
    case = make()
    plain, _ = run(case, "logits", **VERL)
    clamped, _ = run(case, "logits", log_prob_min_clamp=-0.5, loss_max_clamp=0.01, **VERL)
    for name in plain.metrics:
        if "mass" in name:
            assert_same(clamped.metrics[name], plain.metrics[name], name)
    assert clamped.metrics["clamped_fraction"] == 1 and plain.metrics["clamped_fraction"] == 0


# Fixed points: where training ends, by minimising over all logits.


def minimise(**options):
    """p and q on the ids, their masses and the loss, at the minimum of the loss over the student's logits."""
    p = torch.tensor([0.4, 0.2, 0.1], dtype=torch.float64)  # P = 0.7
    teacher = TeacherTopK(torch.tensor([[5, 0, 2]]), p.log()[None])
    z = torch.zeros(1, 8, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [z], max_iter=60, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure():
        optimiser.zero_grad()
        loss = topk_distillation_loss(z, teacher, check=False, **options).loss
        loss.backward()
        return loss

    optimiser.step(closure)
    with torch.no_grad():
        loss = topk_distillation_loss(z, teacher, **options).loss.item()
    q = z.detach().softmax(-1)[0, teacher.token_ids[0]]
    return p, q, loss


@pytest.mark.parametrize("tail", ["bucket", "generalized"])
@pytest.mark.parametrize("divergence", [name for name in DIVERGENCES if name != "total_variation"])
def test_bucket_and_generalized_end_at_the_teacher(divergence, tail):
    p, q, loss = minimise(divergence=divergence, tail=tail)
    assert_same(q, p, tolerance=1e-5)
    assert loss == pytest.approx(0, abs=1e-10)


def test_forward_drop_ends_at_all_mass_on_the_ids():
    p, q, loss = minimise(divergence="forward_kl", tail="drop")
    assert q.sum().item() == pytest.approx(1, abs=1e-5)  # Q = 1 is at infinity
    assert_same(q, p / 0.7, tolerance=1e-5)
    assert loss == pytest.approx(0.7 * math.log(0.7), abs=1e-5)  # P log P < 0


def test_reverse_drop_ends_at_the_teacher_over_e():
    p, q, loss = minimise(divergence="reverse_kl", tail="drop")
    assert_same(q, p / math.e, tolerance=1e-6)
    assert loss == pytest.approx(-0.7 / math.e, abs=1e-10)


def test_renormalize_leaves_the_mass_free():
    p, q, _ = minimise(divergence="forward_kl", tail="renormalize")
    assert_same(q / q.sum(), p / 0.7, tolerance=1e-5)
    assert abs(q.sum().item() - 0.7) > 0.05


def test_reverse_generalized_is_the_stop_gradient_top_k():
    """Its gradient is that of sum over the ids of stop_gradient(q log(q / p)) log q."""
    case = make()
    _, gradients = run(case, "logits", divergence="reverse_kl", tail="generalized", num_tokens=1)
    log_q = case.logits.log_softmax(-1).gather(1, case.teacher.token_ids)
    published = ((log_q.exp() * (log_q - case.teacher.log_probs)).detach() * log_q).sum()
    assert_same(gradients["logits"], torch.autograd.grad(published, case.logits)[0])


# Parity with verl, from its description in reference.py.


@pytest.mark.parametrize("clamp", [None, -2.0, -10.0])
@pytest.mark.parametrize("floor", [False, True])
def test_drop_is_verls_forward_kl_topk(floor, clamp):
    case = make(shapes.Shape((40,), 31, 6, "many rows"))
    case = case._replace(teacher=shapes.top_k(0.7 * case.logits.detach(), 6))  # flatter: some losses are negative
    out = topk_distillation_loss(
        case.logits, case.teacher, log_prob_min_clamp=clamp, loss_min_clamp=0.0 if floor else None, **VERL
    )
    student = case.logits.log_softmax(-1).gather(1, case.teacher.token_ids)
    want = reference.verl_forward_kl_topk(student, case.teacher.log_probs, clamp, floor=floor)
    assert ((want <= 0).sum() > 5) and (floor or (want < 0).any())
    assert_same(out.per_token, want)
    actual, expected = (torch.autograd.grad(x.mean(), case.logits)[0] for x in (out.per_token, want))
    assert_same(actual, expected)


def test_bucket_is_verls_tail_mode_where_its_epsilon_does_not_act():
    case = make(shapes.Shape((40,), 31, 6, "many rows"), rest=False)
    out = topk_distillation_loss(case.logits, case.teacher, divergence="forward_kl", tail="bucket")
    student = case.logits.log_softmax(-1).gather(1, case.teacher.token_ids)
    want = reference.verl_forward_kl_topk_tail(student, case.teacher.log_probs)
    there = 1 - student.exp().sum(-1) >= 1e-3
    assert there.sum() > 20
    assert_same(out.per_token[there], want[there])
    actual, expected = (torch.autograd.grad(x[there].mean(), case.logits)[0] for x in (out.per_token, want))
    assert_same(actual, expected)


def test_bucket_is_exact_where_verls_epsilon_acts():
    z = torch.tensor([[30.0, 0.0, 0.0]], dtype=torch.float64)  # 1 - Q = 1.9e-13
    teacher = TeacherTopK(torch.tensor([[0]]), torch.tensor([[math.log(0.9)]], dtype=torch.float64))
    student_tail = math.log(2) - math.log(math.exp(30) + 2)
    exact = 0.9 * (math.log(0.9) - z[0].log_softmax(0)[0].item()) + 0.1 * (math.log(0.1) - student_tail)
    assert topk_distillation_loss(z, teacher).loss.item() == pytest.approx(exact, rel=1e-12)
    verl = reference.verl_forward_kl_topk_tail(z.log_softmax(-1)[:, :1], teacher.log_probs).item()
    assert verl < 0.5 * exact


# What is refused, and in which words.


def refusal(name, error, pattern, call):
    return pytest.param(error, pattern, call, id=name)


def on(logits=None, teacher=None, **options):
    """A call on the plain case with something wrong."""

    def call(case):
        x = case.logits if logits is None else logits(case) if callable(logits) else logits
        t = case.teacher if teacher is None else teacher(case)
        return unhooked(topk_distillation_loss)(x, t, **options)

    return call


def unhooked(function):
    """The function without the type checks of the test run, as a user calls it."""
    return inspect.unwrap(function)


def payload(k=4, *, log_probs=None, dtype=torch.float32, rest=None, temperature=1.0):
    ids = torch.arange(k).expand(5, k)
    return lambda case: TeacherTopK(ids, torch.full((5, k), -9.0, dtype=dtype), rest, temperature)


WORDS = "remedy in the message"
REFUSALS = [
    refusal("rows", ValueError, r"\[5\].*\[4\]|\[4\].*\[5\]", on(logits=lambda c: c.logits[:4])),
    refusal("leading dimensions", ValueError, r"\[5\].*\[1, 5\]|\[1, 5\].*\[5\]", on(logits=lambda c: c.logits[None])),
    refusal("float mask", TypeError, "mask.*float32.*token_weights", on(mask=torch.ones(5))),
    refusal("mask rows", ValueError, r"mask.*\[5\].*\[4\]", on(mask=torch.ones(4, dtype=torch.bool))),
    refusal("integer weights", TypeError, "token_weights.*int64.*mask", on(token_weights=torch.ones(5).long())),
    refusal("weights rows", ValueError, r"token_weights.*\[5\].*\[5, 1\]", on(token_weights=torch.ones(5, 1))),
    refusal("num_tokens shape", ValueError, r"num_tokens.*\[5\]", on(num_tokens=torch.ones(5))),
    refusal("divergence", ValueError, "divergence.*forward_kl.*'kl'", on(divergence="kl")),
    refusal("tail", ValueError, "tail.*bucket.*'none'", on(tail="none")),
    refusal("option", ValueError, "forward_kl.*no options.*beta", on(beta=0.5)),
    refusal("option name", ValueError, "jsd.*beta.*alpha", on(divergence="jsd", alpha=0.5)),
    refusal("jsd 0", ValueError, "beta.*0.0.*forward_kl", on(divergence="jsd", beta=0.0)),
    refusal("jsd 1", ValueError, "beta.*1.0.*reverse_kl", on(divergence="jsd", beta=1.0)),
    refusal("jsd outside", ValueError, "beta.*1.5", on(divergence="jsd", beta=1.5)),
    refusal("skew_kl 0", ValueError, "alpha.*0.0.*forward_kl", on(divergence="skew_kl", alpha=0.0)),
    refusal("skew_kl 1", ValueError, "alpha.*1.0", on(divergence="skew_kl", alpha=1.0)),
    refusal("skew_reverse_kl 0", ValueError, "alpha.*0.0.*reverse_kl", on(divergence="skew_reverse_kl", alpha=0.0)),
    refusal("alpha_beta a", ValueError, "alpha.*0", on(divergence="alpha_beta", alpha=0.0)),
    refusal("alpha_beta b", ValueError, "beta.*0", on(divergence="alpha_beta", beta=0.0)),
    refusal("alpha_beta a + b", ValueError, "alpha.*beta.*0", on(divergence="alpha_beta", alpha=0.3, beta=-0.3)),
    refusal("alpha_beta NaN", ValueError, "alpha.*finite.*nan", on(divergence="alpha_beta", alpha=float("nan"))),
    refusal("chunk_size type", TypeError, "chunk_size.*whole number.*2.5", on(chunk_size=2.5)),
    refusal("transform type", TypeError, "transform.*LogitTransform.*dict", on(transform={"scale": 2.0})),
    refusal("positive floor", ValueError, "log_prob_min_clamp.*0.5", on(tail="drop", log_prob_min_clamp=0.5)),
    refusal("floor NaN", ValueError, "log_prob_min_clamp.*nan", on(tail="drop", log_prob_min_clamp=float("nan"))),
    refusal(
        "crossed clamps",
        ValueError,
        "loss_min_clamp.*loss_max_clamp = 1.0.*2.0",
        on(tail="drop", loss_min_clamp=2.0, loss_max_clamp=1.0),
    ),
    refusal(
        "renormalize at K = 1", ValueError, "renormalize.*K = 1.*bucket", on(teacher=payload(1), tail="renormalize")
    ),
    refusal(
        "renormalize at K = 0", ValueError, "renormalize.*K = 0.*bucket", on(teacher=payload(0), tail="renormalize")
    ),
    *[
        refusal(
            f"{clamp} with {divergence} {tail}",
            ValueError,
            f"{clamp}.*forward_kl.*drop",
            on(divergence=divergence, tail=tail, **{clamp: -1.0}),
        )
        for clamp in ("log_prob_min_clamp", "loss_min_clamp")
        for divergence, tail in (
            ("forward_kl", None),
            ("forward_kl", "generalized"),
            ("forward_kl", "renormalize"),
            ("reverse_kl", "drop"),
        )
    ],
    refusal("loss_max_clamp", ValueError, "loss_max_clamp.*> 0.*-1.0", on(loss_max_clamp=-1.0)),
    refusal("another temperature", ValueError, "temperature 1.0.*2.0.*re-tempered", on(temperature=2.0)),
    refusal(
        "payload of another temperature", ValueError, "temperature 0.7.*1.0", on(teacher=payload(temperature=0.7))
    ),
    *[
        refusal(f"temperature {t}", ValueError, f"temperature.*{t}", on(teacher=payload(temperature=t), temperature=t))
        for t in (0.0, -1.0, INF, NAN)
    ],
    refusal("chunk_size", ValueError, "chunk_size.*1.*0", on(chunk_size=0)),
    *[
        refusal(f"{d} without rest", ValueError, f"{str(d)[6:]}.*rest_log_prob", on(teacher=payload(dtype=d)))
        for d in (torch.bfloat16, torch.float16)
    ],
    *[
        refusal(
            f"kernel, {form}",
            ValueError,
            "kernel.*'fused'",
            on(
                logits=lambda c, f=form: c.student(f)[0],
                kernel="fused",
                **({} if form == "logits" else {"memory": form}),
            ),
        )
        for form in FORMS
    ],
    refusal("memory, logits", ValueError, "memory.*'none'", on(memory="none")),
    refusal("memory, linear", ValueError, "memory.*'none'", on(logits=lambda c: c.linear, memory="none")),
    refusal(
        "memory without gradients",
        ValueError,
        "memory.*'none'",
        on(logits=lambda c: LinearLogits(*(x.detach() for x in c.linear)), memory="none"),
    ),
    refusal("integer logits", TypeError, "logits.*int64", on(logits=lambda c: c.logits.long())),
    refusal("0-dim logits", ValueError, "logits.*0-dim", on(logits=torch.tensor(1.0))),
    refusal("no tensor", TypeError, "logits", on(logits=[1.0])),
    refusal(
        "hidden size",
        ValueError,
        r"hidden.*\[5, 4\].*\[13, 5\]",
        on(logits=lambda c: c.linear._replace(hidden=c.linear.hidden[:, :4])),
    ),
    refusal(
        "bias size", ValueError, r"bias.*13.*\[12\]", on(logits=lambda c: c.linear._replace(bias=c.linear.bias[:12]))
    ),
    refusal(
        "dtypes",
        TypeError,
        "hidden.*weight.*float32.*float64.*autocast",
        on(logits=lambda c: c.linear._replace(hidden=c.linear.hidden.float())),
    ),
    refusal(
        "bias dtype",
        TypeError,
        "bias.*float32.*float64",
        on(logits=lambda c: c.linear._replace(bias=c.linear.bias.float())),
    ),
    refusal(
        "integer hidden", TypeError, "hidden.*int64", on(logits=lambda c: LinearLogits(*(x.long() for x in c.linear)))
    ),
    refusal("vocab_size", ValueError, "vocab_size.*14.*13", on(transform=LogitTransform(vocab_size=14))),
    refusal("K > V", ValueError, "K.*14.*13", on(teacher=payload(14))),
    refusal("id", ValueError, r"token id.*\[-1, 6\)", on(logits=lambda c: c.logits[:, :6])),
    refusal(
        "sampled divergence",
        ValueError,
        "SampledTargets.*forward_kl.*reverse_kl",
        on(teacher=lambda c: sampled(c), divergence="reverse_kl"),
    ),
    *[
        refusal(
            f"sampled {tail}",
            ValueError,
            f"SampledTargets.*{tail}.*TeacherTopK",
            on(teacher=lambda c: sampled(c), tail=tail),
        )
        for tail in TAILS
    ],
    refusal(
        "sampled clamp", ValueError, "log_prob_min_clamp", on(teacher=lambda c: sampled(c), log_prob_min_clamp=-1.0)
    ),
    refusal("sampled temperature", ValueError, "temperature", on(teacher=lambda c: sampled(c), temperature=2.0)),
    refusal("reuse a leaf", ValueError, "reuse_logits.*leaf.*reuse_logits=False", on(reuse_logits=True)),
    refusal(
        "reuse a view of a leaf",
        ValueError,
        "reuse_logits.*leaf",
        on(logits=lambda c: c.logits.view(5, 13), reuse_logits=True),
    ),
    refusal(
        "reuse a slice of a leaf",
        ValueError,
        "reuse_logits.*leaf",
        on(logits=lambda c: c.logits[:, :], reuse_logits=True),
    ),
    refusal(
        "reuse expanded",
        ValueError,
        "reuse_logits.*expanded",
        on(logits=lambda c: (c.logits[:1] * 1.0).expand(5, 13), reuse_logits=True),
    ),
    refusal(
        "reuse inference",
        ValueError,
        "reuse_logits.*inference",
        on(logits=lambda c: inference(c.logits), reuse_logits=True),
    ),
    refusal(
        "reuse linear", ValueError, "reuse_logits.*LinearLogits", on(logits=lambda c: c.linear, reuse_logits=True)
    ),
]


def inference(x):
    with torch.inference_mode():
        return x * 1.0


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("error, pattern, call", REFUSALS)
def test_refusals(error, pattern, call):
    with pytest.raises(error, match=f"(?s){pattern}"):
        call(make())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_payloads_are_fine_with_a_rest_or_another_tail(dtype):
    case = make()
    t = case.teacher
    teacher = TeacherTopK(t.token_ids, t.log_probs.to(dtype), t.rest_log_prob.float())
    wide = dataclasses.replace(teacher, log_probs=teacher.log_probs.double())
    for tail in TAILS:
        if tail != "bucket":
            teacher, wide = (dataclasses.replace(x, rest_log_prob=None) for x in (teacher, wide))
        out, want = (topk_distillation_loss(case.logits, x, tail=tail) for x in (teacher, wide))
        assert_same(out.loss, want.loss, tail, 1e-6)


def test_coarse_logits_refuses_what_it_cannot_do():
    case = make()
    coarse = unhooked(coarse_logits)
    ids = case.teacher.token_ids
    for error, pattern, call in (
        (ValueError, "memory.*'recompute'.*'single_pass'", lambda: coarse(case.linear, ids, memory="single_pass")),
        (ValueError, "kernel.*'fused'", lambda: coarse(case.logits, ids, kernel="fused")),
        (TypeError, "token_ids.*integers.*float64", lambda: coarse(case.logits, ids.double())),
        (TypeError, "token_ids.*integers.*bool", lambda: coarse(case.logits, ids > 0)),
        (ValueError, r"token_ids.*\[4, 4\].*\[5, 13\]", lambda: coarse(case.logits, ids[:4])),
        (ValueError, "token id 13 .*-1", lambda: coarse(case.logits, torch.full((5, 1), 13))),
        (ValueError, "token id -2 .*-1", lambda: coarse(case.logits, torch.full((5, 1), -2))),
        (ValueError, "entropy=True", lambda: coarse(case.logits, ids).entropy),
    ):
        with pytest.raises(error, match=f"(?s){pattern}"):
            call()


@pytest.mark.parametrize(
    "options, pattern",
    [
        ({"scale": 0.0}, "scale.*0"),
        ({"softcap": 0.0}, "softcap.*0"),
        ({"softcap": -2.0}, "softcap.*-2"),
        ({"vocab_size": 0}, "vocab_size.*0"),
    ],
    ids=str,
)
def test_logit_transform_refuses(options, pattern):
    with pytest.raises(ValueError, match=pattern):
        LogitTransform(**options)


@pytest.mark.usefixtures("without_shape_checks")
def test_what_is_no_teacher_and_no_count_is_named():
    case = make()
    with pytest.raises(TypeError, match=r"teacher must be TeacherTopK.*from_logits"):
        topk_distillation_loss(case.logits, case.logits)
    with pytest.raises(ValueError, match="num_tokens must be a finite number, got nan"):
        topk_distillation_loss(case.logits, case.teacher, num_tokens=float("nan"))
    hidden, weight = case.linear[:2]
    with pytest.raises(ValueError, match="one device, got cpu, meta"):
        topk_distillation_loss(LinearLogits(hidden, weight.to("meta")), case.teacher)
