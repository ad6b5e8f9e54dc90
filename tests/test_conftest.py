import torch


def test_scratch_memory_is_poisoned():
    assert torch.empty(3).isnan().all()
    assert torch.zeros(3).new_empty(3).isnan().all()
    assert torch.empty_like(torch.zeros(3)).isnan().all()
