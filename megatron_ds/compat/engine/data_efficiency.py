"""The block "data_efficiency" of an engine's JSON: `DataEfficiency`, its values; and the methods of an engine
that belong to it.

    data_sampling    curriculum_loader.py: easy samples of training_data= first
    data_routing     dropped_tokens.py: layers of the module that see some of the tokens
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...config.options.option import shown
from ...errors import ConfigError
from ...mpu.agreement import require_agreement
from ...registry import did_you_mean
from ..deepspeed.external_groups import DataParallelWorld
from .curriculum_loader import CurriculumLoader

BLOCK = "data_efficiency"
SEED = 1234
EPOCHS = 1000
IS_FLAG = (bool,)
IS_NUMBER = (int,)
# path below "data_efficiency" → the types of its value; a mapping has keys of a program's own
KEYS: Mapping[str, tuple[type, ...]] = {
    "enabled": IS_FLAG,
    "seed": IS_NUMBER,
    "data_sampling.enabled": IS_FLAG,
    "data_sampling.num_epochs": IS_NUMBER,
    "data_sampling.num_workers": IS_NUMBER,
    "data_sampling.pin_memory": IS_FLAG,
    "data_sampling.dynamic_batching.enabled": IS_FLAG,
    "data_sampling.curriculum_learning.enabled": IS_FLAG,
    "data_sampling.curriculum_learning.data_cluster_path": (str,),
    "data_sampling.curriculum_learning.curriculum_metrics": (Mapping,),
    "data_routing.enabled": IS_FLAG,
    "data_routing.random_ltd.enabled": IS_FLAG,
    "data_routing.random_ltd.total_layer_num": IS_NUMBER,
    "data_routing.random_ltd.random_ltd_layer_num": IS_NUMBER,
    "data_routing.random_ltd.random_ltd_layer_id": (list, tuple),
    "data_routing.random_ltd.model_mask_name": (str, type(None)),
    "data_routing.random_ltd.model_type": (str,),
    "data_routing.random_ltd.hidden_state_order": (str,),
    "data_routing.random_ltd.micro_batch_size": IS_NUMBER,
    "data_routing.random_ltd.global_batch_size": IS_NUMBER,
    "data_routing.random_ltd.random_ltd_schedule": (Mapping,),
    "data_routing.random_ltd.layer_token_lr_schedule.enabled": IS_FLAG,
    "data_routing.random_ltd.layer_token_lr_schedule.total_layer_tokens": IS_NUMBER,
    "data_routing.random_ltd.layer_token_lr_schedule.warmup_type": (str,),
    "data_routing.random_ltd.layer_token_lr_schedule.warmup_layer_tokens": IS_NUMBER,
}
INNER = {path.rpartition(".")[0] for path in KEYS} | {
    "data_sampling",
    "data_routing",
    "data_sampling.dynamic_batching",
}


@dataclass(frozen=True)
class DataEfficiency:
    """metrics     blocks of "curriculum_metrics" by name; empty: no curriculum over samples
    random_ltd  the block "random_ltd"; None: no layer drops tokens
    """

    seed: int = SEED
    epochs: int = EPOCHS
    workers: int = 0
    pin_memory: bool = False
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    random_ltd: Mapping[str, Any] | None = None


def data_efficiency_of(name: str, block: Mapping[str, Any]) -> DataEfficiency:
    """Return the values of a JSON. name: of it in messages. Raises ConfigError for unknown keys and wrong values.

    A block counts where it and the blocks around it are enabled, as in DeepSpeed.
    """
    # All keys, also of blocks that are not enabled.
    found = block.get(BLOCK)
    if found is None:
        return DataEfficiency()
    values = dict(_flat(name, found))
    if not values.get("enabled"):
        return DataEfficiency()
    # Samples.
    is_on = lambda *paths: all(values.get(f"{path}.enabled") for path in paths)
    sampling = "data_sampling"
    metrics = {}
    if is_on(sampling, f"{sampling}.dynamic_batching"):
        raise ConfigError(
            f'{name}: "{BLOCK}.{sampling}.dynamic_batching": a batch has a fixed number of samples. Remove it.'
        )
    if is_on(sampling, f"{sampling}.curriculum_learning"):
        metrics = values.get(f"{sampling}.curriculum_learning.curriculum_metrics", {})
        if not metrics:
            raise ConfigError(
                f'{name}: "{BLOCK}.{sampling}.curriculum_learning" is enabled without "curriculum_metrics". Give a '
                'block for each metric: {"vocab_rarity": { … }}.'
            )
    # Layers.
    routing = "data_routing"
    is_routed = is_on(routing, f"{routing}.random_ltd")
    ltd = found[routing]["random_ltd"] if is_routed else None
    if is_routed and is_on(f"{routing}.random_ltd.layer_token_lr_schedule"):
        raise ConfigError(
            f'{name}: "{BLOCK}.{routing}.random_ltd.layer_token_lr_schedule" is not available, as in DeepSpeed: the '
            "learning rate follows steps. Disable it."
        )
    return DataEfficiency(
        values.get("seed", SEED),
        values.get(f"{sampling}.num_epochs", EPOCHS),
        values.get(f"{sampling}.num_workers", 0),
        values.get(f"{sampling}.pin_memory", False),
        metrics,
        ltd,
    )


def require_same_data_efficiency(
    wish: DataEfficiency, world: DataParallelWorld
) -> None:
    """Raises ConfigError on all ranks unless they have the same values, besides paths. Collective over all ranks."""

    def values() -> dict[str, tuple[Any, str]]:
        metrics = {
            name: {key: block[key] for key in block if not key.endswith("_path")}
            for name, block in wish.metrics.items()
        }
        compared = replace(wish, metrics=metrics)
        return {BLOCK: (json.dumps(asdict(compared), sort_keys=True), "")}

    require_agreement(
        world.world,
        values,
        "the ranks gave initialize different settings",
        "They would train on other samples or tokens. Give the same config on all ranks.",
    )


def set_data_post_process_func(
    engine: Any, post_process_func: Callable[[Any, dict[str, Any]], Any]
) -> None:
    """Pass each micro-batch of the curriculum through post_process_func(batch, state of the sampler).

    The state has "curriculum_step", "consumed_samples" and "current_difficulties": the difficulty of each
    metric. Raises ConfigError without a curriculum over samples.
    """
    _loader_of(
        engine, "set_data_post_process_func"
    ).post_process_func = post_process_func


def set_custom_curriculum_learning_schedule(
    engine: Any, schedule_func_dict: Mapping[str, Callable[[int], int]]
) -> None:
    """Set functions from the step, counted from 1, to the difficulty of metrics. Call it before the first batch.

    Raises ConfigError without a curriculum over samples, and for unknown metrics.
    """
    loader = _loader_of(engine, "set_custom_curriculum_learning_schedule")
    loader.data_sampler.set_custom_curriculum_learning_schedule(schedule_func_dict)


def data_efficiency_state(engine: Any) -> dict[str, Any]:
    """Return what a checkpoint keeps: the position in the samples and the schedule of random-LTD."""
    state = {}
    if isinstance(engine.training_dataloader, CurriculumLoader):
        state["data_sampler"] = engine.training_dataloader.data_sampler.state_dict()
    if engine.random_ltd_scheduler is not None:
        state["random_ltd"] = engine.random_ltd_scheduler.state_dict()
    return state


def load_data_efficiency_state(engine: Any, state: Mapping[str, Any]) -> None:
    """Restore a `data_efficiency_state`; what it lacks stays as it is."""
    loader = engine.training_dataloader
    if isinstance(loader, CurriculumLoader) and "data_sampler" in state:
        loader.load_state_dict(state["data_sampler"])
    if engine.random_ltd_scheduler is not None and "random_ltd" in state:
        engine.random_ltd_scheduler.load_state_dict(state["random_ltd"])


def _loader_of(engine: Any, method: str) -> CurriculumLoader:
    loader = engine.training_dataloader
    if not isinstance(loader, CurriculumLoader):
        raise ConfigError(
            f"engine.{method}: this engine has no curriculum over samples. Give initialize training_data=, and enable "
            f'"{BLOCK}.data_sampling.curriculum_learning".'
        )
    return loader


def _flat(name: str, block: Any, path: str = "") -> Any:
    """(path, value) of all keys. Raises ConfigError for unknown ones and for values of another type."""
    # The block itself.
    where = f"{BLOCK}.{path}".rstrip(".")
    if not isinstance(block, Mapping):
        raise ConfigError(
            f'{name}: "{where}" should be a block {{ … }}, not {shown(block)}.'
        )
    # Each key: a block in it, a key of dynamic batching, which is refused as a whole, or a value.
    for key, value in block.items():
        inner = f"{path}{key}"
        if inner in INNER:
            yield from _flat(name, value, f"{inner}.")
            continue
        if inner.startswith("data_sampling.dynamic_batching."):
            yield inner, value
            continue
        if inner not in KEYS:
            known = [known for known in KEYS if known.startswith(path)]
            raise ConfigError(
                f'{name}: unknown key "{BLOCK}.{inner}"{did_you_mean(inner, known) or "."}'
            )
        # The type of the value.
        types = KEYS[inner]
        if value == "auto":
            continue
        is_flag = isinstance(value, bool)
        if not isinstance(value, types) or is_flag and bool not in types:
            wanted = " or ".join(kind.__name__ for kind in types)
            raise ConfigError(
                f'{name}: "{BLOCK}.{inner}" is {shown(value)}; it must be of type {wanted}.'
            )
        yield inner, value
