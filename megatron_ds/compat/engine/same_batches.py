"""The first micro-batch of an engine with tensor-parallel ranks: all ranks of a group must compute the same one.

As in DeepSpeed it is compared once: a loader that gives ranks of one group different samples does so from the
beginning. The same holds for the random state, from which dropout outside of the divided layers must draw the same
numbers on all ranks of a group.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import CallError
from ...mpu.collectives import all_gather_object
from ...mpu.group import Group


def watch_first_batch(module: nn.Module, group: Group) -> None:
    """Let the module compare the arguments of its first forward over `group`, and no later ones."""
    handles: list[Any] = []
    hook = partial(_compare, group, handles)
    handles.append(
        module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    )


def _compare(
    group: Group, handles: list[Any], module: nn.Module, inputs: tuple, options: dict
) -> None:
    """Collective. Raises CallError, on all ranks of the group, where a tensor differs, or the random state."""
    handles.pop().remove()
    # What each rank has.
    found = list(map(_digest, _tensors((inputs, options))))
    drops = module.training and has_dropout(module)
    states = list(map(_digest, _random_states())) if drops else []
    batches = all_gather_object(found, group)
    of_states = all_gather_object(states, group)
    # It must be the same.
    if any(theirs != batches[0] for theirs in batches):
        shapes = [[shape for shape, _ in theirs] for theirs in batches]
        raise CallError(
            f"the {group.size} tensor-parallel ranks {list(group.ranks)} compute one micro-batch together, but they "
            f"were given different ones (shapes {shapes}). Choose samples by engine.world.data.rank and .size, "
            "as training_data= of initialize does."
        )
    if any(theirs != of_states[0] for theirs in of_states):
        raise CallError(
            f"the tensor-parallel ranks {list(group.ranks)} have different random states, from which dropout would "
            "draw different numbers. Call torch.manual_seed with one seed on the ranks of a group."
        )


def has_dropout(module: nn.Module) -> bool:
    """Return whether a layer of the module, or its config, has a probability of dropout above 0."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p:
            return True
    # Attention draws by functions, whose probabilities are in the config of transformers.
    config = getattr(module, "config", None)
    for name, value in getattr(config, "__dict__", {}).items():
        if "drop" in name and isinstance(value, int | float) and value:
            return True
    return False


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, Mapping):
        for name in value:
            yield from _tensors(value[name])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _digest(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    flat = tensor.detach().cpu().contiguous().view(-1)
    content = flat.view(torch.uint8).numpy()
    digest = hashlib.sha256(content.tobytes())
    return tuple(tensor.shape), digest.hexdigest()


def _random_states() -> Iterator[torch.Tensor]:
    yield torch.get_rng_state()
    if torch.cuda.is_available():
        yield torch.cuda.get_rng_state()
