"""`Grid`: coordinates of the ranks on the axes of parallelism, and the groups. Pure arithmetic, no torch.

Axes:  tp  tensor        cp  context        dp  data          pp  pipeline           world = tp * cp * dp * pp
       etp expert-tensor ep  expert         edp expert-data   the same ranks as tp x cp x dp, cut another way:
                                                              etp * ep * edp = tp * cp * dp

The first axis of `order` varies fastest. Default order, tp=2, cp=1, dp=2, pp=2 (and ep=2, so edp=1):

    rank   0  1  2  3  4  5  6  7
    tp     0  1  0  1  0  1  0  1        groups("tp")       (0,1) (2,3) (4,5) (6,7)
    dp     0  0  1  1  0  0  1  1        groups("dp")       (0,2) (1,3) (4,6) (5,7)
    pp     0  0  0  0  1  1  1  1        groups("tp","pp")  (0,1,4,5) (2,3,6,7)
    ep     0  0  1  1  0  0  1  1        groups("edp")      (0,) (1,) ...

Experts have the pipeline groups of dense layers and, with etp = tp, the default, their tensor groups. Then ep
and edp cut the ranks of cp x dp, and the position of "ep" in the order, relative to "dp", decides which of them
varies faster. (Megatron-LM refuses most orders that give experts other tensor groups. Of orders in which tp is
not first it accepts some, such as cp-dp-tp-ep-pp; its flags reach no such order.)

With another etp ("parallel folding": Liu et al. 2025, arXiv:2504.14960, section 3) a place among the ranks of
tp x cp x dp is a number in two mixed radix systems: tp, cp, dp and etp, ep, edp, each in its order. tp=2, dp=4:

    rank   0  1  2  3  4  5  6  7
    tp     0  1  0  1  0  1  0  1        groups("tp")       (0,1) (2,3) (4,5) (6,7)
    ep     0  1  2  3  0  1  2  3        groups("ep")       (0,1,2,3) (4,5,6,7)              etp=1, ep=4
    edp    0  0  0  0  1  1  1  1        groups("edp")      (0,4) (1,5) (2,6) (3,7)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ..errors import ConfigError

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
LARGEST_PRIME = 10**6  # that `divisors` tries

_DENSE = ("tp", "cp", "dp", "pp")
_EXPERT = ("etp", "ep", "edp", "pp")
_EXPERT_OF_TP = ("tp", "ep", "edp", "pp")  # the same where etp is tp
# Experts' axes, by those whose places in the order they take.
_OF_EXPERTS = {
    "tp": "etp",
    "dp": "edp",
}
_FLAGS = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dp": "the data-parallel size",
    "pp": "pipeline_model_parallel_size",
}


@dataclass(frozen=True)
class Grid:
    """Sizes of the axes and their order.

    tp     tensor: ranks that divide each layer
    cp     context: ranks that divide each sequence
    ep     expert: ranks among those of tp x cp x dp that divide the experts
    dp     data: ranks that divide the batch
    pp     pipeline: ranks that divide the list of layers
    order  names of the axes, the fastest first
    etp    expert-tensor: ranks that divide each expert; 0: those of tp

    Raises ConfigError for sizes below one, a bad order, or etp x ep that does not divide tp x cp x dp.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    order: str = DEFAULT_ORDER
    etp: int = 0

    def __post_init__(self):
        # Sizes, and an order of all axes.
        if self.etp == 0:
            object.__setattr__(self, "etp", self.tp)
        for axis in (*AXES, "etp"):
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 1:
                raise ConfigError(
                    f"{_FLAGS[axis]}={size!r}: the size of a parallel axis is a whole number, "
                    "at least 1."
                )
        if sorted(self.order.split("-")) != sorted(AXES):
            raise ConfigError(
                f"rank order {self.order!r} must name each of {', '.join(AXES)} once, fastest "
                f"first, joined by '-': {DEFAULT_ORDER!r} is the default."
            )
        # Experts are on the ranks of tp x cp x dp.
        places = self.tp * self.cp * self.dp
        if places % self.etp:
            sizes = _listed(divisors(places))
            raise ConfigError(
                f"expert_tensor_parallel_size={self.etp} does not divide tensor x context x data = "
                f"{places}: experts are divided among those ranks. Use a size in {sizes}."
            )
        data = places // self.etp
        if data % self.ep:
            of = f"context x data = {self.cp} x {self.dp} = {data}"
            if self.folds:
                of = f"tensor x context x data / expert-tensor = {places} / {self.etp} = {data}"
            sizes = _listed(divisors(data))
            raise ConfigError(
                f"expert_model_parallel_size={self.ep} does not divide {of}: experts are "
                f"distributed over those ranks. Use a size in {sizes}."
            )

    @classmethod
    def fit(
        cls,
        world_size: int,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        pp: int = 1,
        order: str = DEFAULT_ORDER,
        etp: int = 0,
    ) -> "Grid":
        """Return the grid of `world_size` ranks; dp is what the other axes leave. Raises ConfigError."""
        # The ranks of one replica of the model.
        one = cls(tp=tp, cp=cp, pp=pp, order=order)
        if world_size < 1 or world_size % one.world_size:
            raise ConfigError(_misfit(world_size, one))
        dp = world_size // one.world_size
        return cls(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, order=order, etp=etp)

    @property
    def world_size(self) -> int:
        """tp * cp * dp * pp."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Size of the expert-data axis."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def folds(self) -> bool:
        """Whether experts are divided over other tensor groups than dense layers."""
        return self.etp != self.tp

    def known(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return these axes, with "tp" for "etp" where both are the same: a group has one name."""
        return tuple("tp" if a == "etp" and not self.folds else a for a in axes)

    def size(self, *axes: str) -> int:
        """Return how many ranks a group over these axes has."""
        return prod(self._size(axis) for axis in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank on tp, cp, dp, pp, etp, ep and edp."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(
                f"rank {rank} is not on a grid of {self.world_size} ranks."
            )
        dense = _unravel(rank, self._radix["dense"])
        # The same place, on the experts' axes.
        place = _ravel(dense, self._radix["place"])
        return dense | {"etp": dense["tp"]} | _unravel(place, self._radix["experts"])

    def rank_of(self, **coordinates: int) -> int:
        """Return the rank at these coordinates, 0 on axes left out; of (tp, cp, dp, pp) or of (etp, ep, edp, pp)."""
        view = self._view(coordinates)
        for axis, position in coordinates.items():
            size = self._size(axis)
            if not 0 <= position < size:
                raise ConfigError(
                    f"{axis}={position} is outside its axis, which has size {size}."
                )
        at = dict.fromkeys(_DENSE + _EXPERT, 0) | coordinates
        # The experts' coordinates give those of dense layers.
        if view == _EXPERT:
            at["tp"] = at["etp"]
        if view != _DENSE:
            place = _ravel(at, self._radix["experts"])
            at |= _unravel(place, self._radix["place"])
        return _ravel(at, self._radix["dense"])

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups over these axes: ranks that differ in no other coordinate, ascending, by first rank."""
        # Ranks of a group have equal coordinates on all other axes.
        fixed = [axis for axis in self._view(axes) if axis not in axes]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            place = tuple(at[axis] for axis in fixed)
            found.setdefault(place, []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def split_data(
        self, size: int
    ) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """(inner, outer) groups of the ranks over dp and cp; see `cut_groups`."""
        return cut_groups(self.groups("dp", "cp"), size)

    def embedding_groups(self) -> list[tuple[int, ...]]:
        """First and last rank of each pipeline, which hold a tied embedding; other ranks are alone."""
        # A pipeline of one rank has one end.
        groups = []
        for pipeline in self.groups("pp"):
            groups.append(tuple(dict.fromkeys((pipeline[0], pipeline[-1]))))
            groups.extend((rank,) for rank in pipeline[1:-1])
        return sorted(groups)

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the group over these axes that holds `rank`."""
        at = self.coordinates(rank)
        here = {axis: at[axis] for axis in self._view(axes)}
        # All coordinates on these axes, with those of `rank` on the others.
        places = [here]
        for axis in axes:
            sizes = range(self._size(axis))
            places = [place | {axis: i} for place in places for i in sizes]
        return tuple(sorted(self.rank_of(**place) for place in places))

    def __str__(self) -> str:
        sizes = " x ".join(f"{axis} {self._size(axis)}" for axis in _DENSE)
        if self.folds:
            sizes += f" (experts: etp {self.etp} x ep {self.ep} x edp {self.edp})"
        elif self.ep > 1:
            sizes += f" (experts: ep {self.ep} x edp {self.edp})"
        return sizes

    def _size(self, axis: str) -> int:
        """Size of an axis, edp included."""
        return getattr(self, axis)

    def _view(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return the four axes that contain these. Raises ConfigError for unknown axes, or for both views at once."""
        for view in (_DENSE, _EXPERT, _EXPERT_OF_TP):
            knows = set(axes) <= set(view)
            if knows and not (self.folds and view == _EXPERT_OF_TP):
                return view
        together = ", ".join(axes)
        dense = ", ".join(_DENSE)
        expert = ", ".join(_EXPERT)
        raise ConfigError(
            f"no grid has the axes ({together}) together. Dense layers: "
            f"{dense}; experts: {expert}."
        )

    @cached_property
    def _radix(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Mixed radix systems, fastest digit first: of the rank, and of a place among the ranks that experts cut
        in another way than dense layers."""
        order = self.order.split("-")
        of_experts = [_OF_EXPERTS.get(axis, axis) for axis in order]
        pick = lambda axes, of: tuple((a, self._size(a)) for a in of if a in axes)
        # Where tensor groups are the same, the rest of the axes is cut.
        first = 0 if self.folds else 1
        return {
            "dense": pick(_DENSE, order),
            "place": pick(_DENSE[first:-1], order),
            "experts": pick(_EXPERT[first:-1], of_experts),
        }


def cut_groups(
    groups: list[tuple[int, ...]], size: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """(inner, outer): runs of `size` ranks of each group, and across runs the ranks of equal position.

    Raises ConfigError.
    """
    n = len(groups[0])
    if size < 1 or n % size:
        raise ConfigError(
            f"{n} data-parallel ranks cannot be cut into groups of {size}. Use "
            f"{_listed(divisors(n))}."
        )
    # Neighbours form the inner groups.
    inner = []
    outer = []
    for ranks in groups:
        inner += [ranks[first : first + size] for first in range(0, n, size)]
        outer += [ranks[place::size] for place in range(size)]
    return sorted(inner), sorted(outer)


def divisors(n: int) -> tuple[int, ...]:
    """Return the divisors of n, in rising order. Above 10^12, those without two prime factors above 10^6:
    a number from the command line must not cost minutes.
    """
    found = [1] if n > 0 else []
    rest = n
    prime = 2
    while rest > 1 and prime <= LARGEST_PRIME:
        if prime * prime > rest:
            prime = rest
        # All powers of this prime, times all divisors so far.
        powers = [1]
        while rest % prime == 0:
            rest //= prime
            powers.append(powers[-1] * prime)
        found = [divisor * power for divisor in found for power in powers]
        prime += 1  # every number is tried; those that are not prime divide nothing
    # What is left is a prime, or has no prime factor that was tried.
    if rest > 1:
        found += [divisor * rest for divisor in found]
    return tuple(sorted(found))


def _unravel(index: int, radix: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Return the digits of a number in a mixed radix system, by axis."""
    at = {}
    for axis, size in radix:
        index, at[axis] = divmod(index, size)
    return at


def _ravel(at: dict[str, int], radix: Sequence[tuple[str, int]]) -> int:
    """Return the number that has these digits."""
    index = 0
    for axis, size in reversed(radix):
        index = index * size + at[axis]
    return index


def _misfit(world_size: int, one: Grid) -> str:
    """Return the message for a world size that the model axes do not divide."""
    n = one.world_size
    axes = ("tp", "cp", "pp")
    spelled = ", ".join(f"{_FLAGS[axis]}={getattr(one, axis)}" for axis in axes)
    # The nearest world sizes that fit.
    below = world_size // n * n
    starts = f"{below} or {below + n}" if below else f"{n}"
    text = (
        f"world size {world_size} is not a multiple of {n} ({spelled}): every rank holds one place of "
        f"the grid, and data parallelism takes what is left. Start {starts} ranks"
    )
    # Sizes of one axis that would fit, with the others as they are.
    for axis in axes:
        size = getattr(one, axis)
        others = n // size
        if size > 1 and world_size > 0 and world_size % others == 0:
            sizes = _listed(divisors(world_size // others))
            text += f", or use {_FLAGS[axis]} in {sizes}"
    return text + "."


def _listed(numbers: Sequence[int]) -> str:
    """Return the numbers in parentheses."""
    return f"({', '.join(map(str, numbers))})"


def ranks_in_short(ranks: Sequence[int]) -> str:
    """(0, 1, 2, 3) → 0–3;  (0, 48, 96, 144) → 0, 48, … 144;  others are written out, long ones cut."""
    if len(ranks) <= 2:
        return ", ".join(map(str, ranks))
    first = ranks[0]
    last = ranks[-1]
    step = ranks[1] - first
    # An irregular list.
    if any(b - a != step for a, b in zip(ranks, ranks[1:])):
        if len(ranks) <= 8:
            return ", ".join(map(str, ranks))
        beginning = ", ".join(map(str, ranks[:4]))
        return f"{beginning}, … {last}"
    # Neighbours, or ranks at equal distances.
    if step == 1:
        return f"{first}–{last}"
    return f"{first}, {ranks[1]}, … {last}"
