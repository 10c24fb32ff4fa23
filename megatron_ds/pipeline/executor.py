"""`Executor`: runs the program of one pipeline rank, one loop over a table of handlers, for any schedule.

Tensors between stages are in two tables, keyed by (stage that consumes it, micro-batch). An entry is a
tensor, made by a stage of this rank, or a posted receive; the computation that needs it waits for it, as late
as possible. Neighbouring stages on one rank so pass tensors without a transfer, made contiguous as a transfer
would make them: strides decide the order in which sums are taken, and with it the last bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..batch.batch import Batch
from ..batch.ledger import Entry
from ..errors import CommunicationError, ScheduleError
from ..host.places import writer
from ..mpu.own_channels import OwnChannels, Posted
from .instruction import Instruction, Op, Program
from .passes import forward_only
from .stage import Stage

if TYPE_CHECKING:
    from .device_place import DevicePlace, Moments
    from .timeline import Timeline

Handler = Callable[[Instruction], None]
Key = tuple[int, int | None]  # (stage, micro-batch)
DESCRIPTIONS = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input half of the backward",
    Op.W: "weight half of the backward",
    Op.SEND_ACT: "sending the activation",
    Op.RECV_ACT: "posting the receive of the activation",
    Op.SEND_GRAD: "sending the gradient",
    Op.RECV_GRAD: "posting the receive of the gradient",
    Op.GATHER: "gathering parameters",
    Op.RELEASE: "releasing parameters",
    Op.REDUCE: "reducing gradients",
    Op.TIE: "summing tied gradients",
}


class Executor:
    """Runs steps of one pipeline rank.

    program           the lowered program of this rank; or a function from the number of micro-batches to it,
                      called once per number, for runs whose number changes (ramp, evaluation)
    stages            the stages of this rank, by global number
    stage_rank        global stage → pipeline rank
    activation_shape  micro-batch → shape of the hidden states between stages, which have `dtype`
    hooks             handlers of REDUCE, TIE, GATHER and RELEASE, called with the stage
    prepare           micro-batches → those that `run` trains on, unless None; may be set between steps
    timeline          records start and end of each instruction, unless None; may be set between steps
    moments           (number of micro-batches, forward only) → the start of each instruction of this rank in the
                      simulated schedule, unless None; may be set once: by these the launcher compares devices
    ranges            makes the context in which the instruction of a name runs, for profilers, unless None; may be
                      set between steps
    """

    def __init__(
        self,
        program: Program | Callable[[int], Program],
        stages: Mapping[int, Stage],
        channels: OwnChannels,
        stage_rank: Callable[[int], int],
        activation_shape: Callable[[Batch], tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        hooks: Mapping[Op, Callable[[int], None]] | None = None,
    ):
        self.stages = stages
        self.channels = channels
        self.stage_rank = stage_rank
        self.activation_shape = activation_shape
        self.dtype = dtype
        self.device = device
        # One handler for each operation; the caller adds those of collectives.
        self._handlers: dict[Op, Handler] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward,
            Op.W: self._backward_weights,
            Op.SEND_ACT: self._send,
            Op.RECV_ACT: self._receive,
            Op.SEND_GRAD: self._send,
            Op.RECV_GRAD: self._receive,
            **{op: _with_stage(hook) for op, hook in (hooks or {}).items()},
        }
        # State of the batch that is processed now, by (stage, micro-batch).
        self._activations: dict[Key, Tensor | Posted] = {}
        self._gradients: dict[Key, Tensor | Posted] = {}
        self._losses: dict[int, Any] = {}
        self._microbatches: Sequence[Batch] = ()
        self._shapes: list[
            tuple[int, ...]
        ] = []  # of the hidden states between stages, by micro-batch
        self._current: Instruction | None = None
        self._place = _place_on(device)
        self._scale = 1.0
        self.prepare: Callable[[Sequence[Batch]], Sequence[Batch]] | None = None
        self.moments: Moments | None = None
        self.timeline: Timeline | None = None
        self.ranges: Callable[[str], AbstractContextManager] | None = None
        # Programs by number of micro-batches; a fixed one is compiled at once.
        self._plan = program
        self._steps: dict[tuple[int, bool], list[tuple[Handler, Instruction]]] = {}
        if not callable(program):
            self._compile(program, program_length(program))

    def run(self, microbatches: Sequence[Batch], scale: float = 1.0) -> list[Any]:
        """Forward and backward of all micro-batches; gradients are those of scale * sum of the objectives.

        Returns the losses in order on the rank of the last stage, [] elsewhere. All sends are done on return.
        """
        self._scale = scale
        if self.prepare is not None:
            microbatches = self.prepare(microbatches)
        losses = self._execute(microbatches, forward=False)
        for stage in self.stages.values():
            stage.check_empty()
        return losses

    def forward(self, microbatches: Sequence[Batch]) -> list[Any]:
        """Return the losses, or outputs of a last stage without loss, without gradients.

        Batches with training=False are evaluated without dropout.
        """
        with torch.no_grad():
            return self._execute(microbatches, forward=True)

    @contextmanager
    def place_named(self) -> Iterator[None]:
        """Inside, a CommunicationError names the instruction at which the device is. On a GPU the host waits for
        it only behind the step."""
        try:
            yield
        except CommunicationError as error:
            if self._place is None:
                raise
            raise CommunicationError(f"{self._device_place()}: {error}") from error

    @property
    def entries(self) -> list[Entry]:
        """Loss terms and metrics that layers of this rank added in the last `run` or `forward`, detached."""
        return [entry for stage in self.stages.values() for entry in stage.entries]

    @property
    def rank(self) -> int:
        """Pipeline rank of this executor."""
        return self.stage_rank(min(self.stages))

    def _execute(self, microbatches: Sequence[Batch], forward: bool) -> list[Any]:
        steps = self._steps.get((len(microbatches), forward)) or self._steps_for(
            len(microbatches), forward
        )
        # What an earlier batch left, an interrupted one included, is dropped.
        self._microbatches = microbatches
        self._losses = {}
        self._current = None
        if self._place is not None:
            self._place.begin(self.moments, len(microbatches), forward)
        for stage in self.stages.values():
            stage.begin_step()
        try:
            self._shapes = [self.activation_shape(batch) for batch in microbatches]
            self.channels.announce(self._shapes, self.dtype)
            self._run_steps(steps)
            self.channels.drain()
        # Every error names the instruction at which this rank was.
        except BaseException as error:
            where = self._where()
            self._clear()
            # Its message may be the only one of this rank in the logs.
            if type(error) is CommunicationError:
                raise CommunicationError(f"{where}: {error}") from error
            error.add_note(where)
            raise
        self._microbatches = ()
        assert not self._activations and not self._gradients, (
            f"unconsumed activations {list(self._activations)}, gradients {list(self._gradients)}"
        )
        return [loss for _, loss in sorted(self._losses.items())]

    def _run_steps(self, steps: Sequence[tuple[Handler, Instruction]]) -> None:
        places = writer()
        if self.ranges is not None:
            steps = [(partial(self._in_range, handler), i) for handler, i in steps]
        if self.timeline is None:
            for handler, self._current in steps:
                if places is not None:
                    places.instruction(*self._current)
                handler(self._current)
                if self._place is not None:
                    self._place.add(self._current)
            return
        # Inputs are waited for, so that they are not in the recorded times.
        for handler, self._current in steps:
            if places is not None:
                places.instruction(*self._current)
            self._await(self._current)
            start = self.timeline.now()
            handler(self._current)
            self.timeline.add(self._current, start)
            if self._place is not None:
                self._place.add(self._current)

    def _in_range(self, handler: Handler, i: Instruction) -> None:
        """Run an instruction in a range that has its name."""
        assert self.ranges is not None, "`run` chooses this way only with it"
        with self.ranges(str(i)):
            handler(i)

    def _await(self, i: Instruction) -> None:
        """Wait for the input of a computation before its start is recorded."""
        waiting = {
            Op.F: self._activations,
            Op.B: self._gradients,
            Op.I: self._gradients,
        }.get(i.op, {})
        if (key := (i.stage, i.microbatch)) in waiting:
            waiting[key] = _arrived(waiting[key])

    def _where(self) -> str:
        """Return the current instruction, for messages."""
        i = self._current
        step = f"in a step of {len(self._microbatches)} micro-batches"
        if i is None:
            return f"pipeline rank {self.rank} was about to begin the first instruction {step}"
        where = f"pipeline rank {self.rank} was executing {_described(i)} {step}"
        return where if self._place is None else f"{where}; {self._device_place()}"

    def _device_place(self) -> str:
        """Return the instruction at which the device is, for messages."""
        assert self._place is not None, "`_where` asks only with it"
        done, launched, i = self._place.current()
        at = (
            "behind them: at reductions of gradients, their norm, or metrics"
            if i is None
            else f"at {_described(i)}"
        )
        return f"the device of pipeline rank {self.rank} has done {done} of {launched} instructions and is {at}"

    # Handlers; each takes the instruction alone.

    def _forward(self, i: Instruction) -> None:
        stage = self.stages[i.stage]
        k = i.k
        x = None if stage.is_first else _arrived(self._activations.pop((i.stage, k)))
        output = stage.forward(k, self._microbatches[k], x, self._scale)
        if stage.is_last:
            self._losses[k] = output
        else:
            self._check(i, output)
            self._activations[i.stage + 1, k] = output.contiguous()

    def _backward(self, i: Instruction) -> None:
        stage = self.stages[i.stage]
        k = i.k
        backward = stage.backward if i.op is Op.B else stage.backward_input
        # No local variable holds the gradient of the output, which the backward may free.
        grad = backward(
            k, None if stage.is_last else _arrived(self._gradients.pop((i.stage, k)))
        )
        if not stage.is_first:
            assert grad is not None, "only the first stage returns none"
            self._gradients[i.stage - 1, k] = grad.contiguous()

    def _backward_weights(self, i: Instruction) -> None:
        self.stages[i.stage].backward_weights(i.k)

    def _send(self, i: Instruction) -> None:
        kind, tensors, to = (
            ("act", self._activations, i.stage + 1)
            if i.op is Op.SEND_ACT
            else ("grad", self._gradients, i.stage - 1)
        )
        tensor = _arrived(tensors.pop((to, i.microbatch)))
        self.channels.send(kind, self.stage_rank(to), tensor)

    def _receive(self, i: Instruction) -> None:
        kind, tensors, source = (
            ("act", self._activations, i.stage - 1)
            if i.op is Op.RECV_ACT
            else ("grad", self._gradients, i.stage + 1)
        )
        tensors[i.stage, i.microbatch] = self.channels.recv(
            kind,
            self.stage_rank(source),
            self._shapes[i.k],
            self.dtype,
            self.device,
        )

    def _check(self, i: Instruction, output: Tensor) -> None:
        """Raise CommunicationError unless `output` has the shape and dtype that the next stage expects."""
        expected = self._shapes[i.k]
        if output.shape != expected or output.dtype != self.dtype:
            receiver = self.stage_rank(i.stage + 1)
            raise CommunicationError(
                f"stage {i.stage} on pipeline rank {self.rank} computed "
                f"{list(output.shape)} {_name(output.dtype)} for micro-batch "
                f"{i.microbatch}, but stage {i.stage + 1} on pipeline rank {receiver} "
                f"expects {list(expected)} {_name(self.dtype)}. A layer of stage "
                f"{i.stage} changes the shape or the dtype of the hidden states: all "
                "layers but the last must keep both."
            )

    # Programs → steps.

    def _steps_for(
        self, num_microbatches: int, forward: bool
    ) -> list[tuple[Handler, Instruction]]:
        if not callable(self._plan):
            legal = program_length(self._plan)
            raise ScheduleError(
                f"this executor received {num_microbatches} micro-batches, but its program "
                f"is for {legal}. Pass {legal}, or make the executor with a function from "
                "the number of micro-batches to the program."
            )
        self._compile(self._plan(num_microbatches), num_microbatches)
        return self._steps[num_microbatches, forward]

    def _compile(self, program: Program, num_microbatches: int) -> None:
        if program_length(program) != num_microbatches:
            raise ScheduleError(
                f"the program for a step of {num_microbatches} micro-batches computes "
                f"{program_length(program)}. Make it for exactly {num_microbatches}."
            )
        for i in program:
            if i.op not in self._handlers:
                raise ScheduleError(
                    f"{i}: this executor has no handler for {i.op.name}. Handlers: "
                    f"{', '.join(op.name for op in self._handlers)}; "
                    "REDUCE, TIE, GATHER and RELEASE need a hook."
                )
            if i.stage not in self.stages:
                raise ScheduleError(
                    f"{i} is for stage {i.stage}, which is not on this rank. Stages here: "
                    f"{sorted(self.stages)}."
                )
        steps = lambda instructions: [(self._handlers[i.op], i) for i in instructions]
        self._steps[num_microbatches, False] = steps(program)
        self._steps[num_microbatches, True] = steps(forward_only((program,))[0])

    def _clear(self) -> None:
        """Free the activations after a failure, for the caller that handles it."""
        self._activations.clear()
        self._gradients.clear()
        self._losses = {}
        self._microbatches = ()
        for stage in self.stages.values():
            stage.clear()


def program_length(program: Program) -> int:
    """Number of micro-batches that a program computes."""
    return 1 + max((i.k for i in program if i.op is Op.F), default=-1)


def _described(i: Instruction) -> str:
    microbatch = "" if i.microbatch is None else f" of micro-batch {i.microbatch}"
    return f"{i} ({DESCRIPTIONS[i.op]}{microbatch} at stage {i.stage})"


def _place_on(device: torch.device) -> "DevicePlace | None":
    """Return the place of a GPU, whose instructions the host launches ahead."""
    if device.type != "cuda":
        return None
    from .device_place import DevicePlace

    return DevicePlace()


def _arrived(entry: Tensor | Posted) -> Tensor:
    return entry if isinstance(entry, Tensor) else entry.wait()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _with_stage(hook: Callable[[int], None]) -> Handler:
    return lambda instruction: hook(instruction.stage)
