"""Configuration: flags, YAML and DeepSpeed JSON → one frozen `RunConfig` with the source of every value.

    config = parse(sys.argv[1:], world_size=8)      # raises ConfigError with everything that is wrong
"""

from .data_options import BertConfig, DataConfig
from .logging_options import LoggingConfig
from .model_options import ModelConfig
from .parallel_options import ParallelConfig, ZeroConfig
from .parse import parse
from .run import RunConfig, Source
from .training_options import CheckpointConfig, OptimizerConfig, TrainConfig

__all__ = ["BertConfig", "CheckpointConfig", "DataConfig", "LoggingConfig", "ModelConfig", "OptimizerConfig",
           "ParallelConfig", "RunConfig", "Source", "TrainConfig", "ZeroConfig", "parse"]
