"""Adapters in the names of peft, whose folders `PeftModel.from_pretrained` reads and `save_pretrained` writes.

    ours                                        peft's
    …linear_qkv.0.lora_a.weight  [r, h]         base_model.model.…q_proj.lora_A.weight   [r, h]
    …linear_qkv.0.lora_b.weight  [n d, r]       base_model.model.…q_proj.lora_B.weight   [n d, r]
    …linear_qkv.lora_a.weight    [r, h]         …c_attn.lora_A.weight; where their model has q_proj, k_proj and
                                                v_proj, each gets the whole A and its rows of B
    …linear_qkv.0.lora_m.weight  [n d]          …q_proj.lora_magnitude_vector               [n d]

A magnitude here is that of a row, as in their files; `adapter_tensors.shifted` makes changes of them.
Which modules a layer of ours is, and how its rows are packed, are those of the family of the model.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ....config.options.model import ModelConfig
from ....errors import CheckpointError
from ....features import Provided
from ..adapter_tensors import parts_of_name
from ..family import Family, TensorMapping, entries_of
from ..packings import GATE_UP, QKV_SPLIT

ADAPTER_TARGETS: Provided[Any] = Provided("adapter targets")

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"  # as peft wrote it before
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]+")  # of a module, or of its end
PREFIX = "base_model.model."
A = "lora_a"
B = "lora_b"
M = "lora_m"
THEIRS = {A: "lora_A.weight", B: "lora_B.weight", M: "lora_magnitude_vector"}
LAYERS = (
    "linear_qkv",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "in_proj",
    "out_proj",
)
PROBE = 7  # columns of a tensor by which a packing that transposes is recognised
# Values of keys that change what an adapter computes; other values are refused.
PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "trainable_token_indices": None,
    "lora_bias": False,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "use_qalora": False,
    "use_bdlora": False,
    "target_parameters": None,
    "kasa_config": None,
    "monteclora_config": None,
}
# Initial values that leave the weights of the model as they are; others change them below the adapter.
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer of ours, and the modules that it is in the other model.

    entry    of its weight
    name     of the layer
    family   of the model
    modules  names of theirs, in the order of the rows that they have
    """

    entry: TensorMapping
    model: ModelConfig
    family: Family

    @property
    def name(self) -> str:
        """Our name of the layer."""
        return self.entry.ours.removesuffix(".weight")

    @property
    def modules(self) -> list[str]:
        """Their names of the layer's modules."""
        names = [name.removesuffix(".weight") for name in self.entry.theirs]
        family = self.family
        if family.in_memory is None:
            return names
        return [family.in_memory + name.removeprefix(family.prefix) for name in names]

    @property
    def has_parts(self) -> bool:
        """Whether each module may have an adapter of its own, or is the only one."""
        return len(self.modules) == 1 or self.entry.packing in (QKV_SPLIT, GATE_UP)

    @property
    def is_transposed(self) -> bool:
        """Whether their weights are [in, out]."""
        rows = self.entry.spec.shape[0]
        shapes = self.entry.packing.shapes((rows, PROBE), self.model)
        return shapes[0][0] == PROBE

    def our_rows(self, theirs: torch.Tensor) -> torch.Tensor:
        """Return values [rows, …] of their only module in the order of our rows."""
        values = theirs.view(len(theirs), -1)
        given = values.t() if self.is_transposed else values
        ours = self.entry.packing.to_ours([given], self.model).contiguous()
        return ours.view(theirs.shape)

    def their_rows(self, ours: torch.Tensor) -> list[torch.Tensor]:
        """Return values [rows, …] in the order of our rows as those of each module."""
        parts = self.entry.packing.to_theirs(ours.view(len(ours), -1), self.model)
        if self.is_transposed:
            parts = [part.t() for part in parts]
        return [part.contiguous().view(-1, *ours.shape[1:]) for part in parts]


def adapted_layers(family: Family, model: ModelConfig) -> Iterator[AdaptedLayer]:
    """Yield the layers of a model that may have adapters, but those of experts."""
    for entry in entries_of(family, model):
        layer, _, leaf = entry.ours.rpartition(".")
        is_linear = leaf == "weight" and layer.rpartition(".")[2] in LAYERS
        if is_linear and len(entry.spec.shape) == 2:
            yield AdaptedLayer(entry, model, family)


def from_peft(
    tensors: Mapping[str, torch.Tensor], family: Family, model: ModelConfig
) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter by our names. Raises CheckpointError for tensors of layers that the model
    lacks."""
    left = dict(tensors)
    found: dict[str, torch.Tensor] = {}
    for layer in adapted_layers(family, model):
        modules = layer.modules
        if not layer.has_parts:
            found |= _joined(layer, left)
            continue
        for part, module in enumerate(modules):
            given = _taken(
                left, {leaf: f"{PREFIX}{module}.{w}" for leaf, w in THEIRS.items()}
            )
            if not given:
                continue
            # A module has both matrices or none.
            if not given.keys() >= {A, B}:
                raise CheckpointError(
                    f"the adapter of {module} has one matrix of two: its file is not complete. Save the adapter again."
                )
            name = layer.name
            if len(modules) > 1:
                name = f"{name}.{part}"
            for leaf, value in given.items():
                is_of_rows = leaf != A and len(modules) == 1
                found[f"{name}.{leaf}.weight"] = (
                    layer.our_rows(value) if is_of_rows else value
                )
    if left:
        raise CheckpointError(
            f"the adapter has tensors that no linear layer of the model has: {', '.join(sorted(left)[:5])}. Layers of "
            "attention and of dense feed-forwards can have adapters; merge others with peft's merge_and_unload."
        )
    return found


def _joined(
    layer: AdaptedLayer, left: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the adapter of a layer whose rows those of several modules form together, taken out of `left`. Raises
    CheckpointError unless all of them have one, with the same A."""
    given = [
        _taken(left, {leaf: f"{PREFIX}{module}.{w}" for leaf, w in THEIRS.items()})
        for module in layer.modules
    ]
    if not any(given):
        return {}
    first = given[0]
    is_whole = all(of.keys() == first.keys() >= {A, B} for of in given)
    if not is_whole or any(not torch.equal(of[A], first[A]) for of in given):
        raise CheckpointError(
            f"the adapters of {', '.join(layer.modules)} have not the same A, and here these modules are one layer "
            "with one adapter. Merge the adapter with peft's merge_and_unload, and give the folder of the whole model."
        )
    found = {f"{layer.name}.{A}.weight": first[A]}
    for leaf in first.keys() - {A}:
        values = [of[leaf].view(len(of[leaf]), -1) for of in given]
        rows = layer.entry.packing.to_ours(values, layer.model).contiguous()
        found[f"{layer.name}.{leaf}.weight"] = rows.view(-1, *first[leaf].shape[1:])
    return found


def with_own_factors(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    family: Family,
    model: ModelConfig,
) -> dict[str, torch.Tensor]:
    """Return our tensors with the factors of alpha_pattern multiplied into B, so that all modules share one factor.

    Raises CheckpointError for a pattern that is more than a name, which would have to be executed.
    """
    pattern = config.get("alpha_pattern") or {}
    for name, alpha in pattern.items():
        is_number = isinstance(alpha, int | float) and math.isfinite(alpha)
        is_number = is_number and config["lora_alpha"] != 0
        if not PLAIN_NAME.fullmatch(name) or not is_number:
            raise CheckpointError(
                f"alpha_pattern has {name!r}: {alpha!r}, not the name of a module, or its end, and a number. Merge the "
                "adapter with peft's merge_and_unload, and give the folder of the whole model."
            )
    found = dict(tensors)
    common = config["lora_alpha"]
    for layer in adapted_layers(family, model):
        several = len(layer.modules) > 1
        for part, module in enumerate(layer.modules):
            name = f"{layer.name}.{part}" if several else layer.name
            key = f"{name}.{B}.weight"
            # As in peft, the first entry counts with which the module's name ends.
            given = [
                pattern[end] for end in pattern if f".{module}".endswith(f".{end}")
            ]
            if given and not layer.has_parts:
                raise CheckpointError(
                    f"alpha_pattern has a factor of {module}, which is a part of one layer here. Merge the adapter "
                    "with peft's merge_and_unload, and give the folder of the whole model."
                )
            if given and key in found:
                found[key] = found[key] * (given[0] / common)
    return found


def to_peft(
    tensors: Mapping[str, torch.Tensor], family: Family, model: ModelConfig
) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter by the names of peft. Raises CheckpointError for adapters without a name
    there."""
    left = dict(tensors)
    found = {}
    for layer in adapted_layers(family, model):
        of_modules = _of_modules(layer, left)
        for module, leaves in zip(layer.modules, of_modules, strict=True):
            for leaf, value in leaves.items():
                found[f"{PREFIX}{module}.{THEIRS[leaf]}"] = value
    if left:
        raise CheckpointError(
            f"peft has no name for {', '.join(sorted(left)[:5])}: adapters of experts are of this package alone. Add "
            "them to the weights with megatron-ds merge-adapter, and convert those."
        )
    return found


def _of_modules(
    layer: AdaptedLayer, left: dict[str, torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """Return leaf → tensor of each module of a layer, taken out of `left`; {} for a module without an adapter."""
    modules = range(len(layer.modules))
    whole = _taken(left, {leaf: f"{layer.name}.{leaf}.weight" for leaf in THEIRS})
    if not whole:
        return [
            _taken(
                left, {leaf: f"{layer.name}.{part}.{leaf}.weight" for leaf in THEIRS}
            )
            for part in modules
        ]
    # One adapter for all rows has the same A in each of their modules.
    rows = {leaf: layer.their_rows(v) for leaf, v in whole.items() if leaf != A}
    return [
        {A: whole[A]} | {leaf: parts[module] for leaf, parts in rows.items()}
        for module in modules
    ]


def _taken(
    left: dict[str, torch.Tensor], names: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Take the tensors of these names out of `left`, and return leaf → tensor of those that it had."""
    return {leaf: left.pop(name) for leaf, name in names.items() if name in left}


def check_config(config: Mapping[str, Any], place: object) -> None:
    """Raises CheckpointError for settings of adapters that are not computed here."""
    odd = [
        f"{key}={config[key]!r}"
        for key, plain in PLAIN.items()
        if key in config and config[key] not in (plain, None, [])
    ]
    start = config.get("init_lora_weights")
    if start not in PLAIN_STARTS:
        odd.append(f"init_lora_weights={start!r}")
    if odd:
        raise CheckpointError(
            f"{place}: {', '.join(odd)} is not computed by this package's adapters. Merge the adapter with peft's "
            "merge_and_unload, and give the folder of the whole model."
        )


def targets_of(tensors: Iterable[str]) -> list[str]:
    """Return the words of --lora-target-modules for the layers that have these tensors, by our names."""
    words = []
    for name in tensors:
        layer, part, _ = parts_of_name(name, name)
        kind = layer.rpartition(".")[2]
        words += [
            word
            for word, target in ADAPTER_TARGETS.get().items()
            if target.layer == kind and target.part == part
        ][:1]
    return list(dict.fromkeys(words))
