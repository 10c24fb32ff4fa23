"""`Grid`: coordinates of the ranks on the axes of parallelism, and the groups. Pure arithmetic, no torch.

Axes:  tp  tensor        cp  context        dp  data        pp  pipeline             world = tp * cp * dp * pp
       ep  expert        edp expert-data    the same ranks as cp x dp, cut another way: ep * edp = cp * dp

The first axis of `order` varies fastest. Default order, tp=2, cp=1, dp=2, pp=2 (and ep=2, so edp=1):

    rank   0  1  2  3  4  5  6  7
    tp     0  1  0  1  0  1  0  1        groups("tp")       (0,1) (2,3) (4,5) (6,7)
    dp     0  0  1  1  0  0  1  1        groups("dp")       (0,2) (1,3) (4,6) (5,7)
    pp     0  0  0  0  1  1  1  1        groups("tp","pp")  (0,1,4,5) (2,3,6,7)
    ep     0  0  1  1  0  0  1  1        groups("edp")      (0,) (1,) ...

The position of "ep" in the order, relative to "dp", decides which of ep and edp varies faster among the ranks
of cp x dp. Dense layers and experts have the same tensor and pipeline groups. (Megatron-LM
refuses most orders that give them different ones. Of orders in which tp is not first it accepts some, such as
cp-dp-tp-ep-pp, and gives experts other tensor groups than attention; its flags reach no such order.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ..errors import ConfigError

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
LARGEST_PRIME = 10**6  # that `divisors` tries

_DENSE = ("tp", "cp", "dp", "pp")
_EXPERT = ("tp", "ep", "edp", "pp")
_FLAGS = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "the data-parallel size",
    "pp": "pipeline_model_parallel_size",
}


@dataclass(frozen=True)
class Grid:
    """Sizes of the axes and their order.

    Raises ConfigError for sizes below one, a bad order, or ep that does not divide cp x dp.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    order: str = DEFAULT_ORDER

    def __post_init__(self):
        for axis in AXES:
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
        data = self.cp * self.dp
        if data % self.ep:
            raise ConfigError(
                f"expert_model_parallel_size={self.ep} does not divide context x data = "
                f"{self.cp} x {self.dp} = {data}: experts are distributed over those ranks. "
                f"Use a size in {_listed(divisors(data))}."
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
    ) -> "Grid":
        """The grid of `world_size` ranks; dp is what the other axes leave. Raises ConfigError."""
        one = cls(tp=tp, cp=cp, pp=pp, order=order)
        if world_size < 1 or world_size % one.world_size:
            raise ConfigError(_misfit(world_size, one))
        return cls(
            tp=tp, cp=cp, ep=ep, dp=world_size // one.world_size, pp=pp, order=order
        )

    @property
    def world_size(self) -> int:
        """tp * cp * dp * pp."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Size of the expert-data axis."""
        return self.cp * self.dp // self.ep

    def size(self, *axes: str) -> int:
        """How many ranks a group over these axes has."""
        return prod(self._size(axis) for axis in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank on tp, cp, dp, pp, ep and edp."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(
                f"rank {rank} is not on a grid of {self.world_size} ranks."
            )
        dense = _unravel(rank, self._radix["dense"])
        return dense | _unravel(
            _ravel(dense, self._radix["data"]), self._radix["expert_data"]
        )

    def rank_of(self, **coordinates: int) -> int:
        """The rank at these coordinates, 0 on axes left out; of (tp, cp, dp, pp) or of (tp, ep, edp, pp)."""
        _view(coordinates)
        for axis, at in coordinates.items():
            if not 0 <= at < self._size(axis):
                raise ConfigError(
                    f"{axis}={at} is outside its axis, which has size {self._size(axis)}."
                )
        at = dict.fromkeys(_DENSE + _EXPERT, 0) | coordinates
        if "ep" in coordinates or "edp" in coordinates:
            at |= _unravel(_ravel(at, self._radix["expert_data"]), self._radix["data"])
        return _ravel(at, self._radix["dense"])

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups over these axes: ranks that differ in no other coordinate, ascending, by first rank."""
        fixed = [axis for axis in _view(axes) if axis not in axes]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            found.setdefault(tuple(at[axis] for axis in fixed), []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def split_data(
        self, size: int
    ) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """(inner, outer) groups of the ranks over dp and cp; see `cut_groups`."""
        return cut_groups(self.groups("dp", "cp"), size)

    def embedding_groups(self) -> list[tuple[int, ...]]:
        """First and last rank of each pipeline, which hold a tied embedding; other ranks are alone."""
        groups = []
        for pipeline in self.groups("pp"):
            groups.append(tuple(dict.fromkeys((pipeline[0], pipeline[-1]))))
            groups.extend((rank,) for rank in pipeline[1:-1])
        return sorted(groups)

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group over these axes that holds `rank`."""
        at = self.coordinates(rank)
        here = {axis: at[axis] for axis in _view(axes)}
        ranks = [{}]
        for axis in axes:
            ranks = [r | {axis: i} for r in ranks for i in range(self._size(axis))]
        return tuple(sorted(self.rank_of(**(here | r)) for r in ranks))

    def __str__(self) -> str:
        sizes = " x ".join(f"{axis} {self._size(axis)}" for axis in _DENSE)
        return sizes + (
            f" (experts: ep {self.ep} x edp {self.edp})" if self.ep > 1 else ""
        )

    def _size(self, axis: str) -> int:
        return getattr(self, axis)

    @cached_property
    def _radix(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Mixed radix systems, fastest digit first: of the rank, and of the position within cp x dp, divided
        in two ways."""
        order = self.order.split("-")
        pick = lambda axes: tuple(
            (axis, self._size(axis)) for axis in order if axis in axes
        )
        experts = tuple(
            (("edp", self.edp) if axis == "dp" else (axis, n))
            for axis, n in pick(("ep", "dp"))
        )
        return {
            "dense": pick(_DENSE),
            "data": pick(("cp", "dp")),
            "expert_data": experts,
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
    inner = []
    outer = []
    for ranks in groups:
        inner += [ranks[first : first + size] for first in range(0, n, size)]
        outer += [ranks[place::size] for place in range(size)]
    return sorted(inner), sorted(outer)


def divisors(n: int) -> tuple[int, ...]:
    """The divisors of n, in rising order. Above 10^12, those without two prime factors above 10^6:
    a number from the command line must not cost minutes.
    """
    found = [1] * (n > 0)
    rest = n
    prime = 2
    while rest > 1 and prime <= LARGEST_PRIME:
        if prime * prime > rest:
            prime = rest
        powers = [1]
        while rest % prime == 0:
            rest //= prime
            powers.append(powers[-1] * prime)
        found = [divisor * power for divisor in found for power in powers]
        prime += 1
    return tuple(
        sorted(found if rest <= 1 else [*found, *(divisor * rest for divisor in found)])
    )


def _view(axes) -> tuple[str, ...]:
    """The four axes that contain these. Raises ConfigError for unknown axes, or for both views at once."""
    for view in (_DENSE, _EXPERT):
        if set(axes) <= set(view):
            return view
    raise ConfigError(
        f"no grid has the axes ({', '.join(axes)}) together. Dense layers: "
        f"{', '.join(_DENSE)}; experts: {', '.join(_EXPERT)}."
    )


def _unravel(index: int, radix) -> dict[str, int]:
    at = {}
    for axis, size in radix:
        index, at[axis] = divmod(index, size)
    return at


def _ravel(at: dict[str, int], radix) -> int:
    index = 0
    for axis, size in reversed(radix):
        index = index * size + at[axis]
    return index


def _misfit(world_size: int, one: Grid) -> str:
    """The message for a world size that the model axes do not divide."""
    n = one.world_size
    spelled = ", ".join(
        f"{_FLAGS[axis]}={getattr(one, axis)}" for axis in ("tp", "cp", "pp")
    )
    below = world_size // n * n
    starts = f"{below} or {below + n}" if below else f"{n}"
    text = (
        f"world size {world_size} is not a multiple of {n} ({spelled}): every rank holds one place of "
        f"the grid, and data parallelism takes what is left. Start {starts} ranks"
    )
    alternatives = []
    for axis in ("tp", "cp", "pp"):
        others = n // getattr(one, axis)
        if getattr(one, axis) > 1 and world_size > 0 and world_size % others == 0:
            alternatives.append(
                f"{_FLAGS[axis]} in {_listed(divisors(world_size // others))}"
            )
    return text + "".join(f", or use {text}" for text in alternatives) + "."


def _listed(numbers) -> str:
    return f"({', '.join(map(str, numbers))})"


def ranks_in_short(ranks: Sequence[int]) -> str:
    """(0, 1, 2, 3) → 0–3;  (0, 48, 96, 144) → 0, 48, … 144;  others are written out, long ones cut."""
    if len(ranks) <= 2:
        return ", ".join(map(str, ranks))
    step = ranks[1] - ranks[0]
    if any(b - a != step for a, b in zip(ranks, ranks[1:])):
        return (
            ", ".join(map(str, ranks))
            if len(ranks) <= 8
            else f"{', '.join(map(str, ranks[:4]))}, … {ranks[-1]}"
        )
    return (
        f"{ranks[0]}–{ranks[-1]}"
        if step == 1
        else f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"
    )
