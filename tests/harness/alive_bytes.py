"""Bytes of tensor storages that are alive: counted as operations make them, and gone when the last tensor
lets go.

    with AliveBytes(peak=True) as alive:
        y = f(x)
        print(alive.now(), alive.peak)          # of what was made inside; x does not count

It sees what autograd keeps, what functions keep on `ctx`, and what nobody was meant to keep.
"""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from megatron_ds.host.dispatch_mode import DispatchMode


class AliveBytes(DispatchMode):
    """peak: the most that was alive after any operation, where that is asked for."""

    def __init__(self, peak: bool = False):
        super().__init__()
        self.peak, self._watches_peak = 0, peak
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = function(*args, **kwargs)
        is_new = False
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._made:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                is_new = True
        if is_new and self._watches_peak:
            self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        self._made = {
            key: entry for key, entry in self._made.items() if not entry[0].expired()
        }
        return sum(nbytes for _, nbytes in self._made.values())


def _tensors(tree):
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
