"""`reading_for`: what becomes of each key of a DeepSpeed JSON, in a training script or in an engine.

    reading_for(block, "train")     pretrain_gpt.py --deepspeed_config FILE
    reading_for(block, "engine")    megatron_ds.initialize(config=FILE)

An engine trains a module that a program gives it, in the program's loop. A key that describes the model or
the loop, or that only informs, changes nothing there: it is accepted and listed at the start, as DeepSpeed's
engine leaves it to the program. A key that would have to change the module is refused.
"""

from collections.abc import Mapping
from typing import Any

from ...config.options.option import shown
from ...config.run import all_options
from ...config.sources.answers import asks_for_nothing
from ...config.sources.reading import Setting, SourceReading
from .deepspeed_json import reading_of

TARGETS = ("train", "engine")
SECTIONS = ("optimizer.", "cycle.", "zero.")
# Options that an engine takes in addition to those of SECTIONS.
TAKEN = (
    "train.global_batch_size",
    "train.micro_batch_size",
    "train.gradient_accumulation_steps",
    "logging.log_interval",
    "logging.timing_log_level",
    "logging.tensorboard_dir",
    "logging.csv_monitor_dir",
    "services.wandb_project",
    "services.wandb_entity",
    "services.wandb_group",
    "services.comet_project",
    "services.comet_workspace",
    "services.comet_experiment_name",
    "services.comet_offline_dir",
    "profiler.comms_logger",
    "profiler.comms_logger_ops",
    "profiler.comms_logger_verbose",
    # of megatron_ds.checkpointing.configure, which takes the same JSON
    "train.checkpoint_in_cpu",
    "train.distribute_saved_activations",
)
# Sections whose defaults ask for nothing.
QUIET = (
    "logging.",
    "services.",
    "profiler.",
    "parallel.",
)
SCRIPTED = "it is for pretrain_gpt.py, which has its own loop and log. Remove it."
SPLIT = "give a module that is split over the ranks, and mpu=."
ADVICE = dict.fromkeys(
    (
        "parallel.tensor_model_parallel_size",
        "parallel.context_parallel_size",
        "parallel.cp_comm_type",
    ),
    SPLIT,
)
# How paths begin → why an engine accepts the option without doing anything.
PROGRAMS: Mapping[str, str] = {
    "logging.": "an engine has no log of its own beside the lines of steps_per_print",
    "services.": "an engine sends curves to W&B and Comet, by the blocks of its JSON",
    "profiler.": "megatron-ds launch --autotuning tunes an engine's program, by short trials",
    "curriculum.": "the program cuts its sequences or orders its samples itself",
    "random_ltd.": "the program wraps the layers of its module itself",
    "model.sparse_": "the module computes its own attention",
    "parallel.pipeline_": "an engine runs a module as a whole",
}
# Blocks that an engine does not read, with the reason.
LEFT_OUT: Mapping[str, str] = {
    "pipeline": "an engine runs a module as a whole; for a PipelineModule it reads activation_checkpoint_interval",
    "dump_state": "engine.settings has every value",
    "monitor_config": '"tensorboard", "csv_monitor", "wandb" and "comet" turn on the curves',
}
AUTOCAST = "torch_autocast"
UNMANAGED = "managed_gradient_accumulation"


def reading_for(
    block: Mapping[str, Any], target: str = "train", name: str = "config"
) -> SourceReading:
    """Return the settings of a block, its problems, and the keys that change nothing. name: of it in messages."""
    assert target in TARGETS, f"{target} is not one of {TARGETS}"
    if target == "train":
        return reading_of(name, block)
    left_out = {key: why for key, why in LEFT_OUT.items() if key in block}
    noted = [key for key in left_out if not asks_for_nothing(block[key])]
    rest = {
        key: value
        for key, value in block.items()
        if key not in (*left_out, AUTOCAST, UNMANAGED)
    }
    reading = reading_of(name, rest)
    autocast_of(reading, name, block)
    _check_accumulation(reading, name, block)
    reading.without_effect |= {f"{name} {key}": left_out[key] for key in noted}
    kept = [setting for setting in reading.settings if _is_taken(reading, setting)]
    reading.settings[:] = kept
    return reading


def _is_taken(reading: SourceReading, setting: Setting) -> bool:
    """Return whether an engine takes the option. Other options are noted or refused."""
    path = setting.path
    if path in TAKEN or path.startswith(SECTIONS):
        return True
    if (
        path in all_options()
        and setting.value == all_options()[path].default
        and path.startswith(QUIET)
    ):
        return True
    why = next((why for start, why in PROGRAMS.items() if path.startswith(start)), None)
    if why is None:
        reading.refuse(
            f"{setting.source} is refused here: {ADVICE.get(path, SCRIPTED)}"
        )
    else:
        reading.without_effect[str(setting.source)] = why
    return False


def autocast_of(
    reading: SourceReading, name: str, block: Mapping[str, Any]
) -> str | None:
    """Return the dtype in which torch.autocast runs the forward of an engine's module; None without autocast.

    Adds problems to the reading.
    """
    found = block.get(AUTOCAST)
    if found is not None and not isinstance(found, Mapping):
        reading.refuse(
            f'{name}: "{AUTOCAST}" should be a block {{ … }}, not {shown(found)}.'
        )
        return None
    if not found or found.get("enabled", False) in (False, None, "auto"):
        return None
    unknown = set(found) - {"enabled", "dtype", "lower_precision_safe_modules"}
    for key in sorted(unknown):
        reading.refuse(
            f'{name}: unknown key "{AUTOCAST}.{key}". The block has enabled and dtype.'
        )
    dtype = str(found.get("dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in ("bfloat16", "bf16"):
        reading.refuse(
            f'{name}: "{AUTOCAST}.dtype" is {dtype}, and autocast in another format than bfloat16 '
            "needs loss scaling, which only an fp16 block has. Use bfloat16, or an fp16 block."
        )
    # Autocast and a 16-bit block exclude each other.
    for other in ("bf16", "bfloat16", "fp16"):
        inner = block.get(other)
        if isinstance(inner, Mapping) and inner.get("enabled") is True:
            reading.refuse(
                f'{name}: "{AUTOCAST}" and "{other}" are both enabled. Autocast keeps parameters '
                f'in fp32, "{other}" converts them. Keep one.'
            )
    if found.get("lower_precision_safe_modules"):
        reading.without_effect[f"{name} {AUTOCAST}.lower_precision_safe_modules"] = (
            "gradients are reduced in fp32 for all modules"
        )
    return "bfloat16"


def _check_accumulation(
    reading: SourceReading, name: str, block: Mapping[str, Any]
) -> None:
    """ "managed_gradient_accumulation": false makes each `step` of the program an update."""
    value = block.get(UNMANAGED)
    if value is None or value in (True, "auto"):
        return
    if value is not False:
        reading.refuse(f'{name}: "{UNMANAGED}" is {shown(value)}: it is true or false.')
        return
    # It needs one accumulation step, given or as the two batch sizes imply.
    micro = block.get("train_micro_batch_size_per_gpu")
    whole = block.get("train_batch_size")
    steps = block.get(
        "gradient_accumulation_steps",
        None if micro is not None and whole is not None else 1,
    )
    if steps != 1:
        reading.refuse(
            f'{name}: "{UNMANAGED}": false makes each engine.step() an update. Set '
            '"gradient_accumulation_steps" to 1 as well, leave "train_batch_size" out, and divide '
            "the loss yourself: all backward calls before a step add up."
        )
        return
    reading.without_effect[f"{name} {UNMANAGED}"] = (
        "with one accumulation step each engine.step() is an update, and backward calls before it add up"
    )
