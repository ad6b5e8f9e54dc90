"""The benchmarks: the ways of others are right, the method gives their published figures, and the commands run."""

import json

import pytest
import torch

from potstill.bench import baselines, exactness, memory
from potstill.bench.baselines import BASELINES, truncated_kl
from potstill.bench.exactness import Error, Setting, chunk_errors, inputs
from potstill.bench.peak import CPU, WAYS, Shape, peak_bytes, profiled_peak_bytes
from potstill.bench.report import machine, table
from potstill.cli import main


@pytest.mark.parametrize("floor", [None, -3.0])
@pytest.mark.parametrize("name", BASELINES)
def test_baselines_compute_the_same_loss_and_gradient(name, floor, monkeypatch):
    monkeypatch.setattr(baselines, "CHUNK_SIZE", 4)  # ragged: 4, 4, 3 rows
    logits = torch.randn(11, 53)
    teacher, ids = torch.randn(11, 53).log_softmax(-1).topk(6)
    found = []
    for dtype in (torch.float32, torch.float64):
        z = logits.to(dtype, copy=True).requires_grad_()
        log_q = z.log_softmax(-1).gather(-1, ids) if dtype == torch.float64 else BASELINES[name](z, ids)[0]
        loss = truncated_kl(log_q, teacher.to(dtype), floor)
        (loss * torch.arange(11)).sum().backward()
        assert torch.equal(z.detach(), logits.to(dtype))  # nobody writes to the caller's logits
        found.append((loss, z.grad))
    for value, truth in zip(*found, strict=True):
        torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=1e-5)


def test_verl_like_always_knows_the_top_ids():
    logits = torch.randn(5, 40)
    for name in ("verl-like", "the seed's chunked path"):
        assert torch.equal(BASELINES[name](logits, torch.zeros(5, 3, dtype=torch.long))[1], logits.topk(3).indices)


@pytest.mark.parametrize("name", memory.PUBLISHED)
def test_tracker_gives_the_published_figures(name):
    for (tp, rows), published in zip(memory.CASES, memory.PUBLISHED[name], strict=True):
        shape = Shape(rows, memory.VOCAB_SIZE // tp, memory.TOP_K, memory.HIDDEN_SIZE)
        assert peak_bytes(WAYS[name], shape) / memory.GIB == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("name", ["verl-like", "logits kept", "logits reused", "fused, recompute"])
def test_tracker_sees_what_the_profiler_sees(name):
    shape = Shape(rows=64, vocab_size=4096, top_k=16, hidden_size=64)
    assert peak_bytes(WAYS[name], shape, CPU) == pytest.approx(profiled_peak_bytes(WAYS[name], shape), rel=0.01)


def test_chunks_change_nothing():
    setting = Setting(30, 512, 8, torch.float32, -10.0, (7, 16, 4096))
    found = chunk_errors(setting, *inputs(setting))
    assert all(error.absolute == 0 and error.largest > 0 for error in found.values())


def test_errors_are_the_largest_of_all_parts():
    first = Error.of(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    assert first == (2.0, 4.0, 0.5)
    assert first.join(Error.of(torch.tensor([3.0, 0.0]), torch.tensor([0.3, 0.0]))) == pytest.approx((2.7, 4.0, 9.0))


def test_table_is_markdown():
    assert table([{"a": 1, "": "x"}, {"a": 2, "": "y"}]) == "| a |  |\n| --- | --- |\n| 1 | x |\n| 2 | y |"


def test_commands_print_tables_and_write_json(tmp_path, capsys, monkeypatch):
    path = tmp_path / "lines.jsonl"
    monkeypatch.setattr(exactness, "SMALL", [Setting(30, 512, 8, torch.bfloat16, None, (7, 4096))])
    main(["bench", "exactness", "--quick", "--json", str(path)])
    assert "| 30 x 512, K = 8, bfloat16, clamp None | 7, 4,096 | 0 | 0 | 0 | 0 | 0 | 0 |" in capsys.readouterr().out
    assert main(["bench", "memory", "--quick", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "| verl-like | 0.21 |" in out and "| fused, recompute |" in out
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["benchmark"] for line in lines} == {"exactness", "memory"}
    assert all(line["torch"] == torch.__version__ and line["machine"] == machine()["machine"] for line in lines)
