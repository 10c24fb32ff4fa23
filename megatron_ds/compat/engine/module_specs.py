"""Parameter specs, global names of experts, and layers of a module that was not written for this package.

A parameter that has a `.spec` keeps it. For the others it follows from the marks of Megatron's and
DeepSpeed's layers:

    tensor_model_parallel (or model_parallel),     split over the model-parallel ranks as in Megatron;
    partition_dim, partition_stride                without the mark every model-parallel rank holds the whole
    sequence_parallel                              the gradient is a partial sum over the model-parallel ranks
    allreduce = False, group_name = "ep_size_4"    an expert: ranks of one expert-parallel group hold
                                                   different ones

Each rank of an expert-parallel group has its part of the experts under the same local names. Global names are
unique:

    a ModuleList of experts only     experts.1.weight on part 2 of lists of 4  →  experts.9.weight,
                                     the name that the expert has in a process with all of them
    any other parameter or buffer    experts.weight on part 2 of 8  →  experts.weight.expert_part_2_of_8

Names of the first kind do not depend on ep; a checkpoint with names of the second kind loads at the same ep
only. A stacked parameter whose spec is split over "ep" needs neither: its shards are boxes of one logical
tensor.

The group that sums a gradient follows from the spec (`ParamSpec.reduced_over`, `DataParallelWorld.by_axes`).

Layers are what stage 3 gathers:

    element of a ModuleList, ModuleDict or Sequential     a layer, with all parameters inside
    any other module that owns parameters itself          a layer of these
    module that is marked as a leaf (leaf_modules.py)     a layer, with all parameters inside

An element that holds more than a quarter of the model, and contains lists, is divided like the rest. Layers
are in the order of registration, which should be that of the forward (module_gathering.py handles other
orders).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError, LayoutError
from ...mpu.managed_parameter import describe, spec_of
from ...mpu.param_spec import DATA_AXES, Init, Matrices, ParamSpec, Split
from ...zero.gathering import LayerGathering, Unit
from ..deepspeed.external_groups import SEVENTH, DataParallelWorld
from ..deepspeed.moe_layer import ExpertList

NOT_DRAWN = Init("zeros")  # the values come with the module
LEAF = "_z3_leaf"  # DeepSpeed's attribute of modules that stage 3 gathers as a whole
COMPILED = "_orig_mod"  # where torch.compile(module) keeps the module
SIZE_IN_NAME = re.compile(r"ep_size_(\d+)$")  # DeepSpeed's group names


def name_of(path: str) -> str:
    """Return a name in a module without what torch.compile(module) adds to it, so that it does not depend on it."""
    parts = [part for part in path.split(".") if part != COMPILED]
    return ".".join(parts)


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter), each parameter once; names are those of the module without torch.compile."""
    for path, p in module.named_parameters():
        yield name_of(path), p


def write_specs(module: nn.Module, world: DataParallelWorld) -> None:
    """Set `.spec` of every parameter that has none, and name experts that have one.

    Weight decay is not the spec's here. Raises ConfigError for experts whose ranks are not known, and for
    specs that do not fit the parameter's shape.
    """
    check_experts(module, world)
    names = global_names(module, world)
    for name, p in module.named_parameters():
        if not hasattr(p, "spec"):
            full_name = names.get(name, name_of(name))
            spec = _spec_of(full_name, p, world.model.size)
            describe(p, spec)
        elif is_marked(p) and p.spec.reduced_over == DATA_AXES:
            # A spec without experts, on a parameter that is marked as one.
            full_name = names.get(name, p.spec.name)
            distinct = replace(p.spec, name=full_name, distinct_over=("ep",))
            describe(p, distinct)
        _check_shape(name, p, world)


def is_marked(p: nn.Parameter) -> bool:
    """Return whether other data-parallel ranks hold other experts, by its mark. With ep_size_1 all hold all."""
    is_reduced_by_all = getattr(p, "allreduce", True)
    group = getattr(p, "group_name", None)
    return is_reduced_by_all is False and group != "ep_size_1"


def is_expert(p: nn.Parameter) -> bool:
    """Return whether ranks of one expert-parallel group hold different values of it, by its mark or its spec."""
    if is_marked(p):
        return True
    return hasattr(p, "spec") and p.spec.reduced_over != DATA_AXES


def has_matrix(name: str, p: nn.Parameter) -> bool:
    """Return whether the parameter is the weight of a hidden layer, a matrix for Muon: by its spec, its mark
    `use_muon`, or, as in DeepSpeed, its dimensions and name."""
    if hasattr(p, "spec"):
        return p.spec.matrices is not None
    # Embeddings and output layers are matrices, too, but not of a hidden layer.
    is_outer = any(word in name.lower() for word in ("embed", "lm_head"))
    is_wanted = getattr(p, "use_muon", not is_outer)
    return p.dim() == 2 and is_wanted


def check_experts(module: nn.Module, world: DataParallelWorld) -> None:
    """Raises ConfigError where the ranks of marked experts are not known, or are not those of the mark."""
    marked = [(name, p) for name, p in module.named_parameters() if is_marked(p)]
    if not marked or world.data.size == 1:
        return
    if world.expert is None:
        raise ConfigError(
            f"{len(marked)} parameters are marked as experts (allreduce = False; first {marked[0][0]}), but "
            f"it is not known which of the {world.data.size} data-parallel ranks hold the same experts: "
            "their gradients would be summed over different experts. Give an mpu with the function "
            f"{SEVENTH}, or call megatron_ds.mpu.initialize_model_parallel(expert_model_parallel_size=...) "
            "and give mpu=megatron_ds.mpu. Where every rank holds all experts, remove the mark."
        )
    for name, p in marked:
        size = SIZE_IN_NAME.match(str(getattr(p, "group_name", "")))
        if size and int(size[1]) != world.expert_parts:
            raise ConfigError(
                f"{name} is marked with group_name {size.string!r}, but expert-data groups of "
                f"{world.expert.size} of {world.data.size} ranks mean expert-parallel groups of "
                f"{world.expert_parts}. Use one size of expert-parallel groups in all layers."
            )


def global_names(module: nn.Module, world: DataParallelWorld) -> dict[str, str]:
    """Local name → global name of parameters and buffers that differ between expert-parallel ranks."""
    if world.expert_parts == 1:
        return {}
    lists = dict(_expert_modules(module))
    names = []
    for name, p in module.named_parameters(remove_duplicate=False):
        if _is_distinct(p):
            names.append(name)
    # A buffer has no mark: it differs if it belongs to an expert.
    for name, _ in module.named_buffers(remove_duplicate=False):
        if any(map(lists.get, _owners(name))):
            names.append(name)
    return {name: name_of(_global_name(name, lists, world)) for name in names}


def _is_distinct(p: nn.Parameter) -> bool:
    """Return whether an expert needs a name of its own; a shard of a stacked parameter does not."""
    is_shard = hasattr(p, "spec") and p.spec.is_split_over("ep")
    return is_expert(p) and not is_shard


def _global_name(
    name: str, lists: Mapping[str, nn.Module], world: DataParallelWorld
) -> str:
    on_path: dict[str, nn.ModuleList] = {}
    declared = []
    called_experts = []
    for owner in _owners(name):
        held = lists.get(owner)
        if not isinstance(held, nn.ModuleList):
            continue
        on_path[owner] = held
        if isinstance(held, ExpertList):
            declared.append(owner)
        if "expert" in owner.rpartition(".")[2]:
            called_experts.append(owner)
    if not on_path:
        return f"{name}.expert_part_{world.expert_part}_of_{world.expert_parts}"

    # The index in the list of experts counts the experts of earlier ranks, too.
    chosen = (declared or called_experts[-1:] or list(on_path))[0]
    index, _, rest = name[len(chosen) :].lstrip(".").partition(".")
    at = world.expert_part * len(on_path[chosen]) + int(index)
    return ".".join(filter(None, (chosen, str(at), rest)))


def _expert_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that have parameters, all of them experts with names of their own."""
    for name, owner in module.named_modules(remove_duplicate=False):
        parameters = list(owner.parameters())
        if parameters and all(map(_is_distinct, parameters)):
            yield name, owner


def _owners(name: str) -> list[str]:
    """Return the modules that contain a parameter or buffer, outermost first: "a.b.weight" → "", "a", "a.b"."""
    parts = name.split(".")[:-1]
    # The module itself contains all of them.
    owners = [""]
    for i in range(len(parts)):
        owners.append(".".join(parts[: i + 1]))
    return owners


def _spec_of(name: str, p: nn.Parameter, tp_size: int) -> ParamSpec:
    # Facts that hold with and without a split.
    marks = ("tensor_model_parallel", "model_parallel")
    is_split = any(getattr(p, mark, False) for mark in marks)
    distinct = ("ep",) if is_expert(p) else ()
    matrices = Matrices() if has_matrix(name, p) else None
    # Whole on every model-parallel rank; with sequence parallelism its gradient is partial.
    if not is_split or tp_size == 1:
        is_partial = tp_size > 1 and getattr(p, "sequence_parallel", False)
        partial = ("tp",) if is_partial else ()
        return ParamSpec(
            name,
            tuple(p.shape),
            NOT_DRAWN,
            partial_over=partial,
            distinct_over=distinct,
            matrices=matrices,
        )
    # A shard: the spec has the whole shape.
    dim = getattr(p, "partition_dim", 0)
    split = Split("tp", dim, getattr(p, "partition_stride", 1))
    shape = tuple(n * tp_size if d == dim else n for d, n in enumerate(p.shape))
    return ParamSpec(
        name,
        shape,
        NOT_DRAWN,
        splits=(split,),
        distinct_over=distinct,
        matrices=matrices,
    )


def _check_shape(name: str, p: nn.Parameter, world: DataParallelWorld) -> None:
    sizes = {axis: size for axis, (_, size) in world.coordinates.items()}
    try:
        expected = spec_of(p).local_shape(sizes)
    except LayoutError as error:
        raise ConfigError(
            f"{name} has a spec that does not fit the ranks: {error}"
        ) from error
    if tuple(p.shape) != expected:
        raise ConfigError(
            f"{name} has shape {list(p.shape)} here. Its spec, {spec_of(p).splits} of {list(spec_of(p).shape)}, "
            f"gives {list(expected)} with {sizes['tp']} model-parallel and {sizes['ep']} expert-parallel "
            "ranks. Give the mpu with the groups that the module was made with (for experts: with "
            f"{SEVENTH}, or a Mesh with ep)."
        )


# ----------------------------------------------------------------------------------------------------- layers
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
LARGE = 4  # an element with more than 1 / LARGE of the parameters is divided


@dataclass(frozen=True, eq=False)
class ModuleLayer:
    """`parameters` are gathered around the forward of `module`."""

    name: str
    module: nn.Module
    parameters: list[nn.Parameter]

    @property
    def read_in_backward(self) -> bool:
        """Whether its backward needs the parameters."""
        return not isinstance(self.module, nn.Embedding)


def find_layers(module: nn.Module) -> list[ModuleLayer]:
    """Return the layers; every parameter is in at least one. A module that stands in two places is one layer."""
    total = sum(p.numel() for p in module.parameters())
    found: dict[nn.Module, ModuleLayer] = {}
    for layer in _visit("", module, False, total):
        found.setdefault(layer.module, layer)
    return list(found.values())


def _visit(
    name: str, module: nn.Module, is_element: bool, total: int
) -> Iterator[ModuleLayer]:
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
    is_leaf = getattr(module, LEAF, False)
    if is_leaf or is_element and not is_list and not _is_divided(module, total):
        if parameters := list(module.parameters()):
            yield ModuleLayer(name, module, parameters)
        return
    if own := [p for p in module._parameters.values() if p is not None]:
        yield ModuleLayer(name, module, own)
    for child_name, child in module.named_children():
        full_name = f"{name}.{child_name}" if name else child_name
        yield from _visit(full_name, child, isinstance(module, LISTS), total)


def _is_divided(module: nn.Module, total: int) -> bool:
    numbers = sum(p.numel() for p in module.parameters())
    if LARGE * numbers <= total:
        return False
    # A list without parameters gives no layers.
    for inner in module.modules():
        if isinstance(inner, LISTS) and any(True for _ in inner.parameters()):
            return True
    return False


def units_of_layers(
    layers: Sequence[ModuleLayer], gathering: LayerGathering
) -> dict[nn.Parameter, Unit]:
    """Return the unit of each gathered parameter: the parameter is a view of the unit's flat buffer."""
    storage = lambda tensor: tensor.untyped_storage()._cdata
    units = {}
    for unit in chain.from_iterable(gathering.needs):
        if isinstance(unit, Unit):  # others are those of predictions
            units[storage(unit.flat)] = unit
    gathered: dict[nn.Parameter, Unit] = {}
    for layer in layers:
        for p in layer.parameters:
            own = units.get(storage(p))
            if own is not None:
                gathered[p] = own
    return gathered


def tensors_in(value: Any, _seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield the tensors of a layer's output, however it wraps them."""
    seen = set() if _seen is None else _seen
    if isinstance(value, torch.Tensor):
        yield value
        return
    if id(value) in seen or isinstance(value, nn.Module | type | str | bytes):
        return
    seen.add(id(value))

    # Items of a container, and attributes of an object.
    if isinstance(value, Mapping):
        value = list(value.values())
    items = value if isinstance(value, tuple | list | set) else ()
    attributes = getattr(value, "__dict__", {})
    for item in (*items, *attributes.values()):
        yield from tensors_in(item, seen)
