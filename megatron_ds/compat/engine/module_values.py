"""The values of a module that was not written for this package: brought into the engine's format, made equal
on all ranks; and, while an engine trains it, whole: parameters to read or change, its state_dict.

Specs and global names come from module_specs.py.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint.safetensors_folder import TensorEntry, write_folder
from ...checkpoint.whole_tensors import TensorStream
from ...errors import CheckpointError, ConfigError
from ...mpu.agree import on_one_rank
from ...mpu.collectives import all_gather_object, broadcast_
from ...mpu.group import Group
from ...mpu.managed_parameter import spec_of
from ...mpu.param_spec import ParamSpec
from ...mpu.parameter_piece import ParameterPiece
from ...mpu.stuck_ranks import doing
from ..deepspeed.external_groups import DataParallelWorld
from .module_specs import NOT_DRAWN, global_names, is_expert, name_of
from .number_formats import NumberFormats
from .status import EngineStatus

DrawByName = Callable[[str, int, torch.Tensor], None]
"""draw(name, start, out): fill flat `out` with elements [start, start + len(out)) of the tensor `name`."""

logger = logging.getLogger(__name__)


def prepare(
    module: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    draw: DrawByName | None,
    formats: NumberFormats,
) -> None:
    """Bring the module into its formats and to its device; parameters stay on "meta". Raises ConfigError.

    dtype: of parameters; formats: the exceptions, and those of buffers
    """
    # The module is in one format.
    if dtype == torch.float32:
        odd = {n: p.dtype for n, p in module.named_parameters() if p.dtype != dtype}
        if odd:
            name = next(iter(odd))
            raise ConfigError(
                f"{len(odd)} parameters are not fp32 (first {name}, {odd[name]}), and the "
                'config has neither an enabled "bf16" nor an enabled "fp16" block. Enable one, '
                "or call module.float()."
            )
    # Tensors on "meta" need a function that draws them.
    formats.apply(module, dtype)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if draw is None and (undrawn := next((n for n, t in tensors if t.is_meta), None)):
        raise ConfigError(
            f"{undrawn} is on the meta device, and nothing is given to draw its values with. Give "
            "draw=function(name, start, out), for instance from_safetensors(folder)."
        )
    # Buffers that have values move; the others are drawn.
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta:
                owner._buffers[name] = buffer.to(device).contiguous()
    for name, buffer in list(module.named_buffers()):
        if buffer.is_meta and draw is not None:
            path, _, last = name.rpartition(".")
            values = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            draw(name_of(name), 0, values.view(-1))
            module.get_submodule(path)._buffers[last] = values
    # Parameters that have values move.
    for p in module.parameters():
        if not p.is_meta:
            p.data = p.data.to(device)


@torch.no_grad()
def agree(module: nn.Module, world: DataParallelWorld) -> None:
    """All data-parallel ranks take the values of the first; experts, of the first holder. Collective."""
    _check_same_parameters(module, world)
    changed = []
    kept = 0
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
        elif whole.numel() > 1 and (whole != whole.view(-1)[0]).any():
            # Random values, from the same seed.
            kept += 1
    _report_changes(changed, kept, world.data)


def _values(
    module: nn.Module, world: DataParallelWorld
) -> Iterator[tuple[str, torch.Tensor, Group]]:
    """Parameters and buffers that are not on the meta device, with the ranks that hold the same ones."""
    of_experts = global_names(module, world)
    for name, p in module.named_parameters():
        if not p.is_meta:
            yield name, p, world.by_axes[spec_of(p).reduced_over]
    for name, buffer in module.named_buffers():
        yield name, buffer, world.of_experts if name in of_experts else world.data


def _check_same_parameters(module: nn.Module, world: DataParallelWorld) -> None:
    """Raises ConfigError on all data-parallel ranks unless names, shapes, types and specs are the same."""
    # Dense parameters are the same on all ranks, experts in each expert-data group.
    here: dict[bool, dict[str, tuple]] = {False: {}, True: {}}
    for name, p in module.named_parameters():
        here[is_expert(p) and world.expert is not None][name] = (
            tuple(p.shape),
            p.requires_grad,
            spec_of(p).name,
            str(p.dtype).removeprefix("torch."),
        )
    # Digests are enough where all is well.
    digest = lambda found: hashlib.sha256(repr(found).encode()).hexdigest()
    digests = all_gather_object(
        (world.expert_part, digest(here[False]), digest(here[True])), world.data
    )
    parts = {part for part, _, _ in digests}
    experts = {(part, found) for part, _, found in digests}
    if len({dense for _, dense, _ in digests}) == 1 and len(experts) == len(parts):
        return
    # The ranks differ, which each of them knows, so all exchange the facts of every parameter.
    facts: dict[str, tuple[Any, bool, int]] = {}
    for expert, found in here.items():
        part = world.expert_part if expert else 0
        facts |= {name: (fact, expert, part) for name, fact in found.items()}
    all_of = all_gather_object(facts, world.data)
    for rank, theirs in zip(world.data.ranks[1:], all_of[1:]):
        for name in {**all_of[0], **theirs}:
            one = all_of[0].get(name)
            other = theirs.get(name)
            alike = (
                one == other
                or None not in (one, other)
                and one[1]
                and other[1]
                and one[2] != other[2]
            )
            if not alike:
                raise ConfigError(
                    f"data-parallel ranks hold different modules: {name} is {_shown(one)} on rank "
                    f"{world.data.ranks[0]} and {_shown(other)} on rank {rank}. Their gradients cannot be "
                    "summed. Make the same module on every rank; mark the parameters of experts that only "
                    "some ranks hold with p.allreduce = False; list the ranks of tensor parallelism in the "
                    "mpu's model-parallel group."
                )
    raise ConfigError(
        "data-parallel ranks hold the same parameters in different orders, or ranks of one "
        "expert-data group hold different experts. Make the same module on every rank."
    )


def _shown(fact: tuple | None) -> str:
    if fact is None:
        return "missing"
    (shape, trained, spec_name, dtype), expert, _ = fact
    kind = "an expert " if expert else ""
    frozen = "" if trained else ", frozen"
    return f"{kind}of shape {list(shape)} in {dtype}{frozen} (spec {spec_name})"


def _report_changes(changed: list[str], kept: int, data: Group) -> None:
    """Warn where some random values are equal and others differ: perhaps experts. Collective."""
    found = all_gather_object((changed[:1], len(changed), kept), data)
    first = next((names[0] for names, _, _ in found if names), None)
    if data.rank == 0 and first and any(kept for _, count, kept in found if count):
        logger.warning(
            "%d parameters, first %s, differ between data-parallel ranks although others are "
            "equal: every rank now has the values of the first. If they are experts, which differ "
            "between ranks, mark them with p.allreduce = False",
            max(count for _, count, _ in found),
            first,
        )


def saved_buffers(
    module: nn.Module, world: DataParallelWorld
) -> dict[str, torch.Tensor]:
    """Return the buffers that belong into a state_dict, by their global names (the first of several)."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    names = global_names(module, world)
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            is_saved = (
                buffer is not None and name not in owner._non_persistent_buffers_set
            )
            if is_saved and id(buffer) not in seen:
                seen.add(id(buffer))
                local = f"{prefix}.{name}" if prefix else name
                found[names.get(local, name_of(local))] = buffer
    return found


# ------------------------------------------------------------------------------------------- whole values
@contextmanager
def gathered_parameters(
    engine: EngineStatus,
    parameters: Iterable[nn.Parameter] | nn.Parameter | None = None,
    modifier_rank: int | None = None,
) -> Iterator[None]:
    """A context in which parameters of the module (None: all) hold their whole values. Collective.

    modifier_rank  None: they may only be read. Otherwise this data-parallel rank may write into them, in
                   place; on leaving, all ranks and the fp32 masters have its values
    """
    mine = dict.fromkeys(engine.module.parameters())
    if isinstance(parameters, nn.Parameter):
        parameters = [parameters]
    chosen = list(mine) if parameters is None else list(dict.fromkeys(parameters))
    if count := sum(p not in mine for p in chosen):
        raise ConfigError(
            f"{count} of the {len(chosen)} parameters to be gathered are not parameters of "
            "this engine's module. Take them from engine.module."
        )
    if modifier_rank is not None and not 0 <= modifier_rank < engine.world.data.size:
        raise ConfigError(
            f"modifier_rank is {modifier_rank}, but data-parallel ranks are 0 to "
            f"{engine.world.data.size - 1}."
        )
    gathered = engine.gathering.whole(chosen) if engine.gathering else nullcontext()
    shapes = [p.shape for p in chosen]
    with (
        doing(f"engine.gathered_parameters (global_steps {engine.global_steps})"),
        gathered,
    ):
        # Quantized weights are not what their masters round to: they are compared with what they were.
        is_rounded = (
            modifier_rank is not None
            and engine.optimizer.settings.weight_blocks is not None
        )
        before = (
            {spec_of(p).name: p.detach().clone().view(-1) for p in chosen}
            if is_rounded
            else {}
        )
        yield
        if resized := [p for p, shape in zip(chosen, shapes) if p.shape != shape]:
            raise ConfigError(
                f"{len(resized)} parameters, first {spec_of(resized[0]).name}, were resized: the "
                "engine has laid out their shards. Resize the module before initialize, and "
                "make a new engine."
            )
        if modifier_rank is not None:
            _keep(engine, chosen, modifier_rank, before)


@torch.no_grad()
def _keep(
    engine: EngineStatus,
    parameters: list[nn.Parameter],
    source: int,
    before: Mapping[str, torch.Tensor],
) -> None:
    """Take rank `source`'s values, of other experts the first rank's, into parameters and masters.

    before: the values of parameters before they were changed, where masters do not round to them
    """
    values = {}
    world = engine.world
    for p in parameters:
        group = world.by_axes[spec_of(p).reduced_over]
        writer = world.data.ranks[source]
        broadcast_(
            p.detach(), group, group.ranks.index(writer) if writer in group.ranks else 0
        )
        values[spec_of(p).name] = p.detach().view(-1)
    engine.optimizer.before_change()
    for piece in engine.optimizer.pieces():
        if piece.kind == "weight" and piece.spec.name in values:
            value = values[piece.spec.name][piece.start : piece.stop].to(
                piece.tensor.device
            )
            # A master that rounds to the value was not changed, and keeps its further bits.
            held = before.get(piece.spec.name)
            shown = (
                piece.tensor.to(value.dtype)
                if held is None
                else held[piece.start : piece.stop].to(piece.tensor.device)
            )
            changed = shown != value
            piece.tensor.copy_(
                torch.where(changed, value.to(piece.tensor.dtype), piece.tensor)
            )
    engine.optimizer.after_load()


def full_state_dict(
    engine: EngineStatus, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Return the whole module's state_dict in CPU tensors on rank 0, {} on the others. Collective over all ranks.

    Tensors are assembled one after the other, from the masters. dtype: of the parameters; None: the module's.
    """
    stream = _stream(engine, dtype)
    # One entry for each tensor; in the state_dict a tied parameter has several names.
    whole = {
        entry.name: tensor
        for entry, tensor in zip(stream.entries, stream)
        if tensor is not None
    }
    if engine.world.rank:
        return {}
    names = global_names(engine.module, engine.world)
    state = {}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        shown = names.get(name, name_of(name))
        held = spec_of(value).name if isinstance(value, nn.Parameter) else shown
        state[shown] = whole[held] if held in whole else _on_host(value)
    here = {spec_of(p).name for p in engine.module.parameters()}
    experts_elsewhere = {
        name: tensor for name, tensor in whole.items() if name not in here
    }
    return state | experts_elsewhere


def save_16bit_model(
    engine: EngineStatus,
    save_dir: str | os.PathLike,
    save_filename: str = "pytorch_model.bin",
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write `full_state_dict()` into one file, for torch.load; True. Collective, rank 0 writes.

    Rank 0 needs memory for the whole module; `save_safetensors` does not, and writes a format without code.
    """
    path = Path(save_dir) / save_filename
    state = without_frozen(engine, full_state_dict(engine), exclude_frozen_parameters)

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        writing = path.with_name(f".{path.name}.writing")
        try:
            torch.save(state, writing)
            os.replace(writing, path)
        except (
            OSError,
            RuntimeError,
        ) as error:  # torch raises RuntimeError where the disk is full
            raise CheckpointError(f"{path} could not be written: {error}") from error
        finally:
            writing.unlink(missing_ok=True)

    on_one_rank(engine.world.world, write)
    return True


def without_frozen(
    engine: EngineStatus, state: dict[str, torch.Tensor], exclude: bool
) -> dict[str, torch.Tensor]:
    """`state`; if `exclude`, without the frozen parameters."""
    named = engine.module.named_parameters(remove_duplicate=False)
    frozen = {name_of(name) for name, p in named if not p.requires_grad}
    return {
        name: value for name, value in state.items() if not (exclude and name in frozen)
    }


def save_safetensors(
    engine: EngineStatus,
    directory: str | os.PathLike,
    max_shard_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the whole module's tensors in the format that `from_pretrained` reads. Collective over all ranks.

    A rank holds at most its own state and one tensor. A tied parameter is written once, under its first name.
    max_shard_bytes: of a file; a larger tensor has a file of its own. dtype: as in `full_state_dict`.
    """
    # Buffers are the same on all ranks, except those of experts, which the stream has.
    of_experts = global_names(engine.module, engine.world)
    is_buffer = lambda value: (
        isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    )
    buffers = {
        name_of(name): value
        for name, value in engine.module.state_dict(keep_vars=True).items()
        if is_buffer(value) and name not in of_experts
    }
    entries = [
        TensorEntry(name, tuple(value.shape), value.dtype)
        for name, value in buffers.items()
    ]
    stream = _stream(engine, dtype)

    # Parameters come in the order of the files, one at a time.
    def tensors(order):
        parameters = stream.tensors(
            [entry.name for entry in order if entry.name not in buffers]
        )
        for entry in order:
            yield (
                _on_host(buffers[entry.name])
                if entry.name in buffers
                else next(parameters)
            )

    write_folder(
        directory,
        [*stream.entries, *entries],
        tensors,
        engine.world.world,
        max_shard_bytes,
    )


def _stream(engine: EngineStatus, dtype: torch.dtype | None) -> TensorStream:
    """Return the tensors of all parameters, and the buffers of experts, of which rank 0 has only some."""
    world = engine.world
    dtypes = {spec_of(p).name: dtype or p.dtype for p in engine.module.parameters()}
    order = {spec_of(p).name: i for i, p in enumerate(engine.module.parameters())}
    weights = (piece for piece in engine.optimizer.pieces() if piece.kind == "weight")
    pieces = sorted(weights, key=lambda piece: order[piece.spec.name])
    of_experts = set(global_names(engine.module, world).values())
    for name, buffer in saved_buffers(engine.module, world).items():
        if name in of_experts:
            dtypes[name] = buffer.dtype
            spec = ParamSpec(name, tuple(buffer.shape), NOT_DRAWN)
            pieces.append(
                ParameterPiece(
                    spec, buffer.detach().view(-1), replica=world.of_experts.rank
                )
            )
    return TensorStream(
        pieces,
        coordinates=world.coordinates,
        world=world.world,
        device=world.device,
        dtype_of=dtypes.__getitem__,
    )


def _on_host(value):
    return (
        value.detach().to("cpu", copy=True)
        if isinstance(value, torch.Tensor)
        else value
    )
