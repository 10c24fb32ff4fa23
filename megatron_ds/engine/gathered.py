"""Whole values for users: parameters to read or change, and the state_dict of the whole module, one tensor at a time."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..checkpoint.safetensors_folder import TensorEntry, write_folder
from ..checkpoint.tensor_stream import TensorStream
from ..errors import ConfigError
from ..mpu.collectives import broadcast_

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
    """What rank `source` wrote into parameters is their value from now on, in the masters too."""
    values = {}
    for p in parameters:
        broadcast_(p.detach(), engine.world.data, source)
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
    return {name: whole[value.spec.name] if isinstance(value, nn.Parameter) else _on_host(value)
            for name, value in engine.module.state_dict(keep_vars=True).items()}


def save_safetensors(engine: "Engine", directory: str | os.PathLike, max_shard_bytes: int, dtype: torch.dtype | None) -> None:
    """See `Engine.save_safetensors`."""
    buffers = {name: value for name, value in engine.module.state_dict(keep_vars=True).items()
               if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)}
    entries = [TensorEntry(name, tuple(value.shape), value.dtype) for name, value in buffers.items()]
    stream = _stream(engine, dtype)

    def tensors(order):
        parameters = stream.tensors([entry.name for entry in order if entry.name not in buffers])
        for entry in order:
            yield _on_host(buffers[entry.name]) if entry.name in buffers else next(parameters)

    write_folder(directory, [*stream.entries, *entries], tensors, engine.world.world, max_shard_bytes)


def _stream(engine: "Engine", dtype: torch.dtype | None) -> TensorStream:
    dtypes = {p.spec.name: dtype or p.dtype for p in engine.module.parameters()}
    world = engine.world
    order = {p.spec.name: i for i, p in enumerate(engine.module.parameters())}
    pieces = sorted((p for p in engine.optimizer.pieces() if p.kind == "weight"), key=lambda p: order[p.spec.name])
    return TensorStream(pieces, tp=world.model, world=world.world, device=world.device, dtype_of=dtypes.__getitem__)


def _on_host(value):
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
