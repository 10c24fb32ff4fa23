"""The update of offloaded state: masters and moments are brought to the host one sub-group at a time.

    sub-group           0       1       2       3
    read                |--0--| |--1--| |--2--| |--3--|
    update                      |--0--| |--1--| |--2--| |--3--|
    write                               |--0--| |--1--| |--2--| |--3--|

State in host memory is updated in place: the same code then copies nothing. (Ren et al. 2021,
arXiv:2101.06840; on disks Rajbhandari et al. 2021, arXiv:2104.07857, section 5.)

A *sub-group* is a run of pieces in one bucket, so that it is one interval of every flat buffer that holds a
part of it (weights, gradients, moments): see sub_groups.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from ..mpu.group import DONE, Waitable
from ..mpu.param_spec import ParamSpec
from ..optim import MakeOptimizer, ParamGroup
from .arrays import Array, Tier
from .buckets import GradientStore
from .memory_tier import Buffers
from .offloaded import OffloadedLeaves
from .param_store import ParameterStore
from .parameter_norms import ParameterNorms
from .shard_optimizer import Leaf, Rates, ShardOptimizer, make_leaf
from .sub_groups import SubGroupPlan

HOST = torch.device("cpu")
MASTER = "master"
GRAD = "grad"
LOW = "low"
# Sub-groups in buffers at a time: one being read, one updated, one written.
IN_FLIGHT = 3


class Each:
    """Several reads or writes as one. Waiting again returns at once."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Waitable]):
        self._works = works

    def wait(self) -> None:
        """Wait for each, in order."""
        works = self._works
        self._works = ()
        for work in works:
            work.wait()


@dataclass(frozen=True)
class Staged:
    """The state of a sub-group on the host, or, until the end of `work`, on the way to it."""

    tensors: Mapping[str, torch.Tensor]
    work: Waitable


class SubGroup:
    """Leaves that are updated together. arrays: all that the update reads or writes, flat, each in its tier:

    master  fp32 weights     grad  read only, converted to fp32     low  16-bit weights, written only
    and the optimizer's own state under its own names
    """

    def __init__(
        self,
        plan: SubGroupPlan,
        specs: Sequence[ParamSpec],
        arrays: Mapping[str, Array],
        tier: Tier,
        param_groups: Sequence[ParamGroup],
        buffers: Buffers,
    ):
        self.arrays = dict(arrays)
        self.leaves: list[Leaf] = []
        self._state_names: list[str] = []
        self._spans: list[tuple[int, int]] = []
        staged = self.stage(buffers)
        staged.work.wait()
        at = 0
        for piece in plan.pieces:
            stop = at + piece.padded_numel
            self.leaves.append(
                make_leaf(specs[piece.slot], piece, staged.tensors[MASTER][at:stop])
            )
            self._spans.append((at, stop))
            at = stop
        self._point_to(staged.tensors)
        self.optimizer = ShardOptimizer(param_groups, self.leaves)
        self._move_state(tier)
        self.rest()

    def stage(self, buffers: Buffers, without: Sequence[str] = ()) -> Staged:
        """Begin to copy to the host the state that is not there. without: arrays that are not needed."""
        tensors: dict[str, torch.Tensor] = {}
        works: list[Waitable] = []
        for name, array in self.arrays.items():
            if name in without:
                continue
            dtype = torch.float32 if name == GRAD else array.tensor.dtype
            if array.is_at(HOST, dtype):
                tensors[name] = array.tensor
                continue
            buffer = buffers.get(name, array.padded_numel, dtype)
            tensors[name] = buffer[: array.tensor.numel()]
            if name != LOW:
                works.append(array.read(buffer))
        return Staged(tensors, Each(works))

    def update(
        self, staged: Staged, lr: Rates, weight_decay: float, divisor: float
    ) -> None:
        """Update the sub-group on the host. See `ShardOptimizer.step`."""
        staged.work.wait()
        self._point_to(staged.tensors)
        self.optimizer.step(lr, weight_decay, divisor)
        if LOW in staged.tensors and not all(
            self.optimizer.writes_low(leaf) for leaf in self.leaves
        ):
            staged.tensors[LOW].copy_(staged.tensors[MASTER])

    def begin(
        self, staged: Staged, numbers: tuple[Rates, float, float], norms: ParameterNorms
    ) -> dict[MakeOptimizer, torch.Tensor]:
        """Make the first half of an update. See `ShardOptimizer.begin`."""
        staged.work.wait()
        self._point_to(staged.tensors)
        return self.optimizer.begin(*numbers, norms)

    def finish(
        self,
        staged: Staged,
        reduced: Mapping[MakeOptimizer, torch.Tensor],
        norms: ParameterNorms,
    ) -> None:
        """The second half. See `ShardOptimizer.finish`."""
        staged.work.wait()
        self._point_to(staged.tensors)
        self.optimizer.finish(reduced, norms)
        if LOW in staged.tensors:
            staged.tensors[LOW].copy_(staged.tensors[MASTER])

    def write(
        self, staged: Staged, buffers: Buffers, without: Sequence[str] = ()
    ) -> Waitable:
        """Begin to write what the update changed to its tiers. without: arrays that it did not change."""
        self.rest()
        return Each(
            [
                array.write(buffers.get(name, array.padded_numel, array.tensor.dtype))
                for name, array in self.arrays.items()
                if name not in (GRAD, *without)
                and staged.tensors[name] is not array.tensor
            ]
        )

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the arrays of the optimizer's own state."""
        return tuple(self._state_names)

    def rest(self) -> None:
        """Between updates the leaves are the tensors of the tiers."""
        self._point_to(
            {name: array.tensor for name, array in self.arrays.items() if name != GRAD}
        )

    def state_bytes(self) -> tuple[int, int]:
        """(bytes of masters, bytes of the optimizer's own state), in addition to the model's weights."""
        own = sum(
            array.tensor.nbytes
            for name, array in self.arrays.items()
            if name not in (MASTER, GRAD, LOW)
        )
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
                self.optimizer.place_state(leaf, name, tensors[name][start:stop])

    def _move_state(self, tier: Tier) -> None:
        """The optimizer's new state moves to its tier."""
        states = chain.from_iterable(map(self.optimizer.state_of, self.leaves))
        self._state_names = list(dict.fromkeys(name for name, _ in states))
        numel = self.arrays[MASTER].tensor.numel()
        made = tier.arrays([numel] * len(self._state_names), torch.float32)
        # The arrays are zeros, which the state is before the first update.
        self.arrays |= zip(self._state_names, made)


class OffloadedUpdate(OffloadedLeaves):
    """Updates sub-groups one after the other, while the next is read and the last is written."""

    groups: list[SubGroup]

    def __init__(self, page_locked: bool = False):
        self.groups = []
        self._buffers = [Buffers(page_locked) for _ in range(IN_FLIGHT)]

    @property
    def buffers(self) -> Buffers:
        """The buffers for a sub-group that is processed alone."""
        return self._buffers[0]

    @property
    def working_bytes(self) -> int:
        return sum(buffers.nbytes for buffers in self._buffers)

    def optimizers(self) -> dict[int, ShardOptimizer]:
        found: dict[int, ShardOptimizer] = {}
        for group in self.groups:
            found |= {id(leaf.tensor): group.optimizer for leaf in group.leaves}
        return found

    def step(self, lr: Rates, weight_decay: float, divisor: float) -> None:
        for group, staged in self._in_turn():
            group.update(staged, lr, weight_decay, divisor)

    def begin(
        self, numbers: tuple[Rates, float, float], norms: ParameterNorms
    ) -> Iterator[dict[MakeOptimizer, torch.Tensor]]:
        """Yield the first half of an update; the squares of each sub-group. norms: on the host."""
        for group, staged in self._in_turn(unread=(LOW,), unwritten=(LOW,)):
            yield group.begin(staged, numbers, norms)

    def finish(
        self, reduced: Mapping[MakeOptimizer, torch.Tensor], norms: ParameterNorms
    ) -> None:
        """The second half: moments are read again, and weights are written. reduced, norms: on the host."""
        states = tuple(
            dict.fromkeys(name for group in self.groups for name in group.state_names)
        )
        for group, staged in self._in_turn(unread=(GRAD,), unwritten=states):
            group.finish(staged, reduced, norms)

    def add(
        self,
        plan: SubGroupPlan,
        store: ParameterStore,
        buckets: GradientStore,
        specs: Sequence[ParamSpec],
        param_groups: Sequence[ParamGroup],
        tier: Tier,
    ) -> SubGroup:
        """Make a sub-group whose masters and moments are in a tier. specs: by slot."""
        first = plan.pieces[0]
        numel = plan.numel
        weights = store.array_of(first, numel)
        start = buckets.start_of(first)
        arrays = {MASTER: weights, GRAD: Array(buckets.flat[start : start + numel])}
        if weights.tensor.dtype != torch.float32:
            [arrays[MASTER]] = tier.arrays([numel], torch.float32)
            arrays[LOW] = weights
            buffer = self.buffers.get(
                MASTER, arrays[MASTER].padded_numel, torch.float32
            )
            buffer[:numel].copy_(weights.tensor)
            arrays[MASTER].write(buffer).wait()
        group = SubGroup(plan, specs, arrays, tier, param_groups, self.buffers)
        self.groups.append(group)
        return group

    def _in_turn(
        self, unread: Sequence[str] = (), unwritten: Sequence[str] = ()
    ) -> Iterator[tuple[SubGroup, Staged]]:
        """Yield the sub-groups, each to be updated before the next is asked for."""
        writing: list[Waitable] = [DONE] * IN_FLIGHT

        def stage(k: int) -> Staged:
            writing[k % IN_FLIGHT].wait()
            return self.groups[k].stage(self._buffers[k % IN_FLIGHT], unread)

        # The next sub-group is staged while one is updated.
        ahead = [stage(0)] if self.groups else []
        for k, group in enumerate(self.groups):
            staged = ahead.pop()
            if k + 1 < len(self.groups):
                ahead.append(stage(k + 1))
            yield group, staged
            writing[k % IN_FLIGHT] = group.write(
                staged, self._buffers[k % IN_FLIGHT], unwritten
            )
        for work in writing:
            work.wait()


class UpdateInHalves:
    """An update whose norms are sums over leaves on the device and over sub-groups, which do not fit into
    memory together: all moments, one reduction of the norms, then all weights. State on a disk is read twice.

    norms, host_norms: of the same parameters, on the device and on the host
    """

    def __init__(
        self,
        resident: ShardOptimizer,
        offloaded: OffloadedUpdate,
        norms: ParameterNorms,
        host_norms: ParameterNorms,
    ):
        self._resident = resident
        self._offloaded = offloaded
        self._norms = norms
        self._host_norms = host_norms

    def step(self, lr: Rates, weight_decay: float, divisor: float) -> None:
        """Update all leaves, with the numbers of `ShardOptimizer.step`. Collective."""
        # The resident part has all optimizers that need norms.
        numbers = lr, weight_decay, divisor
        squares = self._resident.begin(*numbers, self._norms)
        for found in self._offloaded.begin(numbers, self._host_norms):
            for maker, of_maker in found.items():
                squares[maker] += of_maker.to(squares[maker].device)
        reduced = {
            maker: self._norms.reduced(total) for maker, total in squares.items()
        }
        self._resident.finish(reduced, self._norms)
        self._offloaded.finish(
            {maker: norms.to(HOST) for maker, norms in reduced.items()},
            self._host_norms,
        )
