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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import ConfigError
from ..mpu.collectives import all_reduce_
from ..mpu.group import Group
from ..mpu.param_spec import ParamSpec
from .buckets import GradBuckets, Holder
from .grad_norm import is_counted, norm_views, num_zeros, squared_norm, sum_over_ranks
from .inner import InnerOptimizer, Leaf, MakeOptimizer, make_leaf
from .layout import SlotPiece, plan_layout
from .memory import ZeroMemory
from .params import ParamStore
from .policy import ShardPolicy, check_available
from .scaler import LossScaler

CLIP_EPSILON = 1e-6      # as in Megatron: coefficient = clip / (norm + 1e-6), applied when < 1


@dataclass(frozen=True)
class DataGroups:
    """The groups that ZeRO speaks over.

    data    ranks that see different samples (or parts of samples) of the same model part: dp-cp
    expert  ranks that hold the same experts: edp
    tp      tensor-parallel ranks
    model   ranks that hold one copy of the model together: tp-pp
    tied    holders of parameters tied across pipeline stages: embd; one rank where there is nothing to tie
    """

    data: Group
    expert: Group
    tp: Group
    model: Group
    tied: Group


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


@dataclass(frozen=True)
class _ParameterSet:
    store: ParamStore
    buckets: GradBuckets
    leaves: list[Leaf]
    counted: list[SlotPiece]            # of this rank's shard, those that count in the norm
    norm_views: list[torch.Tensor]


class ZeroOptimizer:
    """Owns parameters, gradients, masters and optimizer state. Takes over `parameters`: they become views of flat buffers.

    parameters       in forward order; each has a `.spec`. Named twice, the first place counts
    uses             contributions to main_grad per backward, 1 where absent; the tied reduction is not to be counted
    make_optimizer   from parameter groups ({"params": [...], "decay": bool}) to a torch optimizer; `step` sets their "lr",
                     and "weight_decay" where decay is True
    clip_grad        largest gradient norm; 0: no clipping
    bucket_elements  of one reduction
    overlap          reduce during backward
    stage_of         pipeline stage of each parameter, for ranks with several stages; else `arm` and `reduce_tied` mean all
    Raises ConfigError for a policy that is not available yet and for frozen parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, uses: Mapping[nn.Parameter, int], groups: DataGroups,
                 policy: ShardPolicy, make_optimizer: MakeOptimizer, scaler: LossScaler,
                 clip_grad: float, bucket_elements: int, overlap: bool,
                 stage_of: Mapping[nn.Parameter, int] | None = None, count_zeros: bool = False):
        check_available(policy)
        _check_trainable(parameters)
        self.groups, self.policy, self.scaler = groups, policy, scaler
        self.clip_grad, self.count_zeros = clip_grad, count_zeros
        self._device = parameters[0].device if parameters else torch.device("cpu")
        holders = [Holder(p, uses.get(p, 1) + self._is_tied(p), (stage_of or {}).get(p)) for p in dict.fromkeys(parameters)]
        self._sets = [self._make_set(members, bucket_elements, overlap) for members in _split_into_sets(holders)]
        self._untied = self._awaiting_tie()
        self._inner = InnerOptimizer(make_optimizer, [leaf for s in self._sets for leaf in s.leaves])

    @property
    def loss_scale(self) -> float:
        """Multiply the next step's loss by this."""
        return self.scaler.scale

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""
        for s in self._sets:
            s.buckets.begin()
        self._untied = self._awaiting_tie()

    def arm(self, stage_index: int | None = None) -> None:
        """The next backward of this stage completes its gradients: reduce buckets as they fill."""
        for s in self._sets:
            s.buckets.arm(stage_index)

    def reduce_tied(self, stage_index: int | None = None) -> None:
        """Sum the gradients of parameters held by several stages. Collective over the holders, after all their backwards."""
        for holder in self._tied_holders():
            p = holder.parameter
            if id(p) in self._untied and (stage_index is None or holder.stage in (None, stage_index)):
                self._untied.remove(id(p))
                all_reduce_(p.main_grad.view(-1), self.groups.tied)
                p.grad_ready()

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, grad_divisor: float = 1.0) -> StepResult:
        """Update with the sum over the data group of the gradients, divided by `grad_divisor`. Collective over the world.

        Skips the update when a gradient of any rank is not finite. Raises ConfigError when that can no longer be
        helped by a smaller loss scale.
        """
        self.reduce_tied()
        for s in self._sets:
            s.buckets.finish()
        scale = self.loss_scale
        divisor = scale * grad_divisor
        norm, zeros = self._norm(divisor)
        overflow = not math.isfinite(norm)
        self.scaler.update(overflow)
        skipped = overflow and self.scaler.check_overflow
        if not skipped:
            excess = (norm + CLIP_EPSILON) / self.clip_grad if self.clip_grad else 0.0
            self._inner.step(lr, weight_decay, divisor * max(excess, 1.0))
            self._write_back(cast=not self._inner.writes_low)
        return StepResult(norm, skipped, scale, zeros)

    def pieces(self) -> Iterator[StatePiece]:
        """All state of this rank's shard, in a fixed order."""
        for s in self._sets:
            group = s.store.group
            replica, replicas = (0, 1) if s.store.sharded else (group.rank, group.size)
            for leaf in s.leaves:
                start, stop = leaf.piece.start, leaf.piece.stop
                for kind, tensor in [("weight", leaf.tensor.detach()), *self._inner.state_of(leaf)]:
                    yield StatePiece(leaf.spec, kind, start, stop, tensor[:stop - start], replica, replicas)

    def extra_state(self) -> dict[str, float]:
        """Plain numbers that belong to the state, equal on all ranks."""
        return {"num_updates": self._inner.num_updates, **self.scaler.numbers()}

    def load_extra_state(self, numbers: Mapping[str, float]) -> None:
        self._inner.set_num_updates(int(numbers["num_updates"]))
        self.scaler.load_numbers(numbers)

    @torch.no_grad()
    def after_load(self) -> None:
        """Pieces were overwritten: bring the model's parameters in line with the masters. Collective over the data group."""
        self._write_back(cast=True)

    def memory(self) -> ZeroMemory:
        """Bytes held now, measured on the buffers (compare `memory.predict_memory`)."""
        total = ZeroMemory(0, 0, 0, 0)
        for s in self._sets:
            state = (t for leaf in s.leaves for _, t in self._inner.state_of(leaf))
            total += ZeroMemory(s.store.flat.nbytes, s.buckets.flat.nbytes,
                                0 if s.store.master is None else s.store.master.nbytes, sum(t.nbytes for t in state))
        return total

    def _is_tied(self, p: nn.Parameter) -> bool:
        return p.spec.tied is not None and self.groups.tied.size > 1

    def _make_set(self, holders: list[Holder], bucket_elements: int, overlap: bool) -> _ParameterSet:
        group = self.groups.expert if holders[0].parameter.spec.expert else self.groups.data
        # Tied parameters are complete last, after TIE. Buckets start in order, so put them into the last one.
        forward = sorted(holders, key=lambda h: not self._is_tied(h.parameter))
        layout = plan_layout([(h.parameter.spec.name, h.parameter.numel()) for h in forward], bucket_elements, group.size)
        in_buffer = forward[::-1]
        sharded = self.policy.optimizer is not None
        store = ParamStore([h.parameter for h in in_buffer], layout, group, sharded)
        buckets = GradBuckets(in_buffer, layout, group=group, tp=self.groups.tp,
                              sharded=sharded, overlap=overlap)
        specs = [h.parameter.spec for h in in_buffer]
        counted = [p for p in layout.slot_intersections(group.rank) if is_counted(specs[p.slot], self.groups.tp.rank)]
        leaves = [make_leaf(specs[p.slot], p, store.master_of(p), buckets.grad_of(p), store.low_of(p))
                  for p in store.pieces]
        return _ParameterSet(store, buckets, leaves, counted, norm_views(buckets.flat, counted))

    def _tied_holders(self) -> list[Holder]:
        """In the order of their keys, the same on all stages that hold them."""
        tied = [h for s in self._sets for h in s.buckets.holders if self._is_tied(h.parameter)]
        return sorted(tied, key=lambda h: h.parameter.spec.tied)

    def _awaiting_tie(self) -> set[int]:
        return {id(h.parameter) for h in self._tied_holders()}

    def _norm(self, divisor: float) -> tuple[float, int | None]:
        """Norm of the gradient / divisor, and how many of its elements are zero. Collective over the world."""
        local = torch.zeros(2, dtype=torch.float64, device=self._device)
        for s in self._sets:
            local[0] += squared_norm(s.norm_views, self._device)
            if self.count_zeros:
                local[1] += num_zeros(s.buckets.flat, s.counted)
        squares, zeros = sum_over_ranks(local, self.groups.data, self.groups.model)
        return math.sqrt(squares) / divisor, int(zeros) if self.count_zeros else None

    def _write_back(self, cast: bool) -> None:
        for s in self._sets:
            s.store.write_back(cast)


def _split_into_sets(holders: list[Holder]) -> list[list[Holder]]:
    """Parameters that share buffers: experts' apart, each dtype by itself."""
    sets: dict[tuple, list[Holder]] = {}
    for holder in holders:
        sets.setdefault((holder.parameter.spec.expert, str(holder.parameter.dtype)), []).append(holder)
    return [sets[key] for key in sorted(sets)]


def _check_trainable(parameters: Sequence[nn.Parameter]) -> None:
    frozen = [p.spec.name for p in parameters if not p.requires_grad]
    if frozen:
        raise ConfigError(f"{len(frozen)} parameters are frozen (requires_grad is False), first {frozen[0]}: each parameter "
                          "given to ZeroOptimizer is trained, decayed and saved. Leave frozen ones out of the list.")
