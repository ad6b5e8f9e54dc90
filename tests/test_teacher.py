"""What a teacher says of each row: made from logits, and refused where it cannot be."""

import dataclasses
import inspect
import math

import pytest
import torch

import shapes
from potstill import LinearLogits, LogitTransform, SampledTargets, TeacherTopK, student_topk, topk_distillation_loss
from potstill.core import reference
from shapes import INF, assert_same, make, over

NAN = float("nan")


# From logits.


def sorted_top(z, k):
    """The k largest columns, largest first, ties to the lower id: by sorting everything, stably."""
    return z.sort(dim=-1, descending=True, stable=True).indices[..., :k]


TRANSFORMS = {
    "plain": {},
    "temperature": {"temperature": 1.7},
    "scale": {"transform": LogitTransform(scale=0.3)},
    "softcap": {"transform": LogitTransform(softcap=2.0)},
    "padded": {"transform": LogitTransform(vocab_size=12)},
    "all": {"transform": LogitTransform(scale=0.7, softcap=3.0, vocab_size=12), "temperature": 0.6},
}


@pytest.mark.parametrize("options", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("form", ["logits", "linear"])
@pytest.mark.parametrize("k", [1, 4, 11, 12])
def test_top_k_from_logits(k, form, options):
    case = make()
    logits = case.student(form)[0]
    teacher = TeacherTopK.from_logits(logits, k, chunk_size=2, **options)
    z = reference.dense_logits(logits, **options).detach()
    assert torch.equal(teacher.token_ids, sorted_top(z, k))
    want = reference.coarse(z, teacher.token_ids)
    assert_same(teacher.log_probs, want.log_probs)
    assert_same(teacher.rest_log_prob, want.rest_log_prob)
    assert teacher.temperature == options.get("temperature", 1.0)
    assert teacher.token_ids.dtype == torch.int64 and teacher.log_probs.dtype == torch.float64


@pytest.mark.parametrize("options", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("form", ["logits", "linear"])
def test_given_ids_from_logits(form, options):
    """The teacher at the student's own ids, with empty slots and an id that is padding."""
    case = make()
    ids = torch.tensor([[3, -1, 0], [12, 1, 2], [-1, -1, -1], [5, 6, 7], [9, 8, -1]], dtype=torch.int32)
    logits = case.student(form)[0]
    teacher = TeacherTopK.from_logits(logits, token_ids=ids, chunk_size=2, **options)
    want = reference.coarse(reference.dense_logits(logits, **options).detach(), ids)
    assert torch.equal(teacher.token_ids, ids)
    assert_same(teacher.log_probs, want.log_probs)
    assert_same(teacher.rest_log_prob, want.rest_log_prob)
    if not options:
        topk_distillation_loss(case.logits, teacher)


@over()
def test_top_k_on_every_shape(shape):
    """Any leading dimensions, N = 0, -inf columns and padding; the payload passes its own validation."""
    case, options = make(shape), {"transform": shape.transform}
    z = reference.dense_logits(case.logits, **options).detach()
    for k in {1, max(1, shape.k), shape.real or shape.vocab}:
        teacher = TeacherTopK.from_logits(case.logits, k, **options)
        assert torch.equal(teacher.token_ids, sorted_top(z, k))
        want = reference.coarse(z, teacher.token_ids)
        assert_same(teacher.log_probs, want.log_probs)
        assert_same(teacher.rest_log_prob, want.rest_log_prob)
        assert teacher.validate(shape.vocab) is teacher
        if k == (shape.real or shape.vocab):
            assert (teacher.rest_log_prob == -INF).all()
        ids, log_probs = student_topk(case.logits, k, **options)
        assert torch.equal(ids, teacher.token_ids) and torch.equal(log_probs, teacher.log_probs)


def test_student_topk_is_at_temperature_1():
    case = make()
    ids, log_probs = student_topk(case.logits, 3)
    assert_same(log_probs, case.logits.detach().log_softmax(-1).gather(-1, ids))
    assert not log_probs.requires_grad


@pytest.mark.parametrize(
    "row, k, expected",
    [
        ([1.0, 3.0, 3.0, 3.0, 2.0], 1, [1]),
        ([1.0, 3.0, 3.0, 3.0, 2.0], 2, [1, 2]),
        ([1.0, 3.0, 3.0, 3.0, 2.0], 4, [1, 2, 3, 4]),
        ([0.0, 0.0, 0.0, 0.0, 0.0], 3, [0, 1, 2]),
        ([2.0, 2.0, 5.0, 5.0, 2.0], 3, [2, 3, 0]),
        ([-INF, 1.0, -INF, -INF, 0.0], 4, [1, 4, 0, 2]),
        ([0.0, -0.0, 0.0, -0.0, 1.0], 3, [4, 0, 1]),  # 0 and -0 are equal
    ],
)
def test_ties_go_to_the_lower_id(row, k, expected):
    z = torch.tensor([row, row[::-1]])
    teacher = TeacherTopK.from_logits(z, k)
    assert teacher.token_ids[0].tolist() == expected
    assert torch.equal(teacher.token_ids, sorted_top(z, k))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [1, 5, 64, 199, 200])
def test_ties_of_16_bit_logits_at_the_border(k, dtype):
    """Rounded logits tie all the time, the k-th with the next too; any chunk gives the same ids."""
    z = (torch.randn(40, 200) + 50).to(dtype)
    border = z.float().sort(dim=-1, descending=True).values
    assert k == 200 or (border[:, k - 1] == border[:, k]).any()
    for chunk_size in (None, 1, 7):
        assert torch.equal(TeacherTopK.from_logits(z, k, chunk_size=chunk_size).token_ids, sorted_top(z.float(), k))


def test_ties_made_by_a_softcap():
    """Logits that saturate are equal after the transform, whatever they were before."""
    z = torch.tensor([[50.0, 90.0, 70.0, 1.0]])
    teacher = TeacherTopK.from_logits(z, 2, transform=LogitTransform(softcap=1.0))
    assert teacher.token_ids.tolist() == [[0, 1]]


def test_rows_of_nan_do_not_disturb_the_others():
    """The teacher of an unscored row may be anything."""
    z = torch.randn(4, 9)
    clean = TeacherTopK.from_logits(z, 3)
    z[1], z[2, 0] = NAN, NAN
    dirty = TeacherTopK.from_logits(z, 3)
    for row in (0, 3):
        assert torch.equal(dirty.token_ids[row], clean.token_ids[row])
        assert torch.equal(dirty.log_probs[row], clean.log_probs[row])


@pytest.mark.parametrize(
    "how", [{"k": 3}, {"token_ids": torch.zeros(5, 1, dtype=torch.int64)}], ids=["k", "token_ids"]
)
@pytest.mark.parametrize("form", ["logits", "linear"])
def test_a_teacher_has_no_graph(form, how):
    teacher = TeacherTopK.from_logits(make().student(form)[0], **how)
    assert not teacher.log_probs.requires_grad and not teacher.rest_log_prob.requires_grad


@pytest.mark.parametrize(
    "how, pattern",
    [
        ({}, "exactly one of k and token_ids"),
        ({"k": 2, "token_ids": torch.zeros(5, 2, dtype=torch.int64)}, "exactly one of k and token_ids"),
        ({"k": 0}, "between 1 and the 13.*got 0"),
        ({"k": 14}, "between 1 and the 13.*got 14"),
        ({"k": 13, "transform": LogitTransform(vocab_size=12)}, "between 1 and the 12.*got 13"),
        ({"token_ids": torch.full((5, 2), 13)}, "token id 13"),
        ({"token_ids": torch.zeros(4, 2, dtype=torch.int64)}, r"\[4, 2\].*\[5, 13\]"),
        ({"k": 2, "temperature": 0.0}, "temperature.*0"),
        ({"k": 2, "chunk_size": 0}, "chunk_size.*0"),
    ],
    ids=str,
)
def test_from_logits_refuses(how, pattern):
    with pytest.raises(ValueError, match=f"(?s){pattern}"):
        TeacherTopK.from_logits(make().logits, **how)


# Construction.


@pytest.mark.parametrize(
    "arguments, error, pattern",
    [
        ((torch.zeros(2, 3), torch.zeros(2, 3)), TypeError, "token_ids.*integers.*float32"),
        ((torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3)), TypeError, "token_ids.*integers.*bool"),
        ((torch.zeros(2, 3).long(), torch.zeros(2, 3).long()), TypeError, "log_probs.*floating.*int64"),
        ((torch.zeros(2, 3).long(), torch.zeros(2, 4)), ValueError, r"\[2, 3\].*\[2, 4\]"),
        ((torch.zeros(()).long(), torch.zeros(())), ValueError, "K"),
        ((torch.zeros(2, 3).long(), torch.zeros(2, 3), torch.zeros(3)), ValueError, r"rest_log_prob.*\[2\].*\[3\]"),
        ((torch.zeros(2, 3).long(), torch.zeros(2, 3), torch.zeros(2).long()), ValueError, "rest_log_prob.*int64"),
    ],
)
def test_construction_refuses(arguments, error, pattern):
    with pytest.raises(error, match=f"(?s){pattern}"):
        TeacherTopK(*arguments)


def test_sampled_construction_refuses():
    with pytest.raises(TypeError, match=r"weights.*floating.*int64"):
        SampledTargets(torch.zeros(2, 3).long(), torch.zeros(2, 3).long())
    with pytest.raises(ValueError, match=r"\[2, 3\].*\[2, 1\]"):
        SampledTargets(torch.zeros(2, 3).long(), torch.zeros(2, 1))


def test_a_teacher_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().teacher.temperature = 2.0


# Validation.


def three_rows(**change):
    """A payload of 3 rows and 2 slots with one thing changed in row 1; unsaid: ids (4, 7), p = (.5, .3), rest .2."""
    ids = torch.tensor([4, 7]).repeat(3, 1)
    log_probs = torch.tensor([0.5, 0.3]).log().repeat(3, 1)
    rest = torch.tensor(0.2).log().repeat(3)
    dtype = change.pop("dtype", torch.float32)
    log_probs = log_probs.to(dtype)
    for slot, value in change.pop("ids", {}).items():
        ids[1, slot] = value
    for slot, value in change.pop("log_probs", {}).items():
        log_probs[1, slot] = value
    if "rest" in change:
        rest[1] = change.pop("rest")
    assert not change
    return TeacherTopK(ids, log_probs, rest)


V = 10
REFUSED = {
    "id = V": (dict(ids={0: 10}), r"id.*\[-1, 10\).*\b10\b.*(tokenizer|-1)"),
    "id far above": (dict(ids={1: 123456789}), r"id.*123456789"),
    "id below -1": (dict(ids={0: -5}), r"id.*-5"),
    "id -100": (dict(ids={0: -100, 1: -100}), r"id.*-100"),
    "a bad id in an empty slot": (dict(ids={0: 11}, log_probs={0: -INF}), r"id.*11"),
    "twice": (dict(ids={0: 7}), r"twice.*\b7\b.*merge"),
    "NaN": (dict(log_probs={1: NAN}), r"NaN.*(again|score)"),
    "log-prob": (dict(log_probs={1: 0.1}), r"log-prob.*above 0.001.*0\.1"),
    "log-prob just above": (dict(ids={0: -1}, log_probs={1: 1.1e-3}), r"above 0.001.*0\.0011"),
    "log-prob of float16": (dict(log_probs={1: 0.02}, dtype=torch.float16), r"above 0.01.*0\.0[12]"),
    "log-prob +inf": (dict(log_probs={1: INF}), r"above 0.001.*inf"),
    "mass": (dict(log_probs={0: math.log(0.7), 1: math.log(0.6)}), r"mass.*1 \+ 0.001.*1\.3"),
    "mass just above": (dict(log_probs={0: math.log(0.6), 1: math.log(0.4011)}), r"mass.*1\.0011"),
    "mass of bfloat16": (dict(log_probs={0: -0.25, 1: -1.25}, dtype=torch.bfloat16), r"mass.*1 \+ 0.01.*1\.06"),
    "rest NaN": (dict(rest=NAN), r"rest_log_prob.*nan"),
    "rest above 0": (dict(rest=0.5), r"rest_log_prob.*0\.5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_validate_names_row_and_value(name):
    change, pattern = REFUSED[name]
    teacher = three_rows(**change)
    with pytest.raises(ValueError, match=rf"(?s)row 1\b.*{pattern}"):
        teacher.validate(V)
    with pytest.raises(ValueError, match=rf"(?s)row 1\b.*{pattern}"):
        topk_distillation_loss(torch.zeros(3, V), teacher)
    # Unscored, that row may hold anything; with check=False nobody looks at values.
    mask = torch.tensor([True, False, True])
    assert teacher.validate(V, mask) is teacher
    assert topk_distillation_loss(torch.zeros(3, V), teacher, mask=mask).loss.isfinite()
    assert inspect.unwrap(TeacherTopK.validate)(teacher, V, mask.long()) is teacher


ACCEPTED = {
    "as it is": {},
    "float16": dict(dtype=torch.float16),
    "an empty slot": dict(ids={0: -1}),
    "NaN in an empty slot": dict(ids={0: -1}, log_probs={0: NAN}),
    "+inf in an empty slot": dict(ids={0: -1}, log_probs={0: INF}),
    "probability 0": dict(log_probs={0: -INF}),
    "twice, but one is empty": dict(ids={0: 7}, log_probs={0: -INF}),
    "two empty slots": dict(ids={0: -1, 1: -1}),
    "nothing at all": dict(log_probs={0: -INF, 1: -INF}),
    "slightly positive": dict(ids={0: -1}, log_probs={1: 9e-4}, rest=-INF),
    "slightly positive in 16 bits": dict(ids={0: -1}, log_probs={1: 0.009}, rest=-INF, dtype=torch.bfloat16),
    "mass slightly above 1": dict(log_probs={0: math.log(0.6), 1: math.log(0.4009)}, rest=-INF),
    "the last id": dict(ids={0: V - 1}),
    "-9999 for -inf": dict(log_probs={1: -9999.0}),
}


@pytest.mark.parametrize("tail", ["bucket", "generalized", "drop", "renormalize"])
@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_payloads_have_a_finite_loss(name, tail):
    teacher = three_rows(**ACCEPTED[name])
    assert teacher.validate(V) is teacher
    z = torch.randn(3, V, requires_grad=True)
    out = topk_distillation_loss(z, teacher, tail=tail)
    out.loss.backward()
    assert out.loss.isfinite() and z.grad.isfinite().all()
    if tail == "bucket":
        assert (out.per_token >= -1e-6).all()
    no_rest = dataclasses.replace(teacher, rest_log_prob=None)
    if teacher.log_probs.element_size() > 2 or tail != "bucket":
        assert topk_distillation_loss(z, no_rest, tail=tail).loss.isfinite()


def test_slightly_positive_log_probs_count_as_certainty():
    """Server rounding: log p = 1e-6 is p = 1, with nothing left for the rest."""
    z = torch.randn(1, V, dtype=torch.float64)
    teacher = TeacherTopK(torch.tensor([[3]]), torch.tensor([[1e-6]]))
    certain = TeacherTopK(torch.tensor([[3]]), torch.tensor([[0.0]]))
    losses = [topk_distillation_loss(z, x).loss.item() for x in (teacher, certain)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0] == pytest.approx(-z.log_softmax(-1)[0, 3].item(), abs=1e-5)


def test_the_row_is_named_by_its_leading_dimensions():
    ids = torch.zeros(2, 3, 1, dtype=torch.int64)
    ids[1, 2] = 99
    with pytest.raises(ValueError, match=r"row \(1, 2\).*99"):
        TeacherTopK(ids, torch.zeros(2, 3, 1)).validate(V)


def test_k_above_v_is_refused():
    teacher = TeacherTopK(torch.arange(11)[None], torch.full((1, 11), -9.0))
    with pytest.raises(ValueError, match=r"K is 11.*10"):
        teacher.validate(V)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0), (0, 2, 3)])
def test_nothing_is_valid(shape):
    teacher = TeacherTopK(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape))
    assert teacher.validate(V) is teacher
    if math.prod(shape[:-1]) == 0:
        targets = SampledTargets(teacher.token_ids, teacher.log_probs)
        assert targets.validate(V) is targets


SAMPLED = {
    "negative": (dict(weights=[-0.2, 1.2]), r"negative.*-0\.2"),
    "NaN": (dict(weights=[NAN, 1.0]), r"NaN"),
    "sum": (dict(weights=[0.5, 0.3]), r"sum.*0\.8.*TeacherTopK"),
    "sum just off": (dict(weights=[0.5, 0.4989]), r"sum.*0\.9989"),
    "sum of nothing": (dict(ids=[-1, -1]), r"sum.*0"),
    "id": (dict(ids=[4, 10]), r"id.*10"),
    "twice": (dict(ids=[4, 4]), r"twice.*4"),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_validate_of_sampled_targets_names_row_and_value(name):
    change, pattern = SAMPLED[name]
    ids, weights = torch.tensor([4, 7]).repeat(3, 1), torch.tensor([0.6, 0.4]).repeat(3, 1)
    ids[1], weights[1] = torch.tensor(change.get("ids", [4, 7])), torch.tensor(change.get("weights", [0.6, 0.4]))
    targets = SampledTargets(ids, weights)
    with pytest.raises(ValueError, match=rf"(?s)row 1\b.*{pattern}"):
        targets.validate(V)
    mask = torch.tensor([True, False, True])
    assert targets.validate(V, mask) is targets
    assert topk_distillation_loss(torch.zeros(3, V), targets, mask=mask).loss.isfinite()


def test_sampled_targets_may_be_off_by_rounding():
    SampledTargets(torch.tensor([[4, 7]]), torch.tensor([[0.5, 0.4991]])).validate(V)
    SampledTargets(torch.tensor([[4, -1]]), torch.tensor([[1.0, NAN]])).validate(V)
    SampledTargets(torch.tensor([[4, 4]]), torch.tensor([[1.0, 0.0]])).validate(V)


def test_the_loss_checks_unless_told_not_to():
    """check=False trusts the values: what validate would refuse passes."""
    teacher = three_rows(log_probs={0: math.log(0.7), 1: math.log(0.6)})
    assert topk_distillation_loss(torch.zeros(3, V), teacher, tail="drop", check=False).loss.isfinite()


def test_student_support():
    """Reverse KL on the student's own ids, scored by the teacher: the full reverse KL where they are all."""
    student, teacher_logits = make(shapes.PLAIN).logits, 2 * torch.randn(5, 13, dtype=torch.float64)
    previous = 0.0
    for k in (1, 4, 9, 13):
        ids, _ = student_topk(student, k)
        teacher = TeacherTopK.from_logits(teacher_logits, token_ids=ids)
        loss = topk_distillation_loss(student, teacher, divergence="reverse_kl").loss.item()
        assert loss >= previous - 1e-12
        previous = loss
    assert previous == pytest.approx(reference.full_divergence(student, teacher_logits, "reverse_kl").mean().item())


def test_linear_teacher_costs_the_same_as_its_logits():
    case = make()
    linear = TeacherTopK.from_logits(LinearLogits(*case.linear), 4, chunk_size=2)
    dense = TeacherTopK.from_logits(case.logits, 4)
    assert torch.equal(linear.token_ids, dense.token_ids)
    assert_same(linear.log_probs, dense.log_probs)
