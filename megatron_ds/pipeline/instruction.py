"""`Instruction`: one operation of a pipeline rank. A schedule is data: one program of instructions per
pipeline rank.

Schedules consist of F, B, I and W only; `passes.py` adds the sends, receives and reductions that follow from
them.
"""

from enum import StrEnum
from typing import NamedTuple

from ..errors import ScheduleError


class Op(StrEnum):
    """The instruction set; the value is the short form in drawings and traces."""

    F = "F"                  # forward of one micro-batch through one stage
    B = "B"                  # its whole backward
    I = "I"                  # noqa: E741  backward, gradient of the input only      (Qi et al. 2024 call it B)
    W = "W"                  # backward, gradient of the weights only
    SEND_ACT = "SA"
    RECV_ACT = "RA"
    SEND_GRAD = "SG"
    RECV_GRAD = "RG"
    GATHER = "GATHER"        # gather the stage's sharded parameters        (ZeRO stage 3)
    RELEASE = "RELEASE"  # free what GATHER has gathered
    REDUCE = "REDUCE"  # the next backward of the stage completes its gradients: reduce buckets as they fill
    TIE = "TIE"              # sum the gradients of parameters that several stages hold

    __hash__ = str.__hash__  # Enum's own is a Python function, too slow for half a million look-ups


class Instruction(NamedTuple):
    """One entry of a program. A tuple, because 64 stages need half a million of them made, compared and
    hashed.

    stage       global stage = chunk * pipeline_size + pipeline_rank
    microbatch  None for operations on a whole stage (GATHER, RELEASE, REDUCE, TIE)
    """

    op: Op
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.op}{'' if self.microbatch is None else self.microbatch}@{self.stage}"


Program = tuple[Instruction, ...]
Schedule = tuple[Program, ...]      # one program per pipeline rank

COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
BACKWARD = frozenset({Op.B, Op.I, Op.W})
READS_WEIGHTS = frozenset({Op.F, Op.B, Op.I})  # W needs only the layers' inputs and output gradients
SENDS = frozenset({Op.SEND_ACT, Op.SEND_GRAD})
RECEIVES = frozenset({Op.RECV_ACT, Op.RECV_GRAD})
CONSUMED_BY = {
    Op.F: Op.RECV_ACT,
    Op.B: Op.RECV_GRAD,
    Op.I: Op.RECV_GRAD,
}  # computation ← receive of its input
PRODUCED_BY = {Op.F: Op.SEND_ACT, Op.B: Op.SEND_GRAD, Op.I: Op.SEND_GRAD}  # computation → send of its result


def stage_ranks(schedule: Schedule) -> dict[int, int]:
    """Global stage → pipeline rank that computes it. Raises ScheduleError for a stage on two ranks."""
    ranks: dict[int, int] = {}
    for rank, program in enumerate(schedule):
        for i in program:
            if i.op in COMPUTE and ranks.setdefault(i.stage, rank) != rank:
                raise ScheduleError(
                    f"{i} is on pipeline rank {rank}, but stage {i.stage} is on rank {ranks[i.stage]}: "
                    f"the activations of a stage stay on its rank. Move it to rank {ranks[i.stage]}."
                )
    return ranks
