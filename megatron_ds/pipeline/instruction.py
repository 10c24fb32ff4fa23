"""`Instruction`: one operation of a pipeline rank. A schedule is data: one program of instructions per
pipeline rank.

Schedules consist of F, B, I and W only; `passes.py` adds the sends, receives and reductions that follow from
them. `StageCosts` are times of the instructions, measured or estimated.
"""

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import NamedTuple

from ..errors import ScheduleError


class Op(StrEnum):
    """The instruction set; the value is the short form in drawings and traces."""

    F = "F"  # forward of one micro-batch through one stage
    B = "B"  # its whole backward
    I = "I"  # noqa: E741  backward, gradient of the input only      (Qi et al. 2024 call it B)
    W = "W"  # backward, gradient of the weights only
    SEND_ACT = "SA"
    RECV_ACT = "RA"
    SEND_GRAD = "SG"
    RECV_GRAD = "RG"
    GATHER = "GATHER"  # gather the stage's sharded parameters        (ZeRO stage 3)
    RELEASE = "RELEASE"  # free what GATHER has gathered
    REDUCE = "REDUCE"  # the next backward of the stage completes its gradients: reduce full buckets
    TIE = "TIE"  # sum the gradients of parameters that several stages hold

    # Enum's own is a Python function, too slow for half a million look-ups.
    __hash__ = str.__hash__


class Instruction(NamedTuple):
    """One entry of a program. A tuple, since half a million are made, compared and hashed for 64 stages.

    stage       global stage = chunk * pipeline_size + pipeline_rank
    microbatch  None for operations on a whole stage (GATHER, RELEASE, REDUCE, TIE)
    """

    op: Op
    stage: int
    microbatch: int | None = None

    @property
    def k(self) -> int:
        """The micro-batch, of a computation or a transfer."""
        assert self.microbatch is not None, f"{self} is of a whole stage"
        return self.microbatch

    def __str__(self) -> str:
        return f"{self.op}{'' if self.microbatch is None else self.microbatch}@{self.stage}"


Program = tuple[Instruction, ...]
Schedule = tuple[Program, ...]  # one program per pipeline rank

COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
BACKWARD = frozenset({Op.B, Op.I, Op.W})
# W needs only the layers' inputs and output gradients.
READS_WEIGHTS = frozenset({Op.F, Op.B, Op.I})
SENDS = frozenset({Op.SEND_ACT, Op.SEND_GRAD})
RECEIVES = frozenset({Op.RECV_ACT, Op.RECV_GRAD})
TRANSFERS = SENDS | RECEIVES
# Computations that pass activations on; others return gradients.
FORTH = frozenset({Op.F, Op.SEND_ACT, Op.RECV_ACT})
# Computation → receive of its input.
CONSUMED_BY = {
    Op.F: Op.RECV_ACT,
    Op.B: Op.RECV_GRAD,
    Op.I: Op.RECV_GRAD,
}
# Computation → send of its result.
PRODUCED_BY = {
    Op.F: Op.SEND_ACT,
    Op.B: Op.SEND_GRAD,
    Op.I: Op.SEND_GRAD,
}


# Operation at the other end of a transfer, and the distance of its stage.
OTHER_END = {
    Op.SEND_ACT: (Op.RECV_ACT, 1),
    Op.RECV_ACT: (Op.SEND_ACT, -1),
    Op.SEND_GRAD: (Op.RECV_GRAD, -1),
    Op.RECV_GRAD: (Op.SEND_GRAD, 1),
}


def other_end(i: Instruction) -> Instruction:
    """Return the receive of a send, or the send of a receive."""
    op, away = OTHER_END[i.op]
    return Instruction(op, i.stage + away, i.microbatch)


def stage_ranks(schedule: Schedule) -> dict[int, int]:
    """Global stage → pipeline rank that computes it. Raises ScheduleError for a stage on two ranks."""
    ranks: dict[int, int] = {}
    for rank, program in enumerate(schedule):
        for i in program:
            if i.op in COMPUTE and ranks.setdefault(i.stage, rank) != rank:
                raise ScheduleError(
                    f"{i} is on pipeline rank {rank}, but stage {i.stage} is on rank "
                    f"{ranks[i.stage]}: the activations of a stage stay on its rank. Move it "
                    f"to rank {ranks[i.stage]}."
                )
    return ranks


PerStage = float | tuple[float, ...]


@dataclass(frozen=True)
class StageCosts:
    """Time of one micro-batch, in any unit: one number for all stages, or a tuple with one for each stage.

    forward      F
    input_grad   I: backward down to the gradient of the stage's input        (Qi et al. 2024 call it B)
    weight_grad  W: gradients of the stage's weights; B takes input_grad + weight_grad
    transfer     of an activation or a gradient between two ranks, by the stage that sends it
    """

    forward: PerStage = 1
    input_grad: PerStage = 1
    weight_grad: PerStage = 1
    transfer: PerStage = 0

    def __post_init__(self) -> None:
        lengths = {}
        for field in fields(self):
            value = getattr(self, field.name)
            values = value if isinstance(value, tuple) else (value,)
            if not values or any(not 0 <= v < float("inf") for v in values):
                raise ScheduleError(
                    f"{field.name}={value} is not a cost: times are finite and not negative. "
                    "Use a number of 0 or more, or a tuple with one for each stage."
                )
            if isinstance(value, tuple):
                lengths[field.name] = len(value)
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{n} stages for {name}" for name, n in lengths.items())
            raise ScheduleError(
                f"costs are of {counts}, but a pipeline has one number of stages. Use one "
                "number for all stages, or tuples of the same length."
            )

    def of(self, instruction: Instruction) -> float:
        """Time of an instruction, for the simulator. Operations that are not listed above take none."""
        op = instruction.op
        stage = instruction.stage
        if op is Op.B:
            return self._at("input_grad", stage) + self._at("weight_grad", stage)
        return self._at(KIND[op], stage) if op in KIND else 0

    def _at(self, kind: str, stage: int) -> float:
        value = getattr(self, kind)
        if not isinstance(value, tuple):
            return value
        if stage >= len(value):
            raise ScheduleError(
                f"{kind} has costs of {len(value)} stages, but the schedule computes stage "
                f"{stage}. Use one for each stage, or one number for all."
            )
        return value[stage]


KIND = {
    Op.F: "forward",
    Op.I: "input_grad",
    Op.W: "weight_grad",
    Op.SEND_ACT: "transfer",
    Op.SEND_GRAD: "transfer",
}
