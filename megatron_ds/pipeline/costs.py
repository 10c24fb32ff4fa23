"""`StageCosts`: times of the computations of each stage and of the transfers between stages, measured or
estimated.
"""

from dataclasses import dataclass, fields

from ..errors import ScheduleError
from .instruction import Instruction, Op

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
                    f"{field.name}={value} is not a cost: times are finite and not negative. Use a number "
                    "of 0 or more, or a tuple with one for each stage."
                )
            if isinstance(value, tuple):
                lengths[field.name] = len(value)
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{n} stages for {name}" for name, n in lengths.items())
            raise ScheduleError(
                f"costs are of {counts}, but a pipeline has one number of stages. Use one number "
                "for all stages, or tuples of the same length."
            )

    def of(self, instruction: Instruction) -> float:
        """A cost function for the simulator: instruction → time.

        Operations that are not listed above take none.
        """
        op, stage = instruction.op, instruction.stage
        if op is Op.B:
            return self._at("input_grad", stage) + self._at("weight_grad", stage)
        return self._at(KIND[op], stage) if op in KIND else 0

    def _at(self, kind: str, stage: int) -> float:
        value = getattr(self, kind)
        if not isinstance(value, tuple):
            return value
        if stage >= len(value):
            raise ScheduleError(
                f"{kind} has costs of {len(value)} stages, but the schedule computes stage {stage}. "
                "Use one for each stage, or one number for all."
            )
        return value[stage]


KIND = {
    Op.F: "forward",
    Op.I: "input_grad",
    Op.W: "weight_grad",
    Op.SEND_ACT: "transfer",
    Op.SEND_GRAD: "transfer",
}
