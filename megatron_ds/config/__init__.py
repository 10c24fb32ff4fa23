"""Configuration: flags, YAML and DeepSpeed JSON → one frozen `RunConfig` with the source of every value.

config = parse(sys.argv[1:], world_size=8)      # raises ConfigError with everything that is wrong
"""

from .options.data import DataConfig
from .options.logging import LoggingConfig
from .options.model import ModelConfig
from .options.parallel import ParallelConfig, ZeroConfig
from .options.training import CheckpointConfig, OptimizerConfig, TrainConfig
from .parse import parse
from .run import RunConfig, Source

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "Source",
    "TrainConfig",
    "ZeroConfig",
    "parse",
]
