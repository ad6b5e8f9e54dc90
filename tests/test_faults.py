"""Faults that people met elsewhere, by kind: none of a kind may be possible here.

Each test carries the small input of one public report and the right answer in float64. A loss is taken on every path
that it has: as logits, as LinearLogits in both memory modes, and over the full vocabulary.
"""

import math
from functools import partial

import pytest
import torch

import potstill
from potstill import (
    DIVERGENCES,
    LinearLogits,
    LogitTransform,
    SampledTargets,
    TeacherTopK,
    coarse_logits,
    full_vocab_distillation_loss,
    sampled_token_loss,
    topk_distillation_loss,
)
from shapes import FORMS, INF, assert_same

NAN = float("nan")


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def log(*probs):
    """One row of log-probabilities, which are also logits."""
    return f64(probs).log()


def payload(ids, probs, rest=None):
    """One row: ids, their probabilities, and the probability of everything else."""
    return TeacherTopK(torch.tensor([ids]), log(*probs), None if rest is None else log(rest)[0])


def every(probs):
    """A payload of all ids."""
    return payload(list(range(len(probs))), probs, 0.0)


def on_every_path(z, loss):
    """loss(student, **options) and its gradient by z on logits, and on a head that multiplies out to z."""
    for form in FORMS:
        leaf = z.clone().requires_grad_()
        if form == "logits":
            out = loss(leaf)
        else:
            out = loss(LinearLogits(leaf, torch.eye(z.shape[-1], dtype=z.dtype)), memory=form)
        yield form, out, torch.autograd.grad(out.loss, leaf)[0]


def on_full_vocab(z, teacher, **options):
    """full_vocab_distillation_loss and its gradient by z, with each side as logits and as a head."""
    eye = torch.eye(z.shape[-1], dtype=z.dtype)
    for student_is_linear in (False, True):
        for teacher_is_linear in (False, True):
            leaf = z.clone().requires_grad_()
            student = LinearLogits(leaf, eye) if student_is_linear else leaf
            out = full_vocab_distillation_loss(
                student, LinearLogits(teacher, eye) if teacher_is_linear else teacher, **options
            )
            yield "full vocabulary", out, torch.autograd.grad(out.loss, leaf)[0]


def expect(paths, loss, gradient=None, tolerance=1e-7):
    """Every path has this loss and gradient (of its first row), to the digits that are given."""
    for name, out, actual in paths:
        assert out.loss.item() == pytest.approx(loss, abs=tolerance), name
        if gradient is not None:
            assert_same(actual[0], f64(*gradient), name, tolerance)


P, Q = (0.6, 0.3, 0.1), (0.2, 0.3, 0.5)


# Kind 1: the divergence is another one than it is called.


def divergence_of(p, q, value, gradient=None, **options):
    expect(on_every_path(log(*q), partial(topk_distillation_loss, teacher=every(p), **options)), value, gradient)
    expect(on_full_vocab(log(*q), log(*p), **options), value, gradient)


def test_jsd_mixes_probabilities():
    """Kind 1 (TRL 2202): a mixture of log-probabilities is no distribution; it would give 0.2708050."""
    divergence_of(P, Q, 0.1251006, divergence="jsd", beta=0.5)


def test_jsd_at_a_quarter_has_its_weights_on_the_right_sides():
    """Kind 1 (TRL 3043): swapped weights give 0.2155638 or 0.2161850; at .5 nobody would see it."""
    divergence_of(P, Q, 0.4982236, divergence="forward_kl")
    divergence_of(P, Q, 0.5849965, divergence="reverse_kl")
    divergence_of(P, Q, 0.0921738, divergence="jsd", beta=0.25)


@pytest.mark.parametrize("beta, name", [(0.0, "forward_kl"), (1.0, "reverse_kl")])
def test_jsd_at_its_ends_is_refused(beta, name):
    """Kind 1 (verl-recipe 151): clipped to 1 - 1e-6 it would be 6e-07, a loss without a signal."""
    with pytest.raises(ValueError, match=rf"beta.*{beta}.*{name}"):
        topk_distillation_loss(log(*Q), every(P), divergence="jsd", beta=beta)
    with pytest.raises(ValueError, match=rf"beta.*{beta}.*{name}"):
        full_vocab_distillation_loss(log(*Q), log(*P), divergence="jsd", beta=beta)


@pytest.mark.parametrize("temperature", [1.0, 0.9])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_student_that_is_the_teacher_has_nothing_to_learn(divergence, temperature):
    """Kind 1 (TRL 5731): a hidden second loss, or one side's temperature alone, shows at student == teacher."""
    z = torch.randn(3, 11, dtype=torch.float64)
    teacher = TeacherTopK.from_logits(z, 4, temperature=temperature)
    options = {"divergence": divergence, "temperature": temperature}
    zero = torch.zeros(11)
    gradient = None if divergence == "total_variation" else zero  # its slope jumps there
    expect(on_every_path(z, partial(topk_distillation_loss, teacher=teacher, **options)), 0, gradient, 1e-14)
    expect(on_full_vocab(z, z, **options), 0, gradient, 1e-14)


def test_a_softcap_is_part_of_the_model():
    """Kind 1 (TRL 6629): a head that skips the cap optimises 0.5117125."""
    capped = LogitTransform(softcap=2.0)
    teacher = f64([0.0, 1.0])
    loss = partial(topk_distillation_loss, teacher=every(teacher[0].softmax(0).tolist()), transform=capped)
    expect(on_every_path(f64([0.0, 4.0]), loss), 0.0721116)
    expect(on_full_vocab(f64([0.0, 4.0]), teacher, student_transform=capped), 0.0721116)
    expect(on_full_vocab(f64([0.0, 4.0]), teacher), 0.5117125)


def test_the_teacher_matters():
    """Kind 1 (axolotl 3206, atropos 456): nothing is distilled if another payload changes nothing."""
    z = torch.randn(3, 11, dtype=torch.float64)
    one, other = (TeacherTopK.from_logits(torch.randn(3, 11, dtype=torch.float64), 4) for _ in range(2))
    paths = [list(on_every_path(z, partial(topk_distillation_loss, teacher=teacher))) for teacher in (one, other)]
    for (name, a, gradient_a), (_, b, gradient_b) in zip(*paths, strict=True):
        assert a.loss != b.loss and not torch.allclose(gradient_a, gradient_b), name


def test_hard_and_soft_labels_both_train():
    """Kind 1 (axolotl 3660): of two returned terms only one was differentiated."""
    z = torch.randn(1, 5, dtype=torch.float64)
    hard = SampledTargets(torch.tensor([[2]]), f64([1.0]))
    soft = TeacherTopK.from_logits(torch.randn(1, 5, dtype=torch.float64), 2)
    expected = z.softmax(-1) - torch.nn.functional.one_hot(torch.tensor([2]), 5)

    def mixed(weights, student, **options):
        terms = [topk_distillation_loss(student, teacher, **options).loss for teacher in (hard, soft)]
        return potstill.DistillationOutput(weights[0] * terms[0] + weights[1] * terms[1], terms[0], {})

    def gradient(weights):
        return [gradient for _, _, gradient in on_every_path(z, partial(mixed, weights))]

    for only_hard, only_soft, both in zip(*map(gradient, [(1, 0), (0, 1), (0.5, 0.5)]), strict=True):
        assert_same(only_hard, expected)
        assert only_soft.abs().max() > 0.01
        assert_same(both, (only_hard + only_soft) / 2)


@pytest.mark.parametrize(
    "estimator, gradient",
    [("k2", [-0.2630802, 0.2630802]), ("k1_straight_through", [-0.2630802, 0.2630802]), ("k3", [-0.3, 0.3])],
)
def test_sampled_estimators_have_the_gradient_that_is_documented(estimator, gradient):
    """Kind 1 (OpenRLHF 1309): k1 as a loss has none, k3 has the forward KL's, q - p."""
    q, p = f64(0.3, 0.7), f64(0.6, 0.4)
    z = q.log().requires_grad_()
    loss = partial(sampled_token_loss, token_weights=q, num_tokens=1)  # the exact expectation over y ~ q
    (actual,) = torch.autograd.grad(loss(z.log_softmax(0), p.log(), estimator=estimator).loss, z)
    assert_same(actual, f64(*gradient), tolerance=1e-7)
    with pytest.raises(ValueError, match=r"k1.*no learning signal.*policy_gradient"):
        loss(z.log_softmax(0), p.log(), estimator="k1")
    (actual,) = torch.autograd.grad(loss(z.log_softmax(0), p.log(), estimator="k1", policy_gradient=True).loss, z)
    assert_same(actual, f64(-0.2630802, 0.2630802), tolerance=1e-7)


# Kind 2: truncation, clamps, renormalisation, the tail.


@pytest.mark.parametrize(
    "k, tail, options, loss, gradient",
    [
        (1, "drop", {}, -0.2350018, [-0.1, 0.075, 0.025]),  # raises z_0 though q_0 > p_0: the wrong way
        (1, "drop", {"loss_min_clamp": 0.0}, 0.0, [0.0, 0.0, 0.0]),
        (1, "bucket", {}, 0.2231436, [0.3, -0.225, -0.075]),
        (2, "drop", {}, -0.1072954, None),
        (2, "bucket", {}, 0.2950641, [0.3, -0.1, -0.2]),
        (3, "bucket", {}, 0.2950641, [0.3, -0.1, -0.2]),
    ],
)
def test_a_truncated_sum_is_no_divergence_but_the_bucket_is(k, tail, options, loss, gradient):
    """Kind 2 (verl 7855): 89 % of steps sat at a floor of 0 that hid a negative sum."""
    p, q = (0.5, 0.25, 0.25), (0.8, 0.15, 0.05)
    teacher = payload(list(range(k)), p[:k])
    call = partial(topk_distillation_loss, teacher=teacher, tail=tail, **options)
    expect(on_every_path(log(*q), call), loss, gradient)


def test_the_bucket_grows_to_the_full_divergence():
    """Kind 2 (verl 7855): >= 0, non-decreasing in K, at most the full KL, equal to it at K = V - 1 and V."""
    z, t = torch.randn(2, 20, 9, dtype=torch.float64)
    full = next(on_full_vocab(z, t))[1].per_token
    before = torch.zeros(20, dtype=torch.float64)
    for k in range(1, 10):
        now = topk_distillation_loss(z, TeacherTopK.from_logits(t, k)).per_token
        assert (now >= before - 1e-14).all()
        before = now
        if k >= 8:
            assert_same(now, full)


def test_truncated_reverse_kl_is_not_floored_and_the_bucket_is_whole():
    """Kind 2 (verl 7806): at V = 2 one id and a tail are everything."""
    loss = partial(topk_distillation_loss, teacher=payload([0], [0.95]), divergence="reverse_kl")
    expect(on_every_path(log(0.7, 0.3), partial(loss, tail="drop")), -0.2137672)
    expect(on_every_path(log(0.7, 0.3), partial(loss, tail="bucket")), 0.3237607)
    expect(on_full_vocab(log(0.7, 0.3), log(0.95, 0.05), divergence="reverse_kl"), 0.3237607)


def test_a_clip_is_of_tokens_never_of_vocabulary_entries():
    """Kind 2 (TRL 5990): capping the positive entries of a sum alone gave -0.1697225."""
    loss = partial(topk_distillation_loss, teacher=every((0.9, 0.1)))
    expect(on_every_path(log(0.1, 0.9), loss), 1.7577797)
    expect(on_every_path(log(0.1, 0.9), partial(loss, loss_max_clamp=0.05)), 0.05, [0.0, 0.0])


def test_a_mass_above_one_is_an_error():
    """Kind 2 (axolotl 2692): collected log-probabilities of mass 1.3 made a negative loss."""
    with pytest.raises(ValueError, match=r"row 0 .*mass.*1\.3\b"):
        topk_distillation_loss(torch.zeros(1, 4, dtype=torch.float64), payload([1, 2], [0.7, 0.6]))


def test_masses_are_those_of_the_payload_on_every_path():
    """Kind 2 (verl 7855, comments): one backend reported a constant 2e-4 where the mass was 0.99."""
    z = torch.randn(1, 6, dtype=torch.float64)
    student_mass = z.softmax(-1)[0, [4, 1]].sum()
    for tail in ("bucket", "drop"):
        loss = partial(topk_distillation_loss, teacher=payload([4, 1], [0.7, 0.2]), tail=tail)
        for name, out, _ in on_every_path(z, loss):
            assert out.metrics["teacher_mass"].item() == pytest.approx(0.9, abs=1e-12), name
            assert_same(out.metrics["student_mass"], student_mass, name)


# Kind 3: masks, empty and all-masked batches.


def with_kl(*values):
    """Logits [N, 3] and a payload that is certain of id 0, with these KLs: -log q_0."""
    q0 = (-f64(*values)).exp()
    z = torch.stack([q0.log(), ((1 - q0) * 0.25).log(), ((1 - q0) * 0.75).log()], -1)
    n = len(values)
    teacher = TeacherTopK(
        torch.zeros(n, 1, dtype=torch.int64), torch.zeros(n, 1, dtype=torch.float64), torch.full((n,), -INF)
    )
    return z, teacher


def topk_as(form, teacher_of):
    """An entry point: parts that are differentiated, and the loss of them under a mask."""

    def make(n):
        z = torch.randn(n, 7, dtype=torch.float64)
        parts = [z] if form == "logits" else [z, torch.randn(7, 7, dtype=torch.float64), torch.randn(7).double()]
        teacher = teacher_of(torch.randn(n, 7, dtype=torch.float64))

        def loss(*parts, **options):
            if form == "logits":
                return topk_distillation_loss(*parts, teacher, **options)
            return topk_distillation_loss(LinearLogits(*parts), teacher, memory=form, **options)

        return parts, loss

    return make


def full_as(linear):
    def make(n):
        z, teacher = torch.randn(2, n, 7, dtype=torch.float64)
        parts = [z, torch.randn(7, 7, dtype=torch.float64)] if linear else [z]

        def loss(*parts, **options):
            return full_vocab_distillation_loss(LinearLogits(*parts) if linear else parts[0], teacher, **options)

        return parts, loss

    return make


def sampled_as(**estimator):
    def make(n):
        student, teacher = torch.randn(2, n, 7, dtype=torch.float64).log_softmax(-1)[..., 0]
        return [student], lambda student, **options: sampled_token_loss(student, teacher, **estimator, **options)

    return make


def topk(z):
    return TeacherTopK.from_logits(z, 3)


def soft(z):
    return SampledTargets(torch.arange(7).expand(z.shape), z.softmax(-1))


ENTRY_POINTS = {
    **{f"topk_distillation_loss, {form}": topk_as(form, topk) for form in FORMS},
    **{f"topk_distillation_loss, sampled targets, {form}": topk_as(form, soft) for form in FORMS},
    "full_vocab_distillation_loss, logits": full_as(False),
    "full_vocab_distillation_loss, linear": full_as(True),
    "sampled_token_loss, k2": sampled_as(estimator="k2"),
    "sampled_token_loss, k1 as a reward": sampled_as(estimator="k1", policy_gradient=True),
}
entry_points = pytest.mark.parametrize("name", ENTRY_POINTS)


def test_every_public_loss_is_an_entry_point():
    """Kind 3 (TRL 5885): the fix of one of three duplicated losses. A new loss has to appear in ENTRY_POINTS."""
    public = {name for name in potstill.__all__ if name.endswith("_loss")}
    assert public == {name.split(",")[0] for name in ENTRY_POINTS}


@entry_points
@pytest.mark.parametrize("mask", [torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)], ids=str)
def test_a_batch_without_a_scored_row_gives_zero(name, mask):
    """Kind 3 (Automodel 3796, torchtune 2225, Liger 177): 0/0 is NaN, and NaN is forever; no gradient hangs DDP."""
    parts, loss = ENTRY_POINTS[name](3)
    leaves = [x.requires_grad_() for x in parts]
    out = loss(*leaves, mask=mask)
    assert out.loss.item() == 0.0 and out.loss.requires_grad
    out.loss.backward()
    for leaf in leaves:
        assert leaf.grad is not None and (leaf.grad == 0).all()
    for metric in out.metrics.values():
        assert not metric.isnan()


@entry_points
def test_no_rows_at_all(name):
    """Kind 3 (cua-lite 18, prime-rl 1596): a logging line took the maximum of nothing."""
    parts, loss = ENTRY_POINTS[name](0)
    leaves = [x.requires_grad_() for x in parts]
    out = loss(*leaves)
    assert out.loss.item() == 0.0
    out.loss.backward()
    for leaf in leaves:
        assert leaf.grad.shape == leaf.shape and (leaf.grad == 0).all()
    means = {k: v for k, v in out.metrics.items() if not k.endswith(("_min", "_max"))}
    assert all(metric == 0 for metric in means.values())


@entry_points
def test_one_rank_without_a_scored_row(name):
    """Kind 3 (Automodel 3796): rank 0 all masked, rank 1 three rows; the global mean is rank 1's own."""
    parts, loss = ENTRY_POINTS[name](3)
    alone = loss(*parts)
    masked = loss(*parts, mask=torch.zeros(3, dtype=torch.bool), num_tokens=3)
    other = loss(*parts, num_tokens=torch.tensor(3))
    assert_same(masked.loss + other.loss, alone.loss)


@entry_points
def test_a_padded_batch_is_the_same_batch(name):
    """Kind 3 (OptiPFair 34, TRL 7044): two scored rows among 400 are a batch of two."""
    parts, loss = ENTRY_POINTS[name](400)
    mask = torch.zeros(400, dtype=torch.bool)
    mask[[0, 2]] = True
    leaves = [x.requires_grad_() for x in parts]
    out = loss(*leaves, mask=mask)
    assert_same(out.loss, out.per_token[mask].mean())
    assert (out.per_token[~mask] == 0).all()
    gradient = torch.autograd.grad(out.loss, leaves[0])[0]
    assert (gradient[~mask] == 0).all() and (gradient[mask] != 0).any(-1).all()


def test_padding_changes_nothing():
    """Kind 3 (OptiPFair 34): the same sequences in a batch of 4 and of 400 columns, bit for bit or to 1e-6."""
    z, t = torch.randn(2, 2, 400, 9)

    def run(width):
        leaf = z[:, :width].clone().requires_grad_()
        mask = torch.zeros(2, width, dtype=torch.bool)
        mask[0, :3] = mask[1, 1:4] = True
        out = topk_distillation_loss(leaf, TeacherTopK.from_logits(t[:, :width], 3), mask=mask)
        return out.loss, torch.autograd.grad(out.loss, leaf)[0][:, :4]

    for narrow, wide in zip(run(4), run(400), strict=True):
        assert_same(wide, narrow, tolerance=1e-6)


def test_ignored_rows_count_nowhere():
    """Kind 3 (Liger 974): 2.7 is the mean of both rows, 0.2 the right sum over the wrong count."""
    z, teacher = with_kl(0.4, 5.0)
    loss = partial(topk_distillation_loss, teacher=teacher, mask=torch.tensor([True, False]))
    for name, out, gradient in on_every_path(z, loss):
        assert out.loss.item() == pytest.approx(0.4, abs=1e-12), name
        assert (gradient[1] == 0).all(), name


def test_the_mean_is_over_tokens():
    """Kind 3 (TRL 4105): divided by rows times vocabulary it is 0.075."""
    z, teacher = with_kl(0.4, 0.2)
    expect(on_every_path(z, partial(topk_distillation_loss, teacher=teacher)), 0.3, tolerance=1e-12)
    t = torch.full_like(z, -1e4)
    t[:, 0] = 0.0
    expect(on_full_vocab(z, t), 0.3, tolerance=1e-12)


# Kind 4: -inf and NaN.


def test_padding_is_masked_before_the_exponential():
    """Kind 4 (ms-swift 9767): exp(1e10) * 0 is NaN."""
    out = sampled_token_loss(f64(-1, -1e10), f64(-1.5, 0), estimator="k3", mask=torch.tensor([1, 0]))
    assert out.loss.item() == pytest.approx(0.1065307, abs=1e-7)


def test_jsd_of_what_underflows_on_both_sides():
    """Kind 4 (Liger 1453): log-probability -120 on both sides is log 0 in probability space."""
    z = torch.tensor([[0.0, -120.0]])
    teacher = TeacherTopK(torch.tensor([[0, 1]]), z, torch.tensor([-INF]))
    for options in ({"divergence": "jsd", "beta": 0.5}, {"divergence": "skew_kl"}, {"divergence": "skew_reverse_kl"}):
        for _, out, gradient in on_every_path(z, partial(topk_distillation_loss, teacher=teacher, **options)):
            assert out.loss.item() == pytest.approx(0, abs=1e-7) and gradient.isfinite().all()
        for _, out, gradient in on_full_vocab(z, z, **options):
            assert out.loss.item() == pytest.approx(0, abs=1e-7) and gradient.isfinite().all()


def test_columns_at_minus_infinity():
    """Kind 4 (SkyRL 2259): 0 * -inf; the KL is that of the other columns, and theirs is the whole gradient."""
    z, t = f64([0, 1, -INF]), f64([1, 0, -INF])
    two = f64(1, 0).softmax(0) - f64(0, 1).softmax(0)
    gradient = [-two[0].item(), -two[1].item(), 0.0]
    for k in (1, 2, 3):
        leaf = z.clone().requires_grad_()
        out = topk_distillation_loss(leaf, TeacherTopK.from_logits(t, k), entropy=True)
        assert out.loss.item() == pytest.approx(0.4621172, abs=1e-7)
        assert out.metrics["student_entropy"].item() == pytest.approx(0.5822031, abs=1e-7)
        (actual,) = torch.autograd.grad(out.loss, leaf)
        assert actual[0, 2] == 0
        assert_same(actual[0], f64(*gradient))
    leaf = z.clone().requires_grad_()
    out = full_vocab_distillation_loss(leaf, t)
    assert out.loss.item() == pytest.approx(0.4621172, abs=1e-7)
    assert_same(torch.autograd.grad(out.loss, leaf)[0][0], f64(*gradient))


@pytest.mark.parametrize("tail", ["bucket", "generalized", "drop"])
def test_a_payload_entry_of_probability_zero(tail):
    """Kind 4 (SkyRL 2259): teacher log-probabilities [0, -inf] at ids [2, 0]; the plain product is NaN."""
    teacher = TeacherTopK(torch.tensor([[2, 0]]), f64([0.0, -INF]), f64(-INF))
    paths = on_every_path(f64([0, 1, 2]), partial(topk_distillation_loss, teacher=teacher, tail=tail))
    value, gradient = 0.4076060, [0.0900306, 0.2447285, -0.3347590]
    if tail == "generalized":  # + Q - P = q_2 - 1, whose gradient is q_2 (1[j = 2] - q_j)
        q = f64(0, 1, 2).softmax(0)
        value += q[2].item() - 1
        gradient = (f64(*gradient) + q[2] * (f64(0, 0, 1) - q)).tolist()
    expect(paths, value, gradient)


# Kind 5: dtype and precision.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_a_confident_prediction_survives_16_bits(dtype):
    """Kind 5 (Liger 1419): a softmax of .9995 rounds to 1 in bf16, and the target's gradient to 0."""
    z = torch.tensor([[math.log(0.9995 / 0.0005), 0.0]]).to(dtype)
    exact = -z.double().softmax(-1)[0, 1].item()
    assert exact == pytest.approx(-0.0005, rel=0.03)
    teacher = TeacherTopK(torch.tensor([[0]]), torch.zeros(1, 1), torch.tensor([-INF]))
    for name, _, gradient in on_every_path(z, partial(topk_distillation_loss, teacher=teacher)):
        assert gradient.dtype == dtype
        assert gradient[0].tolist() == pytest.approx([exact, -exact], rel=torch.finfo(dtype).eps), name


@pytest.mark.parametrize("memory", ["recompute", "single_pass"])
def test_a_bias_is_part_of_the_logits(memory):
    """Kind 5 (cut-cross-entropy 52): b = (0, 5), hidden 0, target 0: log(1 + e^5), and db = (-.9933, .9933)."""
    parts = f64([0.0]).requires_grad_(), f64([0.0], [0.0]).requires_grad_(), f64(0.0, 5.0).requires_grad_()
    target = SampledTargets(torch.tensor([[0]]), f64([1.0]))
    for teacher in (target, payload([0], [1.0], 0.0)):
        out = topk_distillation_loss(LinearLogits(*parts), teacher, memory=memory)
        assert out.loss.item() == pytest.approx(5.0067153, abs=1e-7)
        d_hidden, d_weight, d_bias = torch.autograd.grad(out.loss, parts)
        assert_same(d_bias, f64(-0.9933071, 0.9933071), tolerance=1e-7)
        assert (d_hidden == 0).all() and (d_weight == 0).all()
    out = full_vocab_distillation_loss(LinearLogits(*parts), f64([0.0, -INF]))
    assert_same(torch.autograd.grad(out.loss, parts)[2], f64(-0.9933071, 0.9933071), tolerance=1e-7)


# Kind 6: normalisation over micro-batches and ranks; metrics.

SPLITS = [[[0, 1, 2, 3]], [[0], [1, 2, 3]], [[0, 1], [2, 3]], [[3], [2], [1], [0]], [[0, 1, 2, 3], []]]


def rows_of(teacher, rows):
    return TeacherTopK(teacher.token_ids[rows], teacher.log_probs[rows], teacher.rest_log_prob[rows])


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_loss_does_not_depend_on_how_the_batch_is_cut(split):
    """Kind 6 (verl 7200): one token of KL 1 and three of .2: 0.4, not 0.6 (mean of means) nor 1.2 (their sum)."""
    z, teacher = with_kl(1.0, 0.2, 0.2, 0.2)
    for form in FORMS:
        leaf = z.clone().requires_grad_()
        eye = torch.eye(3, dtype=torch.float64)
        total, metrics = 0.0, []
        for rows in split:
            student = leaf[rows] if form == "logits" else LinearLogits(leaf[rows], eye)
            memory = {} if form == "logits" else {"memory": form}
            out = topk_distillation_loss(student, rows_of(teacher, rows), num_tokens=4, entropy=True, **memory)
            total = total + out.loss
            metrics.append(out.metrics)
        assert total.item() == pytest.approx(0.4, abs=1e-12)
        whole = topk_distillation_loss(leaf, teacher, entropy=True)
        assert_same(torch.autograd.grad(total, leaf)[0], torch.autograd.grad(whole.loss, leaf)[0])
        for name, x in whole.metrics.items():
            parts = torch.stack([m[name] for m in metrics])
            combined = (
                parts.amin() if name.endswith("_min") else parts.amax() if name.endswith("_max") else parts.sum()
            )
            assert_same(combined, x, name)


def test_ranks_that_average_gradients_multiply_by_their_number():
    """Kind 6 (TRL 6006): with the global count and gradients averaged over 2 ranks the loss needs the factor 2."""
    z, teacher = with_kl(1.0, 0.2, 0.2, 0.2)
    leaf = z.clone().requires_grad_()
    whole = topk_distillation_loss(leaf, teacher)
    ranks = [[0], [1, 2, 3]]
    losses = [2 * topk_distillation_loss(leaf[rows], rows_of(teacher, rows), num_tokens=4).loss for rows in ranks]
    averaged = sum(torch.autograd.grad(loss, leaf)[0] for loss in losses) / 2
    assert sum(losses).item() / 2 == pytest.approx(0.4, abs=1e-12)
    assert_same(averaged, torch.autograd.grad(whole.loss, leaf)[0])


def test_the_count_is_of_scored_rows():
    """Kind 6 (transformers 46204): 4 targets of cross-entropy 1; counting the row before the first gives 0.8."""
    z, teacher = with_kl(1.0, 1.0, 1.0, 1.0, 9.0)
    mask = torch.tensor([1, 1, 1, 1, 0])
    expect(on_every_path(z, partial(topk_distillation_loss, teacher=teacher, mask=mask)), 1.0, tolerance=1e-12)


def test_metrics_do_not_grow_with_the_number_of_ranks():
    """Kind 6 (verl 5203): 4 ranks of KL .4; summed means give 1.6."""
    z, teacher = with_kl(0.4)
    ranks = [topk_distillation_loss(z, teacher, num_tokens=torch.tensor(4)).metrics for _ in range(4)]
    assert sum(m["head_loss"] for m in ranks).item() == pytest.approx(0.4, abs=1e-12)
    assert max(m["loss_max"] for m in ranks).item() == pytest.approx(0.4, abs=1e-12)
    assert min(m["loss_min"] for m in ranks).item() == pytest.approx(0.4, abs=1e-12)


def test_uneven_ranks_share_one_count():
    """Kind 6 (verl 5983): context-parallel ranks of 1 and 7 tokens, KL .4 everywhere."""
    losses = [topk_distillation_loss(*with_kl(*[0.4] * n), num_tokens=8).loss.item() for n in (1, 7)]
    assert sum(losses) == pytest.approx(0.4, abs=1e-12)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_two_terms_share_one_count(split):
    """Kind 6 (speculators 942, NeMo-RL 2745): the KL on the global count, the cross-entropy on a local one."""
    z, teacher = with_kl(1.0, 0.2, 0.2, 0.2)
    labels = SampledTargets(torch.tensor([[1], [2], [0], [1]]), torch.ones(4, 1, dtype=torch.float64))

    def mixed(rows, **options):
        kl = topk_distillation_loss(z[rows], rows_of(teacher, rows), **options)
        ce = topk_distillation_loss(z[rows], SampledTargets(labels.token_ids[rows], labels.weights[rows]), **options)
        return 0.3 * kl.loss + 0.7 * ce.loss

    assert_same(sum(mixed(rows, num_tokens=4) for rows in split), mixed([0, 1, 2, 3]))


# Kind 8: vocabulary and ids.


def test_ids_of_a_wider_vocabulary_are_refused():
    """Kind 8 (DistillKit 7): a teacher with other tokens must not be read silently."""
    teacher = TeacherTopK.from_logits(torch.arange(16.0)[None], 2)  # ids 15 and 14
    for student in (torch.zeros(1, 12), LinearLogits(torch.zeros(1, 4), torch.zeros(12, 4))):
        with pytest.raises(ValueError, match=r"id outside \[-1, 12\): 15.*tokenizer"):
            topk_distillation_loss(student, teacher)
    with pytest.raises(ValueError, match=r"12 and 16.*vocab_size"):
        full_vocab_distillation_loss(torch.zeros(1, 12), torch.zeros(1, 16))


def test_padded_vocabularies_of_different_width():
    """Kind 8: padding is outside the softmax, and what is real in both is said once on each side."""
    z, t = torch.randn(3, 12, dtype=torch.float64), torch.randn(3, 16, dtype=torch.float64)
    real = LogitTransform(vocab_size=10)
    for k in (4, 10):
        padded = topk_distillation_loss(z, TeacherTopK.from_logits(t, k, transform=real), transform=real)
        plain = topk_distillation_loss(z[:, :10], TeacherTopK.from_logits(t[:, :10], k))
        assert_same(padded.loss, plain.loss)
    full = full_vocab_distillation_loss(z, t, student_transform=real, teacher_transform=real)
    assert_same(full.loss, plain.loss)


def test_two_slots_with_one_id_are_refused():
    """Kind 8 (SGLang 32290 and the input contract): counted twice 0.6485185, merged 0.3019449; so say which."""
    teacher = payload([2, 2, 1], [0.5, 0.5, 0.2])
    with pytest.raises(ValueError, match=r"row 0 .*twice.*2.*merge"):
        topk_distillation_loss(torch.zeros(1, 4, dtype=torch.float64), teacher)


# Kind 10: autograd.


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("form", ["logits", "recompute"])
def test_kl_and_entropy_on_one_student(form, order):
    """Kind 10 (SkyRL 1650): an entropy backward that worked in place on logits another node had saved."""
    z = torch.randn(3, 9, dtype=torch.float64)
    teacher = TeacherTopK.from_logits(torch.randn(3, 9, dtype=torch.float64), 4)

    def terms(leaf):
        student = leaf if form == "logits" else LinearLogits(leaf, torch.eye(9, dtype=torch.float64))
        memory = {} if form == "logits" else {"memory": form}
        return [
            lambda: topk_distillation_loss(student, teacher, **memory).loss,
            lambda: coarse_logits(student, teacher.token_ids, entropy=True).entropy.sum(),
        ]

    alone = []
    for i in (0, 1):
        leaf = z.clone().requires_grad_()
        alone.append(torch.autograd.grad(terms(leaf)[i](), leaf)[0])
    leaf = z.clone().requires_grad_()
    first, second = (terms(leaf)[i]() for i in order)
    assert_same(torch.autograd.grad(first + second, leaf)[0], alone[0] + alone[1])
    q = z.softmax(-1)
    entropy = -(q * q.log()).sum(-1, keepdim=True)
    assert_same(alone[1], -q * (q.log() + entropy))


def test_a_teacher_that_requires_grad_gets_none():
    """Kind 10 (TRL 6526): the teacher's head was multiplied with gradients on."""
    weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    teacher = LinearLogits(torch.randn(3, 4, dtype=torch.float64, requires_grad=True), weight)
    payload = TeacherTopK.from_logits(teacher, 3)
    assert not payload.log_probs.requires_grad
    for student in (
        torch.randn(3, 9, dtype=torch.float64),
        LinearLogits(torch.randn(3, 4).double(), torch.randn(9, 4).double()),
    ):
        leaf = (student.hidden if isinstance(student, LinearLogits) else student).requires_grad_()
        (
            topk_distillation_loss(student, payload).loss + full_vocab_distillation_loss(student, teacher).loss
        ).backward()
        assert leaf.grad is not None and weight.grad is None and teacher.hidden.grad is None


def test_a_change_of_the_head_changes_the_loss():
    """Kind 10 (TRL 4612): an adapter on the head was ignored, as its frozen base was read."""
    hidden, weight = torch.ones(1, 2, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    delta = torch.zeros(5, 2, dtype=torch.float64)
    delta[3, 0] = 1.0
    teacher = payload([3, 1], [0.5, 0.2])
    z = hidden @ (weight + delta).T
    expect(
        on_every_path(z, partial(topk_distillation_loss, teacher=teacher)),
        topk_distillation_loss(LinearLogits(hidden, weight + delta), teacher).loss.item(),
        tolerance=1e-12,
    )
    assert (
        abs(
            topk_distillation_loss(LinearLogits(hidden, weight), teacher).loss
            - topk_distillation_loss(z, teacher).loss
        )
        > 1e-3
    )


@entry_points
def test_the_value_does_not_depend_on_requires_grad(name):
    """Kind 10 (Liger 507): the loss was 0 for an input without requires_grad."""
    parts, loss = ENTRY_POINTS[name](3)
    expected = loss(*(x.clone().requires_grad_() for x in parts)).loss.detach()
    assert expected != 0
    assert torch.equal(loss(*parts).loss, expected)
    with torch.no_grad():
        assert torch.equal(loss(*(x.clone().requires_grad_() for x in parts)).loss, expected)
    with torch.inference_mode():
        assert torch.equal(loss(*parts).loss, expected)


# Kind 11: layout, strides, integer width.


def test_any_layout_is_its_contiguous_copy():
    """Kind 11 (TransformerEngine 2734): logits transposed, ids and mask of every second element, an expanded row."""
    z = torch.randn(4, 2, 8, dtype=torch.float64).transpose(0, 1)
    ids = torch.stack([torch.randperm(8) for _ in range(8)]).view(2, 4, 8)[..., ::2]
    log_probs = torch.randn(4, dtype=torch.float64).log_softmax(0).sub(0.5).expand(2, 4, 4)
    mask = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0])[::2].view(2, 4) != 0
    weights = torch.rand(2, 8, dtype=torch.float64)[:, ::2]
    for x in (z, ids, log_probs, weights):
        assert not x.is_contiguous()
    teacher, copy = TeacherTopK(ids, log_probs), TeacherTopK(ids.contiguous(), log_probs.contiguous())
    strided = on_every_path(z, partial(topk_distillation_loss, teacher=teacher, mask=mask, token_weights=weights))
    plain = partial(topk_distillation_loss, teacher=copy, mask=mask.contiguous(), token_weights=weights.contiguous())
    for (name, out, gradient), (_, want, expected) in zip(strided, on_every_path(z.contiguous(), plain), strict=True):
        assert_same(out.loss, want.loss, name)
        assert_same(out.per_token, want.per_token, name)
        assert_same(gradient, expected, name)


UPSTREAM = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "transposed sum": lambda x: x.T.sum(),
    "expanded": lambda x: (x * torch.ones(1, dtype=x.dtype).expand(64, 2)).sum(),
    "dot with a transposed": lambda x: (x * torch.arange(128, dtype=x.dtype).view(2, 64).t()).sum(),
}


@pytest.mark.parametrize("name", UPSTREAM)
def test_expanded_upstream_gradients(name):
    """Kind 11 (TransformerEngine 2402): .sum() sends a stride-0 gradient; read as contiguous it is garbage."""
    z = torch.randn(64, 2, 7, dtype=torch.float64, requires_grad=True)
    teacher_logits = torch.randn(64, 2, 7, dtype=torch.float64)
    teacher = TeacherTopK.from_logits(teacher_logits, 3)
    eye = torch.eye(7, dtype=torch.float64)
    for per_token in (
        lambda: topk_distillation_loss(z, teacher).per_token,
        lambda: topk_distillation_loss(LinearLogits(z, eye), teacher, memory="recompute").per_token,
        lambda: full_vocab_distillation_loss(z, teacher_logits).per_token,
        lambda: coarse_logits(z, teacher.token_ids).rest_log_prob,
    ):
        value = per_token()
        explicit = torch.autograd.functional.jacobian(UPSTREAM[name], value.detach())
        (actual,) = torch.autograd.grad(UPSTREAM[name](value), z)
        (expected,) = torch.autograd.grad(per_token(), z, explicit.contiguous())
        assert_same(actual, expected)


def test_rows_beyond_2_to_the_31_elements():
    """Kind 11 (TRL 7266, mamba 1015): row * stride wraps in 32 bits. Two rows, 2^31 unused elements apart."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    storage = torch.empty(2**31 + 8, dtype=torch.bfloat16)
    far = storage.as_strided((2, 8), (2**31, 1))
    near = torch.randn(2, 8).bfloat16()
    far.copy_(near)
    teacher = TeacherTopK.from_logits(torch.randn(2, 8), 3)
    losses, gradients = [], []
    for z in (far, near):
        leaf = z.detach().requires_grad_()
        out = topk_distillation_loss(leaf, teacher)
        losses.append(out.per_token)
        gradients.append(torch.autograd.grad(out.loss, leaf)[0])
    assert torch.equal(*losses) and torch.equal(*gradients)


@pytest.mark.parametrize("id_of_padding", [-100, -1, 2**40])
def test_padding_ids_are_no_index(id_of_padding):
    """Kind 11 (ms-swift 9947): a gather at -100 is an error, or worse."""
    z = torch.randn(3, 7, dtype=torch.float64)
    teacher = TeacherTopK.from_logits(torch.randn(3, 7, dtype=torch.float64), 2)
    mask = torch.tensor([True, False, True])
    ids = teacher.token_ids.clone()
    ids[1] = id_of_padding
    padded = TeacherTopK(ids, teacher.log_probs, teacher.rest_log_prob)
    for check in (True, False):
        paths = on_every_path(z, partial(topk_distillation_loss, teacher=padded, mask=mask, check=check))
        expect(paths, topk_distillation_loss(z, teacher, mask=mask).loss.item(), tolerance=1e-12)


# Kind 13: temperature.


def test_a_payload_of_another_temperature_is_refused():
    """Kind 13 (slime 2085): a teacher at 1 under a student at 2 gives 0.1683446; a top-k row cannot be re-tempered."""
    t, s = f64([2, 0]), f64([1, 0])
    for temperature, value in ((1.0, 0.0671308), (2.0, 0.0263446)):
        for k in (1, 2):
            teacher = TeacherTopK.from_logits(t, k, temperature=temperature)
            loss = partial(topk_distillation_loss, teacher=teacher, temperature=temperature)
            expect(on_every_path(s, loss), value)
        expect(on_full_vocab(s, t, temperature=temperature), value)
    with pytest.raises(ValueError, match=r"temperature 1\.0.*2\.0.*re-tempered.*score the teacher"):
        topk_distillation_loss(s, TeacherTopK.from_logits(t, 1), temperature=2.0)


def test_temperature_squared_is_one_thing_on_every_path():
    """Kind 13 (OpenRLHF 853, Automodel 1499): T^2 was there on some paths only."""
    t, s = f64([2, 0]), f64([0, 0])
    for temperature, squared, value in ((1.0, False, 0.3278133), (2.0, False, 0.1109441), (2.0, True, 0.4437763)):
        options = {"temperature": temperature, "temperature_squared": squared}
        for k in (1, 2):
            teacher = TeacherTopK.from_logits(t, k, temperature=temperature)
            expect(on_every_path(s, partial(topk_distillation_loss, teacher=teacher, **options)), value)
        expect(on_full_vocab(s, t, **options), value)


# Kinds 14 and 15, as far as they are rows that reach the core.


@pytest.mark.parametrize("nothing", [-INF, -9999.0])
@pytest.mark.parametrize("tail", ["bucket", "drop", "generalized"])
def test_entries_of_no_probability_add_nothing(tail, nothing):
    """Kind 14 (vLLM 10234): -inf is not JSON, so servers say -9999; a term of 0, not data to renormalise."""
    z = f64([0.3, 1.0, -0.5, 0.0])
    teacher = TeacherTopK(torch.tensor([[1, 3]]), f64([0.0, nothing]), f64(-INF))
    alone = TeacherTopK(torch.tensor([[1]]), f64([0.0]), f64(-INF))
    want = topk_distillation_loss(z, alone, tail=tail).loss.item()
    if tail == "generalized" and nothing > -INF:
        want += z.softmax(-1)[0, 3].item()  # a live slot, so q - p of that id counts
    expect(on_every_path(z, partial(topk_distillation_loss, teacher=teacher, tail=tail)), want, tolerance=1e-12)


def test_short_replies_are_padded_with_empty_slots():
    """Kind 14 (vLLM 16546): K = 4 asked, 3 answered, or 2 and two of -inf: mass only from the finite ones."""
    z = torch.randn(1, 8, dtype=torch.float64)
    three = payload([5, 2, 7], [0.5, 0.2, 0.1])
    four = TeacherTopK(torch.tensor([[5, 2, 7, -1]]), torch.cat([three.log_probs, f64([NAN])], 1))
    finite = TeacherTopK(torch.tensor([[5, 2, 7, 0]]), torch.cat([three.log_probs, f64([-INF])], 1))
    for teacher in (four, finite):
        for name, out, _ in on_every_path(z, partial(topk_distillation_loss, teacher=teacher)):
            assert_same(out.loss, topk_distillation_loss(z, three).loss, name)
            assert out.metrics["teacher_mass"].item() == pytest.approx(0.8)


def test_ties_go_to_the_lower_id():
    """Kind 15 (pytorch 27542): 3.001 and 3.002 are both 3 in bf16, where the first id wins; in float32 the second."""
    z = torch.tensor([[3.001, 3.002, 1.0]])
    assert TeacherTopK.from_logits(z.bfloat16(), 1).token_ids.tolist() == [[0]]
    assert TeacherTopK.from_logits(z, 1).token_ids.tolist() == [[1]]
    student, tied = torch.tensor([[0.5, 0.5, 2.0]], dtype=torch.float64), f64([3.0, 3.0, 1.0])
    either = [
        topk_distillation_loss(student, TeacherTopK.from_logits(tied, token_ids=torch.tensor([[i]]))).loss
        for i in (0, 1)
    ]
    assert_same(*either)
