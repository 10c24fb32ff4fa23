"""Messages among threads that arrive as late as they may: `LateNetwork`, in place of `ThreadTransport`.

    network = LateNetwork()
    results = run_ranks(4, function, transport=network.transport)
    assert not network.unfinished()

A collective or a message returns at once. Until `wait`

    what it writes   is NaN (the largest number of integers), and must still be that at the wait
    what it reads    is read when another rank waits for it, at the latest at this rank's own wait, and must not
                     change before; what a reduction may overwrite is NaN
    a send           does not keep its tensor: one that was freed arrives as NaN

So a wait that is left out shows in the values, whatever the speed of the machine: no delay would be long
enough to be sure of it. Sums are those of `ThreadTransport`, to the bit.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .threads import ThreadTransport


class Origin(NamedTuple):
    """operation, and (file, function) of the callers in the package, innermost first."""

    operation: str
    callers: tuple[tuple[str, str], ...]

    def is_in(self, file: str, function: str = "") -> bool:
        return any(
            at.endswith(file) and (not function or name == function)
            for at, name in self.callers
        )

    def __str__(self) -> str:
        places = (
            f"{file} ({function})"
            for file, function in self.callers
            if not file.startswith("mpu/")
        )
        return f"{self.operation} of {next(places, 'a test')}"


class LateNetwork:
    """The transports of one run.

    forgets  whether the `wait` of an operation does nothing: a planted fault
    """

    def __init__(self, forgets: Callable[[Origin], bool] = lambda origin: False):
        self.forgets = forgets
        self.forgotten = 0
        self._works: list[LateWork] = []

    def transport(self, room, rank: int) -> "LateTransport":
        return LateTransport(room, rank, self)

    def begin(self, work: "LateWork") -> "LateWork":
        self._works.append(work)
        return work

    def unfinished(self) -> list[str]:
        """Operations that nothing has waited for, except sends that have arrived."""
        return [str(work.origin) for work in self._works if not work.is_completed()]


class Source:
    """What a rank gives to an operation. keeps: the operation holds the tensor."""

    def __init__(self, tensor: torch.Tensor, keeps: bool = True):
        self._tensor = (lambda: tensor) if keeps else weakref.ref(tensor)
        self._before = tensor.detach().clone()
        self._taken: torch.Tensor | None = None

    @property
    def is_taken(self) -> bool:
        return self._taken is not None

    def take(self) -> torch.Tensor:
        """The values now, and from now on."""
        if self._taken is None:
            tensor = self._tensor()
            self._taken = (
                poison_(torch.empty_like(self._before))
                if tensor is None
                else tensor.detach().clone()
            )
        return self._taken

    def has_changed(self) -> bool:
        tensor = self._tensor()
        return tensor is not None and not same_bits(tensor, self._before)


class Target:
    """Memory that an operation will write. It is NaN until then."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.detach()
        poison_(self.tensor)
        self._before = self.tensor.clone()

    def has_changed(self) -> bool:
        return not same_bits(self.tensor, self._before)


class LateWork:
    """An operation that has begun.

    arrive: the values of the targets, after waiting for other ranks
    """

    def __init__(
        self,
        network: LateNetwork,
        operation: str,
        sources: Sequence[Source],
        targets: Sequence[Target] = (),
        arrive: Callable[[], Sequence[torch.Tensor]] = list,
    ):
        self.origin = Origin(operation, callers())
        self._network, self._arrive = network, arrive
        self._sources, self._targets = sources, targets
        self._is_over = False

    def wait(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._network.forgets(self.origin):
            self._network.forgotten += 1
            return
        for source in self._sources:
            source.take()
        if any(source.has_changed() for source in self._sources):
            raise AssertionError(f"{self.origin}: its input changed before the wait")
        if any(target.has_changed() for target in self._targets):
            raise AssertionError(f"{self.origin}: its output changed before the wait")
        for target, values in zip(self._targets, self._arrive(), strict=True):
            target.tensor.copy_(values.reshape(target.tensor.shape))
        self._sources, self._targets, self._arrive = (), (), list

    def is_completed(self) -> bool:
        sends = [source.is_taken for source in self._sources]
        return self._is_over or (not self._targets and all(sends))


class LateTransport(ThreadTransport):
    """`ThreadTransport` whose operations complete in `wait`."""

    def __init__(self, room, rank: int, network: LateNetwork):
        super().__init__(room, rank)
        self._network = network
        self._asked: dict[tuple, int] = {}  # messages asked for, by (source, tag)
        self._arrived: dict[tuple, list] = {}  # those that came

    def all_reduce(self, tensor, op):
        mine = Source(tensor)
        theirs = self._give(mine, taken=True)
        return self._begin(
            "all-reduce", [], [Target(tensor)], lambda: [total(theirs(), op)]
        )

    def all_gather(self, out, tensor):
        mine = Source(tensor)
        theirs = self._give(mine)
        pieces = out.detach().chunk(self.size)
        # In place, a rank's own piece is an input.
        elsewhere = [
            i
            for i, piece in enumerate(pieces)
            if i != self.rank or piece.data_ptr() != tensor.data_ptr()
        ]
        targets = [Target(pieces[i]) for i in elsewhere]

        def arrive():
            values = theirs()
            return [values[i] for i in elsewhere]

        return self._begin("all-gather", [mine], targets, arrive)

    def reduce_scatter(self, out, tensor, op):
        mine = Source(tensor)
        theirs = self._give(mine, taken=True)
        targets = [Target(tensor), Target(out)]

        def arrive():
            piece = total(theirs(), op).view(-1).chunk(self.size)[self.rank]
            return [mine.take(), piece]

        return self._begin("reduce-scatter", [], targets, arrive)

    def all_to_all(self, out, tensor, sent=None, received=None):
        mine = Source(tensor)
        pieces = list(sent or [len(tensor) // self.size] * self.size)
        theirs = self._give((mine, pieces))

        def arrive():
            parts = [
                source.take().split(cut)[self.rank]
                for source, cut in theirs(takes=False)
            ]
            assert received is None or [len(part) for part in parts] == list(received)
            return [torch.cat(parts)]

        return self._begin("all-to-all", [mine], [Target(out)], arrive)

    def broadcast(self, tensor, source):
        is_source = self.rank == source
        theirs = self._give(Source(tensor))
        sources = [theirs.mine] if is_source else []
        targets = [] if is_source else [Target(tensor)]

        def arrive():
            return [] if is_source else [theirs(takes=False)[source].take()]

        return self._begin("broadcast", sources, targets, arrive)

    def isend(self, tensor, destination, tag):
        source = Source(tensor, keeps=False)
        self.room.mailbox(self.rank, destination, tag).put(source)
        return self._begin("send", [source], [], list)

    def irecv(self, tensor, source, tag):
        number = self._next(source, tag)
        arrive = lambda: [self._message(source, tag, number, tensor)]
        return self._begin("receive", [], [Target(tensor)], arrive)

    def exchange(self, sends, receives):
        tag = "exchanged"
        sources = [Source(tensor) for tensor, _ in sends]
        for source, (_, destination) in zip(sources, sends):
            self.room.mailbox(self.rank, destination, tag).put(source)
        numbers = [self._next(source, tag) for _, source in receives]
        targets = [Target(tensor) for tensor, _ in receives]

        def arrive():
            return [
                self._message(source, tag, number, tensor)
                for (tensor, source), number in zip(receives, numbers)
            ]

        return self._begin("exchange", sources, targets, arrive)

    def _begin(self, operation, sources, targets, arrive) -> LateWork:
        return self._network.begin(
            LateWork(self._network, operation, sources, targets, arrive)
        )

    def _give(self, mine, taken: bool = False) -> "Given":
        """Give something to all ranks in the next collective. taken: its values now."""
        if taken:
            mine.take()
        for other in range(self.size):
            if other != self.rank:
                self.room.mailbox(self.rank, other, "late").put(mine)
        numbers = [self._next(other, "late") for other in range(self.size)]
        return Given(self, mine, numbers)

    def _next(self, source: int, tag) -> int:
        number = self._asked.get((source, tag), 0)
        self._asked[source, tag] = number + 1
        return number

    def _message(self, source: int, tag, number: int, tensor) -> torch.Tensor:
        values = self.received(source, tag, number).take()
        assert values.shape == tensor.shape and values.dtype == tensor.dtype, (
            f"received {list(values.shape)} {values.dtype}, expected {list(tensor.shape)} {tensor.dtype}"
        )
        return values

    def received(self, source: int, tag, number: int):
        """What came as number `number` from a rank."""
        came = self._arrived.setdefault((source, tag), [])
        mailbox = self.room.mailbox(source, self.rank, tag)
        while len(came) <= number:
            came.append(self.room.take(mailbox))
        found, came[number] = came[number], None
        return found


class Given(NamedTuple):
    """A collective: what this rank gives, and the numbers of the other ranks' messages."""

    transport: LateTransport
    mine: object
    numbers: list[int]

    def __call__(self, takes: bool = True) -> list:
        """What all ranks gave, in rank order. takes: its values."""
        here = self.transport
        given = [
            self.mine if rank == here.rank else here.received(rank, "late", number)
            for rank, number in enumerate(self.numbers)
        ]
        return [source.take() for source in given] if takes else given


def total(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction in rank order."""
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    result = tensors[0].clone()
    for tensor in tensors[1:]:
        result = combine(result, tensor)
    return result


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is torch.bool:
        return tensor.fill_(True)
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(torch.iinfo(tensor.dtype).max)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(t.detach().reshape(-1).view(torch.uint8) for t in (a, b)))


def callers() -> tuple[tuple[str, str], ...]:
    """(file, function) of the frames inside the package, innermost first."""
    frame = sys._getframe(1)
    found = []
    while frame is not None:
        file = frame.f_code.co_filename
        if "/megatron_ds/" in file:
            found.append((file.rsplit("/megatron_ds/")[-1], frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found[:12])
