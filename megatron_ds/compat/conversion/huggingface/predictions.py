"""Layers of Hugging Face folders that predict later tokens: they follow those of the model.

    config.json                            num_nextn_predict_layers: 1, or num_mtp_layers
    model.layers.{L}.enorm, hnorm, eh_proj norms of the two inputs of a depth, and the projection of both
    model.layers.{L}.shared_head.norm      the norm behind its block
    model.layers.{L}.*                     the block, named as other blocks are
    model.layers.{L}.embed_tokens, shared_head.head    copies of the embedding and of the output layer

They are read where --mtp-num-layers asks for them, and left out else.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....config.options.layer_pattern import MOST_LAYERS
from ....config.options.model import ModelConfig
from ....errors import CheckpointError
from ..family import Family, Row

OPTION = "mtp_num_layers"
SETTING = "num_nextn_predict_layers"
OTHER_NAME = "num_mtp_layers"
DEPTH = re.compile(r"mtp\.layers\.(\d+)\.(?:transformer_layer\.)?")
LAYERS = "model.layers"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Beside those of a block.
PREDICTION_ROWS = tuple(
    Row(f"decoder.layers.{{i}}.{ours}.{{leaf}}", f"{LAYERS}.{{i}}.{theirs}.{{leaf}}")
    for ours, theirs in (
        ("enorm", "enorm"),
        ("hnorm", "hnorm"),
        ("eh_proj", "eh_proj"),
        ("final_layernorm", "shared_head.norm"),
    )
)


@dataclass(frozen=True)
class PredictionLayers:
    """The setting of their number, which an option of the reader, and not of the model, follows."""

    theirs: str = SETTING

    def option_of(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return {}. Raises CheckpointError for a setting that is no number of layers."""
        number_of(settings)
        return {}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return the setting of a model."""
        return {SETTING: depths_of(model)}


def number_of(settings: Mapping[str, Any]) -> int:
    """Return how many such layers a folder states. Raises CheckpointError."""
    found = [settings[name] for name in (SETTING, OTHER_NAME) if settings.get(name)]
    number = found[0] if found else 0
    if type(number) is not int or not 0 <= number <= MOST_LAYERS:
        raise CheckpointError(
            f"{SETTING} is {number!r}, not a number of layers up to {MOST_LAYERS}"
        )
    return number


def depths_of(model: ModelConfig) -> int:
    """Return how many depths a model has."""
    return getattr(model, OPTION, 0)


def row_name(name: str, model: ModelConfig) -> str:
    """Return our name of a weight as rows have it: that of a depth as a layer behind the last one."""
    number = model.num_layers
    as_layer = lambda found: f"decoder.layers.{number + int(found[1])}."
    return DEPTH.sub(as_layer, name)


def copies(model: ModelConfig) -> dict[str, str]:
    """Return the copies that each depth has of shared weights: name → name of the weight that it equals."""
    unties = model.untie_embeddings_and_output_weights
    found = {}
    for k in range(depths_of(model)):
        layer = f"{LAYERS}.{model.num_layers + k}"
        found[f"{layer}.embed_tokens.weight"] = EMBEDDING
        found[f"{layer}.shared_head.head.weight"] = HEAD if unties else EMBEDDING
    return found


# What a family has whose folders may hold such layers, beside PREDICTION_ROWS and PredictionLayers.
PREDICTING: dict[str, Any] = {"renamed": row_name, "copies": copies}


def options_of_depths(
    wanted: int | None, family: Family, settings: Mapping[str, Any]
) -> dict[str, int]:
    """Return the option of the depths that are to be read, {} for none. Raises CheckpointError if the folder lacks
    some."""
    if not wanted:
        return {}
    there = number_of(settings) if is_predicting(family) else 0
    if wanted > there:
        raise CheckpointError(
            f"--mtp-num-layers {wanted}, and the folder states {there} layers that predict later tokens ({SETTING}). "
            f"Use --mtp-num-layers {there}"
        )
    return {OPTION: wanted}


def is_predicting(family: Family) -> bool:
    """Return whether folders of a family may hold such layers."""
    return family.renamed is row_name


def left_out(
    family: Family, model: ModelConfig, settings: Mapping[str, Any]
) -> list[str]:
    """Return patterns of the names of the layers that are not read."""
    there = number_of(settings) if is_predicting(family) else 0
    numbers = range(model.num_layers + depths_of(model), model.num_layers + there)
    return [f"{LAYERS}.{i}.*" for i in numbers]
