"""full_vocab_distillation_loss: every form of both sides against dense autograd, and what it costs."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from memory import LargestTensor, bytes_kept
from potstill import (
    DIVERGENCES,
    LinearLogits,
    LogitTransform,
    TeacherTopK,
    full_vocab_distillation_loss,
    topk_distillation_loss,
)

N, V, H, H_TEACHER = 7, 11, 5, 6
SOFTCAP = LogitTransform(scale=0.7, softcap=3.0, vocab_size=9)
SIDES = list(itertools.product(("logits", "linear"), repeat=2))


def student_parts(n=N, v=V, h=H, dtype=torch.float64):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((n, h), (v, h), (v,))]


def teacher_parts(n=N, v=V, dtype=torch.float64):
    return [torch.randn(shape, dtype=dtype) for shape in ((n, H_TEACHER), (v, H_TEACHER))]


def form(side, hidden, weight, bias=None):
    if side == "linear":
        return LinearLogits(hidden, weight, bias)
    return hidden @ weight.T if bias is None else hidden @ weight.T + bias


def z(raw, transform, temperature):
    raw = raw[:, : transform.vocab_size or raw.shape[1]] * transform.scale
    if transform.softcap is not None:
        raw = transform.softcap * torch.tanh(raw / transform.softcap)
    return raw / temperature


@pytest.mark.parametrize("sides", SIDES, ids="student {0[0]}, teacher {0[1]}".format)
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("transform", [LogitTransform(), SOFTCAP], ids=["plain", "softcap and padding"])
def test_equals_dense_in_value_and_every_gradient(sides, divergence, transform):
    ours, theirs = student_parts(), teacher_parts()
    mask, weights, temperature = torch.tensor([1, 1, 0, 1, 1, 0, 1]), torch.rand(N, dtype=torch.float64), 1.5
    log_q = z(form("logits", *ours), transform, temperature).log_softmax(1)
    log_p = z(form("logits", *theirs), transform, temperature).log_softmax(1)
    want_rows = DIVERGENCES[divergence].terms(log_q, log_p).sum(1) * mask * temperature**2
    want = (want_rows * weights).sum() / 13
    out = full_vocab_distillation_loss(
        form(sides[0], *ours),
        form(sides[1], *theirs),
        divergence=divergence,
        mask=mask,
        token_weights=weights,
        num_tokens=13,
        temperature=temperature,
        temperature_squared=True,
        student_transform=transform,
        teacher_transform=transform,
        chunk_size=3,
    )
    torch.testing.assert_close(out.loss, want, rtol=0, atol=1e-14)
    torch.testing.assert_close(out.per_token, want_rows, rtol=0, atol=1e-14)
    assert out.metrics["loss_max"] == out.per_token[mask == 1].max()
    for mine, dense in zip(torch.autograd.grad(out.loss, ours), torch.autograd.grad(want, ours), strict=True):
        torch.testing.assert_close(mine, dense, rtol=0, atol=1e-14)


@pytest.mark.parametrize("shape_weight", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("side", ["logits", "linear"])
def test_the_tail_dial_goes_from_bucket_to_full_and_beyond(shape_weight, side):
    ours, teacher = student_parts(), form("logits", *teacher_parts())
    dialled = full_vocab_distillation_loss(form(side, *ours), teacher, k=4, shape_weight=shape_weight, chunk_size=3)
    bucket = topk_distillation_loss(form("logits", *ours), TeacherTopK.from_logits(teacher, 4)).loss
    full = full_vocab_distillation_loss(form("logits", *ours), teacher).loss
    want = (1 - shape_weight) * bucket + shape_weight * full
    torch.testing.assert_close(dialled.loss, want, rtol=0, atol=1e-14)
    for mine, dense in zip(torch.autograd.grad(dialled.loss, ours), torch.autograd.grad(want, ours), strict=True):
        torch.testing.assert_close(mine, dense, rtol=0, atol=1e-14)


def test_all_the_vocabulary_as_top_k_is_the_full_divergence():
    student, teacher = form("logits", *student_parts()), form("logits", *teacher_parts())
    for divergence in DIVERGENCES:
        full = full_vocab_distillation_loss(student, teacher, divergence=divergence).loss
        coarse = topk_distillation_loss(student, TeacherTopK.from_logits(teacher, V), divergence=divergence).loss
        torch.testing.assert_close(coarse, full, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sides", SIDES, ids="student {0[0]}, teacher {0[1]}".format)
def test_gradcheck_of_the_loss(sides):
    theirs = teacher_parts()

    def loss(*ours):
        return full_vocab_distillation_loss(
            form(sides[0], *ours), form(sides[1], *theirs), divergence="jsd", beta=0.3, chunk_size=2
        ).loss

    assert torch.autograd.gradcheck(loss, student_parts(), fast_mode=True)


@pytest.mark.parametrize("sides", SIDES, ids="student {0[0]}, teacher {0[1]}".format)
@pytest.mark.parametrize("transform", [LogitTransform(), SOFTCAP], ids=["plain", "softcap and padding"])
def test_unscored_rows_may_hold_anything(sides, transform):
    ours, theirs = student_parts(), teacher_parts()
    with torch.no_grad():
        ours[0][2] = torch.nan
        theirs[0][2] = torch.inf
    mask = torch.arange(N) != 2
    options = dict(mask=mask, student_transform=transform, teacher_transform=transform)
    loss = full_vocab_distillation_loss(form(sides[0], *ours), form(sides[1], *theirs), **options).loss
    grads = torch.autograd.grad(loss, ours)
    assert loss.isfinite() and grads[0].isfinite().all() and (grads[0][2] == 0).all()
    if sides[0] == "linear":  # a plain matmul before the loss spreads the NaN by itself
        assert grads[1].isfinite().all()


@pytest.mark.parametrize("side", ["logits", "linear"])
def test_no_scored_row_gives_zero_with_a_graph(side):
    for n in (0, 3):
        ours = student_parts(n)
        out = full_vocab_distillation_loss(
            form(side, *ours), form("logits", *teacher_parts(n)), mask=torch.zeros(n, dtype=torch.bool)
        )
        assert out.loss == 0 and out.metrics["loss_min"] == torch.inf
        assert all((grad == 0).all() for grad in torch.autograd.grad(out.loss, ours))


def test_the_teacher_gets_no_gradient():
    theirs = [part.requires_grad_() for part in teacher_parts()]
    for side in ("logits", "linear"):
        full_vocab_distillation_loss(form("logits", *student_parts()), form(side, *theirs)).loss.backward()
    assert all(part.grad is None for part in theirs)


def test_a_teacher_from_inference_mode_is_welcome():
    with torch.inference_mode():
        theirs = teacher_parts()
    ours = student_parts()
    for sides in SIDES:
        with torch.inference_mode():
            teacher = form(sides[1], *theirs)
        full_vocab_distillation_loss(form(sides[0], *ours), teacher).loss.backward()


class TestCost:
    n, v, h = 64, 999, 8

    @pytest.mark.parametrize(("sides", "gemms"), [(("linear", "linear"), (3, 1)), (("linear", "logits"), (3, 0))])
    def test_gemms_and_no_logits(self, sides, gemms):
        ours, theirs = student_parts(self.n, self.v, self.h)[:2], teacher_parts(self.n, self.v)
        teacher = form(sides[1], *theirs)
        with FlopCounterMode(display=False) as counter, LargestTensor() as made:
            full_vocab_distillation_loss(LinearLogits(*ours), teacher, chunk_size=4).loss.backward()
        product = 2 * self.n * self.v
        assert counter.get_total_flops() == gemms[0] * product * self.h + gemms[1] * product * H_TEACHER
        assert made.largest <= max(4 * (self.v + 1), self.v * self.h)

    def test_logits_keep_and_make_nothing_but_their_gradient(self):
        student = torch.randn(self.n, self.v, requires_grad=True)
        teacher = torch.randn(self.n, self.v)
        with bytes_kept(student, teacher) as kept, LargestTensor() as made:
            loss = full_vocab_distillation_loss(student, teacher, chunk_size=4).loss
        assert 0 < kept[0] <= 16 * self.n and made.largest <= 4 * (self.v + 1)
        with LargestTensor() as made:
            loss.backward()
        assert [size for size in made.sizes if size > 4 * (self.v + 1)] == [self.n * self.v]


def test_per_token_of_a_linear_student_cannot_be_differentiated():
    out = full_vocab_distillation_loss(LinearLogits(*student_parts()), form("logits", *teacher_parts()))
    with pytest.raises(RuntimeError, match="per_token"):
        out.per_token.sum().backward()


@pytest.mark.parametrize("side", ["logits", "linear"])
def test_a_second_order_is_refused_and_not_dropped(side):
    ours = student_parts()
    loss = full_vocab_distillation_loss(form(side, *ours), form("logits", *teacher_parts())).loss
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(loss, ours, create_graph=True)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(divergence="kl"), "divergence must be one of"),
        (dict(beta=0.5), "takes no options, got beta"),
        (dict(k=3), "k and shape_weight go together"),
        (dict(shape_weight=1.0), "k and shape_weight go together"),
        (dict(k=3, shape_weight=1.0, divergence="jsd"), "forward KL only"),
        (dict(k=V + 1, shape_weight=1.0), "k must be between 1 and the 11"),
        (dict(k=3, shape_weight=-1.0), "shape_weight must be finite and >= 0"),
        (dict(k=3, shape_weight=float("inf")), "shape_weight must be finite and >= 0"),
        (dict(teacher_transform=LogitTransform(vocab_size=9)), "11 and 9 real tokens.*vocab_size"),
        (dict(teacher=torch.zeros(N + 1, V)), r"rows \[8\] but the student has rows \[7\]"),
        (dict(teacher=torch.zeros(N, V + 1)), "11 and 12 real tokens"),
    ],
)
def test_refusals(options, message):
    given = dict(student=torch.zeros(N, V), teacher=torch.zeros(N, V)) | options
    with pytest.raises(ValueError, match=message):
        full_vocab_distillation_loss(given.pop("student"), given.pop("teacher"), **given)


def test_a_padded_head_matches_a_teacher_without_padding():
    student, teacher = torch.randn(N, V), torch.randn(N, 9)
    padded = full_vocab_distillation_loss(student, teacher, student_transform=LogitTransform(vocab_size=9)).loss
    torch.testing.assert_close(padded, full_vocab_distillation_loss(student[:, :9], teacher).loss)
