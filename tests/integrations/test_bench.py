"""What `potstill bench` calls verl-like is like verl: in loss, gradient and peak memory."""

import json
import subprocess
import sys

import torch

from potstill import TeacherTopK
from potstill.bench.packages import THEIRS, ours

ROWS, V, K = 24, 101, 7


def test_losses_and_gradients_of_one_value(on_ranks, same):
    """Of float32 logits, where the log-probabilities that FSDP's form in the logits' own dtype are exact too."""

    def check():
        torch.manual_seed(9)
        logits = torch.randn(ROWS, V, requires_grad=True)
        teacher = TeacherTopK.from_logits(2 * torch.randn(ROWS, V), K)
        wanted = ours(logits, teacher.token_ids, teacher.log_probs)
        (gradient,) = torch.autograd.grad(wanted, logits)
        for loss in THEIRS.values():
            found = loss(logits, teacher.token_ids, teacher.log_probs)
            same(found, wanted)
            same(torch.autograd.grad(found, logits)[0], gradient)

    on_ranks(check, size=1)


def test_the_command_and_the_peaks(tmp_path):
    command = [sys.executable, "-m", "potstill.bench.packages", "--quick", "--threads", "1"]
    lines = tmp_path / "lines"
    found = subprocess.run([*command, "--json", str(lines)], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    results = [json.loads(line) for line in lines.read_text().splitlines()]
    peak = {line["way"]: line["peak_bytes"] for line in results if "peak_bytes" in line}
    assert abs(peak["verl-like"] / peak["verl, Megatron"] - 1) < 0.01
    assert peak["logits reused"] < peak["logits kept"] < peak["verl, Megatron"]
    assert {"verl, Megatron", "verl-like"} <= {line["way"] for line in results if "seconds" in line}
    assert all(name in found.stdout for name in THEIRS)
