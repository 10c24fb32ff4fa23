"""Contexts that see each operation of torch."""

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A TorchDispatchMode that is not compiled. torch wraps others in two functions that keep its compiler away,
    a third of the time of an operation without values."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
