"""Counts of the operations that torch dispatches, which on a GPU are about as many launches."""

from collections import Counter

from megatron_ds.host.dispatch_mode import DispatchMode


class Counted(DispatchMode):
    """`calls`: name of an operation, without overload → how often it ran inside."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))
