"""DeepSpeed's attributes of sharded parameters, by which programs decide whether they must gather one:

    if hasattr(p, "ds_id"):
        with zero.GatheredParameters(p):
            value = p.detach().cpu().clone()

Parameters of `zero.Init` and those of an engine at stage 3, also on one rank, have them; others do not.
"""

import enum
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    WholeParameter = nn.Parameter
else:
    WholeParameter = object  # two bases with a layout in C do not combine


class _Shard(Protocol):
    """What the names read of `zero_init.Partition`."""

    part: torch.Tensor


class ZeroParamStatus(enum.Enum):
    """`p.ds_status`: whether this rank has the whole parameter."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ShardedNames(WholeParameter):
    """The attributes, for subclasses of `nn.Parameter`. Each raises AttributeError if it is not sharded."""

    __slots__ = ()
    partition: _Shard  # of a parameter of `zero.Init`

    @property
    def ds_id(self) -> int:
        """A number that no other parameter of this process has while this one exists."""
        self._engine_at("ds_id")
        return id(self)

    @property
    def ds_shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        self._engine_at("ds_shape")
        return self.shape

    @property
    def ds_numel(self) -> int:
        """Number of elements of the whole parameter."""
        self._engine_at("ds_numel")
        return self.numel()

    @property
    def ds_status(self) -> ZeroParamStatus:
        """AVAILABLE inside of `zero.GatheredParameters`, and while a layer computes with it."""
        engine = self._engine_at("ds_status")
        is_whole = not self.is_meta
        if engine is not None and engine.gathering is not None:
            is_whole = engine.gathering.has(self)
        return ZeroParamStatus.AVAILABLE if is_whole else ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_tensor(self) -> torch.Tensor:
        """A copy of this rank's shard, flat: of a parameter of `zero.Init` with its padding."""
        engine = self._engine_at("ds_tensor")
        if engine is None:
            return self.partition.part.clone()
        parts = [part for _, part in engine.gradients.states(self, "weight")]
        return torch.cat([self.new_empty(0), *(part.to(self.dtype) for part in parts)])

    @property
    def ds_active_sub_modules(self) -> set[int]:
        """Modules that compute with it, which programs clear before they remove hooks; always empty."""
        self._engine_at("ds_active_sub_modules")
        return set()

    def _engine_at(self, name: str) -> Any:
        """Return the parameter's engine at stage 3; None for a parameter of `zero.Init`."""
        engine = self.__dict__.get("engine", lambda: None)()
        if engine is not None and engine.zero_optimization_stage() == 3:
            return engine
        if "partition" in self.__dict__:
            return None
        raise AttributeError(f"this parameter has no {name}: it is not sharded.")


class ShownParameter(ShardedNames, nn.Parameter):
    """A parameter of `zero.Init` that is gathered."""
