"""Whole values of an engine's module: parameters to read or change, its state_dict, one tensor at a time."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn

from ..checkpoint.pieces import ParameterPiece
from ..checkpoint.safetensors_folder import TensorEntry, write_folder
from ..checkpoint.whole_tensors import TensorStream
from ..errors import CheckpointError, ConfigError
from ..mpu.agree import on_one_rank
from ..mpu.collectives import broadcast_
from ..mpu.param_spec import ParamSpec
from .engine_status import EngineStatus
from .module_specs import NOT_DRAWN, global_names
from .module_values import saved_buffers


@contextmanager
def gathered_parameters(engine: EngineStatus, parameters: Iterable[nn.Parameter] | nn.Parameter | None,
                        modifier_rank: int | None) -> Iterator[None]:
    """See `Engine.gathered_parameters`."""
    mine = dict.fromkeys(engine.module.parameters())
    if isinstance(parameters, nn.Parameter):
        parameters = [parameters]
    chosen = list(mine) if parameters is None else list(dict.fromkeys(parameters))
    if count := sum(p not in mine for p in chosen):
        raise ConfigError(f"{count} of the {len(chosen)} parameters to be gathered are not parameters of "
                          "this engine's module. Take them from engine.module.")
    if modifier_rank is not None and not 0 <= modifier_rank < engine.world.data.size:
        raise ConfigError(f"modifier_rank is {modifier_rank}, but data-parallel ranks are 0 to "
                          f"{engine.world.data.size - 1}.")
    with engine.gathering.whole(chosen) if engine.gathering else nullcontext():
        yield
        if modifier_rank is not None:
            _keep(engine, chosen, modifier_rank)


@torch.no_grad()
def _keep(engine: EngineStatus, parameters: list[nn.Parameter], source: int) -> None:
    """Take rank `source`'s values into the parameters and masters of all ranks.

    Experts that `source` does not hold keep the values of the first rank that holds them.
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
            # A master that rounds to the value was not changed, and keeps its further bits.
            changed = piece.tensor.to(value.dtype) != value
            piece.tensor.copy_(torch.where(changed, value.to(piece.tensor.dtype), piece.tensor))
    engine.optimizer.after_load()


def full_state_dict(engine: EngineStatus, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """See `Engine.full_state_dict`."""
    stream = _stream(engine, dtype)
    # One entry for each tensor; in the state_dict a tied parameter has several names.
    whole = {entry.name: tensor for entry, tensor in zip(stream.entries, stream) if tensor is not None}
    if engine.world.rank:
        return {}
    names, state = global_names(engine.module, engine.world), {}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        held = value.spec.name if isinstance(value, nn.Parameter) else names.get(name, name)
        state[names.get(name, name)] = whole[held] if held in whole else _on_host(value)
    here = {p.spec.name for p in engine.module.parameters()}
    experts_elsewhere = {name: tensor for name, tensor in whole.items() if name not in here}
    return state | experts_elsewhere


def save_16bit_model(engine: EngineStatus, directory: str | os.PathLike, filename: str,
                     exclude_frozen: bool) -> bool:
    """See `Engine.save_16bit_model`."""
    path = Path(directory) / filename
    state = without_frozen(engine, full_state_dict(engine, None), exclude_frozen)

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        writing = path.with_name(f".{path.name}.writing")
        try:
            torch.save(state, writing)
            os.replace(writing, path)
        except (OSError, RuntimeError) as error:        # torch raises RuntimeError where the disk is full
            raise CheckpointError(f"{path} could not be written: {error}") from error
        finally:
            writing.unlink(missing_ok=True)

    on_one_rank(engine.world.world, write)
    return True


def without_frozen(engine: EngineStatus, state: dict[str, torch.Tensor],
                   exclude: bool) -> dict[str, torch.Tensor]:
    """`state`; if `exclude`, without the frozen parameters."""
    named = engine.module.named_parameters(remove_duplicate=False)
    frozen = {name for name, p in named if not p.requires_grad}
    return {name: value for name, value in state.items() if not (exclude and name in frozen)}


def save_safetensors(engine: EngineStatus, directory: str | os.PathLike, max_shard_bytes: int,
                     dtype: torch.dtype | None) -> None:
    """See `Engine.save_safetensors`."""
    of_experts = global_names(engine.module, engine.world)
    is_buffer = lambda value: isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    buffers = {name: value for name, value in engine.module.state_dict(keep_vars=True).items()
               if is_buffer(value) and name not in of_experts}
    entries = [TensorEntry(name, tuple(value.shape), value.dtype) for name, value in buffers.items()]
    stream = _stream(engine, dtype)

    def tensors(order):
        parameters = stream.tensors([entry.name for entry in order if entry.name not in buffers])
        for entry in order:
            yield _on_host(buffers[entry.name]) if entry.name in buffers else next(parameters)

    write_folder(directory, [*stream.entries, *entries], tensors, engine.world.world, max_shard_bytes)


def _stream(engine: EngineStatus, dtype: torch.dtype | None) -> TensorStream:
    """The tensors of all parameters, and the buffers of experts, of which rank 0 has only some."""
    world = engine.world
    dtypes = {p.spec.name: dtype or p.dtype for p in engine.module.parameters()}
    order = {p.spec.name: i for i, p in enumerate(engine.module.parameters())}
    weights = (piece for piece in engine.optimizer.pieces() if piece.kind == "weight")
    pieces = sorted(weights, key=lambda piece: order[piece.spec.name])
    of_experts = set(global_names(engine.module, world).values())
    for name, buffer in saved_buffers(engine.module, world).items():
        if name in of_experts:
            dtypes[name] = buffer.dtype
            spec = ParamSpec(name, tuple(buffer.shape), NOT_DRAWN)
            pieces.append(ParameterPiece(spec, buffer.detach().view(-1), replica=world.expert.rank))
    return TensorStream(pieces, coordinates=world.coordinates, world=world.world, device=world.device,
                        dtype_of=dtypes.__getitem__)


def _on_host(value):
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
