"""torch.compile around the losses: eager values and gradients, and a bounded number of graphs."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_losses.py")


@pytest.mark.parametrize(
    "arguments",
    [
        ["linear", "fullgraph"],
        *(
            pytest.param(arguments, marks=pytest.mark.slow)
            for arguments in (["logits"], ["logits", "fullgraph"], ["linear"], ["single_pass"], ["full_vocab"])
        ),
    ],
    ids=" ".join,
)
def test_compiled_equals_eager(arguments):
    run = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
