"""`CompressedUpdate`: the part of a step of `ZeroOptimizer` in which ranks exchange signs in place of
gradients.

What is exchanged in a step follows from its number (`phases.py`):

    FULL       gradients are reduced as by any optimizer
    GRADIENT   x_i = g_i:                  compressed mean → exp_avg ← β₁ exp_avg + (1 - β₁) x
    MOMENTUM   x_i = β₁ m + (1 - β₁) g_i:  compressed mean → exp_avg
    NONE       exp_avg ← β₁ exp_avg + (1 - β₁) g_i, different on each rank
    SUM        as NONE; then the sum of the updates of each rank: compressed mean → "local_sum"

g_i is P times the gradient that rank i of P has: gradients are shares of the global batch, so g is the mean
of g_i. Except in FULL, `SwitchedExchange` leaves gradients as they are. Sums over tensor-parallel ranks and
over the holders of tied parameters are made all the same, before the signs are taken.

ZeRO 1: second moment and master are those of the rank's shard. "exp_avg" is whole on every rank, because each
adds its own gradient to it; checkpoints contain the rank's shard of it, and the rest is gathered from other
ranks before the first step that needs it.

Note: clipping. The norm of the mean gradient is not known after the freeze, but R² = Σ_i ‖g_i‖² / P is. With
noise of the ranks that is independent, R² = ‖g‖² (1 + (P - 1) ν), where ν is the share of noise in ‖g‖². It
is measured in FULL steps, where both norms are known, and its running mean gives the estimate of ‖g‖ that
clips on all ranks. (R itself would clip all steps of many ranks, and v, which is frozen, would not follow.)
"""

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch

from ...errors import ConfigError
from ...mpu.collectives import all_gather_into_
from ...mpu.managed_parameter import spec_of
from ...zero.data_groups import DataGroups
from ...zero.norm import is_counted, norm_views, squared_norm
from ...zero.parameter_set import ParameterSet
from ...zero.shard_optimizer import ShardOptimizer
from ...zero.state_piece import StatePiece
from ...zero.update_hook import UpdateHook
from .compressed_optimizer import CompressedOptimizer
from .compressed_set import (
    MOMENTUM,
    SUM,
    WORKER_ERROR,
    CompressedSet,
    counts_of_workers,
    make_set,
    numbers_of,
    own_kinds,
)
from .phases import Exchange, Phases
from .switched_exchange import NoiseShare, SwitchedExchange
from .units import is_vector

logger = logging.getLogger(__name__)
NEW_NUMBER_OF_RANKS = (
    "the checkpoint was written by %d data-parallel ranks with a 1-bit optimizer, and this run has %d: each "
    "rank continues with the mean of their compression errors, and of sums that are not exchanged yet: this "
    "keeps the sum of the gradients. Later steps are those of the new number of ranks"
)
ONLY_MEANS = (
    "the checkpoint has the mean of the compression errors of all ranks, and not those of each: it keeps the "
    "sum of the gradients, but later steps have other bits than those of a run that was not interrupted"
)


class CompressedUpdate(UpdateHook):
    """phases: of all parameter groups. resident: whose "exp_avg" become views of the whole buffers."""

    def __init__(
        self,
        phases: Phases,
        sets: Sequence[ParameterSet],
        groups: DataGroups,
        resident: ShardOptimizer,
        exchange: SwitchedExchange,
        device: torch.device,
    ):
        self._phases = phases
        self._resident = resident
        self._exchange = exchange
        self._groups = groups
        self._sets = [make_set(s, phases, groups, resident, device) for s in sets]
        self._is_whole = False  # `momentum` of all sets, beyond this rank's shard
        self._noise = NoiseShare()
        exchange.measured = matrices_of(sets, groups)
        self.begin()

    @property
    def is_local(self) -> bool:
        """Whether gradients stay those of each rank in this step."""
        return self._kind is not Exchange.FULL

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # the base has a constant, which is read alone
        """Bytes of state that is not counted with the leaves: errors, and momentum of other ranks' shards."""
        return sum(s.nbytes for s in self._sets)

    def begin(self) -> None:
        """A step begins: decide what is exchanged."""
        self._kind = self._phases.at(self._resident.num_updates + 1)
        self._exchange.is_off = self.is_local
        self._exchange.squares = None

    def measure(
        self, views: Iterable[Sequence[torch.Tensor]], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(addend of the norm's square, and of Σ_i ‖g_i‖² / P of `matrices_of` where gradients are summed).
        Where they stay local, the norm's square is Σ_i ‖g_i‖² / P itself."""
        if not self.is_local:
            squares, _ = super().measure(views, device)
            own = self._exchange.squares
            none = torch.zeros_like(squares)
            return squares, none if own is None else own * self._workers
        total = torch.zeros((), dtype=torch.float64, device=device)
        for s in self._sets:
            total += squared_norm(s.norm_views, device) * s.group.size
        return total, None

    def norm_of(self, measured: Sequence[float]) -> float:
        """Return the norm of the mean gradient, or its estimate."""
        norm = math.sqrt(measured[0])
        if self.is_local:
            return norm / self._noise.ratio(self._workers)
        if self._workers > 1 and math.isfinite(norm) and norm > 0:
            self._noise.add(measured[2] / measured[0], self._workers)
        return norm

    def before_update(self, divisor: float) -> None:
        """Exchange what the optimizer needs for its update. divisor: of the gradients. Collective."""
        self._check_betas()
        if self._kind is Exchange.FULL:
            self._is_whole = False
            return
        self._gather_momentum()
        for optimizer in self._optimizers:
            optimizer.before_exchange()
        is_first = self._phases.at(self._resident.num_updates) is Exchange.FULL
        for s in self._sets:
            if self._starts_anew(is_first):
                s.mean.forget()
            self._exchange_set(s, divisor)

    def after_update(self) -> None:
        """Exchange the sums of updates, if it is time. Collective."""
        if self._kind is Exchange.SUM:
            for s in self._sets:
                assert s.sums is not None, "phases with SUM have sums"
                s.mean.reduce_(s.sums)
            for optimizer in self._optimizers:
                optimizer.after_exchange()

    # -------------------------------------------------------------------------------- state
    def own_kinds(
        self, saving: bool, saved: Mapping[str, float] | None
    ) -> Collection[str]:
        """Return the kinds of state of which a checkpoint has each worker's.

        saving: one that is written now. saved: one with these `numbers`, which is loaded; None: of neither.
        """
        return self._differing if saving else own_kinds(saved or {}, self._workers)

    def own_pieces(self, own: Collection[str], saving: bool) -> Iterator[StatePiece]:
        """Yield the pieces that are not those of a leaf. own: of `own_kinds`; their leaves have no pieces.

        saving: to write; collective then.
        """
        for s in self._sets:
            yield from s.saved(own) if saving else s.loaded(own)
            for leaf in s.of.resident:
                yield from numbers_of(
                    leaf,
                    cast(CompressedOptimizer, self._resident.optimizer_of(leaf)),
                    s.of.plan,
                    s.group.rank,
                    s.group.size,
                )

    def pieces_of_worker(self) -> Iterator[StatePiece]:
        """Yield what this worker alone has at a step at which the most differs, to count its bytes."""
        for s in self._sets if self._workers > 1 else ():
            yield from s.of_worker(
                s.buffers if self._phases.sums_locally else (WORKER_ERROR,)
            )

    def numbers(self) -> dict[str, float]:
        """Numbers of a checkpoint, equal on all ranks of a stage."""
        found = {
            "workers": self._workers,
            "noise_share": self._noise.value,
            "noise_count": self._noise.count,
            **counts_of_workers(self._differing, self._workers),
        }
        for i, optimizer in enumerate(self._optimizers):
            found |= {
                f"{name}/{i}": value for name, value in optimizer.numbers().items()
            }
        return found

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        """Restore `numbers`, with a line in the log if each worker begins with the mean of all."""
        self._noise = NoiseShare(
            numbers.get("noise_share", 0.0), int(numbers.get("noise_count", 0))
        )
        own = own_kinds(numbers, self._workers)
        for i, optimizer in enumerate(self._optimizers):
            optimizer.differs = MOMENTUM in own
            optimizer.load_numbers(
                {
                    name.rpartition("/")[0]: value
                    for name, value in numbers.items()
                    if name.endswith(f"/{i}")
                }
            )
        before = numbers.get("workers")
        is_first = self._groups.data.rank == self._groups.model.rank == 0
        if is_first and before not in (None, self._workers):
            logger.warning(NEW_NUMBER_OF_RANKS, before, self._workers)
        elif is_first and WORKER_ERROR in self._differing and not own:
            logger.warning(ONLY_MEANS)
        self.begin()

    def after_load(self) -> None:
        """State was overwritten: momentum of other shards is not known any more."""
        self._is_whole = False
        for optimizer in self._optimizers:
            optimizer.after_load()

    @property
    def _differing(self) -> Collection[str]:
        """The kinds of state that differ between workers now."""
        updates = self._resident.num_updates
        if self._workers == 1 or self._phases.variance_updates(updates) == updates:
            return ()  # nothing has been compressed, or never is
        differs = any(optimizer.differs for optimizer in self._optimizers)
        return (WORKER_ERROR, MOMENTUM, SUM) if differs else (WORKER_ERROR,)

    # -------------------------------------------------------------------------------- within
    @property
    def _workers(self) -> int:
        return self._groups.data.size

    @property
    def _optimizers(self) -> Sequence[CompressedOptimizer]:
        return cast(Sequence[CompressedOptimizer], self._resident.optimizers)

    @property
    def _beta1(self) -> float:
        return self._optimizers[0].param_groups[0]["betas"][0]

    def _check_betas(self) -> None:
        betas = set()
        for optimizer in self._optimizers:
            betas |= {group["betas"] for group in optimizer.param_groups}
        if len(betas) > 1:
            raise ConfigError(
                f"parameter groups have the betas {' and '.join(map(str, sorted(betas)))}: the momentum of "
                "all parameters is compressed together, with one decay rate. Give all groups the same betas."
            )

    def _starts_anew(self, follows_full: bool) -> bool:
        """Return whether the errors so far are of something else. Refreshes of 0/1 Adam leave them."""
        before = self._phases.at(self._resident.num_updates)
        if self._phases.sums_locally:
            return self._kind in (Exchange.SUM, Exchange.NONE) and before in (
                Exchange.FULL,
                Exchange.GRADIENT,
            )
        return follows_full

    def _exchange_set(self, s: CompressedSet, divisor: float) -> None:
        beta1 = self._beta1
        factor = s.group.size / divisor
        if self._kind is Exchange.GRADIENT:
            x = s.gradient.float().mul_(factor)
            s.mean.reduce_(x)
            s.momentum.lerp_(x, 1 - beta1)
            return
        s.momentum.mul_(beta1).add_(s.gradient, alpha=(1 - beta1) * factor)
        if self._kind is Exchange.MOMENTUM:
            s.mean.reduce_(s.momentum)

    def _gather_momentum(self) -> None:
        """Momentum of other ranks' shards, where only the own one is known."""
        if self._is_whole:
            return
        self._is_whole = True
        for s in self._sets:
            if s.of.plan.policy.optimizer is None:
                continue
            layout = s.of.plan.layout
            group = s.group
            for bucket, own in zip(layout.buckets, layout.shard_pieces(group.rank)):
                all_gather_into_(
                    s.momentum[bucket.start : bucket.stop],
                    s.momentum[own.start : own.stop],
                    group,
                )


def matrices_of(
    sets: Sequence[ParameterSet], groups: DataGroups
) -> dict[str, list[torch.Tensor]]:
    """Name of a bucket → its matrices that this rank counts in the norm.

    Where tensor parallelism can split some of them, only these: gradients of others may still be partial sums
    when they are reduced, and the noise is to be measured on the same parameters under every layout.
    """
    specs = [spec_of(p) for s in sets for p in s.parameters]
    matrices = [spec for spec in specs if not is_vector(spec)]
    # Those that tensor parallelism can split, if there are any.
    divided = {spec.name for spec in matrices if spec.tensor_split is not None}
    wanted = divided or {spec.name for spec in matrices}
    found = {}
    for s in sets:
        layout = s.plan.layout
        grads = s.buckets
        assert grads is not None, "sets that are trained have gradients"
        counted = {
            piece.slot: piece
            for piece in layout.whole_slots()
            if spec_of(s.parameters[piece.slot]).name in wanted
            and is_counted(spec_of(s.parameters[piece.slot]), groups)
        }
        for bucket in layout.buckets:
            pieces = [
                counted[i]
                for i in range(bucket.first_slot, bucket.last_slot)
                if i in counted
            ]
            name = layout.slots[bucket.first_slot].name
            found[name] = norm_views(grads.flat, pieces, grads.start_of)
    return found
