"""Whole values for users: parameters to read or change, and the state_dict of the whole module, one tensor at a time."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..checkpoint.pieces import ParameterPiece
from ..checkpoint.safetensors_folder import TensorEntry, write_folder
from ..checkpoint.whole_tensors import TensorStream
from ..errors import CheckpointError, ConfigError
from ..mpu.agree import together
from ..mpu.collectives import broadcast_
from ..mpu.param_spec import ParamSpec
from .module_specs import NOT_DRAWN, global_names
from .module_values import saved_buffers

if TYPE_CHECKING:
    from .engine import Engine


@contextmanager
def gathered_parameters(engine: "Engine", parameters: Iterable[nn.Parameter] | nn.Parameter | None,
                        modifier_rank: int | None) -> Iterator[None]:
    """See `Engine.gathered_parameters`."""
    mine = {p: name for name, p in engine.module.named_parameters()}
    if isinstance(parameters, nn.Parameter):
        parameters = [parameters]
    chosen = list(mine) if parameters is None else list(dict.fromkeys(parameters))
    if strangers := sum(p not in mine for p in chosen):
        raise ConfigError(f"{strangers} of the {len(chosen)} parameters to be gathered are not of this engine's module. Take "
                          "them from engine.module.")
    if modifier_rank is not None and not 0 <= modifier_rank < engine.world.data.size:
        raise ConfigError(f"modifier_rank is {modifier_rank}, but data-parallel ranks are 0 to {engine.world.data.size - 1}.")
    with engine.gathering.whole(chosen) if engine.gathering else nullcontext():
        yield
        if modifier_rank is not None:
            _keep(engine, chosen, modifier_rank)


@torch.no_grad()
def _keep(engine: "Engine", parameters: list[nn.Parameter], source: int) -> None:
    """What rank `source` wrote into parameters is their value from now on, in the masters too.

    Experts: of those that `source` holds. Others are taken from the first of their ranks.
    """
    values, world = {}, engine.world
    for p in parameters:
        group = world.by_axes[p.spec.reduced_over]
        writer = world.data.ranks[source]
        broadcast_(p.detach(), group, group.ranks.index(writer) if writer in group.ranks else 0)
        values[p.spec.name] = p.detach().view(-1)
    engine.optimizer.before_change()
    for piece in engine.optimizer.pieces():
        if piece.kind == "weight" and piece.spec.name in values:
            value = values[piece.spec.name][piece.start:piece.stop].to(piece.tensor.device)
            # A master that rounds to the value was not changed, and has bits that the value has not.
            changed = piece.tensor.to(value.dtype) != value
            piece.tensor.copy_(torch.where(changed, value.to(piece.tensor.dtype), piece.tensor))
    engine.optimizer.after_load()


def full_state_dict(engine: "Engine", dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """See `Engine.full_state_dict`."""
    stream = _stream(engine, dtype)
    # A name for each tensor, not for each parameter: tied ones have several.
    whole = {entry.name: tensor for entry, tensor in zip(stream.entries, stream) if tensor is not None}
    if engine.world.rank:
        return {}
    names, state = global_names(engine.module, engine.world), {}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        held = value.spec.name if isinstance(value, nn.Parameter) else names.get(name, name)
        state[names.get(name, name)] = whole[held] if held in whole else _on_host(value)
    here = {p.spec.name for p in engine.module.parameters()}
    return state | {name: tensor for name, tensor in whole.items() if name not in here}      # experts of other ranks


def save_16bit_model(engine: "Engine", directory: str | os.PathLike, filename: str, exclude_frozen: bool) -> bool:
    """See `Engine.save_16bit_model`."""
    state, path = without_frozen(engine, full_state_dict(engine, None), exclude_frozen), Path(directory) / filename

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        writing = path.with_name(f".{path.name}.writing")
        try:
            torch.save(state, writing)
            os.replace(writing, path)
        except (OSError, RuntimeError) as error:        # torch's writer raises RuntimeError where the disk is full
            raise CheckpointError(f"{path} could not be written: {error}") from error
        finally:
            writing.unlink(missing_ok=True)

    together(engine.world.world, write, only=0)
    return True


def without_frozen(engine: "Engine", state: dict[str, torch.Tensor], exclude: bool) -> dict[str, torch.Tensor]:
    """`state`, without the parameters that are not trained if `exclude`."""
    frozen = {name for name, p in engine.module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: value for name, value in state.items() if not (exclude and name in frozen)}


def save_safetensors(engine: "Engine", directory: str | os.PathLike, max_shard_bytes: int, dtype: torch.dtype | None) -> None:
    """See `Engine.save_safetensors`."""
    of_experts = global_names(engine.module, engine.world)
    buffers = {name: value for name, value in engine.module.state_dict(keep_vars=True).items()
               if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and name not in of_experts}
    entries = [TensorEntry(name, tuple(value.shape), value.dtype) for name, value in buffers.items()]
    stream = _stream(engine, dtype)

    def tensors(order):
        parameters = stream.tensors([entry.name for entry in order if entry.name not in buffers])
        for entry in order:
            yield _on_host(buffers[entry.name]) if entry.name in buffers else next(parameters)

    write_folder(directory, [*stream.entries, *entries], tensors, engine.world.world, max_shard_bytes)


def _stream(engine: "Engine", dtype: torch.dtype | None) -> TensorStream:
    """Of all parameters, and of the buffers of experts, which rank 0 has only some of."""
    dtypes = {p.spec.name: dtype or p.dtype for p in engine.module.parameters()}
    world = engine.world
    order = {p.spec.name: i for i, p in enumerate(engine.module.parameters())}
    pieces = sorted((p for p in engine.optimizer.pieces() if p.kind == "weight"), key=lambda p: order[p.spec.name])
    of_experts = set(global_names(engine.module, world).values())
    for name, buffer in saved_buffers(engine.module, world).items():
        if name in of_experts:
            dtypes[name] = buffer.dtype
            pieces.append(ParameterPiece(ParamSpec(name, tuple(buffer.shape), NOT_DRAWN), buffer.detach().view(-1),
                                         replica=world.expert.rank))
    return TensorStream(pieces, coordinates=world.coordinates, world=world.world, device=world.device,
                        dtype_of=dtypes.__getitem__)


def _on_host(value):
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
