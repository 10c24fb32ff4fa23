"""Whether recorded steps finish on GPUs that put all their streams into one hardware queue.

The queue of a rank is what its host has launched, in that order (`StreamOrder.queue`). Its head leaves when the
kernels before it on its stream have run and, if it is a wait, when its event is reached. A message occupies its
stream until all of its ranks have it at the head. What stands behind the head waits, whatever its stream.
"""

from collections import Counter
from collections.abc import Sequence

from .stream_order import HOST, Entry, StreamOrder


class Queue:
    """The hardware queue of one rank. arrived: how many ranks have reached each part of a message."""

    def __init__(self, entries: Sequence[Entry], arrived: Counter):
        self.entries, self.head = entries, 0
        self._arrived = arrived
        self._under_way: dict[str, Entry] = {}  # the last message of each stream

    def run(self) -> bool:
        """Dispatch what can be; whether that was anything."""
        before = self.head
        while self.head < len(self.entries) and self._is_ready(self.entries[self.head]):
            entry = self.entries[self.head]
            if entry.meets:
                self._under_way[entry.stream] = entry
                self._arrived.update(name for name, _ in entry.meets)
            self.head += 1
        return self.head > before

    def blocked(self) -> str:
        """What is at the head; "" at the end."""
        if self.head == len(self.entries):
            return ""
        entry = self.entries[self.head]
        return f"{entry.what} on {entry.stream}, of {self.head} launched before it"

    def _is_ready(self, entry: Entry) -> bool:
        if entry.stream != HOST and not self._is_reached(entry.stream):
            return False
        needs = {} if entry.needs is None else entry.needs
        return all(self._is_reached(*of_stream) for of_stream in needs.items())

    def _is_reached(self, stream: str, time: float = float("inf")) -> bool:
        """Whether all kernels of a stream up to a time have run."""
        message = self._under_way.get(stream)
        if message is None or message.time > time:
            return True
        return all(self._arrived[name] >= ranks for name, ranks in message.meets)


def blocked_queues(orders: Sequence[StreamOrder]) -> list[str]:
    """What is at the head of each rank's queue, if the ranks do not finish."""
    arrived: Counter = Counter()
    queues = [Queue(order.queue, arrived) for order in orders]
    while any([queue.run() for queue in queues]):
        pass
    return [
        f"rank {rank}: {text}"
        for rank, queue in enumerate(queues)
        if (text := queue.blocked())
    ]
