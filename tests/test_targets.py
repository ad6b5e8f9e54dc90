"""Sparse unbiased targets: their mean is the teacher's row, their squared error is the formula, at any shape.

Repetitions are rows: one teacher row expanded to thousands, each of which gets its own random numbers. Seeds are
fixed, and every tolerance stands many standard errors away.

The formulas, for weights w with E w = p. With one id's variance Var(w_i), the squared error E|w - p|^2 is their sum.
- K draws: w_i = Binomial(K, p_i) / K, so Var = p_i (1 - p_i) / K and the sum is (1 - sum p^2) / K.
- Exact ids have no variance. An id of the tail weighs c with probability p_i / c, else 0: Var = c^2 (p_i / c)
  (1 - p_i / c) = c p_i - p_i^2, and the sum is c p_t - sum_tail p^2. Here c = p_t / m for the m slots of the tail, so
  this is p_t^2 / m (1 - m sum_tail (p_i / p_t)^2): p_t^2 / m times the spread of the tail. It holds for top_h as it
  does for threshold sampling; what differs is how many ids are exact.
How ids are selected together (systematically) changes covariances, which are not in the sum.
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from potstill import LinearLogits, LogitTransform, SampledTargets, topk_distillation_loss
from potstill.core.targets import keep_and_select
from potstill.core.tiles import read_as

INF = math.inf
METHODS = [("threshold", None), ("top_h", 3), ("random", None)]
SELECTING = [("threshold", None), ("top_h", 3)]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def targets(logits, k, method="threshold", top_h=None, seed=0, **options):
    return SampledTargets.from_logits(logits, k, method=method, top_h=top_h, generator=seeded(seed), **options)


def dense(sampled, width):
    """weights [rows, V] in float64 of a SampledTargets."""
    ids, weights = sampled.token_ids.flatten(0, -2), sampled.weights.flatten(0, -2).double()
    out = torch.zeros(ids.shape[0], width + 1, dtype=torch.float64)
    return out.scatter_(1, ids.where(ids >= 0, width), weights)[:, :width]


def zipf(exponent, width, seed=0):
    """log p of a Zipf law, the ids permuted, in float64."""
    ranks = torch.randperm(width, generator=seeded(seed)).double() + 1
    return (-exponent * ranks.log()).log_softmax(0)


def exact_count(p, k, at_least=0):
    """How many ids are exact, by trying each number: the first that leaves no p_i >= c in the tail; and that c."""
    ordered = p.sort(descending=True).values
    for h in range(at_least, k):
        c = ordered[h:].sum() / (k - h)
        if ordered[h] < c:
            return h, c
    raise AssertionError("k slots hold every id")


def formula(p, k, method, top_h):
    if method == "random":
        return (1 - p.square().sum()) / k
    h, c = exact_count(p, k, top_h or 0)
    tail = p.sort(descending=True).values[h:]
    return c * tail.sum() - tail.square().sum()


# --- what they are for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, top_h", METHODS)
@pytest.mark.parametrize("exponent, k", [(2.2, 16), (1.5, 24)])  # the top 8 hold 0.95 and 0.79 of the mass
def test_mean_of_4000_draws_is_the_full_gradient(exponent, k, method, top_h):
    """Through the loss: the gradient of the mean over 4,000 targets of one row is q - p within 2 %."""
    log_p = zipf(exponent, 400)
    z = torch.randn(400, requires_grad=True)
    sampled = targets(log_p.float().expand(4000, 400), k, method, top_h)
    output = topk_distillation_loss(z.expand(4000, 400), sampled)
    output.loss.backward()
    expected = z.detach().double().softmax(0) - log_p.exp()
    assert (z.grad - expected).norm() / expected.norm() < 0.02
    assert output.metrics["teacher_mass_min"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    "exponent, k, method, top_h",
    [
        (2.2, 8, "threshold", None),
        (1.0, 24, "threshold", None),
        (0.0, 24, "threshold", None),  # uniform: nothing is exact
        (1.5, 24, "top_h", 18),  # more exact ids than threshold sampling takes
        (1.0, 24, "top_h", 20),
        (1.5, 24, "top_h", 2),  # fewer: then it is threshold sampling
        (1.5, 1, "threshold", None),  # one draw
        (2.2, 8, "random", None),
        (1.0, 24, "random", None),
        (0.0, 24, "random", None),
        (1.5, 1, "random", None),
    ],
)
def test_squared_error_is_the_formula(exponent, k, method, top_h):
    log_p = zipf(exponent, 256)
    errors = (dense(targets(log_p.expand(20000, 256), k, method, top_h), 256) - log_p.exp()).square().sum(1)
    expected = formula(log_p.exp(), k, method, top_h)
    standard_error = errors.std() / 20000**0.5
    assert standard_error < 0.0125 * expected  # the repetitions are enough to tell 5 %
    assert errors.mean() == pytest.approx(expected.item(), rel=0.05)


@pytest.mark.parametrize("method, top_h, k", [("threshold", None, 24), ("top_h", 18, 24), ("random", None, 24)])
def test_each_id_is_unbiased(method, top_h, k):
    """Every id on its own: mean weight p_i within 5 standard errors."""
    p = zipf(1.3, 128).exp()
    weights = dense(targets(p.log().expand(20000, 128), k, method, top_h), 128)
    standard_error = weights.std(0) / 20000**0.5
    assert ((weights.mean(0) - p).abs() <= 5 * standard_error + 1e-12).all()


def test_exact_ids_keep_their_weight_and_the_others_share_one():
    p = zipf(1.5, 128).exp()
    h, c = exact_count(p, 16)
    top = p.sort(descending=True)
    sampled = targets(p.log().expand(50, 128), 16)
    assert (sampled.token_ids[:, :h] == top.indices[:h]).all()
    torch.testing.assert_close(sampled.weights[:, :h], top.values[:h].expand(50, h), rtol=1e-12, atol=0)
    torch.testing.assert_close(sampled.weights[:, h:], c.expand(50, 16 - h), rtol=1e-12, atol=0)


def test_figures_of_the_method_comparison():
    """V = 2048, Zipf 1.5, 64 ids: relative RMS errors 0.071 threshold, 0.178 random, 0.137 (biased) truncated.

    Relative RMS is sqrt(E|w - p|^2) / |q - p|, the error of the logit gradient over that gradient. The norm is the
    student's: 0.27 is that of one with N(0, 1) noise on the teacher's logits (over such students the mean is 0.25 and
    the root mean square 0.28). "At the same 64 unique ids": random sampling with as many draws as give 64 distinct
    ids on average. Truncated: the top 64 ids renormalised.
    """
    log_p, norm = zipf(1.5, 2048), 0.27
    p = log_p.exp()
    draws = next(n for n in range(64, 2048) if (1 - (1 - p) ** n).sum() >= 64)
    assert draws == 347
    threshold = targets(log_p.float().expand(2000, 2048), 64)
    random = targets(log_p.float().expand(2000, 2048), draws, "random")
    assert (random.token_ids >= 0).sum(1).double().mean() == pytest.approx(64, rel=0.01)
    top = p.topk(64)
    truncated = torch.zeros_like(p).scatter_(0, top.indices, top.values / top.values.sum())
    for rows, figure in ((dense(threshold, 2048), 0.071), (dense(random, 2048), 0.178), (truncated[None], 0.137)):
        rms = (rows - p).square().sum(1).mean().sqrt()
        assert rms / norm == pytest.approx(figure, rel=0.02)


# --- every shape of row -----------------------------------------------------------------------------------------

WIDTH = 11
ROWS = {
    "ordinary": torch.linspace(2, -2, WIDTH),
    "uniform": torch.zeros(WIDTH),
    "one-hot": torch.tensor([-INF] * 4 + [0.0] + [-INF] * 6),
    "nearly one-hot": torch.tensor([0.0] * 4 + [80.0] + [0.0] * 6),  # tail masses of 1e-35
    "underflowing tail": torch.tensor([0.0] * 4 + [300.0] + [0.0] * 6),  # tail masses of 1e-130
    "half the columns": torch.tensor([0.0, -INF] * 5 + [1.0]),  # 6 live ids
    "first and last dead": torch.tensor([-INF, *torch.linspace(-1, 1, WIDTH - 2), -INF]),
    "two of one size": torch.tensor([3.0, 3.0] + [-30.0] * 9),
    "scaled by 1000": 1000 * torch.linspace(2, -2, WIDTH),
}


@pytest.mark.parametrize(
    "k, method, top_h",
    [
        (k, method, top_h and min(top_h, k - 1))
        for k in (1, 2, 4, 6, WIDTH - 1, WIDTH)
        for method, top_h in METHODS
        if (k, method) != (1, "top_h")  # which leaves at least one slot to the tail
    ],
)
@pytest.mark.parametrize("name", ROWS)
def test_any_row(name, k, method, top_h):
    """Valid targets of sum 1; distinct ids of the row; K of them, or the exact row where K covers it."""
    logits = ROWS[name]
    p = logits.double().softmax(0)
    sampled = targets(logits.expand(300, WIDTH), k, method, top_h).validate(WIDTH)
    assert sampled.weights.dtype == torch.float32 and sampled.token_ids.dtype == torch.int64
    torch.testing.assert_close(sampled.weights.sum(1), torch.ones(300), atol=1e-6, rtol=0)
    full = sampled.token_ids >= 0
    assert ((sampled.weights > 0) == full).all()
    assert (p[sampled.token_ids[full]] > 0).all()
    live = int((p.float() > 0).sum())
    if method != "random":
        assert (full.sum(1) == min(k, live)).all()
        if k >= live:
            torch.testing.assert_close(dense(sampled, WIDTH), p.expand(300, WIDTH), atol=1e-7, rtol=2e-6)
    else:
        assert (full.sum(1) <= min(k, live)).all()
        torch.testing.assert_close(sampled.weights * k, (sampled.weights * k).round())


@pytest.mark.parametrize("method, top_h", SELECTING)
@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
def test_rounding_selects_nothing_twice(uniform, method, top_h):
    """The ends of [0, 1), on rows whose ids are as large as the steps of the sampling: ties, and little besides."""
    generator, k = seeded(), 8
    for small in (1e-3, 1e-7, 1e-10, 1e-13, 1e-16, 1e-30):
        tied = torch.full((200, 60), small, dtype=torch.float64).log()
        for row in tied:
            n = int(torch.randint(1, 12, (), generator=generator))
            row[torch.randperm(60, generator=generator)[:n]] = 0.0
        for raw in (tied, tied.float()):
            reader = read_as(raw, None, 1.0, None)
            uniforms = torch.full((200, 1), uniform, dtype=torch.float64)
            sampled = SampledTargets(*keep_and_select(raw, k, top_h or 0, uniforms, reader))
            sampled.validate(60)
            assert (sampled.token_ids >= 0).all()
            torch.testing.assert_close(sampled.weights.sum(1), torch.ones(200, dtype=torch.float64))


@pytest.mark.parametrize("method, top_h", METHODS)
def test_ties_of_bf16_at_scale(method, top_h):
    """A wide vocabulary, where bf16 rounds many logits to the same value: K distinct ids in every row."""
    logits = (2 * torch.randn(40, 30011)).bfloat16()
    sampled = targets(logits, 64, method, top_h).validate(30011)
    assert sampled.weights.dtype == torch.float32
    if method != "random":
        assert (sampled.token_ids >= 0).all()
        again = targets(logits.float(), 64, method, top_h)  # bf16 is only how they are stored
        assert (again.token_ids == sampled.token_ids).all()


@pytest.mark.parametrize("method, top_h", METHODS)
@pytest.mark.parametrize("shape", [(0,), (2, 0), (), (2, 3)])
def test_leading_dimensions(shape, method, top_h):
    logits = torch.randn(*shape, WIDTH, dtype=torch.float64)
    sampled = targets(logits, 5, method, top_h)
    assert sampled.token_ids.shape == sampled.weights.shape == (*shape, 5)
    assert sampled.weights.dtype == torch.float64
    flat = targets(logits.reshape(-1, WIDTH), 5, method, top_h)
    assert (flat.token_ids == sampled.token_ids.reshape(-1, 5)).all()
    hidden = LinearLogits(torch.randn(*shape, 3), torch.randn(WIDTH, 3))
    assert targets(hidden, 5, method, top_h).token_ids.shape == (*shape, 5)


@pytest.mark.parametrize("method, top_h", METHODS)
@pytest.mark.parametrize("poison", [math.nan, -INF])
def test_rows_without_a_distribution_are_refused_unless_masked(poison, method, top_h):
    """They do not disturb their neighbours."""
    logits = torch.randn(3, WIDTH)
    clean = targets(logits, 5, method, top_h)
    logits[1] = poison
    sampled = targets(logits, 5, method, top_h)
    assert (sampled.token_ids[[0, 2]] == clean.token_ids[[0, 2]]).all()
    with pytest.raises(ValueError, match="teacher row 1"):
        sampled.validate(WIDTH)
    sampled.validate(WIDTH, torch.tensor([True, False, True]))


# --- how the logits are read ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, top_h", METHODS)
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 16, 17, 100])
def test_chunks_do_not_matter(chunk_size, method, top_h):
    logits = torch.randn(17, 97) * 2
    whole, cut = (targets(logits, 8, method, top_h, chunk_size=size) for size in (None, chunk_size))
    assert (whole.token_ids == cut.token_ids).all()
    torch.testing.assert_close(whole.weights, cut.weights, rtol=0 if chunk_size > 1 else 1e-6, atol=0)


@pytest.mark.parametrize("method, top_h", METHODS)
@pytest.mark.parametrize("chunk_size", [None, 1, 4])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_logits(with_bias, chunk_size, method, top_h):
    hidden, weight = torch.randn(2, 9, 5, dtype=torch.float64), torch.randn(37, 5, dtype=torch.float64)
    bias = torch.randn(37, dtype=torch.float64) if with_bias else None
    logits = torch.nn.functional.linear(hidden, weight, bias)
    expected = targets(logits, 8, method, top_h)
    sampled = targets(LinearLogits(hidden, weight, bias), 8, method, top_h, chunk_size=chunk_size)
    assert (sampled.token_ids == expected.token_ids).all()
    torch.testing.assert_close(sampled.weights, expected.weights)


@pytest.mark.parametrize("method, top_h", METHODS)
def test_transform_and_temperature(method, top_h):
    """Scale, softcap and temperature as LogitTransform says; padding columns are never seen, not even NaN."""
    raw = torch.randn(12, 30, dtype=torch.float64) * 3
    raw[:, 27:] = math.nan
    z = 2 * torch.tanh(0.7 * raw[:, :27] / 2) / 1.5
    transform = LogitTransform(scale=0.7, softcap=2.0, vocab_size=27)
    sampled = targets(raw, 8, method, top_h, transform=transform, temperature=1.5).validate(27)
    expected = targets(z, 8, method, top_h)
    assert (sampled.token_ids == expected.token_ids).all() and sampled.temperature == 1.5
    torch.testing.assert_close(sampled.weights, expected.weights)
    with pytest.raises(ValueError, match="temperature"):
        topk_distillation_loss(torch.randn(12, 30), sampled)


@pytest.mark.parametrize("method, top_h", METHODS)
def test_seeds(method, top_h):
    logits = torch.randn(30, 97)
    same, again, other = (targets(logits, 8, method, top_h, seed=seed).token_ids for seed in (1, 1, 2))
    assert (same == again).all() and (same != other).any()
    ids = []
    for _ in range(2):
        torch.manual_seed(3)  # without a generator: torch's own
        ids.append(SampledTargets.from_logits(logits, 8, method=method, top_h=top_h).token_ids)
    assert (ids[0] == ids[1]).all()
    generator = seeded()
    first, second = (
        SampledTargets.from_logits(logits, 8, method=method, top_h=top_h, generator=generator).token_ids
        for _ in range(2)
    )
    assert (first != second).any()


@pytest.mark.parametrize("method, top_h", METHODS)
def test_rows_are_independent(method, top_h):
    """Equal rows get different draws: the random numbers belong to the row."""
    ids = targets(torch.zeros(50, 97), 8, method, top_h).token_ids
    assert len({tuple(row) for row in ids.tolist()}) > 25


@pytest.mark.parametrize("method, top_h", METHODS)
def test_strides_inputs_and_graph(method, top_h):
    base = torch.randn(23, 4, 6).requires_grad_()
    view = base.permute(2, 1, 0)[::2]
    before = base.detach().clone()
    sampled, copied = (targets(x, 5, method, top_h) for x in (view, view.contiguous()))
    assert (sampled.token_ids == copied.token_ids).all()
    assert torch.equal(base, before) and not sampled.weights.requires_grad


@pytest.mark.parametrize("method, top_h", METHODS)
def test_autocast_changes_nothing_but_mixed_dtypes(method, top_h):
    hidden, weight = torch.randn(9, 5), torch.randn(37, 5)
    plain = targets(LinearLogits(hidden, weight), 8, method, top_h)
    with torch.autocast("cpu", torch.bfloat16):
        inside = targets(LinearLogits(hidden, weight), 8, method, top_h)
        mixed = targets(LinearLogits(hidden.bfloat16(), weight), 8, method, top_h)
    assert (plain.token_ids == inside.token_ids).all()
    rounded = targets(LinearLogits(hidden.bfloat16(), weight.bfloat16()), 8, method, top_h)
    assert (mixed.token_ids == rounded.token_ids).all()


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation allocated: what shares memory with an argument is a view."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given, returned = (
            [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
            for tree in ((args, kwargs), result)
        )
        known = {x.untyped_storage().data_ptr() for x in given}
        fresh = (x.numel() for x in returned if x.untyped_storage().data_ptr() not in known)
        self.largest = max(self.largest, *fresh, 0)
        return result


@pytest.mark.parametrize("method, top_h", METHODS)
@pytest.mark.parametrize("linear", [False, True])
def test_nothing_wider_than_a_tile(linear, method, top_h):
    """64 rows in tiles of at most 4: no tensor holds more than 4 rows of the vocabulary."""
    logits = torch.randn(64, 499)
    if linear:
        logits = LinearLogits(torch.randn(64, 3), torch.randn(499, 3))
    with LargestTensor() as seen:
        targets(logits, 5, method, top_h, chunk_size=4)
    assert 499 <= seen.largest <= 4 * 500


@pytest.mark.parametrize(
    "message, options",
    [
        ("method must be one of threshold, top_h, random, got 'topk'", {"method": "topk"}),
        ("top_h only goes with method='top_h', got top_h=2", {"top_h": 2}),
        ("top_h only goes with method='top_h', got top_h=2", {"top_h": 2, "method": "random"}),
        ("needs 0 < top_h < k = 4, got top_h=None.*threshold", {"method": "top_h"}),
        ("needs 0 < top_h < k = 4, got top_h=0", {"method": "top_h", "top_h": 0}),
        ("needs 0 < top_h < k = 4, got top_h=4", {"method": "top_h", "top_h": 4}),
        ("k must be between 1 and the 8 real tokens.*got 0", {"k": 0}),
        ("k must be between 1 and the 8 real tokens.*got 9", {"k": 9}),
        ("k must be between 1 and the 7 real tokens.*got 8", {"k": 8, "transform": LogitTransform(vocab_size=7)}),
        ("temperature", {"temperature": 0.0}),
        ("chunk_size", {"chunk_size": 0}),
    ],
)
def test_refusals(message, options):
    with pytest.raises(ValueError, match=message):
        SampledTargets.from_logits(torch.zeros(2, 8), **({"k": 4} | options))
