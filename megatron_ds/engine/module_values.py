"""The values of a module that was not written for this package: brought into the engine's format, made equal
on all ranks.

Specs and global names come from module_specs.py.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator

import torch
from torch import nn

from ..errors import ConfigError
from ..mpu.collectives import all_gather_object, broadcast_
from ..mpu.external_groups import DataParallelWorld
from ..mpu.group import Group
from .module_specs import global_names, is_expert

Decays = Callable[[str, nn.Parameter], bool]
DrawByName = Callable[[str, int, torch.Tensor], None]
"""draw(name, start, out): fill flat `out` with elements [start, start + len(out)) of the tensor `name`."""

logger = logging.getLogger(__name__)


def prepare(module: nn.Module, dtype: torch.dtype, device: torch.device, draw: DrawByName | None) -> None:
    """Bring the module into the format and to the device it trains in; its buffers get values, its parameters
    stay on "meta".

    Raises ConfigError where the module is in another format than the config, or belongs to an engine already.
    """
    taken = next((n for n, p in module.named_parameters() if hasattr(p, "grad_ready")), None)
    if taken:
        raise ConfigError(f"the module belongs to another engine already ({taken}). Make a new module, or go "
                          "on with that engine.")
    if dtype == torch.float32:
        odd = {n: p.dtype for n, p in module.named_parameters() if p.dtype != dtype}
        if odd:
            name = next(iter(odd))
            raise ConfigError(f"{len(odd)} parameters are not fp32 (first {name}, {odd[name]}), and the "
                              'config has neither an enabled "bf16" nor an enabled "fp16" block. Enable one, '
                              "or call module.float().")
    module.to(dtype)                                        # floating ones only, on "meta" too
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if draw is None and (name := next((n for n, t in tensors if t.is_meta), None)):
        raise ConfigError(f"{name} is on the meta device, and nothing is given to draw its values with. Give "
                          "draw=function(name, start, out), for instance from_safetensors(folder).")
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta:
                owner._buffers[name] = buffer.to(device).contiguous()
    for name, buffer in list(module.named_buffers()):
        if buffer.is_meta:
            _materialize(module, name, buffer, device, draw)
    for p in module.parameters():
        if not p.is_meta:
            p.data = p.data.to(device)


@torch.no_grad()
def agree(module: nn.Module, world: DataParallelWorld) -> None:
    """All data-parallel ranks take the values of the first: modules are often made with different seeds.
    Collective.

    Experts are taken from the first rank that holds the same ones. Raises ConfigError where ranks hold
    different parameters.
    """
    _check_same_parameters(module, world)
    changed, kept = [], 0
    for name, tensor, group in _values(module, world):
        before = tensor.detach().clone()
        whole = tensor.detach().contiguous()
        broadcast_(whole, group)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)
        if not isinstance(tensor, nn.Parameter):
            continue
        if not torch.equal(before, whole):
            changed.append(name)
        elif whole.numel() > 1 and (whole != whole.view(-1)[0]).any():      # random, from the same seed
            kept += 1
    _report_changes(changed, kept, world.data)


def _values(module: nn.Module, world: DataParallelWorld) -> Iterator[tuple[str, torch.Tensor, Group]]:
    """Parameters and buffers that are not on the meta device, with the ranks that hold the same ones."""
    of_experts = global_names(module, world)
    for name, p in module.named_parameters():
        if not p.is_meta:
            yield name, p, world.by_axes[p.spec.reduced_over]
    for name, buffer in module.named_buffers():
        yield name, buffer, world.expert if name in of_experts else world.data


def _check_same_parameters(module: nn.Module, world: DataParallelWorld) -> None:
    """Raises ConfigError on all data-parallel ranks unless names, shapes, marks and specs are the same."""
    here: dict[bool, dict[str, tuple]] = {False: {}, True: {}}
    for name, p in module.named_parameters():
        here[is_expert(p) and world.expert is not None][name] = (tuple(p.shape), p.requires_grad, p.spec.name)
    digest = lambda found: hashlib.sha256(repr(found).encode()).hexdigest()
    digests = all_gather_object((world.expert_part, digest(here[False]), digest(here[True])), world.data)
    parts, experts = {part for part, _, _ in digests}, {(part, found) for part, _, found in digests}
    if len({dense for _, dense, _ in digests}) == 1 and len(experts) == len(parts):
        return
    facts = {name: (fact, expert, world.expert_part if expert else 0)
             for expert, found in here.items() for name, fact in found.items()}
    all_of = all_gather_object(facts, world.data)
    for rank, theirs in zip(world.data.ranks[1:], all_of[1:]):
        for name in {**all_of[0], **theirs}:
            one, other = all_of[0].get(name), theirs.get(name)
            alike = one == other or None not in (one, other) and one[1] and other[1] and one[2] != other[2]
            if not alike:
                raise ConfigError(
                    f"data-parallel ranks hold different modules: {name} is {_shown(one)} on rank "
                    f"{world.data.ranks[0]} and {_shown(other)} on rank {rank}. Their gradients cannot be "
                    "summed. Make the same module on every rank; mark the parameters of experts that only "
                    "some ranks hold with p.allreduce = False; list the ranks of tensor parallelism in the "
                    "mpu's model-parallel group.")
    raise ConfigError("data-parallel ranks hold the same parameters in different orders, or ranks of one "
                      "expert-data group hold different experts. Make the same module on every rank.")


def _shown(fact: tuple | None) -> str:
    if fact is None:
        return "missing"
    (shape, trained, spec_name), expert, _ = fact
    kind, frozen = "an expert " if expert else "", "" if trained else ", frozen"
    return f"{kind}of shape {list(shape)}{frozen} (spec {spec_name})"


def _report_changes(changed: list[str], kept: int, data: Group) -> None:
    """Warn where some random values are equal and others differ: with one seed, this may be intended.

    Collective.
    """
    found = all_gather_object((changed[:1], len(changed), kept), data)
    first = next((names[0] for names, _, _ in found if names), None)
    if data.rank == 0 and first and any(kept for _, count, kept in found if count):
        logger.warning("%d parameters, first %s, differ between data-parallel ranks although others are "
                       "equal: every rank now has the values of the first. If they are experts, which differ "
                       "between ranks, mark them with p.allreduce = False",
                       max(count for _, count, _ in found), first)


def saved_buffers(module: nn.Module, world: DataParallelWorld) -> dict[str, torch.Tensor]:
    """The buffers that belong into a state_dict, by their global names (the first of several)."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    names = global_names(module, world)
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            is_saved = buffer is not None and name not in owner._non_persistent_buffers_set
            if is_saved and id(buffer) not in seen:
                seen.add(id(buffer))
                local = f"{prefix}.{name}" if prefix else name
                found[names.get(local, local)] = buffer
    return found


def _materialize(module: nn.Module, name: str, buffer: torch.Tensor, device: torch.device,
                 draw: DrawByName) -> None:
    path, _, last = name.rpartition(".")
    values = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    draw(name, 0, values.view(-1))
    module.get_submodule(path)._buffers[last] = values
