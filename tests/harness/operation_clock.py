"""A clock that counts operations, so that measured times are those of the work and not of the machine."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_ds.host.dispatch_mode import DispatchMode
from megatron_ds.planning import layer_costs


class OperationClock(DispatchMode):
    """now: operations that torch has dispatched since it was entered."""

    def __init__(self):
        super().__init__()
        self.now = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.now += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def layers_timed_by_operations() -> Iterator[None]:
    """Inside, `time_layers` measures operations in place of seconds."""
    with OperationClock() as clock, pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_costs, "_now", lambda device: clock.now)
        yield
