"""Features outside the core that the core asks for by name, and does without where they are not installed.

    compat/        dialects of other programs: their flags, files and checkpoints
    extensions/    optimizers and data features that hang on the core's interfaces

The core imports neither. `plugged` loads the object of a row of `PLUGINS` when it is first needed.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

# name → "module below megatron_ds:object in it", or a module, whose functions are asked for
PLUGINS = {
    "adapted layers": "extensions.lora.adapted_layers:with_adapters",
    "adapter merge": "extensions.lora.merging:merged",
    "adapter norms": "extensions.lora.merging:row_norms",
    "adapter options": "extensions.lora.lora_options:LoraConfig",
    "elastic check": "compat.deepspeed.elasticity:compute_elastic_config",
    "elastic enabled": "compat.deepspeed.elasticity:elasticity_enabled",
    "dry run": "extensions.dry_run.dry_run:dry_run",
    "comet points": "extensions.services.comet_log:CometPoints",
    "comet sink": "extensions.services.comet_log:CometLog",
    "mlflow sink": "extensions.services.mlflow_log:MlflowLog",
    "otel sink": "extensions.services.otel_log:OtelLog",
    "wandb points": "extensions.services.wandb_log:WandbPoints",
    "wandb sink": "extensions.services.wandb_log:WandbLog",
    "evaluation check": "extensions.evaluation.harness:check_harness",
    "evaluation tasks": "extensions.evaluation.harness:harness_of_run",
    "foreign names": "compat.deepspeed.deepspeed_modules:find",
    "foreign modules": "compat.deepspeed.deepspeed_modules:Finder",
    "attention kernel": "extensions.kernels.cpu.compiled_attention",
    "attention tiles": "extensions.kernels.gpu.flash_tiles",
    "joined block": "extensions.joined_blocks.joined_block:Join",
    "grouped products": "extensions.kernels.cpu.compiled_grouped",
    "kernels": "extensions.kernels",
    "prepared kernels": "extensions.kernels.prepared_kernels:prepare_kernels",
    "moved modules": "compat.moved_modules:MovedFinder",
    "foreign json": "compat.config.deepspeed_json:load_json",
    "foreign words": "compat.config.installed_words:WORDS",
    "foreign checkpoints": "compat.conversion.foreign_start:CHECKPOINTS",
    "adapter targets": "extensions.lora.lora_targets:TARGETS",
    "attention layouts": "extensions.sparse_layouts.layer_layouts:LAYOUTS",
    "layouts of heads": "extensions.sparse_layouts.sparse_layouts:LAYOUTS",
    "attention options": "extensions.sparse_layouts.sparse_options:SparseOptions",
    "curriculum options": "extensions.data_efficiency.data_efficiency_options:CurriculumConfig",
    "token drop options": "extensions.data_efficiency.data_efficiency_options:RandomLTDConfig",
    "difficulty": "extensions.data_efficiency.difficulty:make_difficulty",
    "metric keys": "extensions.data_efficiency.data_efficiency_options:METRIC_KEYS",
    "sample order": "extensions.data_efficiency.sample_order:make_order",
    "curriculum sampler": "extensions.data_efficiency.curriculum_sampler:CurriculumSampler",
    "token rise": "extensions.data_efficiency.difficulty:Rise",
    "shortened batches": "extensions.data_efficiency.seqlen_curriculum:shortening",
    "token dropping layers": "extensions.data_efficiency.random_ltd:with_random_ltd",
    "optimizer options": "extensions.onebit.onebit_options:OneBitOptions",
    "optimizer facts": "extensions.onebit.onebit_facts:FACTS",
}


WINGS = ("compat", "extensions")


def plugged(name: str) -> Any | None:
    """The object of a plugin; None if its package is not installed."""
    module, _, attribute = PLUGINS[name].partition(":")
    if not is_installed(module.partition(".")[0]):
        return None
    found = import_module(f"{__package__}.{module}")
    return getattr(found, attribute) if attribute else found


def missing_wings() -> str:
    """A sentence for messages about unknown names: the wings that are not installed. Empty if all are."""
    missing = [f"{__package__}.{wing}" for wing in WINGS if not is_installed(wing)]
    if not missing:
        return ""
    return f" Not installed: {', '.join(missing)}, which may have it. Install the whole package."


def is_installed(wing: str) -> bool:
    """Whether a package below megatron_ds is there."""
    return find_spec(f"{__package__}.{wing}") is not None
