"""DeepSpeed's names for the instructions of a pipeline stage, `deepspeed.runtime.pipe.schedule`, as data: an
engine has one stage, and this package's own pipelines have schedules of their own (megatron_ds.pipeline).

A schedule is a clock. At each tick a stage works on one micro-batch or on none (F forward, B backward), after
it has passed on what it computed in the tick before and has received what it needs now. With s = stage,
S = stages, M = micro-batches:

    training     F of m at tick s + 2 m, B of m at tick 2 S - 1 - s + 2 m,   2 (M + S - 1) ticks     (1F1B)
    evaluation   F of m at tick s + m,                                       M + S - 1 ticks

    training, S = 2, M = 3     tick     0   1   2   3   4   5   6   7
                               stage 0  F0  .   F1  B0  F2  B1  .   B2
                               stage 1  .   F0  B0  F1  B1  F2  B2  .

Narayanan et al. 2019 (PipeDream, SOSP), section 3.2, for 1F1B.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any


# ---------------------------------------------------------------------------------------- instructions
class PipeInstruction:
    """What a stage does. Keywords become attributes."""

    def __init__(self, **kwargs: Any):
        self.name = type(self).__name__
        self.kwargs = kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.kwargs.items())
        return f"{self.name}({arguments})"


class OptimizerStep(PipeInstruction):
    """Update the weights and zero the gradients."""


class ReduceGrads(PipeInstruction):
    """Reduce gradients over the data-parallel ranks."""


class ReduceTiedGrads(PipeInstruction):
    """Reduce gradients of parameters that several stages hold."""


class BufferOpInstruction(PipeInstruction):
    """An instruction about the buffer `buffer_id`, which holds one micro-batch."""

    def __init__(self, buffer_id: int, **kwargs: Any):
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Read the next micro-batch of the data into the buffer."""


class ForwardPass(BufferOpInstruction):
    """Compute the forward of the buffer."""


class BackwardPass(BufferOpInstruction):
    """Compute the backward of the buffer."""


class SendActivation(BufferOpInstruction):
    """Send the output of the buffer to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive the input of the buffer from the stage before."""


class SendGrad(BufferOpInstruction):
    """Send the gradient of the buffer's input to the stage before."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradient of the buffer's output from the next stage."""


# ------------------------------------------------------------------------------------------- schedules
Needs = list[tuple[type[BufferOpInstruction], int | None]]
"""Exchanges with neighbours, and the micro-batch of each; None: there is none at this tick."""


class PipeSchedule(ABC):
    """The instructions of one stage, tick by tick: iterate over it, or over `steps()`."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int):
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1
        self._ticks: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Return the instructions of each tick."""

    def num_pipe_buffers(self) -> int:
        """Number of micro-batches that the stage holds at a time."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """Position of the stage in the pipeline."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of a step."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Whether no stage is before this one."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether no stage is behind this one."""
        return self.stage_id == self.stages - 1

    def __iter__(self) -> "PipeSchedule":
        self._ticks = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self._ticks is None:
            self._ticks = self.steps()
        return next(self._ticks)

    # What the subclasses share.
    def _buffer(self, micro_batch: int) -> int:
        return micro_batch % self.num_pipe_buffers()

    def _micro_batch(self, tick: int, first: int, every: int) -> int | None:
        """Return the micro-batch of a tick, if micro-batch 0 has tick `first` and each next one `every` ticks
        later.
        """
        m, rest = divmod(tick - first, every)
        return m if not rest and 0 <= m < self.micro_batches else None

    def _loads(self, m: int) -> list[PipeInstruction]:
        """The first stage reads inputs, the last one labels."""
        is_outer = self.is_first_stage or self.is_last_stage
        return [LoadMicroBatch(self._buffer(m))] if is_outer else []


class TrainSchedule(PipeSchedule):
    """1F1B, with the update behind the last backward."""

    def num_pipe_buffers(self) -> int:
        """Return the micro-batches between a forward and its backward, at least two."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def steps(self) -> Iterator[list[PipeInstruction]]:
        ticks = 2 * (self.micro_batches + self.stages - 1)
        for tick in range(ticks):
            commands = self._exchanges(tick)
            if (m := self._forward(tick)) is not None:
                commands += [*self._loads(m), ForwardPass(self._buffer(m))]
            if (m := self._backward(tick)) is not None:
                commands.append(BackwardPass(self._buffer(m)))
            if tick == ticks - 1:
                commands += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield commands

    def _forward(self, tick: int) -> int | None:
        return self._micro_batch(tick, self.stage_id, 2)

    def _backward(self, tick: int) -> int | None:
        return self._micro_batch(tick, 2 * self.stages - 1 - self.stage_id, 2)

    def _exchanges(self, tick: int) -> list[PipeInstruction]:
        """Neighbours meet in one order: activations go first with the stage before, and with the next one."""
        needs: Needs = []
        if not self.is_first_stage:
            needs += [(RecvActivation, self._forward(tick))]
            needs += [(SendGrad, self._backward(tick - 1))]
        if not self.is_last_stage:
            needs += [(SendActivation, self._forward(tick - 1))]
            needs += [(RecvGrad, self._backward(tick))]
        return [kind(self._buffer(m)) for kind, m in needs if m is not None]


class InferenceSchedule(PipeSchedule):
    """Forwards alone. Stages with an even number send before they receive, the others the reverse."""

    def num_pipe_buffers(self) -> int:
        """One micro-batch that is computed, and one that is sent."""
        return 2

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for tick in range(self.micro_batches + self.stages - 1):
            now = self._micro_batch(tick, self.stage_id, 1)
            before = self._micro_batch(tick - 1, self.stage_id, 1)
            needs: Needs = []
            if not self.is_last_stage:
                needs.append((SendActivation, before))
            if not self.is_first_stage:
                needs.append((RecvActivation, now))
            if self.stage_id % 2:
                needs.reverse()
            commands: list[PipeInstruction] = [
                kind(self._buffer(m)) for kind, m in needs if m is not None
            ]
            if now is not None:
                commands += [*self._loads(now), ForwardPass(self._buffer(now))]
            yield commands


class DataParallelSchedule(PipeSchedule):
    """Training without stages: each micro-batch forward and backward, then the update."""

    def num_pipe_buffers(self) -> int:
        """One micro-batch."""
        return 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for m in range(self.micro_batches):
            commands: list[PipeInstruction] = [LoadMicroBatch(0)]
            commands += [ForwardPass(0), BackwardPass(0)]
            if m == self.micro_batches - 1:
                commands += [ReduceGrads(), OptimizerStep()]
            yield commands
