"""What a pipeline rank can be told to do. A schedule is data: one program of instructions per pipeline rank.

Schedules are made of F, B, I and W only; `passes.py` adds what follows from them (sends, receives, reductions).
"""

from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    F = "F"                  # forward of one micro-batch through one stage
    B = "B"                  # its whole backward
    I = "I"                  # noqa: E741  backward, gradient of the input only      (Qi et al. 2024 call it B)
    W = "W"                  # backward, gradient of the weights only
    SEND_ACT = "SA"
    RECV_ACT = "RA"
    SEND_GRAD = "SG"
    RECV_GRAD = "RG"
    GATHER = "GATHER"        # make the stage's parameters whole            (ZeRO stage 3)
    RELEASE = "RELEASE"      # drop what GATHER brought
    REDUCE = "REDUCE"        # the next backward of this stage completes its gradients: reduce buckets as they fill
    TIE = "TIE"              # sum the gradients of parameters that live on several stages

    __hash__ = str.__hash__  # Enum's own is a Python function; programs of half a million instructions are looked up by op


class Instruction(NamedTuple):
    """One step of a program. (A tuple, because half a million of them are made, compared and looked up for 64 stages.)

    stage       global stage = chunk * pipeline_size + pipeline_rank
    microbatch  None where the operation is not about one micro-batch (GATHER, RELEASE, REDUCE, TIE)
    """

    op: Op
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.op}{'' if self.microbatch is None else self.microbatch}@{self.stage}"


Program = tuple[Instruction, ...]
Schedule = tuple[Program, ...]      # one program per pipeline rank
