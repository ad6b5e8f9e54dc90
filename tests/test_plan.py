"""The planner: its formulas against the tracker, the promised figures, and what it advises."""

import json
from functools import partial

import pytest

from potstill.bench.memory import LIMITS
from potstill.bench.peak import CPU, GPU, OURS, WAYS, Shape, our_loss, peak_bytes
from potstill.cli import main
from potstill.core.tiles import Budget
from potstill.plan import GIB, STRATEGIES, Job, least_tp, most_tokens, recommend, sizes_of

LARGE = Budget(tile=256 << 20, product=512 << 20, weight_gradient=0)
JOBS = [
    Job(1024, 62_080, 2560, 128, None, GPU),  # a rank's share of a large vocabulary
    Job(768, 151_936, 1024, 64, None, GPU),  # several products, of unequal height
    Job(4096, 32_768, 1024, 512, None, LARGE),  # the loss itself needs more than a tile
    Job(8192, 16_384, 4096, 1, None, LARGE),  # hidden states as wide as the vocabulary is large
    Job(400, 20_000, 512, 20, 100, CPU),  # chunk_size, and the budgets of a CPU
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.tokens}x{job.vocab_size}")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_formulas_agree_with_the_tracker(job, strategy):
    way = WAYS[strategy]
    if way in OURS.values():
        options = {**way.loss.args[0], "chunk_size": job.chunk_size}
        way = way._replace(loss=partial(our_loss, options))
    shape = Shape(job.tokens, job.vocab_size, job.top_k, job.hidden_size)
    assert STRATEGIES[strategy](job) == pytest.approx(peak_bytes(way, shape, job.budget), rel=0.03)


@pytest.mark.parametrize("strategy", LIMITS)
def test_formulas_keep_the_promised_limits(strategy):
    peaks = [STRATEGIES[strategy](Job(rows, 248_320, 2_560, 128)) / GIB for rows in (4_096, 16_384)]
    assert all(peak <= limit for peak, limit in zip(peaks, LIMITS[strategy], strict=True))


def test_what_fits_is_on_the_border():
    job = Job(16_384, 248_320, 2_560, 128)
    for name, strategy in STRATEGIES.items():
        most = most_tokens(name, job, 8 * GIB)
        assert strategy(job._replace(tokens=most)) <= 8 * GIB < strategy(job._replace(tokens=most + 1))
        tp = least_tp(name, job, 8 * GIB)
        assert strategy(job.rank_of(tp)) <= 8 * GIB and (tp == 1 or strategy(job.rank_of(tp // 2)) > 8 * GIB)
    assert most_tokens("verl-like", job, 0) == 0 and least_tp("verl-like", job, 0) is None


def test_advice_follows_the_budget():
    job = Job(16_384, 248_320, 2_560, 128)
    assert recommend(job, 1)[:2] == ("fused, single_pass", None)  # as memory="auto"
    assert recommend(job, 1, 8 * GIB)[:2] == ("fused, single_pass", None)
    assert recommend(job, 1, 3.5 * GIB)[:2] == ("fused, recompute", None)
    assert recommend(job, 1, 2.95 * GIB)[:2] == ("fused, recompute", 256)
    assert recommend(job, 4, 8 * GIB)[:2] == ("fused, recompute", None)
    assert recommend(job, 1, 1 * GIB) is None
    assert recommend(job._replace(hidden_size=8_192), 1)[:2] == ("fused, recompute", None)


def test_command(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 248_320, "hidden_size": 2_560}}))
    assert sizes_of(str(tmp_path)) == sizes_of(str(tmp_path / "config.json")) == (248_320, 2_560)
    given = ["plan", "--model", str(tmp_path), "--tokens", "16384", "--top-k", "128"]
    assert main([*given, "--tp", "4", "--budget", "2"]) == 0
    out = capsys.readouterr().out
    assert "one rank of 4, with 62,080 ids" in out and "allocator rounds up" in out
    assert "| verl-like | 13.29 | no | 32 |" in out
    assert main([*given, "--budget", "1"]) == 0
    assert "Nothing fits; it would with --tp 16" in capsys.readouterr().out
    assert main(given) == 0
    assert 'memory="single_pass", chunk_size=None' in capsys.readouterr().out


@pytest.mark.parametrize(
    "given, message",
    [
        (["--vocab", "100"], "--vocab and --hidden go together"),
        (["--vocab", "100", "--hidden", "0"], "--hidden must be > 0, got 0"),
        (["--model", "EMPTY"], "has no vocab_size or hidden_size"),
    ],
)
def test_mistakes(given, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    given = [str(tmp_path) if x == "EMPTY" else x for x in given]
    assert main(["plan", *given, "--tokens", "10", "--top-k", "4"]) == 2
    assert message in capsys.readouterr().err
