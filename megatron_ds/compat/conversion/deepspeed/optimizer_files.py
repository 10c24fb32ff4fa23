"""Optimizer state in the files of DeepSpeed's engine: shards of ZeRO, numbers of steps, the loss scaler."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....errors import CheckpointError
from ..files.foreign_pickle import fields_of
from ..files.stored_tensor import MASTER, StoredTensor, compared_with
from .experts import WHOLE, StoredExperts, groups_of_experts
from .folder import EngineFiles, count, entry, open_file
from .stage0 import stage0_state
from .zero_shards import Shard, merged_parts, merged_slices, replayed_slices, vectors_of

Named = dict[str, dict[str, StoredTensor]]
# Ours ← theirs, of the dynamic loss scaler.
SCALER = {
    "loss_scale": "cur_scale",
    "loss_scale_lives": "cur_hysteresis",
    "loss_scale_last_overflow": "last_overflow_iter",
    "loss_scale_iteration": "cur_iter",
}


@dataclass(frozen=True)
class RankFiles:
    """Content of the optimizer files of one model-parallel rank, one of each data-parallel rank.

    states   of the optimizer of ZeRO
    inners   of the optimizer inside: {"state", "param_groups"}
    masters  fp32 weights, flat, of each group
    """

    paths: Sequence[Path]
    states: Sequence[Mapping]
    inners: Sequence[Mapping]
    masters: Sequence[Sequence]

    def group(self, g: int, ranks: Iterable[int]) -> list[Shard]:
        """Return group g of parameters on these data-parallel ranks."""
        return [
            Shard(
                self.paths[d],
                vectors_of(
                    self.inners[d].get("state", {}).get(g),
                    self.masters[d][g],
                    self.paths[d],
                ),
            )
            for d in ranks
        ]


def zero_state(
    files: EngineFiles,
    rank: int,
    shapes: Sequence[Mapping],
    *,
    stage3: bool,
    experts: StoredExperts | None,
    ignored: set[str],
) -> tuple[Named, dict[str, Any]]:
    """Return the masters and moments of one model-parallel rank, at stages 1 to 3, and its common state.

    shapes   of each group, {name: shape}
    ignored  receives names of stored objects that are not used
    Raises CheckpointError for files that do not belong together.
    """
    # Files of one save have made the same number of steps and have the same groups.
    opened = _opened(files, rank, stage3, ignored)
    steps: set[int] = set()
    for inner, path in zip(opened.inners, opened.paths):
        steps |= optimizer_steps(inner, path)
    if len(steps) > 1:
        raise CheckpointError(
            f"{files.folder}: parts of the optimizer state have made {sorted(steps)} "
            "steps. Files of several checkpoints are mixed up. Copy all files of one "
            "again."
        )
    for path, of_rank in zip(opened.paths, opened.masters):
        if not stage3 and len(of_rank) != len(shapes):
            raise CheckpointError(
                f"{path} has {len(of_rank)} groups of parameters, and the model file "
                f"{len(shapes)}: they are of different checkpoints."
            )
    # Stage 3 divides each parameter; stages 1 and 2 divide the concatenation of a group.
    parts = _parts_of_groups(opened, len(shapes))
    if stage3:
        tensors = _parts_of_parameters(opened, shapes)
    else:
        tensors = {}
        for g, group in enumerate(shapes):
            for kind, named in _group(opened, g, group, parts[g], experts).items():
                tensors.setdefault(kind, {}).update(named)
    # What is equal on all ranks is taken from the first.
    common = {
        "param_groups": opened.inners[0].get("param_groups"),
        "scaler": scaler_numbers(opened.states[0].get("loss_scaler")),
    }
    return tensors, common | ({"num_updates": steps.pop()} if steps else {})


def _opened(
    files: EngineFiles, rank: int, stage3: bool, ignored: set[str]
) -> RankFiles:
    paths = [files.optimizers[rank, d] for d in range(files.shards)]
    opened = [open_file(path) for path in paths]
    ignored.update(name for file in opened for name in file.ignored)
    states = [
        entry(file.content, "optimizer_state_dict", dict, path)
        for file, path in zip(opened, paths)
    ]
    inner, master = (
        ("optimizer_state_dict", "fp32_flat_groups")
        if stage3
        else ("base_optimizer_state", "single_partition_of_fp32_groups")
    )
    return RankFiles(
        paths,
        states,
        [entry(state, inner, dict, path) for state, path in zip(states, paths)],
        [
            entry(state, master, (list, tuple), path)
            for state, path in zip(states, paths)
        ],
    )


def _parts_of_groups(opened: RankFiles, groups: int) -> list[int]:
    """Return the number of expert-parallel ranks that hold different parameters of a group; 1 without experts."""
    number = len(opened.paths)
    found = [1] * groups
    for state, inner, path in zip(opened.states, opened.inners, opened.paths):
        counts = entry(state, "partition_count", (int, list), path, number)
        described = entry(inner, "param_groups", list, path, [])
        for g, shards in enumerate(
            counts if isinstance(counts, list) else [counts] * groups
        ):
            of_experts = g < min(groups, len(described)) and bool(
                described[g].get("moe")
            )
            if shards != number and not (
                of_experts and shards and number % shards == 0
            ):
                raise CheckpointError(
                    f"{path} is one of {shards} shards, and there are {number}. Files of "
                    "several checkpoints are mixed up, or some are missing."
                )
            if of_experts:
                found[g] = number // shards
    return found


def _group(
    opened: RankFiles,
    g: int,
    shapes: Mapping[str, tuple[int, ...]],
    parts: int,
    experts: StoredExperts | None,
) -> Named:
    """Return the mapping kind → name → tensor of a group at stages 1 and 2."""
    mappings = [state.get("param_slice_mappings") for state in opened.states]
    tensors: Named = {}
    for part in range(parts):
        # Expert-parallel ranks alternate, and each forms a flat vector of its own.
        ranks = range(part, len(opened.paths), parts)
        shards = opened.group(g, ranks)
        # Old files lack the slices, which follow from the sizes and the order.
        stored = [mapping for mapping in mappings if isinstance(mapping, list)]
        if len(stored) == len(mappings):
            slices = [
                entry(dict(enumerate(stored[d])), g, Mapping, opened.paths[d])
                for d in ranks
            ]
        else:
            slices = replayed_slices(shapes, shards)
        for kind, named in merged_slices(shapes, shards, slices).items():
            # Experts have local numbers on each rank, which become global numbers.
            if parts > 1:
                place = opened.paths[part]
                if experts is None:
                    raise CheckpointError(
                        f"{place}: {parts} expert-parallel ranks divide a group of "
                        "parameters, and the folder has no files of experts. Copy them."
                    )
                named = {
                    experts.global_name(name, part, parts, place): tensor
                    for name, tensor in named.items()
                }
            tensors.setdefault(kind, {}).update(named)
    return tensors


def _parts_of_parameters(opened: RankFiles, shapes: Sequence[Mapping]) -> Named:
    """Return the mapping kind → name → tensor of all groups at stage 3."""
    joined = []
    for d, path in enumerate(opened.paths):
        groups = [
            opened.group(g, [d])[0].vectors for g in range(len(opened.masters[d]))
        ]
        joined.append(
            Shard(
                path,
                {kind: [vectors[kind][0] for vectors in groups] for kind in groups[0]},
            )
        )
    return merged_parts(
        {name: shape for group in shapes for name, shape in group.items()}, joined
    )


def checked_masters(
    masters: Mapping[str, StoredTensor], experts: StoredExperts
) -> dict[str, StoredTensor]:
    """Return the masters of experts; reading one compares it with the weight in the expert's file, since a file of
    another rank has state of the same names and shapes."""
    why = "The optimizer state is of another save or expert-parallel rank. Load the weights alone."
    return {
        name: compared_with(experts.weights[name], master, why)
        for name, master in masters.items()
        if name in experts.weights
    }


# ---- Stage 0.


def unnamed_state(
    optimizer: Mapping, weights: Mapping[str, StoredTensor], place: object
) -> tuple[Named, dict[str, Any]]:
    """Return the state of an optimizer by number of the parameter: (masters and moments, common state).

    weights: of the module, in the order of registration. Raises CheckpointError.
    """
    inner, masters = _unnamed(optimizer, place)
    return stage0_state(inner, masters, weights, place), _common(
        optimizer, inner, place
    )


def expert_state(
    files: EngineFiles,
    optimizer: Mapping,
    weights: Mapping[str, StoredTensor],
    experts: StoredExperts,
) -> tuple[Named, dict[str, Any]]:
    """Return `unnamed_state` of all expert-parallel ranks, which have a file each. Raises CheckpointError.

    optimizer: of the model file, which is that of rank 0
    """
    if not files.expert_optimizers:
        raise CheckpointError(
            f"{files.folder} has no expp_rank files, which hold the optimizer state of its "
            "experts. Copy them, or load the weights alone."
        )
    parts = len(files.expert_optimizers)
    found: Named = {}
    commons = {}
    for rank, path in sorted(files.expert_optimizers.items(), reverse=True):
        own = entry(open_file(path).content, "optimizer", dict, path)
        inner, masters = _unnamed(own, path)
        flags = groups_of_experts(
            entry(inner, "param_groups", list, path, []), parts, path
        )
        names = experts.in_order(weights, rank, parts, path)
        # Groups of experts and of other parameters have names of their own.
        for flag in set(flags):
            chosen = {
                name: tensor
                for name, tensor in names.items()
                if not any(flags) or (name in experts.weights) == flag
            }
            groups = [g for g, other in enumerate(flags) if other == flag]
            state = stage0_state(
                {**inner, "param_groups": [inner["param_groups"][g] for g in groups]},
                masters and [masters[g] for g in groups],
                chosen,
                path,
            )
            for (
                kind,
                named,
            ) in (
                state.items()
            ):  # rank 0 comes last, and its state of other parameters remains
                found.setdefault(kind, {}).update(named)
        commons[path] = _common(own, inner, path)
    # All ranks must agree, and masters must agree with the weights of experts.
    _check_ranks(files, optimizer, commons)
    if MASTER in found:
        found[MASTER] |= checked_masters(found[MASTER], experts)
    return found, commons[files.expert_optimizers[0]]


def _check_ranks(
    files: EngineFiles, optimizer: Mapping, commons: Mapping[Path, Mapping]
) -> None:
    """Raises CheckpointError for files of several saves, and if that of rank 0 is another rank's."""
    steps = {common.get("num_updates") for common in commons.values()}
    if len(steps) > 1:
        raise CheckpointError(
            f"{files.folder}: optimizers of expert-parallel ranks have made {steps} steps. "
            f"Files of several checkpoints are mixed up. {WHOLE}."
        )
    place = files.models[0, 0]
    path = files.expert_optimizers[0]
    one = _unnamed(optimizer, place)[0].get("state") or {}
    other = _unnamed(open_file(path).content["optimizer"], path)[0].get("state") or {}
    last = max(one, default=None)
    for kind, tensor in (one.get(last) or {}).items():
        there = (other.get(last) or {}).get(kind)
        if isinstance(tensor, StoredTensor) and not (
            isinstance(there, StoredTensor) and torch.equal(tensor.read(), there.read())
        ):
            raise CheckpointError(
                f"{path} holds {kind} of another expert-parallel rank or save than "
                f"{place}, which has the state of rank 0, too: files are swapped. "
                f"{WHOLE}."
            )


def _unnamed(optimizer: Mapping, place: object) -> tuple[Mapping, Any]:
    """Return ({"state", "param_groups"} of torch's optimizer, fp32 weights of each group or None)."""
    masters = optimizer.get("fp32_groups")
    # A fused optimizer has one vector for each group.
    if masters is None and "fp32_groups_flat" in optimizer:
        masters = [[flat] for flat in entry(optimizer, "fp32_groups_flat", list, place)]
    return optimizer.get("optimizer_state_dict", optimizer), masters


def _common(optimizer: Mapping, inner: Mapping, place: object) -> dict[str, Any]:
    steps = optimizer_steps(inner, place)
    return {
        "param_groups": inner.get("param_groups"),
        "scaler": scaler_numbers(optimizer),
    } | ({"num_updates": max(steps)} if steps else {})


# ---- Numbers.


def optimizer_steps(inner: Mapping, place: object) -> set[int]:
    """Return the numbers of updates of the groups or parameters; FusedAdam records them in `param_groups`."""
    found = [
        *entry(inner, "state", Mapping, place, {}).values(),
        *entry(inner, "param_groups", list, place, []),
    ]
    states = [state for state in found if isinstance(state, Mapping)]
    steps = {count(state, "step", place) for state in states}
    return {step for step in steps if step is not None}


def scaler_numbers(state: Any) -> dict[str, float]:
    """Return the numbers of a dynamic loss scaler; {} for a fixed one."""
    values = fields_of(state)
    if (
        not (values.get("dynamic") or values.get("dynamic_loss_scale"))
        or "cur_scale" not in values
    ):
        return {}
    numbers = {"cur_hysteresis": 1, "last_overflow_iter": -1, "cur_iter": 0} | values
    found = {ours: numbers[theirs] for ours, theirs in SCALER.items()}
    if (
        not all(type(n) in (int, float) for n in found.values())
        or not 0 < found["loss_scale"] < 2**64
    ):
        raise CheckpointError(
            f"the loss scaler has the state {found}. The file is damaged."
        )
    return found | {name: int(n) for name, n in found.items() if name != "loss_scale"}
