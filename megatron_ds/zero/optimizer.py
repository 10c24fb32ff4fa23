"""`ZeroOptimizer`: from gradients to updated parameters, at every ZeRO stage.

One step, called by all data-parallel ranks (contributions arrive during backward, see buckets.py):

    begin_step   zero the gradients
    arm          before the backward of the last micro-batch: buckets are reduced as they fill
    reduce_tied  after it: sum the gradients of parameters that several stages hold
    measure      finish reductions → norm
    update       overflow? skip : clip, unscale and update → gather

Parameters are kept in sets (set_plan.py); each set has its layout, weights and gradients. Zeroing, norm and
update each pass over the gradients once: unscaling and clipping are one divisor of the update.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..mpu.collectives import barrier
from ..mpu.host_reads import read_numbers
from ..mpu.managed_parameter import spec_of
from ..optim import MakeOptimizer
from .arrival import Arrivals, is_gathered_whole
from .copies import copy_each
from .data_groups import DATA_AXES, DataGroups
from .exchange import BufferPool, reads_in_place
from .gradient_checksum import GradientChecksum
from .memory import ZeroMemory
from .norm import count_zeros, sum_over_ranks
from .offload_settings import DEVICE
from .offloaded import OffloadedLeaves
from .param_store import Draw
from .parameter_set import ParameterSet, SetMaker, TiedGradients
from .set_plan import ParameterUse, SetPlan, plan_parameters
from .settings import ZeroSettings
from .shard_optimizer import Leaf, Rates, ShardOptimizer
from .state_piece import StatePiece
from .tiers import open_tiers
from .traffic import in_turn, predict_traffic
from .unused import PathCheck

if TYPE_CHECKING:
    from .gathering import LayerGathering
    from .offload import UpdateInHalves
    from .parameter_norms import ParameterNorms
    from .whole_matrices import WholeMatrices

# As in Megatron: coefficient = clip / (norm + 1e-6), applied when < 1.
CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    grad_norm   of the unscaled gradient, before clipping; not finite if the step was skipped for overflow
    loss_scale  the factor of this step's loss
    dropped     why the update was skipped although the gradient is finite, as `check` of `update` returned it
    """

    grad_norm: float
    skipped: bool
    loss_scale: float
    dropped: Any = None


class ZeroOptimizer:
    """Owns parameters, gradients, masters and optimizer state. `parameters` become views of its flat buffers.

    parameters  in forward order; each has a `.spec`. If one occurs twice, the first place counts. A parameter
                that requires no gradient is frozen: kept and saved, never updated
    use         which layers use them, on which pipeline stages
    device      where state is kept that is not offloaded; default: the device of the parameters
    draw        gives values to parameters that are on the meta device

    Collective if an optimizer asks for norms. Raises ConfigError if an offload tier cannot be opened, or if
    an optimizer needs whole tensors that this layout splits.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        settings: ZeroSettings,
        groups: DataGroups,
        use: ParameterUse | None = None,
        device: torch.device | None = None,
        draw: Draw | None = None,
    ):
        parameters = list(dict.fromkeys(parameters))
        use = use or ParameterUse()
        self._use = use
        self.settings = settings
        self.groups = groups
        self.scaler = settings.make_scaler()
        self.device = device or (
            parameters[0].device if parameters else torch.device("cpu")
        )
        # Sets of parameters, with their weights and gradients.
        self.exchange = settings.make_exchange(self.device)
        self.checksum = GradientChecksum(self.device) if settings.checksums else None
        self.offloaded = self._make_offloaded()
        self._tiers = open_tiers(settings.offload, self.device)
        readers = (
            groups.ranks_of(DATA_AXES).inner if reads_in_place(self.exchange) else None
        )
        self._pool = BufferPool(settings.grad_dtype, self.device, readers)
        plans = plan_parameters(parameters, settings, groups, use)
        self.sets = self._make_sets(plans, parameters, draw)
        self._gathering = self._make_gathering()
        self._tied = TiedGradients(self.sets, groups)
        paths = [gathering.path for gathering in self._gathering.values()]
        self.path_check = PathCheck(settings.unused, groups.data, groups.model, paths)
        # The optimizers of what is on the device.
        leaves = [leaf for s in self.trained for leaf in s.resident]
        norms = self._make_norms(plans, parameters, self.device)
        matrices = self._make_matrices(plans, parameters)
        self.resident = ShardOptimizer(settings.param_groups, leaves, norms, matrices)
        self._in_halves = self._make_halves(plans, parameters, norms)
        self._hook = settings.update_rule.make_hook(
            sets=self.trained,
            groups=groups,
            resident=self.resident,
            exchange=self.exchange,
            device=self.device,
        )
        self._of_offloaded = self.offloaded.optimizers()

    def _make_sets(
        self,
        plans: Sequence[SetPlan],
        parameters: Sequence[nn.Parameter],
        draw: Draw | None,
    ) -> list[ParameterSet]:
        """Return the sets of the plans, whose gradients fill buffers of one pool."""
        maker = SetMaker(
            self.settings,
            self.groups,
            self._use,
            draw,
            self._pool,
            self.exchange,
            self._tiers,
            self.offloaded,
            self.checksum,
        )
        return [maker.make(plan, parameters) for plan in plans]

    # What only some runs have is loaded by them.
    def _make_offloaded(self) -> OffloadedLeaves:
        if self.settings.offload.optimizer == DEVICE:
            return OffloadedLeaves()
        from .offload import OffloadedUpdate

        return OffloadedUpdate(page_locked=self.device.type == "cuda")

    def _make_gathering(self) -> "dict[int, LayerGathering]":
        """Return the gathering of each stage, if parameters are in shards."""
        if not any(s.plan.units for s in self.sets):
            return {}
        from .stage_gathering import make_gathering

        return {
            stage: make_gathering(self._use, stage, self.sets, self.settings.prefetch)
            for stage in self._use.layers
        }

    def _make_norms(
        self,
        plans: Sequence[SetPlan],
        parameters: Sequence[nn.Parameter],
        device: torch.device,
    ) -> "ParameterNorms | None":
        if not any(group.traits.needs_norms for group in self.settings.param_groups):
            return None
        from .norm_entries import norm_entries
        from .parameter_norms import ParameterNorms

        entries = norm_entries(plans, parameters, self.settings, self.groups)
        return ParameterNorms(entries, self.groups, device)

    def _make_matrices(
        self, plans: Sequence[SetPlan], parameters: Sequence[nn.Parameter]
    ) -> "dict[MakeOptimizer, WholeMatrices]":
        param_groups = self.settings.param_groups
        if not any(group.traits.needs_matrices for group in param_groups):
            return {}
        from .whole_matrices import whole_matrices

        return whole_matrices(plans, parameters, param_groups, self.groups, self.device)

    def _make_halves(
        self,
        plans: Sequence[SetPlan],
        parameters: Sequence[nn.Parameter],
        norms: "ParameterNorms | None",
    ) -> "UpdateInHalves | None":
        """Return the update of a run whose norms are sums over the device and over offloaded state."""
        if norms is None or self.settings.offload.optimizer == DEVICE:
            return None
        from .offload import HOST, OffloadedUpdate, UpdateInHalves

        assert isinstance(self.offloaded, OffloadedUpdate)
        host_norms = self._make_norms(plans, parameters, HOST)
        assert host_norms is not None
        return UpdateInHalves(self.resident, self.offloaded, norms, host_norms)

    # -------------------------------------------------------------------------------- parameters in shards
    def gathering_of(self, stage: int) -> "LayerGathering | None":
        """Return the gathering whose `enter` and `leave` are called around the layers of a stage; None if parameters
        are always whole."""
        gathering = self._gathering.get(stage)
        return gathering if gathering is not None and any(gathering.needs) else None

    def arrivals_of(self, stage: int) -> Arrivals | None:
        """Return what waits for the updated weights of each layer of a stage; None if they are there after `update`.

        They are, unless `Arrivals.begin` is called. Stages share buckets, so then it must be for all stages.
        """
        if any(is_gathered_whole(s) for s in self.sets):
            return Arrivals(self._use.layers[stage], self.sets)
        return None

    def wait_for_weights(self) -> None:
        """Updated weights of all layers are there for what is queued from now on."""
        for s in self.sets:
            s.store.wait()

    def keep_gathered(self, stage: int) -> None:
        """Begin to gather all layers of a stage, whole until `release_gathered`. `enter` waits for each."""
        if gathering := self.gathering_of(stage):
            gathering.keep_gathered()

    def release_gathered(self, stage: int) -> None:
        """Free all layers of a stage."""
        if gathering := self.gathering_of(stage):
            gathering.release_gathered()

    @contextmanager
    def gathered(self, stage: int) -> Iterator[None]:
        """Inside, the parameters of a stage are whole; for reading only. Collective over the data group."""
        self.wait_for_weights()
        self.keep_gathered(stage)
        if gathering := self.gathering_of(stage):
            gathering.wait()
        try:
            yield
        finally:
            self.release_gathered(stage)

    # -------------------------------------------------------------------------------- a step
    @property
    def loss_scale(self) -> float:
        """The factor of the next step's loss."""
        return self.scaler.scale

    @property
    def trained(self) -> list[ParameterSet]:
        """The sets that are not frozen."""
        return [s for s in self.sets if s.buckets is not None]

    def begin_step(self) -> None:
        """Discard the gradients of the last step."""
        for gathering in self._gathering.values():
            gathering.reset()
        self._hook.begin()
        for s in self.trained:
            s.gradients.begin()
        self.exchange.begin()
        if self.checksum is not None:
            self.checksum.begin()
        self._tied.begin()

    def arm(self, stage_index: int | None = None) -> None:
        """The next backward of this stage (None: of all) completes its gradients: reduce full buckets."""
        for s in self.trained:
            s.gradients.arm(stage_index)

    def reopen(self) -> None:
        """Reduce the gradients of a finished backward, so that further backwards can add to them. Collective.

        Call `arm` again before the last backward of the step.
        """
        for s in self.trained:
            s.gradients.reopen()

    def reduce_tied(self, stage_index: int | None = None) -> None:
        """Sum gradients of parameters that several stages hold, after all their backwards. Collective."""
        self._tied.reduce(stage_index)

    def step(
        self, lr: Rates, weight_decay: float = 0.0, grad_divisor: float = 1.0
    ) -> StepResult:
        """`measure` and `update`; between them the host waits for the device. Collective over the world."""
        return self.update(read_numbers(self.measure()), lr, weight_decay, grad_divisor)

    @torch.no_grad()
    def measure(self, zeros: bool = False) -> torch.Tensor:
        """Finish the reductions; two numbers about the gradients of all ranks, for `update`: float64 [2] on
        the device; with `zeros` a third, the number of elements that are zero. Afterwards no rank reads
        weights until the update is complete. Collective over the world; the host does not wait for it.
        """
        # All gradients are complete before any is measured.
        self.reduce_tied()
        self.wait_for_weights()  # of layers that had no forward
        for s in self.trained:
            s.gradients.finish()
        views = [s.norm_views for s in self.trained]
        squares, further = self._hook.measure(views, self.device)
        if zeros:
            further = torch.zeros_like(squares)
            for s in self.trained:
                further += count_zeros(s.norm_views, self.device) - s.padding
        # One all-reduce for all numbers, since each costs a latency.
        number = self.path_check.number(self._received())
        return sum_over_ranks(squares, number, self.groups, further)

    @torch.no_grad()
    def update(
        self,
        measured: Sequence[float],
        lr: Rates,
        weight_decay: float = 0.0,
        grad_divisor: float = 1.0,
        check: Callable[[float], Any] | None = None,
    ) -> StepResult:
        """Update with the sum of the gradients over the data group, divided by `grad_divisor`, unless one of
        any rank is not finite. Collective over the world.

        measured: the numbers of `measure`, on the host
        check: of the norm; returns why the update is skipped although all are finite, or None. The loss scale
        counts such a step as good. The same on all ranks
        lr, weight_decay: of all parameter groups, or learning rates by name; lr None: torch's parameter
        groups have their own of both.
        Raises ConfigError if the loss scale cannot be lowered any more, MegatronDSError, on all ranks, if
        paths differ (unused.py).
        """
        if measured[1]:
            self.path_check.report(self._received())
        scale = self.loss_scale
        divisor = scale * grad_divisor
        norm = self._hook.norm_of(measured) / divisor
        dropped = None if check is None else check(norm)
        skipped = self._check_overflow(norm) or dropped is not None
        if not skipped:
            self._clip_and_update(lr, weight_decay, divisor, norm)
            self._refresh()
        return StepResult(norm, skipped, scale, dropped)

    def set_beta1(self, beta1: float) -> None:
        """Adam's beta1 in the following updates, where a schedule changes it."""
        for optimizer in (
            self.resident,
            *(group.optimizer for group in self.offloaded.groups),
        ):
            optimizer.set_beta1(beta1)

    def _received(self) -> dict[str, bool]:
        """Return whether each parameter received a gradient. Not of experts: one that no token chose has none."""
        found: dict[str, bool] = {}
        for s in self.trained:
            if s.plan.reduced_over == DATA_AXES:
                names = (spec_of(h.parameter).name for h in s.gradients.holders)
                found |= zip(names, (g.received for g in s.gradients.gradients))
        return found

    def _check_overflow(self, norm: float) -> bool:
        """Adapt the loss scale; whether the update is skipped because gradients are not finite."""
        overflow = not math.isfinite(norm)
        self.scaler.update(overflow)
        return overflow and self.scaler.check_overflow

    def _clip_and_update(
        self, lr: Rates, weight_decay: float, divisor: float, norm: float
    ) -> None:
        """One divisor unscales and clips: the optimizers apply it while they read the gradients."""
        clip = self.settings.clip_grad
        excess = (norm + CLIP_EPSILON) / clip if clip else 0.0
        numbers = lr, weight_decay, divisor * max(excess, 1.0)
        self._hook.before_update(numbers[-1])
        if self._in_halves:
            self._in_halves.step(*numbers)
        else:
            self.resident.step(*numbers)
            self.offloaded.step(*numbers)
        self._hook.after_update()
        leaves = chain.from_iterable(s.resident for s in self.trained)
        round_masters(leaf for leaf in leaves if not self.resident.writes_low(leaf))
        self._tiers.settle()

    # -------------------------------------------------------------------------------- state
    def pieces(
        self, saving: bool = False, saved: Mapping[str, float] | None = None
    ) -> Iterator[StatePiece]:
        """All state of this rank, in a fixed order.

        saving: what a checkpoint has that is written now, with means over ranks of state that differs on
        them; then it is collective, and only for reading
        saved: what a checkpoint with these numbers (`extra_state`) has for this rank, to be filled
        """
        self.wait_for_weights()
        own = self._hook.own_kinds(saving, saved)
        for s in self.sets:
            group = s.store.ranks.data
            replica, replicas = (0, 1) if s.store.sharded else (group.rank, group.size)
            for leaf in s.leaves:
                state = (
                    () if s.buckets is None else self._optimizer_of(leaf).state_of(leaf)
                )
                for kind, tensor in [("weight", leaf.tensor.detach()), *state]:
                    if kind not in own:
                        flat = leaf.unpadded(tensor)
                        piece = leaf.piece
                        yield StatePiece(
                            leaf.spec,
                            kind,
                            piece.start,
                            piece.stop,
                            flat,
                            replica,
                            replicas,
                        )
        yield from self._hook.own_pieces(own, saving)

    def encoded_pieces(self) -> list[StatePiece]:
        """Frozen weights that are kept encoded, in new memory of the host, to be loaded: `after_load` encodes them."""
        pieces = []
        for s in self.sets:
            pieces += s.store.opened(s.parameters)
        return pieces

    def pieces_of_worker(self) -> Iterator[StatePiece]:
        """Return what later checkpoints may have for this rank alone, besides `pieces`; to count its bytes."""
        return self._hook.pieces_of_worker()

    def extra_state(self) -> dict[str, float]:
        """Numbers that belong to the state, equal on all ranks."""
        return {
            "num_updates": self.resident.num_updates,
            **self.scaler.numbers(),
            **self._hook.numbers(),
        }

    def load_extra_state(self, numbers: Mapping[str, float]) -> None:
        """Restore what `extra_state` returned."""
        for optimizer in (
            self.resident,
            *(group.optimizer for group in self.offloaded.groups),
        ):
            optimizer.set_num_updates(int(numbers["num_updates"]))
        self._hook.load_numbers(numbers)
        self.scaler.load_numbers(numbers)

    def before_change(self) -> None:
        """Pieces will be overwritten: on return no rank reads them any more. Collective over the data group.

        Loading a checkpoint does not need this call: ranks agree on what to read before any of them writes.
        """
        self._synchronize()

    @torch.no_grad()
    def after_load(self) -> None:
        """Set the model's parameters from the masters, after pieces were loaded. Collective over the data
        group."""
        round_masters(leaf for s in self.sets for leaf in s.leaves)
        self._hook.after_load()
        self._tiers.settle()
        self._refresh()

    # -------------------------------------------------------------------------------- bytes
    def memory(self) -> ZeroMemory:
        """Bytes held now, in all tiers, measured on the buffers (compare `prediction.predict_sets`)."""
        return ZeroMemory(
            parameters=sum(s.store.nbytes for s in self.sets),
            gradients=sum(s.gradients.flat.nbytes for s in self.trained),
            masters=sum(s.master_bytes() for s in self.sets),
            optimizer=sum(map(self._state_bytes, self.trained)),
        )

    def _state_bytes(self, trained: ParameterSet) -> int:
        states = (self._optimizer_of(leaf).state_of(leaf) for leaf in trained.leaves)
        return sum(tensor.nbytes for state in states for _, tensor in state)

    def memory_by_place(self) -> dict[str, int]:
        """Return the bytes of `memory`, by tier: "device", "cpu", "nvme"."""
        places: Counter[str] = Counter()
        offload = self.settings.offload
        for s in self.trained:
            for group in s.sub_groups:
                places[offload.optimizer] += sum(group.state_bytes())
        if offload.parameters != DEVICE:
            places[offload.parameters] += sum(s.store.tier_bytes for s in self.sets)
        places[DEVICE] = self.memory().total - places.total()
        return dict(+places)  # of several bytes: + drops places without any

    @property
    def working_bytes(self) -> int:
        """Bytes of buffers in which gradients fill up and are sent, and offloaded state is updated."""
        return (
            self._pool.nbytes
            + self.exchange.nbytes
            + self.offloaded.working_bytes
            + self._hook.nbytes
        )

    def traffic(
        self,
        microbatches: int,
        reduce_each: bool,
        keeps_gathered: bool,
        moments: Iterable[tuple[str, int]] | None = None,
    ) -> Counter:
        """Payload bytes of a step by (operation, group's axes), over the data-parallel ranks, as planned.

        moments: see `count_gathers`; needed if stages share parameters, because their order matters then
        """
        gathers: Mapping[Any, int] = {}
        if self._gathering:
            from .gather_counts import count_gathers

            gathers, _ = count_gathers(
                self._gathering,
                moments or in_turn(self._gathering, microbatches, keeps_gathered),
            )
        itemsize = self.sets[0].parameters[0].dtype.itemsize if self.sets else 0
        rule = self.settings.update_rule
        sent = predict_traffic(
            [s.plan for s in self.sets],
            [s.store.ranks for s in self.sets],
            [[gathers[unit] for unit in s.store.units] for s in self.sets],
            self.exchange,
            microbatches=microbatches,
            reduce_each=reduce_each,
            parameter_bytes=itemsize,
            further=chain.from_iterable(
                rule.messages(s.plan.layout, s.parameters, s.store.ranks, self.groups)
                for s in self.trained
            ),
        )
        return Counter(
            {
                (operation, axes): count
                for (operation, axes, _), count in sent.bytes.items()
            }
        )

    def _optimizer_of(self, leaf: Leaf) -> ShardOptimizer:
        return self._of_offloaded.get(id(leaf.tensor), self.resident)

    def _refresh(self) -> None:
        """Gather the updated weights of other ranks. Collective."""
        for s in self.sets:
            s.store.refresh()
        self._synchronize()

    def _synchronize(self) -> None:
        """Ranks that map each other's weights wait for each other. (Before an update the norm does so.)"""
        groups = {
            id(s.store.ranks.inner): s.store.ranks.inner
            for s in self.sets
            if s.store.is_shared
        }
        for group in groups.values():
            barrier(group)


def round_masters(leaves: Iterable[Leaf]) -> None:
    """Masters → the weights with which a 16-bit model computes."""
    if pairs := [
        (leaf.tensor.low, leaf.tensor) for leaf in leaves if leaf.tensor.low is not None
    ]:
        copy_each(pairs)
