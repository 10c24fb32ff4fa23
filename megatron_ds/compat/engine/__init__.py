"""An engine for any torch module: DeepSpeed's way of training, on this package's ZeRO
(docs/use/engine.md).

    engine, optimizer, loader, scheduler = megatron_ds.initialize(model=module, config="ds_config.json")
"""

from ...checkpoint.safetensors_folder import from_safetensors
from .engine import Engine
from .initialization import initialize
from .json_settings import add_config_arguments
from .loader import RepeatingLoader

__all__ = [
    "Engine",
    "RepeatingLoader",
    "add_config_arguments",
    "from_safetensors",
    "initialize",
]
