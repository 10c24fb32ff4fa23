"""DeepSpeed's `zero.Init` and `zero.GatheredParameters`: modules whose parameters are sharded before there is
an engine.

    with megatron_ds.zero.Init(config_dict_or_path=config):
        model = Model()                     # each rank keeps its shard of every parameter; parameters are on
                                            "meta"
    with megatron_ds.zero.GatheredParameters(model.head.weight, modifier_rank=0):
        if rank == 0:
            torch.nn.init.zeros_(model.head.weight)
    engine, *_ = megatron_ds.initialize(model=model, config=config)

    parameter, 10 elements, 4 ranks     |0 1 2|3 4 5|6 7 8|9 . .|        equal parts, the last one padded

A module's parameters are sharded when its `__init__` ends, with the values of data-parallel rank 0. Memory is
needed for the shards, and for the modules whose `__init__` is running. Values are those that a module has
without `Init`: parameters that an outer module's `__init__` reads by name or iterates over are gathered until
that `__init__` ends.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from ...mpu.collectives import all_gather_into_, broadcast_
from ...mpu.group import Group
from ...mpu.managed_parameter import spec_of
from ...zero.optimizer import ZeroOptimizer
from ...zero.param_store import become
from ..config.deepspeed_json import load_json
from ..deepspeed.external_groups import group_of, join_world
from .module_specs import is_expert, named_parameters
from .number_formats import NumberFormats, has_list
from .sharded_names import ShardedNames, ShownParameter
from .watched import WatchedParameters

RESIZE = (
    "Resize (resize_token_embeddings) inside of `with zero.GatheredParameters("
    "list(model.parameters()), modifier_rank=0):` on all ranks, before initialize."
)


class Partition:
    """This rank's shard of a parameter, kept as `.partition` while the parameter itself is on "meta"."""

    @torch.no_grad()
    def __init__(
        self,
        parameter: nn.Parameter,
        group: Group,
        dtype: torch.dtype | None,
        pin: bool = False,
        source: int = 0,
    ):
        """Shard the parameter, with the values of rank `source` of the group. Collective over the group."""
        self.group = group
        self.shape = parameter.shape
        self.device = parameter.device
        flat = (
            parameter.detach()
            .to(dtype if parameter.is_floating_point() else None)
            .reshape(-1)
        )
        size = -(-flat.numel() // group.size)
        whole = flat.new_zeros(size * group.size)
        whole[: flat.numel()] = flat
        broadcast_(whole, group, source)
        self.part = whole[group.rank * size : (group.rank + 1) * size].clone()
        self.part = (
            self.part.pin_memory() if pin and torch.cuda.is_available() else self.part
        )
        self.hide(parameter)

    def whole(self) -> torch.Tensor:
        """All values. Collective over the group."""
        flat = self.part.new_empty(self.part.numel() * self.group.size)
        all_gather_into_(flat, self.part, self.group)
        return flat[: self.shape.numel()].view(self.shape)

    def show(self, parameter: nn.Parameter) -> None:
        """Give the parameter all its values. Collective over the group."""
        become(parameter, self.whole())
        parameter.__class__ = ShownParameter

    def hide(self, parameter: nn.Parameter) -> None:
        """Move the parameter to "meta"; its shard is kept."""
        empty = torch.empty(self.shape, dtype=self.part.dtype, device="meta")
        meta = HiddenParameter(empty, parameter.requires_grad)
        meta.__dict__.update(parameter.__dict__)
        meta.partition = self
        torch.utils.swap_tensors(parameter, meta)

    def move(self, device: torch.device | None) -> None:
        """Keep the shard on another device; None: where it is."""
        if device is not None and device.type != "meta":
            self.part = self.part.to(device)
            self.device = self.part.device

    def is_of(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter has the shape of its shards."""
        return parameter.shape == self.shape

    @torch.no_grad()
    def take(self, parameter: nn.Parameter, source: int) -> None:
        """Keep the values that the parameter has on rank `source`; its values must be shown.

        Collective over the group.
        """
        values = parameter.detach().contiguous()
        broadcast_(values, self.group, source)
        flat = values.view(-1)
        size = self.part.numel()
        mine = flat[self.group.rank * size : (self.group.rank + 1) * size]
        self.part[: mine.numel()] = mine


class HiddenParameter(ShardedNames, nn.Parameter):
    """A parameter of which this rank has its shard alone.

    It is on "meta" (`is_meta`), but `device` is that of its values: libraries move what they add to a module,
    such as adapters, to the device of the parameters that are there.
    """

    partition: Partition

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch's stub has an attribute
        """Where its values are when it is gathered."""
        return self.partition.device

    def to(self, *args: Any, **options: Any) -> torch.Tensor:
        """Return the parameter itself, after its shard has moved to the device; in another dtype as a new one."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **options)
        if dtype not in (None, self.dtype):
            return super().to(*args, **options)
        self.partition.move(device)
        return self

    def cpu(self, *args: Any, **options: Any) -> torch.Tensor:
        """Return the parameter, with its shard in host memory."""
        return self.to("cpu")

    def cuda(self, device: Any = None, *args: Any, **options: Any) -> torch.Tensor:
        """Return the parameter, with its shard on a GPU."""
        return self.to(torch.device("cuda") if device is None else device)


class Init:
    """A context in which modules are made with sharded parameters; `module` is sharded at once. Collective.

    data_parallel_group  a process group; None: that of `mpu`, or all ranks
    config_dict_or_path  gives the number format of the shards unless `dtype` does; `config`: its former name
    remote_device        None or "cpu": shards lie where the parameters were made. "nvme" is refused
    mem_efficient_linear, zero_param_parallel_group  no effect: they concern DeepSpeed's implementation
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Mapping[str, Any] | str | os.PathLike | None = None,
        config: Mapping[str, Any] | str | os.PathLike | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
    ):
        if remote_device not in (None, "none", "cpu"):
            raise ConfigError(
                f"zero.Init(remote_device={remote_device!r}): shards are kept in memory until "
                'initialize, which then offloads them according to "offload_param". Leave '
                "remote_device out."
            )
        self._enabled = enabled
        self._pin = pin_memory
        if enabled:
            given = data_parallel_group
            self._dtype = dtype or _dtype_of(
                config if config_dict_or_path is None else config_dict_or_path
            )
            self._group = group_of(given) if given is not None else join_world(mpu).data
        # A module that is there already is sharded at once.
        if module is not None and self._enabled:
            kept = NumberFormats().kept(module, self._dtype)
            for name, p in named_parameters(module):
                self._cut(p, None if name in kept else self._dtype)

    def __enter__(self) -> "Init":
        # Inside of another context it is the outer one that shards.
        self._enabled = self._enabled and "__init_subclass__" not in vars(nn.Module)
        if self._enabled:
            # Modules whose __init__ is running, each with the parameters that it has gathered.
            self._making: list[tuple[nn.Module, list[nn.Parameter]]] = []
            self._watched: list[nn.Module] = []
            kinds = [kind for kind in _kinds(nn.Module) if "__init__" in kind.__dict__]
            self._replaced = [(kind, kind.__dict__["__init__"]) for kind in kinds]
            for kind, original in self._replaced:
                _set_init(kind, self._wrapped(original))
            type.__setattr__(
                nn.Module, "__init_subclass__", classmethod(self._new_kind)
            )
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._enabled:
            return
        del nn.Module.__init_subclass__
        for kind, original in self._replaced:
            _set_init(kind, original)
        for module in self._watched:
            module._parameters = dict(dict.items(module._parameters))

    def _new_kind(self, kind: type[nn.Module], **options: Any) -> None:
        super(nn.Module, kind).__init_subclass__(**options)
        original = kind.__dict__.get("__init__")
        if original is not None:
            self._replaced.append((kind, original))
            _set_init(kind, self._wrapped(original))

    def _wrapped(self, original: Callable) -> Callable:
        @wraps(original)
        def made(module: nn.Module, *args, **kwargs) -> None:
            # This call is the `__init__` of a base class.
            if any(other is module for other, _ in self._making):
                return original(module, *args, **kwargs)
            gathered: list[nn.Parameter] = []
            self._making.append((module, gathered))
            try:
                original(module, *args, **kwargs)
            finally:
                self._making.pop()
            # In a model that names parameters to stay fp32, names are known only when all modules are made.
            around = [module, *(other for other, _ in self._making)]
            keeps = any(has_list(other, self._dtype) for other in around)
            for p in [
                *gathered,
                *(q for q in module._parameters.values() if q is not None),
            ]:
                self._cut(p, None if keeps else self._dtype)
            if not isinstance(module._parameters, _Gathering):
                module._parameters = _Gathering(module._parameters, self._gather)
                self._watched.append(module)

        return made

    def _cut(self, p: nn.Parameter, dtype: torch.dtype | None) -> None:
        if not p.is_meta and not is_expert(p):
            Partition(p, self._group, dtype, self._pin)

    def _gather(self, p: nn.Parameter) -> None:
        """Give a parameter its values while an `__init__` is running; it is sharded again when that ends."""
        if self._making and p.is_meta and hasattr(p, "partition"):
            p.partition.show(p)
            self._making[-1][1].append(p)


class _Gathering(WatchedParameters):
    """Gathers its parameters also when a module iterates over them."""

    def items(  # type: ignore[override]  # for iteration, of which nn.Module does no more
        self,
    ) -> list[tuple[str, nn.Parameter | None]]:
        return [(name, self[name]) for name in self]

    def values(  # type: ignore[override]  # as `items`
        self,
    ) -> list[nn.Parameter | None]:
        return [self[name] for name in self]


class GatheredParameters:
    """A context in which parameters of an engine, of `zero.Init`, or any have whole values. Collective.

    modifier_rank  None: they may only be read. Otherwise all ranks keep, on leaving, the values of this
                   data-parallel rank
    fwd_module     no effect: parameters that another module reads are found without it
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ):
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        self._parameters = (
            [p for p in given if isinstance(p, nn.Parameter)] if enabled else []
        )
        self._modifier = modifier_rank

    def __enter__(self) -> None:
        self._exits = ExitStack()
        engines: dict[int, tuple[Any, list[nn.Parameter]]] = {}
        self._cut = [
            p for p in self._parameters if p.is_meta and hasattr(p, "partition")
        ]
        for p in self._parameters:
            if (engine := getattr(p, "engine", lambda: None)()) is not None:
                engines.setdefault(id(engine), (engine, []))[1].append(p)
        for p in self._cut:
            p.partition.show(p)
        for engine, parameters in engines.values():
            self._exits.enter_context(
                engine.gathered_parameters(parameters, self._modifier)
            )

    def __exit__(self, *error: Any) -> None:
        resized = [] if error[0] else [p for p in self._cut if not p.partition.is_of(p)]
        for p in self._cut:
            if self._modifier is None or error[0] is not None:
                p.partition.hide(p)
            elif p.partition.is_of(p):
                p.partition.take(p, self._modifier)
                p.partition.hide(p)
            else:
                Partition(p, p.partition.group, p.dtype, source=self._modifier)
        self._exits.__exit__(*error)
        if resized and self._modifier is None:
            raise ConfigError(
                f"{len(resized)} parameters, the first now of shape {list(resized[0].shape)}, "
                "were resized inside of zero.GatheredParameters without modifier_rank=: they "
                "have their former values again. " + RESIZE
            )


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """No effect, for programs that call it: reads by other modules are found when they happen."""


unregister_external_parameter = register_external_parameter


def partitions_of(module: nn.Module) -> dict[nn.Parameter, Partition]:
    """Return the shards of the parameters made under `zero.Init`.

    Raises ConfigError for parameters that were marked as experts or resized later.
    """
    found = {
        p: p.partition
        for p in module.parameters()
        if p.is_meta and hasattr(p, "partition")
    }
    for name, p in module.named_parameters():
        if p in found and is_expert(p):
            raise ConfigError(
                f"{name} was made under zero.Init and marked as an expert afterwards: "
                "zero.Init has given all ranks the values of data-parallel rank 0. Make "
                "experts outside of zero.Init."
            )
        if p in found and not found[p].is_of(p):
            raise ConfigError(
                f"{name} was made under zero.Init with the shape {list(found[p].shape)} and "
                f"has the shape {list(p.shape)} now, without values: it was resized while "
                f"ranks held shards of it. {RESIZE}"
            )
    return found


def check_values(
    module: nn.Module, partitions: Mapping[nn.Parameter, Partition]
) -> None:
    """Raises ConfigError where a tensor on "meta" has no shard, so that its values are nowhere."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lost = [
        name for name, tensor in tensors if tensor.is_meta and tensor not in partitions
    ]
    if lost:
        raise ConfigError(
            f"{len(lost)} tensors on the meta device have no values, first {lost[0]}: "
            f"{len(partitions)} parameters of this module have shards of zero.Init, and these "
            "have none. Make them under zero.Init or on a real device, or give draw=. "
            f"{RESIZE}"
        )


@torch.no_grad()
def become_whole(module: nn.Module) -> None:
    """Give each rank all values of the parameters made under `zero.Init`, in host memory, and forget the shards.

    Collective over the groups that hold them. A module without shards stays as it is.
    """
    partitions = partitions_of(module)
    for p, partition in partitions.items():
        become(p, partition.whole().cpu())
        del vars(p)["partition"]
    if partitions:
        module.cpu()  # buffers and parameters made elsewhere


def zeros(name: str, start: int, out: torch.Tensor) -> None:
    """A placeholder for values that `move_into` writes."""
    out.zero_()


@torch.no_grad()
def move_into(
    zero: ZeroOptimizer, partitions: Mapping[nn.Parameter, Partition]
) -> None:
    """Copy sharded parameters into the optimizer, one after the other. Collective over the data group."""
    if not partitions:
        return
    pieces: dict[str, list] = {}
    for piece in zero.pieces():
        if piece.kind == "weight":
            pieces.setdefault(piece.spec.name, []).append(piece)
    zero.before_change()
    for p, partition in partitions.items():
        flat = partition.whole().view(-1)
        for piece in pieces.get(spec_of(p).name, ()):
            piece.tensor.copy_(flat[piece.start : piece.stop])
        p.__dict__.pop("partition", None)
    zero.after_load()


def _dtype_of(
    config: Mapping[str, Any] | str | os.PathLike | None,
) -> torch.dtype | None:
    """Return the 16-bit number format that a config enables; None where it enables none."""
    if config is None:
        return None
    block = (
        config
        if isinstance(config, Mapping)
        else load_json(os.fspath(config), "config")
    )
    formats = (
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("fp16", torch.float16),
    )
    enabled = [
        dtype
        for key, dtype in formats
        if isinstance(block.get(key), Mapping) and block[key].get("enabled") is True
    ]
    return enabled[0] if enabled else None


def _set_init(kind: type, function: Callable) -> None:
    type.__setattr__(kind, "__init__", function)


def _kinds(kind: type) -> list[type]:
    found: dict[type, None] = dict.fromkeys(kind.__subclasses__())
    for sub in list(found):
        found.update(dict.fromkeys(_kinds(sub)))
    return list(found)
