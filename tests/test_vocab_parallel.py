"""Tensor parallelism: every check of shard_checks.py on real process groups, and what needs none."""

import json
import os
import subprocess
import sys

import pytest

import shard_checks
from potstill import VocabShard


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3, 4))])
def test_every_check_holds_on_every_rank(size, tmp_path):
    command = [sys.executable, shard_checks.__file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), str(tmp_path)], stderr=subprocess.PIPE, env=environment)
        for rank in range(size)
    ]
    errors = [rank.communicate(timeout=400)[1].decode() for rank in ranks]
    found = [tmp_path / f"rank{rank}.json" for rank in range(size)]
    assert all(path.exists() for path in found), "\n".join(errors)
    for rank, path in enumerate(found):
        for check, failure in json.loads(path.read_text()).items():
            assert not failure, f"rank {rank}, {check}: {failure}"


def test_without_a_process_group():
    with pytest.raises(ValueError, match="init_process_group"):
        VocabShard(0, 4)
