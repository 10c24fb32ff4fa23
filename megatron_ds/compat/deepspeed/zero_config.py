"""`deepspeed.runtime.zero.config`: the JSON's block "zero_optimization" as an object.

    zero = DeepSpeedZeroConfig(**json["zero_optimization"])
    zero.stage, zero.prefetch_bucket_size, zero.offload_optimizer.device, zero.leaf_module.classes

Programs read the values of a JSON there, and DeepSpeed's defaults of the keys that it leaves out. An engine
reads the JSON itself (engine/json_settings.py), and refuses what it cannot do.
"""

import sys
from collections.abc import Callable, Mapping
from logging import getLogger
from pathlib import Path
from typing import Any, ClassVar

from ...errors import ArgumentError, ConfigError
from ..engine.leaf_modules import DEFAULT_CLASSES
from .classes import OffloadDeviceEnum
from .config_block import (
    BlockKey,
    ConfigBlock,
    block,
    count,
    flag,
    one_of,
    optional,
    share,
    texts,
    whole,
)

DEFAULT_LEAF_MODULE_CLASSES = list(DEFAULT_CLASSES)
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []
DEVICES = one_of(*(device.value for device in OffloadDeviceEnum))
logger = getLogger("DeepSpeed")  # where programs look for it


class DeepSpeedZeroLeafModuleConfig(ConfigBlock):
    """Which modules are leaves: "leaf_module" (engine/leaf_modules.py)."""

    classes: list[str]
    names: list[str]
    name_suffixes: list[str]
    KEYS: ClassVar[Mapping[str, BlockKey]] = {
        "classes": BlockKey(DEFAULT_LEAF_MODULE_CLASSES, texts),
        "names": BlockKey(DEFAULT_LEAF_MODULE_NAMES, texts),
        "name_suffixes": BlockKey(DEFAULT_LEAF_MODULE_NAME_SUFFIXES, texts),
    }


class DeepSpeedZeroOffloadParamConfig(ConfigBlock):
    """Where weights rest: "offload_param"."""

    device: str
    nvme_path: Path | None
    buffer_count: int
    buffer_size: int
    max_in_cpu: int
    pin_memory: bool
    KEYS: ClassVar[Mapping[str, BlockKey]] = {
        "device": BlockKey("none", DEVICES),
        "nvme_path": BlockKey(None, optional(Path)),
        "buffer_count": BlockKey(5, count),
        "buffer_size": BlockKey(10**8, count),
        "max_in_cpu": BlockKey(10**9, count),
        "pin_memory": BlockKey(True, flag),
    }


class DeepSpeedZeroOffloadOptimizerConfig(ConfigBlock):
    """Where the optimizer's state rests: "offload_optimizer"."""

    device: str
    nvme_path: Path | None
    buffer_count: int
    pin_memory: bool
    pipeline_read: bool
    pipeline_write: bool
    fast_init: bool
    ratio: float
    super_offload: bool
    cpuadam_cores_perc: float
    KEYS: ClassVar[Mapping[str, BlockKey]] = {
        "device": BlockKey("none", DEVICES),
        "nvme_path": BlockKey(None, optional(Path)),
        "buffer_count": BlockKey(4, count),
        "pin_memory": BlockKey(True, flag),
        "pipeline_read": BlockKey(False, flag),
        "pipeline_write": BlockKey(False, flag),
        "fast_init": BlockKey(False, flag),
        "ratio": BlockKey(1.0, share),
        "super_offload": BlockKey(False, flag),
        "cpuadam_cores_perc": BlockKey(0.8, share),
    }

    @property
    def pipeline(self) -> bool:
        """Whether reading or writing overlaps the update."""
        return self.pipeline_read or self.pipeline_write


def _stage_3(name: str, default: int | bool, read: Callable[[Any], Any]) -> dict:
    """Return a key that the JSON spells with "stage3_" before it."""
    return {name: BlockKey(default, read, f"stage3_{name}")}


def _flags(default: bool, names: str) -> dict[str, BlockKey]:
    return {name: BlockKey(default, flag) for name in names.split()}


def _on_cpu(value: Any) -> dict[str, str] | None:
    return {"device": "cpu"} if value is not None and flag(value) else None


# Former key → the key in its place, and its value from that of the former one.
FORMER: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "cpu_offload": ("offload_optimizer", _on_cpu),
    "cpu_offload_param": ("offload_param", _on_cpu),
    "stage3_gather_fp16_weights_on_model_save": (
        "gather_16bit_weights_on_model_save",
        flag,
    ),
}


class DeepSpeedZeroConfig(ConfigBlock):
    """Has the keys of "zero_optimization". Keys and values that DeepSpeed does not know are refused, and ZenFlow."""

    stage: int
    overlap_comm: bool
    compute_grad_norm: bool
    elastic_checkpoint: bool
    offload_param: DeepSpeedZeroOffloadParamConfig | None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None
    leaf_module: DeepSpeedZeroLeafModuleConfig
    KEYS: ClassVar[Mapping[str, BlockKey]] = {
        "stage": BlockKey(0, one_of(0, 1, 2, 3)),
        **_flags(
            True,
            "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions "
            "compute_grad_norm load_from_fp32_weights ignore_unused_parameters memory_efficient_linear "
            "override_module_apply",
        ),
        **_flags(
            False,
            "elastic_checkpoint legacy_stage1 round_robin_gradients parameter_alignment "
            "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients "
            "mics_hierarchical_params_gather pipeline_loading_checkpoint log_trace_cache_warnings "
            "enable_sanity_checks save_muon_momentum_buffer_in_memory",
        ),
        "overlap_comm": BlockKey(None, optional(flag)),
        "cpu_offload_use_pin_memory": BlockKey(None, optional(flag)),
        "reduce_bucket_size": BlockKey(500_000_000, count),
        "allgather_bucket_size": BlockKey(500_000_000, count),
        "sub_group_size": BlockKey(10**9, count),
        "zero_hpz_partition_size": BlockKey(1, count),
        # Of versions before 0.19.8.
        "mics_shard_size": BlockKey(-1, whole),
        "zeropp_loco_param": BlockKey(None, optional(dict)),
        **_stage_3("prefetch_bucket_size", 50_000_000, count),
        **_stage_3("param_persistence_threshold", 100_000, count),
        **_stage_3("model_persistence_threshold", sys.maxsize, count),
        **_stage_3("max_live_parameters", 10**9, count),
        **_stage_3("max_reuse_distance", 10**9, count),
        **_stage_3("module_granularity_threshold", 0, whole),
        **_stage_3("gather_16bit_weights_on_model_save", False, flag),
        **_stage_3("use_all_reduce_for_fetch_params", False, flag),
        **_stage_3("allgather_sequential", False, flag),
        "offload_param": BlockKey(
            None, optional(block(DeepSpeedZeroOffloadParamConfig))
        ),
        "offload_optimizer": BlockKey(
            None, optional(block(DeepSpeedZeroOffloadOptimizerConfig))
        ),
        "leaf_module": BlockKey({}, block(DeepSpeedZeroLeafModuleConfig)),
    }

    def __init__(self, strict: bool = False, **given: Any):
        """Take the values of the block. strict: "auto" is a value like others."""
        if given.get("zenflow") is not None:
            raise ConfigError(
                "zero_optimization.zenflow: ZenFlow is not available here. Remove the block."
            )
        given.pop("zenflow", None)
        super().__init__(strict, **_renamed(given))
        if self.overlap_comm is None:
            self.overlap_comm = self.stage == 3
        self._check()

    def _check(self) -> None:
        """Raise ArgumentError for values that do not fit the stage."""
        if not self.compute_grad_norm and self.stage not in (1, 2):
            raise ArgumentError(
                f"compute_grad_norm is false at stage {self.stage}: only stages 1 and 2 can leave the norm of "
                "the gradients out. Remove the key."
            )
        offload = self.offload_optimizer
        if offload and offload.ratio < 1.0 and self.stage != 3:
            raise ArgumentError(
                f"offload_optimizer.ratio is {offload.ratio} at stage {self.stage}: only stage 3 can offload a "
                "part of the optimizer. Set stage 3, or remove the ratio."
            )


def _renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block with today's keys. Raises ArgumentError where it has a key in both spellings."""
    renamed = {key: value for key, value in given.items() if key not in FORMER}
    for former in FORMER.keys() & given.keys():
        name, read = FORMER[former]
        if {name, f"stage3_{name}"} & given.keys():
            raise ArgumentError(
                f"{former} and {name} are both given: the first is the former name of the second. Remove it."
            )
        logger.warning("%s is a former key: use %s", former, name)
        renamed[name] = read(given[former])
    return renamed


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """Return the block of a whole JSON. "zero_optimization": true is stage 1, as in DeepSpeed."""
    given = param_dict.get("zero_optimization", {})
    if not isinstance(given, bool):
        return DeepSpeedZeroConfig(**given)
    size = {"allgather_bucket_size": param_dict.get("allgather_size", "auto")}
    return DeepSpeedZeroConfig(stage=1, **size) if given else DeepSpeedZeroConfig()
