"""Classes of DeepSpeed that programs instantiate or compare with: settings, kinds, scalers, monitors."""

import enum
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ...mpu.launch import read_launch
from ..engine.gradient_sum import sums_gradients
from ..engine.json_settings import block_of, read_settings
from ..engine.monitor import Monitor

ALLREDUCE_SIZE = 500_000_000
DEFAULT_PORT = 29500
CURVES = ("tensorboard", "csv_monitor", "wandb", "comet")  # blocks of the JSON


class DeepSpeedConfig:
    """A DeepSpeed JSON, read: its batch sizes and stage. Raises ConfigError with all its problems.

    config  a dict, or the path of a file or its text
    mpu     gives the number of data-parallel ranks; None: all ranks
    """

    def __init__(
        self, config: Mapping[str, Any] | str, mpu: Any = None, mesh_device: Any = None
    ):
        name, self._param_dict = block_of(config)
        ranks = (
            read_launch().world_size
            if mpu is None
            else mpu.get_data_parallel_world_size()
        )
        self.settings = settings = read_settings(
            dict(self._param_dict), ranks, None, name
        )
        self.train_micro_batch_size_per_gpu = settings.train.micro_batch_size
        self.gradient_accumulation_steps = settings.num_microbatches
        self.train_batch_size = (
            self.train_micro_batch_size_per_gpu
            * self.gradient_accumulation_steps
            * ranks
        )
        self.zero_optimization_stage = settings.zero.stage
        self.zero_enabled = settings.zero.stage > 0
        self.fp16_enabled = settings.optimizer.fp16
        self.bfloat16_enabled = settings.optimizer.bf16
        self.gradient_clipping = settings.optimizer.clip_grad
        sums = sums_gradients(name, self._param_dict)
        self.gradient_allreduce_op = "sum" if sums else "mean"
        self.steps_per_print = settings.logging.log_interval

    @property
    def monitor_config(self) -> Mapping[str, Any]:
        """The blocks of curves, for `MonitorMaster`."""
        return {key: self._param_dict[key] for key in CURVES if key in self._param_dict}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"DeepSpeedConfig has no {name!r} here: it has the batch sizes, "
            "zero_optimization_stage, gradient_clipping, and in `settings` all settings."
        )


class DeepSpeedCheckpoint:
    """Raises ConfigError: folders of DeepSpeed are read as a whole."""

    def __init__(self, *args: Any, **options: Any):
        raise ConfigError(
            "deepspeed.checkpoint.DeepSpeedCheckpoint is not available: engine.load_checkpoint "
            "reads folders of DeepSpeed; docs/scale/checkpoints.md describes their conversion."
        )


class MonitorMaster(Monitor):
    """Curves in files and at services, by the blocks of a JSON (a dict) or a `DeepSpeedConfig`."""

    def __init__(self, monitor_config: Any):
        block = getattr(monitor_config, "_param_dict", monitor_config)
        if not isinstance(block, Mapping):
            raise ConfigError(
                f"MonitorMaster({type(monitor_config).__name__}): give the JSON as a dict, with its "
                'blocks "tensorboard", "csv_monitor", "wandb" and "comet".'
            )
        # As in DeepSpeed, event files without a path are written here.
        wanted = {key: dict(block[key]) for key in CURVES if key in block}
        if "tensorboard" in wanted:
            wanted["tensorboard"].setdefault("output_path", ".")
        settings = read_settings({"train_batch_size": 1, **wanted}, 1)
        super().__init__(settings if read_launch().rank == 0 else None)


class ZeroStageEnum(int, enum.Enum):
    """The stages of ZeRO."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(enum.StrEnum):
    """Where state is offloaded to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(enum.StrEnum):
    """Kinds of state of an engine."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroParamType(enum.Enum):
    """Kinds of parameters of stage 3."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class DummyOptim:
    """Parameter groups of a program without an optimizer."""

    def __init__(self, params: Any):
        self.param_groups = [{"params": params}]


class LossScaler:
    """A fixed loss scale, for `isinstance`: an engine scales losses itself."""

    def __init__(self, scale: float = 1.0):
        self.cur_scale = self.loss_scale = scale


class DynamicLossScaler(LossScaler):
    """A loss scale that changes, for `isinstance`: an engine scales losses itself."""

    def __init__(self, init_scale: float = 2.0**32, **options: Any):
        super().__init__(init_scale)
