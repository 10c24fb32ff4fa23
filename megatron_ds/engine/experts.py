"""Which parameters of a module are experts, and under which global names.

DeepSpeed and Megatron-core mark the parameters of experts that differ between data-parallel ranks with `p.allreduce = False`;
DeepSpeed adds `p.group_name = "ep_size_4"`. With ep ranks in an expert-parallel group each rank holds one part of the experts,
under the same local names as the other ranks. Global names are unique:

    a ModuleList of experts only     experts.1.weight on part 2 of lists of 4  →  experts.9.weight: the name that the expert
                                     has in a process that holds all of them
    any other parameter or buffer    experts.weight on part 2 of 8  →  experts.weight.expert_part_2_of_8

Names of the first kind do not depend on ep; a checkpoint with names of the second kind loads at the same ep only.
"""

import re
from collections.abc import Iterator

from torch import nn

from ..errors import ConfigError
from ..mpu.external_groups import SEVENTH, DataParallelWorld

SIZE_IN_NAME = re.compile(r"ep_size_(\d+)$")        # DeepSpeed's group names


def is_expert(p: nn.Parameter) -> bool:
    """Whether the parameter is marked as one of a part of the experts. With ep_size_1 every rank holds all experts."""
    if hasattr(p, "spec"):
        return p.spec.expert
    return getattr(p, "allreduce", True) is False and getattr(p, "group_name", None) != "ep_size_1"


def check_experts(module: nn.Module, world: DataParallelWorld) -> None:
    """Raises ConfigError where experts are marked and their ranks are not known, or are other ones than the mark says."""
    marked = [(name, p) for name, p in module.named_parameters() if is_expert(p)]
    if not marked or world.data.size == 1:
        return
    name, p = marked[0]
    if world.expert is None:
        raise ConfigError(
            f"{len(marked)} parameters are marked as experts (allreduce = False; first {name}), but which of the "
            f"{world.data.size} data-parallel ranks hold the same experts is not known: their gradients would be summed over "
            f"different experts. Give an mpu with the function {SEVENTH}, or call "
            "megatron_ds.mpu.initialize_model_parallel(expert_model_parallel_size=...) and give mpu=megatron_ds.mpu. Where "
            "every rank holds all experts, remove the mark.")
    parts = world.data.size // world.expert.size
    for name, p in marked:
        size = SIZE_IN_NAME.match(str(getattr(p, "group_name", "")))
        if size and int(size[1]) != parts:
            raise ConfigError(f"{name} is marked with group_name {p.group_name!r}, but the expert-data group of "
                              f"{world.expert.size} of {world.data.size} ranks means expert-parallel groups of {parts}. An "
                              "engine supports one size of expert-parallel groups.")


def global_names(module: nn.Module, world: DataParallelWorld) -> dict[str, str]:
    """The global name of each expert parameter, and of each buffer that belongs to experts, by its local name."""
    if world.expert is None or world.data.size == world.expert.size:
        return {}
    lists = dict(_expert_modules(module))
    names = [name for name, p in module.named_parameters(remove_duplicate=False) if is_expert(p)]
    names += [name for name, _ in module.named_buffers(remove_duplicate=False) if any(map(lists.get, _owners(name)))]
    return {name: _global_name(name, lists, world) for name in names}


def _global_name(name: str, lists: dict[str, nn.Module | None], world: DataParallelWorld) -> str:
    on_path = [owner for owner in _owners(name) if isinstance(lists.get(owner), nn.ModuleList)]
    called = [owner for owner in on_path if "expert" in owner.rpartition(".")[2]]
    if not on_path:
        return f"{name}.expert_part_{world.expert_part}_of_{world.data.size // world.expert.size}"
    chosen = called[-1] if called else on_path[0]
    index, _, rest = name[len(chosen):].lstrip(".").partition(".")
    at = world.expert_part * len(lists[chosen]) + int(index)
    return ".".join(filter(None, (chosen, str(at), rest)))


def _expert_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that have parameters, all of them experts."""
    for name, owner in module.named_modules(remove_duplicate=False):
        parameters = list(owner.parameters())
        if parameters and all(map(is_expert, parameters)):
            yield name, owner


def _owners(name: str) -> list[str]:
    """The names of all modules around a parameter or buffer, outermost first: "a.b.weight" → "", "a", "a.b"."""
    parts = name.split(".")[:-1]
    return ["", *(".".join(parts[:i + 1]) for i in range(len(parts)))]
