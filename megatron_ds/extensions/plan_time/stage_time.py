"""Seconds of a phase of a stage: its events, on a device that computes and sends at the same time.

Call   the device is busy until it is done
Begun      the message starts when the messages before it have arrived and the device has come so far
Awaited    the device waits until that message has arrived
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from .device import Device
from .link_time import Links
from .recorded_work import Awaited, Begun, Call, Event
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
    arrivals: dict[int, tuple[float, str]] = {}
    for event in events:
        if isinstance(event, Call):
            seconds = seconds_of(event.work, device)
            kind = kind_of(event)
            found.by_kind[kind] = found.by_kind.get(kind, 0.0) + seconds
            clock += seconds
        elif isinstance(event, Begun):
            sent = max(clock, sent) + links.seconds(
                event.operation, event.axes, event.size, event.nbytes
            )
            arrivals[event.number] = sent, event.axes
        elif isinstance(event, Awaited):
            # A message that has arrived costs nothing.
            arrival, axes = arrivals.get(event.number, (clock, ""))
            waited = max(0.0, arrival - clock)
            if waited:
                found.waits[axes] = found.waits.get(axes, 0.0) + waited
            clock += waited
    found.seconds = max(clock, sent)
    return found


def kind_of(event: Call) -> str:
    """Return what a call mostly does: "products", "attention" or "other"."""
    if event.work.scores:
        return "attention"
    return "products" if event.work.products else "other"
