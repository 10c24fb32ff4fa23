"""`ZeroOptimizer`: from gradients to updated parameters, at every ZeRO stage, with any elementwise torch optimizer.

One step, all data-parallel ranks together (contributions arrive during backward, see buckets.py):

    begin_step   zero the gradients
    arm          before the backward of the last micro-batch: buckets reduce as they fill
    reduce_tied  after it: sum the gradients of parameters that several stages hold
    step         finish reductions → norm → overflow? skip : clip, unscale and update my pieces → gather parameters

Parameters are kept in sets, experts' apart from the others and one per dtype; each set has its Layout, ParamStore and
GradBuckets. Zeroing, norm and update each pass over the gradients once: unscaling and clipping ride along in the update.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..mpu.collectives import all_reduce_, barrier, share_memory
from ..mpu.group import Group
from ..mpu.param_spec import DATA_AXES, ParamSpec
from .buckets import Holder
from .buffer_pool import BufferPool
from .data_groups import Hierarchy
from .divergence import fingerprint, tell_divergence
from .exchange import GradCommunication
from .gathering import LayerGathering
from .layer_plan import LayerPlan, make_gathering
from .norm import num_zeros, squared_norm, sum_over_ranks
from .offload import Offload, OffloadedUpdate
from .parameter_set import ParameterSet, SetMaker
from .prediction import ZeroMemory
from .scaler import LossScaler
from .set_plan import Fact, SetPlan, plan_sets
from .settings import ShardPolicy
from .shard_optimizer import InnerOptimizer, Leaf, MakeOptimizer
from .traffic import count_gathers, in_turn, predict_traffic
from .units import Draw

CLIP_EPSILON = 1e-6      # as in Megatron: coefficient = clip / (norm + 1e-6), applied when < 1


@dataclass(frozen=True)
class DataGroups:
    """The groups that ZeRO speaks over.

    data    ranks that see different samples (or parts of samples) of the same model part: dp-cp
    expert  ranks that hold the same experts: edp
    tp      tensor-parallel ranks
    model   ranks that hold one copy of the model together: tp-pp
    tied    holders of parameters tied across pipeline stages: embd; one rank where there is nothing to tie
    inner, outer  the data ranks as a hierarchy, for the policy that needs one
    """

    data: Group
    expert: Group
    tp: Group
    model: Group
    tied: Group
    inner: Group | None = None
    outer: Group | None = None

    def sharing_memory(self) -> "DataGroups":
        """The same, where ranks that gather weights see each other's where they can. Collective over the data group."""
        name = "inner" if self.inner else "data"
        return replace(self, **{name: share_memory(getattr(self, name))})


@dataclass(frozen=True)
class StepResult:
    """grad_norm: of the unscaled gradient, before clipping; not finite when the step was skipped for overflow.

    loss_scale: the one this step's loss was multiplied by. num_zeros: zero elements of the gradient, None unless asked for.
    """

    grad_norm: float
    skipped: bool
    loss_scale: float
    num_zeros: int | None = None


@dataclass(frozen=True)
class StatePiece:
    """Elements [start, stop) of one kind of state of a flattened local (tensor-parallel) parameter.

    kind     "weight" (the fp32 value) or the optimizer's name of the tensor ("exp_avg", "exp_avg_sq", …)
    tensor   flat view: read it to save, copy into it to load
    replica  this rank's place among the `replicas` ranks of the same tensor-parallel place that hold identical content
    """

    spec: ParamSpec
    kind: str
    start: int
    stop: int
    tensor: torch.Tensor
    replica: int
    replicas: int


class ZeroOptimizer:
    """Owns parameters, gradients, masters and optimizer state. Takes over `parameters`: they become views of flat buffers.

    parameters       in forward order; each has a `.spec`. Named twice, the first place counts. One that does not require a
                     gradient is frozen: kept and saved, never updated
    uses             contributions to main_grad per backward, 1 where absent; the tied reduction is not to be counted
    make_optimizer   from parameter groups ({"params": [...], "decay": bool}) to a torch optimizer; `step` sets their "lr",
                     and "weight_decay" where decay is True, unless its lr is None
    clip_grad        largest gradient norm; 0: no clipping
    bucket_elements  of one reduction
    overlap          reduce during backward
    stage_of         pipeline stage of each parameter, SHARED where several stages of this rank use it; `arm` and
                     `reduce_tied` of a stage mean all parameters of which it is not known
    layer_plan       stage 3 only; see `gathering_of`
    grad_dtype       gradients accumulate in it
    sent_dtype       and travel in it; None: the same
    sent_divisor     divided by this while they travel; None: by the number of ranks
    device, draw     where the state shall be, and the values of parameters that are on the meta device
    offload          what of it shall be elsewhere
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, uses: Mapping[nn.Parameter, int], groups: DataGroups,
                 policy: ShardPolicy, make_optimizer: MakeOptimizer, scaler: LossScaler,
                 clip_grad: float, bucket_elements: int, overlap: bool,
                 stage_of: Mapping[nn.Parameter, int] | None = None, count_zeros: bool = False,
                 layer_plan: LayerPlan | None = None, grad_dtype: torch.dtype = torch.float32,
                 sent_dtype: torch.dtype | None = None, sent_divisor: float | None = 1.0,
                 device: torch.device | None = None, draw: Draw | None = None, offload: Offload | None = None):
        self.groups, self.policy, self.scaler = groups, policy, scaler
        self.clip_grad, self.count_zeros = clip_grad, count_zeros
        self._offload = offload = offload or Offload()
        parameters = list(dict.fromkeys(parameters))
        self._device = device or (parameters[0].device if parameters else torch.device("cpu"))
        self._layer_plan = layer_plan or LayerPlan({})
        places = {p: (stage, 0) for p, stage in (stage_of or {}).items()} | self._layer_plan.places()
        facts = [Fact(p.spec.name, p.numel(), str(p.dtype), p.spec.reduced_over != DATA_AXES, self._is_tied(p),
                      not p.requires_grad, *places.get(p, (None, 0))) for p in parameters]
        plans = plan_sets(facts, policy, data_shards=groups.data.size, expert_shards=groups.expert.size,
                          bucket_elements=bucket_elements, persistence=self._layer_plan.persistence,
                          gather_alone=offload.parameters is not None,
                          inner_shards=groups.inner.size if groups.inner else None)
        self._data_ranks = (Hierarchy(groups.data, groups.inner, groups.outer) if policy.parameter == "inner"
                            else Hierarchy.flat(groups.data))
        self._pool = BufferPool(grad_dtype, self._device)
        self._communication = GradCommunication(grad_dtype, self._device, sent_dtype, sent_divisor)
        self._offloaded = OffloadedUpdate(pin=self._device.type == "cuda")
        # One rank, where others would shard, is armed before each micro-batch: there is no one to count for. And where
        # layers are gathered in between, reductions start when one is left: in the same order on all ranks.
        maker = SetMaker(uses, groups.tp, self._device, draw, overlap and policy.gradient is None,
                         overlap and policy.parameter is None, self._pool, self._communication, offload,
                         make_optimizer, self._offloaded)
        self._sets = [self._make_set(maker, plan, parameters, facts) for plan in plans]
        self._gathering = {stage: make_gathering(self._layer_plan, stage, self._sets) for stage in self._layer_plan.layers}
        self._untied = self._awaiting_tie()
        for s in self._sets:
            s.lend_grads()
        self._inner = InnerOptimizer(make_optimizer, [leaf for s in self._trained for leaf in s.resident])
        for s in self._sets:
            s.drop_grads()
        self._inner_of_offloaded = {id(leaf.tensor): group.inner for group in self._offloaded.groups for leaf in group.leaves}

    def gathering_of(self, stage: int) -> LayerGathering | None:
        """Whose `enter` and `leave` surround the layers of a stage; None where parameters are always whole."""
        gathering = self._gathering.get(stage)
        return gathering if gathering is not None and any(gathering.needs) else None

    def pin(self, stage: int) -> None:
        """Begin to gather all layers of a stage, to stay whole until `unpin`: `enter` waits for each. Collective."""
        if gathering := self.gathering_of(stage):
            gathering.pin()

    def unpin(self, stage: int) -> None:
        if gathering := self.gathering_of(stage):
            gathering.unpin()

    @contextmanager
    def gathered(self, stage: int):
        """Inside, the parameters of a stage are whole; to be read, not written. Collective over the data group."""
        self.pin(stage)
        if gathering := self.gathering_of(stage):
            gathering.wait()
        try:
            yield
        finally:
            self.unpin(stage)

    @property
    def loss_scale(self) -> float:
        """Multiply the next step's loss by this."""
        return self.scaler.scale

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""
        for gathering in self._gathering.values():
            gathering.reset()
        for s in self._trained:
            s.buckets.begin()
        self._untied = self._awaiting_tie()

    def arm(self, stage_index: int | None = None) -> None:
        """The next backward of this stage completes its gradients: reduce buckets as they fill."""
        for s in self._trained:
            s.buckets.arm(stage_index)

    def reopen(self) -> None:
        """After `arm` and its backward: further gradients are added before the step, and `arm` comes again. Collective."""
        for s in self._trained:
            s.buckets.reopen()

    def reduce_tied(self, stage_index: int | None = None) -> None:
        """Sum the gradients of parameters held by several stages. Collective over the holders, after all their backwards."""
        for s, i, holder in self._tied_holders():
            p = holder.parameter
            if id(p) in self._untied and (stage_index is None or holder.stage in (None, stage_index)):
                self._untied.remove(id(p))
                if s.plan.policy.gradient is None:
                    all_reduce_(p.main_grad.view(-1), self.groups.tied)
                    p.grad_ready()
                else:       # each in a bucket of its own, so that all its holders have the same shards
                    s.buckets.finish()
                    piece = s.plan.layout.shard_pieces(s.buckets.ranks.shard)[s.plan.layout.slots[i].bucket]
                    all_reduce_(s.buckets.flat[piece.offset:piece.offset + piece.stop - piece.start], self.groups.tied)

    @torch.no_grad()
    def step(self, lr: float | None, weight_decay: float = 0.0, grad_divisor: float = 1.0) -> StepResult:
        """Update with the sum over the data group of the gradients, divided by `grad_divisor`. Collective over the world.

        lr, weight_decay: for all parameters. lr None: the inner optimizers' groups have values of their own for both.

        Skips the update when a gradient of any rank is not finite. Raises ConfigError when that can no longer be
        helped by a smaller loss scale.
        """
        self.reduce_tied()
        for s in self._trained:
            s.buckets.finish()
        scale = self.loss_scale
        divisor = scale * grad_divisor
        norm, zeros = self._norm(divisor)           # a meeting of all ranks: nobody reads weights that change now
        overflow = not math.isfinite(norm)
        self.scaler.update(overflow)
        skipped = overflow and self.scaler.check_overflow
        if not skipped:
            excess = (norm + CLIP_EPSILON) / self.clip_grad if self.clip_grad else 0.0
            self._update(lr, weight_decay, divisor * max(excess, 1.0))
            self._refresh()
        return StepResult(norm, skipped, scale, zeros)

    def pieces(self) -> Iterator[StatePiece]:
        """All state of this rank's shard, in a fixed order."""
        for s in self._sets:
            group = s.store.ranks.data
            replica, replicas = (0, 1) if s.store.sharded else (group.rank, group.size)
            for leaf in s.leaves:
                start, stop = leaf.piece.start, leaf.piece.stop
                state = () if s.buckets is None else self._inner_of(leaf).state_of(leaf)
                for kind, tensor in [("weight", leaf.tensor.detach()), *state]:
                    yield StatePiece(leaf.spec, kind, start, stop, tensor[:stop - start], replica, replicas)

    def extra_state(self) -> dict[str, float]:
        """Plain numbers that belong to the state, equal on all ranks."""
        return {"num_updates": self._inner.num_updates, **self.scaler.numbers()}

    def load_extra_state(self, numbers: Mapping[str, float]) -> None:
        for inner in (self._inner, *(group.inner for group in self._offloaded.groups)):
            inner.set_num_updates(int(numbers["num_updates"]))
        self.scaler.load_numbers(numbers)

    def before_change(self) -> None:
        """Pieces will be overwritten: on return nobody looks at what is in them. Collective over the data group.

        Loading a checkpoint needs no such call: ranks agree on what to read before any of them writes.
        """
        self._meet()

    @torch.no_grad()
    def after_load(self) -> None:
        """Pieces were overwritten: bring the model's parameters in line with the masters. Collective over the data group."""
        for s in self._sets:
            self._round(s.leaves)
        self._settle()
        self._refresh()

    def memory(self) -> ZeroMemory:
        """Bytes held now, wherever they are, measured on the buffers (compare `memory.predict_memory`)."""
        total = ZeroMemory(0, 0, 0, 0)
        for s in self._sets:
            total += ZeroMemory(s.store.nbytes, 0 if s.buckets is None else s.buckets.flat.nbytes, s.master_bytes(), 0)
        state = (t for s in self._trained for leaf in s.leaves for _, t in self._inner_of(leaf).state_of(leaf))
        return total + ZeroMemory(0, 0, 0, sum(t.nbytes for t in state))

    def memory_by_place(self) -> dict[str, int]:
        """The same bytes by where they are: "device", "cpu", "nvme"."""
        total, places = self.memory(), Counter()
        for s in self._trained:
            for group in s.sub_groups:
                places[self._offload.optimizer.place] += sum(group.state_bytes())
        if home := self._offload.parameters:
            places[home.place] += sum(s.store.shard_bytes for s in self._sets if s.plan.units)
        places["device"] = total.total - places.total()
        return {place: count for place, count in places.items() if count}

    def traffic(self, microbatches: int, reduce_each: bool, pinned: bool,
                moments: Iterable[tuple[str, int]] | None = None) -> Counter:
        """Payload bytes of a step by (operation, group's axes), over the data-parallel ranks, as planned.

        moments: see `count_gathers`; where stages share parameters, their order counts
        """
        gathers = count_gathers(self._gathering, moments or in_turn(self._gathering, microbatches, pinned))
        itemsize = self._sets[0].parameters[0].dtype.itemsize if self._sets else 0
        sent = predict_traffic([s.plan for s in self._sets], [s.store.ranks for s in self._sets],
                               [[gathers[unit] for unit in s.store.units] if s.plan.units else [] for s in self._sets],
                               microbatches=microbatches, reduce_each=reduce_each, parameter_bytes=itemsize,
                               gradient_bytes=self._communication.dtype.itemsize)
        return Counter({(operation, axes): count for (operation, axes, _), count in sent.bytes.items()})

    @property
    def working_bytes(self) -> int:
        """Bytes of the buffers that gradients fill up and travel in, and that offloaded state comes to the host in."""
        return self._pool.nbytes + self._communication.nbytes + self._offloaded.working_bytes

    @property
    def _trained(self) -> list[ParameterSet]:
        return [s for s in self._sets if s.buckets is not None]

    def _is_tied(self, p: nn.Parameter) -> bool:
        return p.spec.tied is not None and self.groups.tied.size > 1

    def _make_set(self, maker: SetMaker, plan: SetPlan, parameters: list[nn.Parameter], facts: Sequence[Fact]) -> ParameterSet:
        members = [parameters[i] for i in plan.members]
        return maker.make(plan, members, [facts[i].stage for i in plan.members], [self._is_tied(p) for p in members],
                          Hierarchy.flat(self.groups.expert) if plan.expert else self._data_ranks)

    def _tied_holders(self) -> list[tuple[ParameterSet, int, Holder]]:
        """In the order of their keys, the same on all stages that hold them."""
        tied = [(s, i, h) for s in self._trained for i, h in enumerate(s.buckets.holders) if self._is_tied(h.parameter)]
        return sorted(tied, key=lambda entry: entry[2].parameter.spec.tied)

    def _awaiting_tie(self) -> set[int]:
        return {id(h.parameter) for _, _, h in self._tied_holders()}

    def _norm(self, divisor: float) -> tuple[float, int | None]:
        """Norm of the gradient / divisor, and how many of its elements are zero. Collective over the world."""
        local = torch.zeros(4, dtype=torch.float64, device=self._device)
        for s in self._trained:
            local[0] += squared_norm(s.norm_views, self._device)
            if self.count_zeros:
                local[1] += num_zeros((s.buckets.grad_of(p)[:p.stop - p.start] for p in s.counted), self._device)
        local[2:] = torch.tensor(fingerprint(self._received()), dtype=torch.float64)
        squares, zeros, spread = sum_over_ranks(local, self.groups.data, self.groups.model)
        if spread:
            tell_divergence(self._received(), self.groups.data, self.groups.model)
        return math.sqrt(squares) / divisor, int(zeros) if self.count_zeros else None

    def _received(self) -> dict[str, bool]:
        """Which parameters had gradients. Not of experts: one that no token chose has none."""
        return {h.parameter.spec.name: received for s in self._trained if not s.plan.expert
                for h, received in zip(s.buckets.holders, s.buckets.received)}

    def _update(self, lr: float | None, weight_decay: float, divisor: float) -> None:
        for s in self._sets:
            s.lend_grads()
        self._inner.step(lr, weight_decay, divisor)
        if not self._inner.writes_low:
            self._round(leaf for s in self._trained for leaf in s.resident)
        for s in self._sets:
            s.drop_grads()
        self._offloaded.step(lr, weight_decay, divisor)
        self._settle()

    @staticmethod
    def _round(leaves: Iterable[Leaf]) -> None:
        """Masters → the weights that a 16-bit model computes with."""
        if pairs := [(leaf.tensor.low, leaf.tensor) for leaf in leaves if leaf.tensor.low is not None]:
            torch._foreach_copy_(*map(list, zip(*pairs)))

    def _settle(self) -> None:
        for home in {self._offload.optimizer, self._offload.parameters} - {None}:
            home.settle()

    def _refresh(self) -> None:
        for s in self._sets:
            s.store.refresh()
        self._meet()

    def _meet(self) -> None:
        """Ranks that see each other's weights have all come here. (One after an update; before it the norm is another.)"""
        groups = {id(s.store.ranks.inner): s.store.ranks.inner for s in self._sets if s.plan.units and s.store.is_shared}
        for group in groups.values():
            barrier(group)

    def _inner_of(self, leaf: Leaf) -> InnerOptimizer:
        return self._inner_of_offloaded.get(id(leaf.tensor), self._inner)
