"""`ShapeCheck`: pipeline ranks compare, once a step, the shapes of the hidden states they are about to
exchange.

Before its first message of a step to another rank, a rank sends it the shapes and the dtype of all the step's
micro-batches, in a message of fixed length. The receiver compares them with its own. Without this, ranks that
divide a batch differently would wait for messages that never arrive, until the timeout.

    | micro-batches | dtype | CRC-32 of all shapes | runs | of each run of equal shapes: length, dims, sizes |

Runs that do not fit into the message are compared by the checksum alone.
"""

import zlib
from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from .group import Work

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST_RUNS, MOST_SIZES = 12, 4
HEADER, RUN = 4, 2 + MOST_SIZES


class ShapeCheck:
    """The exchange of one rank with its peers. Does nothing until `start` is called for the first time."""

    def __init__(self):
        self._expected: torch.Tensor | None = None
        self._announced: set[int] = set()             # peers that this step's message was sent to
        # peer → its message under way; None: verified
        self._received: dict[int, tuple[torch.Tensor, Work] | None] = {}

    def start(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        """Begin a step. shapes: of the hidden states of each micro-batch."""
        self._expected = encode_shapes(shapes, dtype)
        self._announced, self._received = set(), {}

    def announce(self, peer: int, send: Callable[[torch.Tensor], None]) -> None:
        """Send this step's message to `peer`, the first time only."""
        if self._expected is not None and peer not in self._announced:
            self._announced.add(peer)
            send(self._expected)

    def expect(self, peer: int, receive: Callable[[torch.Tensor], Work]) -> None:
        """Post the receive of this step's message of `peer`, the first time only."""
        if self._expected is not None and peer not in self._received:
            message = torch.empty_like(self._expected)
            self._received[peer] = message, receive(message)

    def verify(self, peer: int, wait: Callable[[Work], None]) -> str:
        """Wait for the message of `peer` and return how it differs from this rank's; "" if it does not.

        Returns "" at once where the step's message was not expected or was verified before.
        """
        if self._received.get(peer) is None:
            return ""
        message, work = self._received[peer]
        wait(work)
        self._received[peer] = None
        return describe_difference(self._expected, message)


def encode_shapes(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> torch.Tensor:
    """The message, int64 on the CPU; see above. shapes: of each micro-batch in turn."""
    shapes = [tuple(shape) for shape in shapes]
    assert all(len(shape) <= MOST_SIZES for shape in shapes), (
        f"hidden states have at most {MOST_SIZES} dimensions: {shapes}")
    runs = [(len(list(same)), len(shape), *shape, *[0] * (MOST_SIZES - len(shape)))
            for shape, same in groupby(shapes)]
    shown = runs[:MOST_RUNS]
    numbers = [len(shapes), DTYPES.index(dtype), zlib.crc32(repr(runs).encode()), len(shown), *sum(shown, ())]
    return torch.tensor(numbers + [0] * (HEADER + RUN * MOST_RUNS - len(numbers)))


def describe_difference(expected: torch.Tensor, received: torch.Tensor) -> str:
    """The first difference between two messages, for an error; "" if they are equal."""
    if torch.equal(expected, received):
        return ""
    (count, dtype, *_), (its_count, its_dtype, *_) = expected.tolist(), received.tolist()
    if count != its_count:
        return f"this rank's step has {count} micro-batches, the sender's has {its_count}"
    names = [_name_of(dtype), _name_of(its_dtype)]
    for k, (shape, its_shape) in enumerate(zip(_shapes(expected), _shapes(received))):
        if shape != its_shape or dtype != its_dtype:
            return (f"micro-batch {k} was expected as {shape} {names[0]}, but the sender has {its_shape} "
                    f"{names[1]}")
    return f"a micro-batch after number {len(_shapes(expected)) - 1} has another shape than expected"


def _name_of(dtype: int) -> str:
    return str(DTYPES[dtype]).removeprefix("torch.") if 0 <= dtype < len(DTYPES) else "an unknown dtype"


def _shapes(message: torch.Tensor) -> list[list[int]]:
    """Of the micro-batches whose runs are in the message."""
    _, _, _, num_runs, *numbers = message.tolist()
    runs = [numbers[RUN * i:RUN * (i + 1)] for i in range(num_runs)]
    return [sizes[:dimensions] for count, dimensions, *sizes in runs for _ in range(count)]
