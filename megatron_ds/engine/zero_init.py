"""DeepSpeed's `zero.Init` and `zero.GatheredParameters`: modules that are made in parts, before there is an engine.

    with megatron_ds.zero.Init(config_dict_or_path=config):
        model = Model()                     # each rank keeps its part of every parameter; parameters are on "meta"
    with megatron_ds.zero.GatheredParameters(model.head.weight, modifier_rank=0):
        if rank == 0:
            torch.nn.init.zeros_(model.head.weight)
    engine, *_ = megatron_ds.initialize(model=model, config=config)

    parameter, 10 elements, 4 ranks     |0 1 2|3 4 5|6 7 8|9 . .|        equal parts, the last one padded

A module's parameters are cut when its `__init__` ends, with the values of data-parallel rank 0; the memory needed is that of
the parts, and of the modules whose `__init__` is under way. Values are those that a module has without `Init`: what an outer
module's `__init__` reads by name or iterates over is gathered until that `__init__` ends.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import nn

from ..config.deepspeed_json import load_json
from ..errors import ConfigError
from ..mpu.collectives import all_gather_into_, broadcast_
from ..mpu.external_groups import group_of, join_world
from ..mpu.group import Group
from ..zero.optimizer import ZeroOptimizer
from ..zero.param_store import become
from .module_specs import is_expert


class Partition:
    """The part of a parameter that this rank keeps; the parameter itself is on "meta" meanwhile. It has it as `.partition`."""

    @torch.no_grad()
    def __init__(self, parameter: nn.Parameter, group: Group, dtype: torch.dtype | None, pin: bool = False):
        """Collective over the group: the values are those of its first rank."""
        self.group, self.shape, self.device = group, parameter.shape, parameter.device
        flat = parameter.detach().to(dtype if parameter.is_floating_point() else None).reshape(-1)
        size = -(-flat.numel() // group.size)
        whole = flat.new_zeros(size * group.size)
        whole[:flat.numel()] = flat
        broadcast_(whole, group)
        self.part = whole[group.rank * size:(group.rank + 1) * size].clone()
        self.part = self.part.pin_memory() if pin and torch.cuda.is_available() else self.part
        self.hide(parameter)

    def whole(self) -> torch.Tensor:
        """The values. Collective over the group."""
        flat = self.part.new_empty(self.part.numel() * self.group.size)
        all_gather_into_(flat, self.part, self.group)
        return flat[:self.shape.numel()].view(self.shape)

    def show(self, parameter: nn.Parameter) -> None:
        """The parameter has its values. Collective over the group."""
        become(parameter, self.whole())

    def hide(self, parameter: nn.Parameter) -> None:
        meta = nn.Parameter(torch.empty(self.shape, dtype=self.part.dtype, device="meta"), parameter.requires_grad)
        meta.__dict__.update(parameter.__dict__)
        meta.partition = self
        torch.utils.swap_tensors(parameter, meta)

    @torch.no_grad()
    def take(self, parameter: nn.Parameter, source: int) -> None:
        """Keep what rank `source` has in the parameter that is shown. Collective over the group."""
        values = parameter.detach().contiguous()
        broadcast_(values, self.group, source)
        flat, size = values.view(-1), self.part.numel()
        mine = flat[self.group.rank * size:(self.group.rank + 1) * size]
        self.part[:mine.numel()] = mine


class Init:
    """A context in which modules are made in parts; or, given `module`, cuts that one at once. Collective over all ranks.

    data_parallel_group  a process group; None: that of `mpu`, or all ranks
    config_dict_or_path  says the number format of the parts; `config` is its former name; `dtype` comes first
    enabled              False: has no effect
    remote_device        None or "cpu": parts lie where the parameters were made. "nvme" is refused
    pin_memory           of the parts
    mem_efficient_linear, zero_param_parallel_group  have no effect: they concern DeepSpeed's implementation
    """

    def __init__(self, module: nn.Module | None = None, data_parallel_group: Any = None, mem_efficient_linear: bool = True,
                 remote_device: str | None = None, pin_memory: bool = False,
                 config_dict_or_path: Mapping[str, Any] | str | os.PathLike | None = None,
                 config: Mapping[str, Any] | str | os.PathLike | None = None, enabled: bool = True,
                 dtype: torch.dtype | None = None, mpu: Any = None, zero_param_parallel_group: Any = None):
        if remote_device not in (None, "none", "cpu"):
            raise ConfigError(f"zero.Init(remote_device={remote_device!r}): parts are kept in memory until initialize, which "
                              'then offloads them as "offload_param" says. Leave remote_device out.')
        self._enabled, self._pin = enabled, pin_memory
        if enabled:
            self._dtype = dtype or _dtype_of(config_dict_or_path if config_dict_or_path is not None else config)
            self._group = group_of(data_parallel_group) if data_parallel_group is not None else join_world(mpu).data
            self._enabled = self._group.size > 1
        if module is not None and self._enabled:
            for p in module.parameters():
                self._cut(p)

    def __enter__(self) -> "Init":
        if self._enabled:
            self._making: list[tuple[nn.Module, list[nn.Parameter]]] = []      # modules under way, what each has gathered
            self._watched: list[nn.Module] = []
            self._replaced = [(kind, kind.__init__) for kind in _kinds(nn.Module) if "__init__" in kind.__dict__]
            for kind, original in self._replaced:
                kind.__init__ = self._wrapped(original)
            nn.Module.__init_subclass__ = classmethod(self._new_kind)
        return self

    def __exit__(self, *error) -> None:
        if not self._enabled:
            return
        del nn.Module.__init_subclass__
        for kind, original in self._replaced:
            kind.__init__ = original
        for module in self._watched:
            module._parameters = dict(dict.items(module._parameters))

    def _new_kind(self, kind: type, **options) -> None:
        super(nn.Module, kind).__init_subclass__(**options)
        if "__init__" in kind.__dict__:
            self._replaced.append((kind, kind.__init__))
            kind.__init__ = self._wrapped(kind.__init__)

    def _wrapped(self, original: Callable) -> Callable:
        @wraps(original)
        def made(module: nn.Module, *args, **kwargs) -> None:
            if any(other is module for other, _ in self._making):       # the __init__ of a base class
                return original(module, *args, **kwargs)
            gathered: list[nn.Parameter] = []
            self._making.append((module, gathered))
            try:
                original(module, *args, **kwargs)
            finally:
                self._making.pop()
            for p in [*gathered, *(q for q in module._parameters.values() if q is not None)]:
                self._cut(p)
            if not isinstance(module._parameters, _Gathering):
                module._parameters = _Gathering(module._parameters, self)
                self._watched.append(module)

        return made

    def _cut(self, p: nn.Parameter) -> None:
        if not p.is_meta and not is_expert(p):
            Partition(p, self._group, self._dtype, self._pin)

    def gather(self, p: nn.Parameter | None) -> nn.Parameter | None:
        """For a module whose `__init__` is under way; cut again when that ends."""
        if self._making and p is not None and p.is_meta and hasattr(p, "partition"):
            p.partition.show(p)
            self._making[-1][1].append(p)
        return p


class _Gathering(dict):
    """A module's `_parameters`: those that are read are gathered first."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], init: Init):
        super().__init__(parameters)
        self._gather = init.gather

    def __getitem__(self, name: str) -> nn.Parameter | None:
        return self._gather(super().__getitem__(name))

    def items(self):
        return [(name, self._gather(p)) for name, p in super().items()]

    def values(self):
        return [self._gather(p) for p in super().values()]


class GatheredParameters:
    """A context in which parameters have whole values: of an engine, made under `zero.Init`, or any. Collective.

    params         a parameter, or several
    modifier_rank  None: changes are undefined. Else all ranks keep, on leaving, what this data-parallel rank has then
    fwd_module     has no effect: parameters that another module reads are found without it
    """

    def __init__(self, params: nn.Parameter | Iterable[nn.Parameter], modifier_rank: int | None = None,
                 fwd_module: nn.Module | None = None, enabled: bool = True):
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        self._parameters = [p for p in given if isinstance(p, nn.Parameter)] if enabled else []
        self._modifier = modifier_rank

    def __enter__(self) -> None:
        self._exits = ExitStack()
        engines: dict[int, tuple[Any, list[nn.Parameter]]] = {}
        self._cut = [p for p in self._parameters if p.is_meta and hasattr(p, "partition")]
        for p in self._parameters:
            if (engine := getattr(p, "engine", lambda: None)()) is not None:
                engines.setdefault(id(engine), (engine, []))[1].append(p)
        for p in self._cut:
            p.partition.show(p)
        for engine, parameters in engines.values():
            self._exits.enter_context(engine.gathered_parameters(parameters, self._modifier))

    def __exit__(self, *error) -> None:
        for p in self._cut:
            if self._modifier is not None and error[0] is None:
                p.partition.take(p, self._modifier)
            p.partition.hide(p)
        self._exits.__exit__(*error)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Has no effect: a parameter that another module reads is found when it is read. For programs that call it."""


unregister_external_parameter = register_external_parameter


def partitions_of(module: nn.Module) -> dict[nn.Parameter, Partition]:
    """Of the parameters that were cut by `zero.Init`."""
    return {p: p.partition for p in module.parameters() if p.is_meta and hasattr(p, "partition")}


def zeros(name: str, start: int, out: torch.Tensor) -> None:
    """Draws nothing: the values of cut parameters come later."""
    out.zero_()


@torch.no_grad()
def move_into(zero: ZeroOptimizer, partitions: Mapping[nn.Parameter, Partition]) -> None:
    """The values of cut parameters into the optimizer, one after the other. Collective over the data-parallel ranks."""
    if not partitions:
        return
    pieces: dict[str, list] = {}
    for piece in zero.pieces():
        if piece.kind == "weight":
            pieces.setdefault(piece.spec.name, []).append(piece)
    zero.before_change()
    for p, partition in partitions.items():
        flat = partition.whole().view(-1)
        for piece in pieces.get(p.spec.name, ()):
            piece.tensor.copy_(flat[piece.start:piece.stop])
        p.__dict__.pop("partition", None)
    zero.after_load()


def _dtype_of(config: Mapping[str, Any] | str | os.PathLike | None) -> torch.dtype | None:
    """The number format that a config enables; None: none of 16 bits."""
    block = config if isinstance(config, Mapping) else {} if config is None else load_json(os.fspath(config), "config")
    enabled = [dtype for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16))
               if isinstance(block.get(key), Mapping) and block[key].get("enabled") is True]
    return enabled[0] if enabled else None


def _kinds(kind: type) -> list[type]:
    found = {sub: None for sub in kind.__subclasses__()}
    for sub in list(found):
        found.update(dict.fromkeys(_kinds(sub)))
    return list(found)
