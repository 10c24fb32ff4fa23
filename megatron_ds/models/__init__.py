"""Models as lists of named layers. `MODELS[name](config, tp=…)` gives the list; `build_stages` builds slices of it."""

from .gpt import gpt_layers
from .kv_cache import KVCache, make_caches
from .layer import MODELS, Layer, Placement
from .losses import Loss, gpt_loss
from .random_ltd import with_random_ltd
from .stage_modules import build_stage, build_stages, count_uses, run_layers

__all__ = ["MODELS", "KVCache", "Layer", "Loss", "Placement", "build_stage", "build_stages", "count_uses", "gpt_layers",
           "gpt_loss", "make_caches", "run_layers", "with_random_ltd"]
