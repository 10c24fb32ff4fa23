"""An engine for any torch module: DeepSpeed's way of training, on this package's ZeRO. See docs/engine.md.

    engine = megatron_ds.initialize(model=module, config="ds_config.json")
"""

from ..checkpoint.safetensors_folder import from_safetensors
from .build import initialize
from .engine import Engine

__all__ = ["Engine", "from_safetensors", "initialize"]
