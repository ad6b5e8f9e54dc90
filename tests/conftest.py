"""Fixtures for every test: poisoned scratch memory, one thread, a fixed seed."""

import pytest
import torch
from jaxtyping import config


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty is NaN under test, so that memory which is read before it is written cannot go unnoticed."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def without_shape_checks():
    """Without the shape checks of the test run: for what a user sees who passes the wrong thing, and for compiling."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
