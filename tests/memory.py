"""Counting what a computation allocates: the largest tensor it makes, and the bytes autograd keeps."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """`sizes` are the element counts of every tensor that owns new storage, in order."""

    def __init__(self):
        super().__init__()
        self.sizes = [0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                self.sizes.append(x.untyped_storage().nbytes() // x.element_size())
        return out

    @property
    def largest(self):
        return max(self.sizes)


@contextmanager
def bytes_kept(*inputs):
    """Yield a list whose only entry becomes the bytes of storage saved for backward, beyond that of the inputs."""
    owned = {x.untyped_storage().data_ptr() for x in inputs}
    storages: dict[int, int] = {}
    total = [0]

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in owned:
            storages[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield total
    total[0] = sum(storages.values())
