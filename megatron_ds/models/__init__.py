"""Models as lists of named layers. `MODELS[name](config, ctx)` gives the list.

`build_stages` builds the part of the list that a rank holds.
"""

from .architecture import MODELS, Architecture, Loss, gpt_loss, language_model
from .gpt import gpt_layers
from .layer import Layer, LayerFlops
from .stage_modules import build_stage, build_stages, count_uses, run_layers

__all__ = [
    "MODELS",
    "Architecture",
    "Layer",
    "LayerFlops",
    "Loss",
    "build_stage",
    "build_stages",
    "count_uses",
    "gpt_layers",
    "gpt_loss",
    "language_model",
    "run_layers",
]
