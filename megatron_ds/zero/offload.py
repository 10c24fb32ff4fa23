"""The update of offloaded state: masters and moments are brought to the host a sub-group at a time.

    sub-group           0       1       2       3
    read                |--0--| |--1--| |--2--| |--3--|
    update                      |--0--| |--1--| |--2--| |--3--|
    write                               |--0--| |--1--| |--2--| |--3--|

What lies in the host's memory is updated where it lies; the same code then moves nothing. (Ren et al. 2021,
arXiv:2101.06840; on disks Rajbhandari et al. 2021, arXiv:2104.07857, section 5.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..mpu.group import Work
from ..mpu.param_spec import ParamSpec
from .shard_optimizer import InnerOptimizer, Leaf, MakeOptimizer
from .sub_groups import SubGroupPlan
from .tiers import Array, Buffers, Home

HOST = torch.device("cpu")
MASTER, GRAD, LOW = "master", "grad", "low"
IN_FLIGHT = 3       # sub-groups in buffers at a time: one being read, one updated, one written


@dataclass(frozen=True)
class Offload:
    """Where state goes. optimizer: home of masters and moments, None: the device; parameters: of the shards of stage 3.

    ratio              part of the optimizer state that goes; the rest stays on the device and is updated there
    sub_group_elements brought to the host at a time
    """

    optimizer: Home | None = None
    parameters: Home | None = None
    ratio: float = 1.0
    sub_group_elements: int = 4 * 2**20


@dataclass(frozen=True)
class Staged:
    """A sub-group's state on the host, or on its way there."""

    tensors: Mapping[str, torch.Tensor]
    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class SubGroup:
    """Leaves that are updated together. `arrays`: all that the update reads or writes, flat, each in its home.

    master  fp32 weights     grad  read only, converted to fp32     low  the model's 16-bit weights, written only
    and the optimizer's own state under its own names
    """

    def __init__(self, plan: SubGroupPlan, specs: Sequence[ParamSpec], arrays: Mapping[str, Array], home: Home,
                 make_optimizer: MakeOptimizer, buffers: Buffers):
        self.arrays = dict(arrays)
        self.leaves: list[Leaf] = []
        self._state_names: list[str] = []
        self._spans: list[tuple[int, int]] = []
        staged = self.stage(buffers)
        staged.wait()
        at = 0
        for piece in plan.pieces:
            stop = at + piece.padded_numel
            tensor = nn.Parameter(staged.tensors[MASTER][at:stop])
            tensor.spec, tensor.piece, tensor.low = specs[piece.slot], piece, None
            self.leaves.append(Leaf(tensor.spec, piece, tensor))
            self._spans.append((at, stop))
            at = stop
        self._point_to(staged.tensors)
        self.inner = InnerOptimizer(make_optimizer, self.leaves)
        self._adopt_state(home)
        self.rest()

    def stage(self, buffers: Buffers) -> Staged:
        """Begin to bring everything to the host that is not there."""
        tensors, works = {}, []
        for name, array in self.arrays.items():
            dtype = torch.float32 if name == GRAD else array.tensor.dtype
            if array.is_at(HOST, dtype):
                tensors[name] = array.tensor
                continue
            buffer = buffers.get(name, array.padded_numel, dtype)
            tensors[name] = buffer[:array.tensor.numel()]
            if name != LOW:
                works.append(array.read(buffer))
        return Staged(tensors, works)

    def update(self, staged: Staged, lr: float | None, weight_decay: float, divisor: float) -> None:
        staged.wait()
        self._point_to(staged.tensors)
        self.inner.step(lr, weight_decay, divisor)
        if LOW in staged.tensors and not self.inner.writes_low:
            staged.tensors[LOW].copy_(staged.tensors[MASTER])

    def write(self, staged: Staged, buffers: Buffers) -> list[Work]:
        """Begin to send home what the update changed."""
        self.rest()
        return [array.write(buffers.get(name, array.padded_numel, array.tensor.dtype)) for name, array in self.arrays.items()
                if name != GRAD and staged.tensors[name] is not array.tensor]

    def rest(self) -> None:
        """The leaves are what lies in the homes."""
        self._point_to({name: array.tensor for name, array in self.arrays.items() if name != GRAD})

    def state_bytes(self) -> tuple[int, int]:
        """(of masters, of the optimizer's own state) beside the model's weights."""
        own = sum(array.tensor.nbytes for name, array in self.arrays.items() if name not in (MASTER, GRAD, LOW))
        return (self.arrays[MASTER].tensor.nbytes if LOW in self.arrays else 0), own

    def _point_to(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for leaf, (start, stop) in zip(self.leaves, self._spans):
            p = leaf.tensor
            p.grad = None
            p.data = tensors[MASTER][start:stop]
            p.low = tensors[LOW][start:stop] if LOW in tensors else None
            if GRAD in tensors:
                p.grad = tensors[GRAD][start:stop]
            for name in self._state_names:
                self.inner.place_state(leaf, name, tensors[name][start:stop])

    def _adopt_state(self, home: Home) -> None:
        """The optimizer's new state moves to its home."""
        self._state_names = list(dict.fromkeys(name for leaf in self.leaves for name, _ in self.inner.state_of(leaf)))
        numel = self.arrays[MASTER].tensor.numel()
        made = home.arrays([numel] * len(self._state_names), torch.float32)
        self.arrays |= zip(self._state_names, made)         # zeros, as the state is before the first update


class OffloadedUpdate:
    """Updates sub-groups one after the other, reading the next and writing the last meanwhile."""

    def __init__(self, pin: bool = False):
        self.groups: list[SubGroup] = []
        self._buffers = [Buffers(pin) for _ in range(IN_FLIGHT)]

    @property
    def buffers(self) -> Buffers:
        """For a sub-group at work alone."""
        return self._buffers[0]

    @property
    def working_bytes(self) -> int:
        return sum(buffers.nbytes for buffers in self._buffers)

    def step(self, lr: float | None, weight_decay: float, divisor: float) -> None:
        writing: list[list[Work]] = [[] for _ in self._buffers]

        def stage(k: int) -> Staged:
            wait_for(writing[k % IN_FLIGHT])
            return self.groups[k].stage(self._buffers[k % IN_FLIGHT])

        ahead = stage(0) if self.groups else None
        for k, group in enumerate(self.groups):
            staged, ahead = ahead, stage(k + 1) if k + 1 < len(self.groups) else None
            group.update(staged, lr, weight_decay, divisor)
            writing[k % IN_FLIGHT] = group.write(staged, self._buffers[k % IN_FLIGHT])
        for works in writing:
            wait_for(works)


def wait_for(works: list[Work]) -> None:
    while works:
        works.pop().wait()
