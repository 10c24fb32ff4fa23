"""What a schedule holds and sends: bytes of live activations per rank, messages and bytes per link between ranks.

Both follow from the order alone, without clocks.
"""

from collections import Counter
from dataclasses import dataclass

from .costs import PerStage
from .instruction import Op, Program, Schedule
from .passes import BACKWARD, stage_ranks
from .validate import MAKES

Link = tuple[int, int, str]                        # (source rank, destination rank, "act" | "grad")


@dataclass(frozen=True)
class Held:
    """Bytes that one micro-batch keeps on a stage: a number for all stages alike, or a tuple with one for each stage.

    activations    from F to the end of B, or of I                           (M_B in Qi et al. 2024, section 3)
    for_weights    from the end of I to the end of W; what only the input half needed is gone by then    (their M_W)
    """

    activations: PerStage = 1
    for_weights: PerStage = 1


def peak_bytes(schedule: Schedule, held: Held) -> tuple[float, ...]:
    """Per rank, the most that its live activations take at once."""
    trained = {(i.stage, i.microbatch) for program in schedule for i in program if i.op in BACKWARD}
    return tuple(_peak(program, held, trained) for program in schedule)


def links(schedule: Schedule, message_bytes: int = 0) -> dict[Link, tuple[int, int]]:
    """Link → (messages, bytes) of one step. Stages that are neighbours on one rank send nothing.

    message_bytes    of one activation between stages; its gradient has as many
    """
    home = stage_ranks(schedule)
    messages: Counter[Link] = Counter()
    for rank, program in enumerate(schedule):
        for i in program:
            if i.op in MAKES:
                kind, away = MAKES[i.op]
                destination = home.get(i.stage + away, rank)
                if destination != rank:
                    messages[rank, destination, kind] += 1
    return {link: (number, number * message_bytes) for link, number in sorted(messages.items())}


def _peak(program: Program, held: Held, trained: set[tuple[int, int | None]]) -> float:
    live = peak = 0
    for i in program:
        whole, rest = _at(held.activations, i.stage), _at(held.for_weights, i.stage)
        if i.op is Op.F and (i.stage, i.microbatch) in trained:
            live += whole
            peak = max(peak, live)
        elif i.op in BACKWARD:
            live -= {Op.B: whole, Op.I: whole - rest, Op.W: rest}[i.op]
    return peak


def _at(value: PerStage, stage: int) -> float:
    return value[stage] if isinstance(value, tuple) else value
