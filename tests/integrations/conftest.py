"""Tests against the real packages. They need an environment of their own: `make test-integrations`."""

import os
import re
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

NEEDS = {"test_bench.py": "verl", "test_megatron.py": "verl", "test_verl.py": "verl"}
collect_ignore = [name for name, package in NEEDS.items() if not find_spec(package)]


@pytest.fixture
def on_ranks(tmp_path):
    """Call check() in `size` processes, one tensor-parallel group of Megatron's over gloo."""

    def run(check, size=2, **layout):
        # Forked: importing these packages again in each process would take longer than all the tests.
        start_processes(_rank, (check, size, tmp_path / check.__name__, layout), size, start_method="fork")

    return run


def _rank(rank, check, size, store, layout):
    from megatron.core import parallel_state

    # Megatron asks the launcher's variables for some of its settings.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    torch.cuda.current_device = lambda: "cpu"  # where Megatron puts the buffers of a sequence-parallel layer
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(**({"tensor_model_parallel_size": size} | layout))
    check()
    dist.barrier()


@pytest.fixture
def counted():
    """Within `with counted() as calls`: the names of the collectives, and the bytes that this rank puts in."""
    return _counted


@contextmanager
def _counted():
    calls = []
    names = (
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "broadcast",
    )
    originals = {name: getattr(dist, name) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        for name in originals:

            def call(*args, _name=name, _original=originals[name], **options):
                tensor = args[1] if _name.startswith(("all_gather", "reduce_scatter")) else args[0]
                calls.append((_name, tensor.nbytes))
                return _original(*args, **options)

            patch.setattr(dist, name, call)
        yield calls


@pytest.fixture
def blocks():
    """The blocks in a language of a page of docs/integrations."""

    def read(name, language="python"):
        text = Path(__file__).parents[2].joinpath("docs/integrations", name).read_text()
        return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)

    return read


@pytest.fixture
def same():
    """Equal to a number of decimals that leaves float32 its rounding and nothing else."""

    def compare(actual, expected, tolerance=2e-6):
        torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)

    return compare
