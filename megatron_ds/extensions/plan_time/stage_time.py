"""Seconds of a phase of a stage: its events, on a device that computes and sends at the same time.

Call       the device is busy until it is done
Allocated  it is busy until the pages are there, where a run returns freed memory
Begun      the message starts when the messages before it have arrived and the device has come so far; it keeps the
           device for the part that does not overlap
Awaited    the device waits until that message has arrived
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from .device import Device
from .link_time import Links
from .recorded_work import Allocated, Awaited, Begun, Call, Event
from .work_time import seconds_of


@dataclass
class PhaseTime:
    """Seconds of a phase. waits: in which the device waits for messages, by the axes of their groups.

    by_kind: seconds of the device by what it computes: products, attention, other
    """

    seconds: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    by_kind: dict[str, float] = field(default_factory=dict)


def phase_time(events: Iterable[Event], device: Device, links: Links) -> PhaseTime:
    """Return the time of a phase."""
    # `clock` is when the device is free, `sent` when the last message has arrived.
    found = PhaseTime()
    clock = 0.0
    sent = 0.0
    busy = 1 - links.cluster.overlap
    arrivals: dict[int, tuple[float, str]] = {}
    for event in events:
        if isinstance(event, Call):
            seconds = seconds_of(event.work, device)
            kind = kind_of(event)
            _add(found.by_kind, kind, seconds)
            clock += seconds
        elif isinstance(event, Allocated):
            # The system clears each page when it is first used.
            seconds = event.nbytes * device.constants.page
            _add(found.by_kind, "new pages", seconds)
            clock += seconds
        elif isinstance(event, Begun):
            # Messages pass one after the other.
            passing = links.seconds(
                event.operation, event.axes, event.size, event.nbytes
            )
            sent = max(clock, sent) + passing
            arrivals[event.number] = sent, event.axes
            held = passing * busy
            clock += held
            _add(found.waits, event.axes, held)
        elif isinstance(event, Awaited):
            # A message that has arrived costs nothing.
            arrival, axes = arrivals.get(event.number, (clock, ""))
            waited = max(0.0, arrival - clock)
            _add(found.waits, axes, waited)
            clock += waited
    found.seconds = max(clock, sent)
    return found


def _add(seconds: dict[str, float], name: str, value: float) -> None:
    if value:
        seconds[name] = seconds.get(name, 0.0) + value


def kind_of(event: Call) -> str:
    """Return what a call mostly does: "products", "attention" or "other"."""
    if event.work.scores:
        return "attention"
    return "products" if event.work.products else "other"
