"""Experts of DeepSpeed's `MoE` layers in its checkpoints: their weights in files of their own, and their
optimizer state under the names that they have on their rank.

    layer_{l}_expert_{e}_mp_rank_00_model_states.pt     weights of expert e of the l-th MoE layer
    expp_rank_{r}_mp_rank_00_optim_states.pt            stage 0: optimizer of expert-parallel rank r

With n experts of a layer on a rank, its expert i is expert r n + i of the layer:

    blocks.0.deepspeed_moe.experts.deepspeed_experts.1.up.weight    on rank 1 of 2, of 4 experts
    blocks.0.deepspeed_moe.experts.deepspeed_experts.3.up.weight    in the file of expert 3, and here

At stages 1 and 2 the data-parallel ranks r, r + ep, r + 2 ep, … divide the group of these experts.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import CheckpointError
from ..files.stored_tensor import StoredTensor
from .folder import EngineFiles, open_file

_NAME = re.compile(
    r"(.*)\.deepspeed_moe\.experts\.deepspeed_experts\.([0-9]{1,9})\.(.+)"
)
_GROUP = re.compile(r"ep_size_([0-9]{1,9})")
GATE = ".deepspeed_moe.gate.wg.weight"  # the experts follow it in the order of registration
WHOLE = "Copy all files of one checkpoint again"


@dataclass(frozen=True)
class StoredExperts:
    """The experts of all layers.

    weights, buffers  name → tensor, with numbers among all experts of the layer
    layers            name of the layer → its number of experts
    """

    weights: Mapping[str, StoredTensor]
    buffers: Mapping[str, StoredTensor]
    layers: Mapping[str, int]

    def global_name(self, name: str, rank: int, parts: int, place: object) -> str:
        """Return the name among all experts of what `name` is on expert-parallel rank `rank` of `parts`.

        Raises CheckpointError for names that are not an expert's.
        """
        match = _NAME.fullmatch(name)
        number = self.layers.get(match[1]) if match else None
        if (
            match is None
            or number is None
            or number % parts
            or int(match[2]) >= number // parts
        ):
            raise CheckpointError(
                f"{place}: {name} is in a group of parameters that {parts} expert-parallel "
                f"ranks divide, and is not an expert of such a rank. {WHOLE}."
            )
        return _joined(match[1], rank * (number // parts) + int(match[2]), match[3])

    def in_order(
        self, others: Mapping[str, StoredTensor], rank: int, parts: int, place: object
    ) -> dict[str, StoredTensor]:
        """Return the weights of an expert-parallel rank under their global names, in the order of registration.

        others: weights outside of experts, in that order
        """
        held: dict[str, dict[str, StoredTensor]] = {}
        for name, tensor in self.weights.items():
            match = _NAME.fullmatch(name)
            assert match is not None, "the weights are those of experts"
            layer, expert, _ = match.groups()
            if self.layers[layer] % parts:
                raise CheckpointError(
                    f"{place}: {parts} expert-parallel ranks do not divide the "
                    f"{self.layers[layer]} experts of {layer}. {WHOLE}."
                )
            if int(expert) * parts // self.layers[layer] == rank:
                held.setdefault(layer, {})[name] = tensor
        found = {}
        for name, tensor in others.items():
            found[name] = tensor
            found |= (
                held.pop(name.removesuffix(GATE), {}) if name.endswith(GATE) else {}
            )
        if held:
            raise CheckpointError(
                f"{place}: there is no gate of {', '.join(held)}, whose experts are in the "
                f"folder. {WHOLE}."
            )
        return found


def experts_of(files: EngineFiles, content: Mapping[str, Any]) -> StoredExperts | None:
    """Return the experts of a checkpoint; None without any. Raises CheckpointError.

    content: of the first model file
    """
    place = files.models[0, 0]
    numbers = content.get("num_experts")
    # A model without MoE layers has neither files of experts nor their numbers.
    if not files.experts:
        if isinstance(numbers, list) and numbers:
            raise CheckpointError(
                f"{files.folder} has no layer_0_expert_0_mp_rank_00_model_states.pt, and "
                f"{place} records {numbers} experts in its layers. Copy the missing files."
            )
        return None
    # The numbers decide which files must be present, so they are checked before any file is read.
    _check_supported(files, content)
    if not isinstance(numbers, list) or not all(
        type(n) is int and 0 < n <= 2**20 for n in numbers
    ):
        raise CheckpointError(
            f"{place}: the numbers of experts of the layers are {numbers!r}, and DeepSpeed "
            "records a list of them. It is damaged, or of a version before 0.5.5."
        )
    _check_complete(files, numbers)
    buffers = {_any_number(str(name)) for name in content.get("buffer_names") or ()}
    # The files of a layer are merged into one set of tensors.
    found: dict[str, StoredTensor] = {}
    layers = {}
    for layer, number in enumerate(numbers):
        prefix, tensors = _layer(
            [files.experts[layer, expert] for expert in range(number)]
        )
        if prefix in layers:
            raise CheckpointError(
                f"{files.experts[layer, 0]} holds experts of {prefix}, as those of an "
                f"earlier layer do: files are swapped. {WHOLE}."
            )
        layers[prefix] = number
        found |= tensors
    # Buffers are stored beside the weights and separated by the names that the model file lists.
    is_buffer = {name: _any_number(name) in buffers for name in found}
    return StoredExperts(
        {name: tensor for name, tensor in found.items() if not is_buffer[name]},
        {name: tensor for name, tensor in found.items() if is_buffer[name]},
        layers,
    )


def _check_supported(files: EngineFiles, content: Mapping[str, Any]) -> None:
    settings = content.get("ds_config")
    settings = settings if isinstance(settings, Mapping) else {}
    is_stage3 = files.models[0, 0].name.startswith("zero_pp_rank")
    problems = {
        "tensor- or pipeline-parallel ranks": files.model_ranks > 1
        or bool(files.layers),
        "experts of AutoEP (expert_parallel in the JSON)": bool(
            content.get("ds_autoep_layers")
        ),
        "ZeRO stage 3": is_stage3,
        "use_data_before_expert_parallelism": bool(
            settings.get("use_data_before_expert_parallelism")
        ),
    }
    if refused := [name for name, is_there in problems.items() if is_there]:
        raise CheckpointError(
            f"{files.folder}: checkpoints with experts are not read with "
            f"{' and '.join(refused)}. Save one with ZeRO stage 0, 1 or 2 without them, or "
            "export the model with the program that trained it."
        )


def _check_complete(files: EngineFiles, numbers: Sequence[int]) -> None:
    wanted: set[tuple[int, int]] = set()
    for layer, number in enumerate(numbers):
        wanted |= {(layer, expert) for expert in range(number)}
    if absent := sorted(wanted - files.experts.keys()):
        layer, expert = absent[0]
        raise CheckpointError(
            f"{files.folder}: {len(absent)} of {len(wanted)} files of experts are missing, "
            f"first that of layer {layer}, expert {expert}. Files of all ranks must be in "
            "one folder: copy those that other nodes wrote."
        )
    if extra := sorted(files.experts.keys() - wanted):
        raise CheckpointError(
            f"{files.experts[extra[0]]}: the model has {len(numbers)} layers with "
            f"{list(numbers)} experts. It is a file of another checkpoint. {WHOLE}."
        )


def _layer(paths: Sequence[Path]) -> tuple[str, dict[str, StoredTensor]]:
    """Return (name of the layer, its tensors) from the files of its experts in order."""
    found: dict[str, StoredTensor] = {}
    kinds: dict[str, Any] = {}  # of expert 0: leaf → shape and dtype
    first = ""
    for expert, path in enumerate(paths):
        # The names in a file must agree with the layer and the expert in the name of the file.
        held = {}
        for name, tensor in open_file(path).content.items():
            match = _NAME.fullmatch(name) if isinstance(name, str) else None
            if match is None or not isinstance(tensor, StoredTensor):
                raise CheckpointError(
                    f"{path} holds {name!r}, which is no tensor of an expert of an MoE "
                    "layer of DeepSpeed. It is damaged, or another file."
                )
            first = first or match[1]
            if (match[1], int(match[2])) != (first, expert):
                raise CheckpointError(
                    f"{path} holds expert {match[2]} of {match[1]}, and by its name expert "
                    f"{expert} of {first}: files are swapped. {WHOLE}."
                )
            held[match[3]] = (tensor.shape, tensor.dtype)
            found[name] = tensor
        # All experts of a layer have the tensors of expert 0.
        kinds = kinds if expert else held
        if held != kinds or not held:
            odd = sorted(
                leaf
                for leaf in held.keys() | kinds.keys()
                if held.get(leaf) != kinds.get(leaf)
            )
            raise CheckpointError(
                f"{path} and {paths[0].name} hold other tensors or shapes: "
                f"{', '.join(odd) or 'none'}, and all experts of a layer are alike. "
                f"{WHOLE}."
            )
    return first, found


# ---- Stage 0.


def groups_of_experts(
    param_groups: Iterable[Mapping], parts: int, place: object
) -> list[bool]:
    """Return whether each group of parameters is one of experts; all False where the program did not divide them.

    Raises CheckpointError unless experts are divided over `parts` ranks.
    """
    flags = [bool(group.get("moe")) for group in param_groups]
    names = [str(group.get("name")) for group, flag in zip(param_groups, flags) if flag]
    sizes = {int(match[1]) for name in names if (match := _GROUP.fullmatch(name))}
    if len(sizes) > 1:
        raise CheckpointError(
            f"{place}: layers have experts over {sorted(sizes)} ranks, and the optimizer "
            "state of ZeRO stage 0 does not record which. Load the weights alone, or save "
            "with ZeRO stage 1."
        )
    if sizes and sizes != {parts}:
        raise CheckpointError(
            f"{place}: {sizes.pop()} expert-parallel ranks saved it, and there are "
            f"expp_rank files of {parts}. Copy the missing files, or load the weights "
            "alone."
        )
    return flags


def _joined(layer: str, expert: int, leaf: str) -> str:
    return f"{layer}.deepspeed_moe.experts.deepspeed_experts.{expert}.{leaf}"


def _any_number(name: str) -> str:
    """Return the name with the number of the expert left out."""
    match = _NAME.fullmatch(name)
    return f"{match[1]} {match[3]}" if match else name
