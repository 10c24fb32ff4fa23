"""A checkpoint of DeepSpeed's engine as logical tensors under the names of the module that it trained.

Weights are the fp32 masters where the files have them. Of a shared parameter the first name is kept; the
others are in `settings["shared"]`. Frozen parameters have weights and no optimizer state.

    names     model.layers.0.mlp.up_proj.weight              of the module
              2.mlp.dense_h_to_4h.weight                     pipeline: number of the layer, and its name
    settings  args (Namespace as dict), ds_config, lr_scheduler, param_groups, client_state, shared
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....errors import CheckpointError
from ..files.foreign_pickle import ForeignObject, fields_of
from ..files.stored_tensor import (
    MASTER,
    WEIGHT,
    RawCheckpoint,
    StoredProgress,
    StoredTensor,
)
from ..malformed import refuses_malformed
from ..tensor_parallel_merge import RankPacking, merged_over_tp
from .experts import StoredExperts, experts_of
from .folder import (
    EngineFiles,
    buffer_names,
    count,
    entry,
    files_of,
    open_file,
    scalar,
    shapes_in,
)
from .optimizer_files import (
    Named,
    checked_masters,
    expert_state,
    unnamed_state,
    zero_state,
)
from .zero_shards import merged_fragments

OWN_KEYS = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "ds_config",
    "ds_version",
    "checkpoint_parallel_dimensions",
    "universal_checkpoint_info",
    "num_experts",
    "ds_autoep_layers",
}
TIED = "tied_modules."
BUFFER = "buffer"
# Classes whose content is read here, or stated by the files otherwise.
READ = {
    "torch.Tensor",
    "argparse.Namespace",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
}


@dataclass(frozen=True)
class RankState:
    """What the files of one model-parallel rank hold: kind → name → tensor, and the state beside tensors.

    common  {"num_updates", "scaler", "param_groups"}, each only if recorded
    """

    tensors: Named
    shared: Mapping[str, str]
    common: Mapping[str, Any]


@refuses_malformed
def read_engine_folder(
    folder: Path, weights_only: bool = False, thirds: bool | None = None
) -> RawCheckpoint:
    """Return the checkpoint in a folder global_stepN. Raises CheckpointError.

    weights_only  files of optimizer shards may be missing, except at stage 3
    thirds        packing of query_key_value, see `RankPacking`; needed if tensor-parallel ranks are merged
    """
    # Each file is read once, and all files must belong to one save.
    files = files_of(folder)
    opened = {place: open_file(path) for place, path in files.models.items()}
    contents = {place: file.content for place, file in opened.items()}
    _check_same_save(files, contents)
    ignored = {name for file in opened.values() for name in file.ignored}
    # Without training steps and optimizer files, a converter wrote the folder, whose rows are [Q; K; V].
    if (
        thirds is None
        and not contents[0, 0].get("global_steps")
        and not files.optimizers
    ):
        thirds = False  # written by a converter, before any training
    packing = RankPacking(
        thirds, bool(fields_of(contents[0, 0].get("args")).get("swiglu"))
    )
    # Each model-parallel rank contributes its weights and optimizer state.
    experts = experts_of(files, contents[0, 0])
    states = [
        _state_of_rank(files, contents, rank, weights_only, ignored, experts)
        for rank in range(files.model_ranks)
    ]
    if files.layers:
        tensors = _of_pipeline(files, states, packing)
    else:
        tensors = _merged([state.tensors for state in states], packing)
    first = contents[0, 0]
    common = states[0].common
    # Buffers are equal on all ranks, so the last file that holds one decides.
    buffers: dict[str, StoredTensor] = {}
    for rank, content in contents.items():
        buffers |= _buffers(content, files.models[rank])
    if experts:
        buffers |= experts.buffers
    tensors[BUFFER] = buffers
    shared: dict[str, str] = {}
    for state in states:
        shared |= state.shared
    # The counters of the first rank hold for the whole run.
    settings = plain_settings(first, common.get("param_groups"), shared)
    place = files.models[0, 0]
    progress = StoredProgress(
        count(first, "global_steps", place),
        count(first, "global_samples", place),
        count(first, "tokens", place),
        count(first, "skipped_steps", place),
        common.get("num_updates"),
        common.get("scaler", {}),
    )
    return RawCheckpoint(
        folder, tensors, settings, progress, tuple(sorted(ignored - READ))
    )


def plain_settings(
    content: Mapping[str, Any], groups: Any, shared: Mapping[str, str]
) -> dict[str, Any]:
    """Return `RawCheckpoint.settings` from the content of a model file, and the groups of the optimizer."""
    return {
        "ds_config": _plain(content.get("ds_config")),
        "args": _plain(fields_of(content.get("args"))),
        "lr_scheduler": _plain(content.get("lr_scheduler")),
        "shared": dict(shared),
        "param_groups": _plain(groups),
        "client_state": {
            key: _plain(value)
            for key, value in content.items()
            if key not in (*OWN_KEYS, "args")
        },
    }


def _check_same_save(
    files: EngineFiles, contents: Mapping[tuple[int, int], Mapping]
) -> None:
    """Raises CheckpointError for files of different steps or numbers of ranks."""
    for name in ("global_steps", "dp_world_size", "ds_version"):
        values = {
            str(content.get(name)): files.models[place]
            for place, content in contents.items()
        }
        if len(values) > 1:
            (one, here), (other, there) = list(values.items())[:2]
            raise CheckpointError(
                f"{name} is {one} in {here} and {other} in {there}: they are files of "
                "different checkpoints. Copy all files of one checkpoint again."
            )
    ranks = count(contents[0, 0], "dp_world_size", files.models[0, 0])
    if files.optimizers and ranks is not None and ranks != files.shards:
        raise CheckpointError(
            f"{files.folder} has optim_states of {files.shards} data-parallel ranks, and "
            f"{ranks} ranks saved it. Copy the missing files, or load the weights alone."
        )


def _state_of_rank(
    files: EngineFiles,
    contents: Mapping[tuple[int, int], Mapping],
    rank: int,
    weights_only: bool,
    ignored: set[str],
    experts: StoredExperts | None,
) -> RankState:
    content = contents[rank, 0]
    place = files.models[rank, 0]
    weights, shared = _module_weights(content, place)
    # At stage 3 the model file has empty tensors, or there is one for each data-parallel rank.
    stage3 = (
        max(d for k, d in files.models if k == rank) > 0
        or any(tensor.shape == (0,) for tensor in weights.values())
        and content.get("param_shapes") is not None
    )
    # Without shapes of parameters the run had stage 0, whose optimizer is in the model file.
    if content.get("param_shapes") is None:
        tensors, common = (
            ({}, {})
            if weights_only
            else _stage0(files, content, place, weights, experts)
        )
        weights |= experts.weights if experts else {}
        return RankState({WEIGHT: weights, **tensors}, shared, common)
    shapes = [
        shapes_in(group, place) for group in entry(content, "param_shapes", list, place)
    ]
    # Frozen parameters have no optimizer state, so stage 3 stores their parts in the model files.
    if stage3:
        fragments = [
            contents[rank, d].get("frozen_param_fragments") or {}
            for d in range(files.shards)
            if (rank, d) in contents
        ]
        frozen = shapes_in(content.get("frozen_param_shapes") or {}, place)
        weights = merged_fragments(frozen, fragments, place)
    weights |= experts.weights if experts else {}
    # Without optimizer files only the weights remain, except at stage 3.
    if not files.optimizers:
        if stage3 or not weights_only:
            raise CheckpointError(_no_optimizer_files(files, stage3))
        return RankState({WEIGHT: weights}, shared, {})
    # The fp32 masters replace the rounded weights of the module.
    tensors, common = zero_state(
        files, rank, shapes, stage3=stage3, experts=experts, ignored=ignored
    )
    masters = {
        name: tensor
        for name, tensor in tensors.pop(MASTER).items()
        if name not in shared
    }
    if experts:
        masters |= checked_masters(masters, experts)
    return RankState(
        {WEIGHT: {**weights, **masters}, **({} if weights_only else tensors)},
        shared,
        common,
    )


def _no_optimizer_files(files: EngineFiles, stage3: bool) -> str:
    """Return the error of a folder without optim_states files."""
    advice = "Copy them, or load the weights alone."
    if stage3:
        advice = "At ZeRO stage 3 they hold the weights: copy them."
    return f"{files.folder} has no optim_states files. {advice}"


def _buffers(content: Mapping[str, Any], place: Path) -> dict[str, StoredTensor]:
    names = buffer_names(content, place)
    held = content.get("module") or {}
    return {
        name: held[name] for name in names if isinstance(held.get(name), StoredTensor)
    }


def _module_weights(
    content: Mapping[str, Any], place: Path
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return (weights, {name of a shared weight: name that is kept}) of the module, without buffers."""
    buffers = buffer_names(content, place)
    shared = {
        str(k): str(v)
        for k, v in entry(content, "shared_params", Mapping, place, {}).items()
    }
    found = {}
    by_place: dict[tuple[str, tuple[int, ...]], str] = {}
    for name, tensor in entry(content, "module", Mapping, place, {}).items():
        if not isinstance(tensor, StoredTensor) or name in buffers or name in shared:
            continue
        # Parameters that share memory share a storage in the file.
        source = (
            by_place.setdefault((tensor.place, tensor.shape), name)
            if 0 not in tensor.shape
            else name
        )
        if source != name:
            shared[name] = source
            continue
        found[name] = tensor
    return found, shared


def _stage0(
    files: EngineFiles,
    content: Mapping,
    place: Path,
    weights: Mapping[str, StoredTensor],
    experts: StoredExperts | None,
) -> tuple[Named, dict[str, Any]]:
    """Return the state at stage 0, where the optimizer is in the model file, by number of the parameter."""
    optimizer = entry(content, "optimizer", dict, place, {})
    if not optimizer:
        return {}, {}
    if files.layers:
        if files.model_ranks > 1:
            raise CheckpointError(
                f"{place}: the optimizer state of several pipeline stages without ZeRO has "
                "no names. Load the weights alone, or save with ZeRO stage 1."
            )
        weights = {}
        for (layer, _), path in sorted(files.layers.items()):
            weights |= _layer_weights(layer, path)
    if experts:
        tensors, common = expert_state(files, optimizer, weights, experts)
        weights = {**weights, **experts.weights}
    else:
        tensors, common = unnamed_state(optimizer, weights, place)
    if MASTER in tensors:
        tensors[WEIGHT] = {**weights, **tensors.pop(MASTER)}
    return tensors, common


# ---- Pipelines and tensor parallelism.


def _layer_weights(layer: int, path: Path) -> dict[str, StoredTensor]:
    content = open_file(path).content
    found = {}
    places = set()
    for leaf, tensor in content.items():
        if (
            isinstance(tensor, StoredTensor)
            and (tensor.place, tensor.shape) not in places
        ):
            places.add((tensor.place, tensor.shape))
            found[f"{layer}.{leaf}"] = tensor
    return found


def _of_pipeline(
    files: EngineFiles, states: Sequence[RankState], packing: RankPacking
) -> Named:
    """Return the weights of the layer files, and masters and moments of all stages under the names of those."""
    tp_size = 1 + max(t for _, t in files.layers)
    by_rank: list[dict[str, StoredTensor]] = [{} for _ in range(tp_size)]
    for (layer, rank), path in sorted(files.layers.items()):
        by_rank[rank] |= _layer_weights(layer, path)
    weights = _merged([{WEIGHT: named} for named in by_rank], packing)[WEIGHT]
    # Model-parallel ranks with the same parameters of their own are the tensor-parallel ranks of a stage.
    stages: dict[frozenset, list[Named]] = {}
    for state in states:
        names = {name for named in state.tensors.values() for name in named}
        own = frozenset(name for name in names if not name.startswith(TIED))
        stages.setdefault(own, []).append(state.tensors)
    found: Named = {WEIGHT: dict(weights)}
    # The stages go backwards, so the first stage's copy of tied parameters remains.
    for held in reversed(stages.values()):
        has_state = any(any(tensors.values()) for tensors in held)
        if len(held) != tp_size and has_state:
            raise CheckpointError(
                f"{files.folder}: {len(held)} optim_states hold the same parameters, and "
                f"the layer files are of {tp_size} tensor-parallel ranks. Files are mixed "
                "up."
            )
        for kind, named in _merged(held, packing).items():
            found.setdefault(kind, {}).update(_untied(named, weights))
    return found


def _untied(
    named: Mapping[str, StoredTensor], weights: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return tied_modules.KEY.LEAF under the name N.LEAF of the first layer file that holds it."""
    found = {}
    for name, tensor in named.items():
        if name.startswith(TIED):
            leaf = name.removeprefix(TIED).partition(".")[2]
            holders = [other for other in weights if other.partition(".")[2] == leaf]
            same = [
                other
                for other in holders
                if weights[other].shape == tensor.shape and other not in named
            ]
            if not same:
                raise CheckpointError(
                    f"{tensor.place}: no layer file holds {leaf} of shape "
                    f"{list(tensor.shape)}."
                )
            name = same[0]
        found[name] = tensor
    return found


def _merged(ranks: Sequence[Named], packing: RankPacking) -> Named:
    """Return the tensors merged over tensor-parallel ranks."""
    if len(ranks) == 1:
        return dict(ranks[0])
    result: Named = {}
    for kind, named in ranks[0].items():
        for rank, other in enumerate(ranks):
            if odd := other.get(kind, {}).keys() ^ named.keys():
                raise CheckpointError(
                    f"tensor-parallel rank {rank} and rank 0 do not hold the same tensors: "
                    f"{sorted(odd)[0]} ({kind}). Files are mixed up."
                )
        result[kind] = {
            name: merged_over_tp(name, [other[kind][name] for other in ranks], packing)
            for name in named
        }
    return result


def _plain(value: Any) -> Any:
    """Return the value without objects of classes and tensors, except tensors with one element."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, StoredTensor):
        return scalar(value) if value.shape in ((), (1,)) else None
    if isinstance(value, Mapping):
        return {
            key: _plain(item)
            for key, item in value.items()
            if isinstance(key, str | int)
        }
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, ForeignObject):
        fields = fields_of(value)
        return (
            {str(key): _plain(item) for key, item in fields.items()} if fields else None
        )
    return None


def without_state(raw: RawCheckpoint) -> RawCheckpoint:
    """Return the weights and buffers alone."""
    kept = {kind: raw.tensors[kind] for kind in (WEIGHT, BUFFER) if kind in raw.tensors}
    return replace(raw, tensors=kept, progress=replace(raw.progress, num_updates=None))
