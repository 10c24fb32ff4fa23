"""Norms: of the whole gradient, and of logical parameters; the check that ranks have gradients of the same
parameters; and the loss scale, which falls when the norm is not finite.

The gradient norm counts each logical element once, in one pass over this rank's shard of the gradients, also
if gradients are whole everywhere (ZeRO 0). The partial sums are added over the data group (all shards, all
experts) and over the model-parallel group (all tensor-parallel parts, all stages). Not counted: parameters
that every tensor-parallel rank holds, except on the first, and second copies of tied parameters.

Note: rows. torch sums a flat fp32 norm in a handful of fp32 accumulators, with an error of 2e-4 at 8 M
elements. Norms of rows of 1024, squared and summed in float64, are as fast and accurate to 1e-9. The total is
finite exactly if every gradient is (except for elements beyond 1e19, whose squares overflow fp32 and which
count as infinite).

Note: divergence. A rank that took another path through the model than its peers trains on a sum in which its
part is missing. The ranks compare a fingerprint, 16 bits, of the parameters that received gradients; it is
sent with the norm (unused.py).

Note: loss scale. fp16 gradients below 6e-8 vanish, so the loss is multiplied by a scale and the gradient
divided by it in the update. The dynamic scale follows DeepSpeed's ZeRO rule, for every precision and stage:

    overflow     one of `hysteresis` lives is lost; losing the last one halves the scale (and leaves one life)
    no overflow  after every `window` consecutive steps without one, the scale doubles and the lives are
                 restored

`ScalerState.after` is the rule, a pure function; `LossScale` holds the current state.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config import OptimizerConfig
from ..errors import ConfigError
from ..host.device_copies import column, on_device
from ..mpu.collectives import all_reduce_
from ..mpu.group import Group
from ..mpu.managed_parameter import spec_of
from ..mpu.param_spec import EXPERT_DATA_AXES, ParamSpec
from .data_groups import Axes, DataGroups
from .layout import SlotPiece

ROW = 1024
ROWS_AT_A_TIME = 4096
# what `sum_over_ranks` sends over the data and the model group
DATA_BYTES = 3 * 8
MODEL_BYTES = 2 * 8


def is_counted(spec: ParamSpec, tp_rank: int) -> bool:
    """Return whether this rank's gradient of the parameter counts in the norm."""
    return not spec.tied_copy and (spec.is_split_over("tp") or tp_rank == 0)


def norm_views(
    flat: torch.Tensor,
    pieces: Iterable[SlotPiece],
    start_of: Callable[[SlotPiece], int],
) -> list[torch.Tensor]:
    """Return the gradients of the pieces as few 2-D views: neighbours are joined, runs cut into rows and a rest.

    flat, start_of: where the gradients are. Pieces are neighbours if they are so in the *whole* buffer: the
    order in which squares are added does not depend on the share of it that this rank keeps.
    """
    runs: list[list[int]] = []
    end = None
    for piece in pieces:
        start = start_of(piece)
        if end == piece.flat:
            runs[-1][1] += piece.padded_numel
        else:
            runs.append([start, start + piece.padded_numel])
        end = piece.flat + piece.padded_numel
    views = []
    for start, stop in runs:
        middle = stop - (stop - start) % ROW
        views += [flat[start:middle].view(-1, ROW), flat[middle:stop].view(1, -1)]
    return [view for view in views if view.numel()]


def squared_norm(views: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of squares of all elements, a float64 scalar."""
    if not views:
        return torch.zeros((), dtype=torch.float64, device=device)
    rows = torch.empty(
        sum(len(view) for view in views), dtype=torch.float32, device=device
    )
    at = 0
    for view in views:
        # On the CPU torch makes a wide copy of 16-bit gradients: of a small part at a time.
        is_copied = view.dtype != torch.float32 and view.device.type == "cpu"
        for part in view.split(ROWS_AT_A_TIME) if is_copied else [view]:
            torch.linalg.vector_norm(
                part, dim=1, dtype=torch.float32, out=rows[at : at + len(part)]
            )
            at += len(part)
    return rows.double().square().sum()


def count_zeros(views: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Number of elements that are exactly zero, a float64 scalar."""
    zeros = torch.zeros((), dtype=torch.float64, device=device)
    for view in views:
        zeros += view.numel() - torch.count_nonzero(view)
    return zeros


def sum_over_ranks(
    squares: torch.Tensor,
    number: float,
    groups: DataGroups,
    zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    """float64 [2] on the device: the sum of `squares` over all ranks, and 0 if data-parallel ranks have the
    same `number`, below 2^16; NaN if one of them is infinite. With `zeros` [3]: their sum, too.

    Collective over the data and the model group; the host does not wait.
    """
    f = number
    local = column(
        [squares, f, f * f, *([] if zeros is None else [zeros])], squares.device
    )
    all_reduce_(local, groups.data)
    # n Σf² - (Σf)², n² times the variance of the fingerprints: 0 exactly if all are equal, exact in float64.
    local[1] = groups.data.size * local[2] - local[1].square()
    if zeros is not None:
        local[2] = local[3]
    local = local[: 2 if zeros is None else 3]
    all_reduce_(local, groups.model)
    return local


@dataclass(frozen=True, slots=True)
class NormEntry:
    """A logical parameter. is_split: each rank along `axes`, those that sum its gradient, holds a part of its
    optimizer state."""

    spec: ParamSpec
    axes: Axes
    is_split: bool
    is_tied: bool


class ParameterNorms:
    """Norms of tensors that belong to logical parameters, such as weights or updates, over all their parts.

    A parameter may be in shards of several data-parallel ranks, split over tensor-parallel ranks, over ranks
    with other experts, and held by two pipeline stages. A call makes one all-reduce for all parameters over
    each group that has parts, and no host synchronization. It is collective; ranks without parts of any
    parameter call it with empty lists.

    entries: parameters whose optimizers ask for norms, in the same order on all ranks of the same stages
    """

    def __init__(
        self, entries: Sequence[NormEntry], groups: DataGroups, device: torch.device
    ):
        self._groups = groups
        self._device = torch.device(device)
        self.lists = 0  # of the last call
        self._position = {entry.spec.name: i for i, entry in enumerate(entries)}
        self._indices: dict[tuple[str, ...], torch.Tensor] = {}
        tied = sorted(
            (entry.spec.tied, i) for i, entry in enumerate(entries) if entry.is_tied
        )
        self._tied = self._tensor([i for _, i in tied], torch.int64)
        self._is_first_holder = self._tensor(
            [not entries[i].spec.tied_copy for _, i in tied]
        )
        self._counts_here = self._tensor(
            [groups.tp.rank == 0 or e.spec.is_split_over("tp") for e in entries]
        )
        # Over data-parallel ranks: parts in shards, and experts, which the first of the ranks that hold the
        # same ones counts.
        is_first = groups.rank_by_axes.get(EXPERT_DATA_AXES, 0) == 0
        over_data = [e.is_split or e.axes == EXPERT_DATA_AXES for e in entries]
        self._sums_over_data = any(over_data)
        self._over_data = self._tensor(over_data, torch.bool)
        self._part_here = self._tensor(
            [
                of_data and (e.is_split or is_first)
                for of_data, e in zip(over_data, entries)
            ]
        )

    def __call__(
        self,
        lists: Sequence[Sequence[torch.Tensor]],
        parameters: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Norms, fp32 [len(lists), len(parameters)], of the logical parameters with the parts `parameters`.

        lists: of tensors, one for each of `parameters`: the parts themselves, their updates, ...
        """
        return self.of(self.reduced(self.squares(lists, parameters)), parameters)

    def squares(
        self,
        lists: Sequence[Sequence[torch.Tensor]],
        parameters: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """float64 [len(lists), entries]: sums of squares of these parts, to add to those of other parts."""
        self.lists = len(lists)
        squares = torch.zeros(
            len(lists), len(self._position), dtype=torch.float64, device=self._device
        )
        if parameters:
            values = [tensor for tensors in lists for tensor in tensors]
            norms = torch.stack(torch._foreach_norm(values, 2, torch.float64)).view(
                len(lists), -1
            )
            squares.index_add_(1, self._index(parameters), norms.square())
        return squares

    def reduced(self, squares: torch.Tensor) -> torch.Tensor:
        """Norms of all entries, fp32, from the squares of all parts that this rank has. Collective."""
        return self._sum(squares).sqrt().float()

    def of(
        self, norms: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the columns of `reduced` of the logical parameters with the parts `parameters`."""
        return norms[:, self._index(parameters)]

    def largest(
        self, values: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Maxima, fp32 [len(parameters)], over all parts of the logical parameters.

        values: fp32 [len(parameters)], not negative, of the parts `parameters`. Collective, as a call.
        """
        found = torch.zeros(len(self._position), device=self._device)
        index = self._index(parameters)
        found.scatter_reduce_(0, index, values, "amax")
        for group, _ in self.sent_of_largest():
            all_reduce_(found, group, "max")
        return found[index]

    def sent_of_largest(self) -> Iterator[tuple[Group, int]]:
        """(group, bytes) of each all-reduce of `largest`."""
        if self._position and self._sums_over_data:
            yield self._groups.data, 4 * len(self._position)
        if self._position and self._groups.tp.size > 1:
            yield self._groups.tp, 4 * len(self._position)

    def sent(self, lists: int) -> Iterator[tuple[Group, int]]:
        """(group, bytes) of each all-reduce of a call with this many lists."""
        whole = 8 * lists * len(self._position)
        if self._sums_over_data:
            yield self._groups.data, whole
        if self._groups.tp.size > 1 and whole:
            yield self._groups.tp, whole
        if len(self._tied):
            yield self._groups.tied, 8 * lists * len(self._tied)

    def _index(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        names = tuple(spec_of(p).name for p in parameters)
        # Copied to the device once, since every step uses the same.
        if names not in self._indices:
            self._indices[names] = self._tensor(
                [self._position[name] for name in names], torch.int64
            )
        return self._indices[names]

    def _sum(self, squares: torch.Tensor) -> torch.Tensor:
        # Parameters that are whole on every data-parallel rank have their sum already.
        if self._sums_over_data:
            summed = squares * self._part_here
            all_reduce_(summed, self._groups.data)
            squares = torch.where(self._over_data, summed, squares)
        # Tensor-parallel parts; the first rank's of parameters that all these ranks hold.
        if self._groups.tp.size > 1:
            squares = squares * self._counts_here
            all_reduce_(squares, self._groups.tp)
        # Pipeline stages: all holders use the sum of the first, so that their copies stay equal to the bit.
        if len(self._tied):
            of_first = squares[:, self._tied] * self._is_first_holder
            all_reduce_(of_first, self._groups.tied)
            squares = squares.index_copy(1, self._tied, of_first)
        return squares

    def _tensor(self, values: list, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return on_device(torch.tensor(values, dtype=dtype), self._device)


# ---------------------------------------------------------------------------------------------- loss scale
FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class ScalerRule:
    """How the loss scale changes.

    dynamic      False: the scale never changes
    window       steps without overflow after which the scale is doubled
    hysteresis   overflows after which the scale is halved
    consecutive  only consecutive overflows count: a step without overflow restores the hysteresis
    """

    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    consecutive: bool = False


@dataclass(frozen=True, slots=True)
class ScalerState:
    """The scale, the number of overflows left until it is halved (`lives`), the iteration of the last
    overflow (-1: none yet), and the number of iterations so far."""

    scale: float
    lives: int
    last_overflow: int = -1
    iteration: int = 0

    def after(self, overflow: bool, rule: ScalerRule) -> "ScalerState":
        """Return the state after one more step. Raises ConfigError if the scale would fall below the minimum."""
        if not rule.dynamic:
            return self
        scale = self.scale
        lives = self.lives
        last_overflow = self.last_overflow
        if not overflow:
            # Steps without overflow before this one.
            stable = self.iteration - last_overflow - 1
            grows = stable > 0 and stable % rule.window == 0
            scale *= FACTOR if grows else 1.0
            lives = rule.hysteresis if grows or rule.consecutive else lives
            return ScalerState(scale, lives, last_overflow, self.iteration + 1)
        if lives > 1:
            return ScalerState(scale, lives - 1, self.iteration, self.iteration + 1)
        if scale <= rule.minimum:
            error: Any = ConfigError(
                f"gradients overflow at iteration {self.iteration} of the loss scaler although the loss "
                f"scale is at its minimum of {rule.minimum:g}: a lower scale would not help because the loss "
                "itself diverges. Lower the learning rate, train in bf16, or lower --min-loss-scale."
            )
            # Overflow is that of all ranks.
            error.on_all_ranks = True
            raise error
        return ScalerState(
            max(scale / FACTOR, rule.minimum), lives, self.iteration, self.iteration + 1
        )


class LossScale:
    """Holds the state. check_overflow False: a gradient that is not finite is applied anyway (never in fp16)."""

    def __init__(
        self,
        scale: float = 1.0,
        rule: ScalerRule | None = None,
        check_overflow: bool = True,
    ):
        self.rule = rule or ScalerRule()
        self.check_overflow = check_overflow or self.rule.dynamic
        self.state = ScalerState(float(scale), self.rule.hysteresis)

    @property
    def scale(self) -> float:
        """The current factor of the loss."""
        return self.state.scale

    def update(self, overflow: bool) -> None:
        """Count a step, and change the scale if it has to change."""
        self.state = self.state.after(overflow, self.rule)

    def numbers(self) -> dict[str, float]:
        """Return the state for a checkpoint. Empty if the scale never changes: then the configuration has it."""
        s = self.state
        if not self.rule.dynamic:
            return {}
        return {
            "loss_scale": s.scale,
            "loss_scale_lives": s.lives,
            "loss_scale_last_overflow": s.last_overflow,
            "loss_scale_iteration": s.iteration,
        }

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        """Restore what `numbers` returned; without numbers the state stays as configured."""
        if self.rule.dynamic and "loss_scale" in numbers:
            self.state = ScalerState(
                float(numbers["loss_scale"]),
                int(numbers["loss_scale_lives"]),
                int(numbers["loss_scale_last_overflow"]),
                int(numbers["loss_scale_iteration"]),
            )


def make_scaler(settings: OptimizerConfig) -> LossScale:
    """Dynamic for fp16 without a fixed `loss_scale`, else fixed."""
    if not settings.fp16:
        return LossScale(1.0)
    if settings.loss_scale:
        return LossScale(settings.loss_scale)
    rule = ScalerRule(
        True,
        settings.loss_scale_window,
        settings.hysteresis,
        settings.min_loss_scale,
        settings.consecutive_hysteresis,
    )
    return LossScale(settings.initial_loss_scale, rule)
