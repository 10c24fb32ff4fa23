"""Import paths that documents and programs use → the modules that now stand elsewhere.

    import megatron_ds.comm                     is megatron_ds.compat.deepspeed.comm, the same module object
    from megatron_ds.engine import Engine       is megatron_ds.compat.engine's

The paths on the left are part of the public interface: they go on working.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "megatron_ds"

# Packages that moved with all modules below them: path → path, both below megatron_ds.
MOVED_PACKAGES = {
    "engine": "compat.engine",
    "conversion": "compat.conversion",
    "recipes": "compat.recipes",
    "commands.launch": "extensions.launch",
    "commands.report": "extensions.report",
    "data.chat": "extensions.chat",
    "ops.cpu": "extensions.kernels.cpu",
    "ops.gpu": "extensions.kernels.gpu",
}
# Modules that moved by themselves.
MOVED = {
    "accelerator": "compat.deepspeed.accelerator",
    "checkpointing": "compat.deepspeed.checkpointing",
    "comm": "compat.deepspeed.comm",
    "utils": "compat.deepspeed.utils",
    "utils.tensor_fragment": "compat.deepspeed.tensor_fragment",
    "utils.zero_to_fp32": "compat.deepspeed.zero_to_fp32",
    "moe.layer": "compat.deepspeed.moe_layer",
    "ramps": "progress.ramps",
    "cycles": "progress.cycles",
    "difficulty": "extensions.data_efficiency.difficulty",
    "commands.analyze_data": "extensions.data_efficiency.analyze_data",
    "commands.build_corpus": "extensions.corpora.build_corpus",
    "commands.check_recipe": "compat.recipes.check_recipe",
    "commands.cluster_check": "extensions.launch.cluster_check",
    "commands.cluster_findings": "extensions.launch.cluster_findings",
    "commands.convert_checkpoint": "compat.conversion.convert_checkpoint",
    "commands.draw_context": "extensions.report.draw_context",
    "commands.env_report": "extensions.launch.env_report",
    "commands.evaluate": "extensions.evaluation.evaluate",
    "commands.generate_text": "extensions.generation.generate_text",
    "commands.inspect_dataset": "extensions.corpora.inspect_dataset",
    "commands.merge_adapter": "compat.conversion.merge_adapter",
    "commands.merge_datasets": "extensions.corpora.merge_datasets",
    "commands.plot_expert_load": "extensions.report.plot_expert_load",
    "commands.plot_loss": "extensions.report.plot_loss",
    "commands.preprocess_data": "extensions.corpora.preprocess_data",
    "commands.serve": "extensions.serving.serve",
    "commands.show_schedule": "extensions.report.show_schedule",
    "commands.train_tokenizer": "extensions.corpora.train_tokenizer",
    "commands.watch_run": "extensions.report.watch_run",
    "commands.weights_of_zero": "compat.deepspeed.weights_of_zero",
    "data.curriculum": "extensions.data_efficiency",
    "data.curriculum.curriculum_order": "extensions.data_efficiency.curriculum_order",
    "data.curriculum.difficulty_analysis": "extensions.data_efficiency.difficulty_analysis",
    "data.curriculum.difficulty_metrics": "extensions.data_efficiency.difficulty_metrics",
    "data.curriculum.seqlen_curriculum": "extensions.data_efficiency.seqlen_curriculum",
    "data.chat.encode_chats": "extensions.corpora.encode_chats",
    "data.chat.mask_file": "data.text.mask_file",
    "data.chat.preference_pair": "extensions.corpora.preference_pair",
    "data.text.corpus_record": "extensions.corpora.corpus_record",
    "data.text.corpus_shards": "extensions.corpora.corpus_shards",
    "data.text.plain_text": "extensions.corpora.plain_text",
    "data.text.preprocess": "extensions.corpora.preprocess",
    "data.text.sentences": "extensions.corpora.sentences",
    "data.text.text_files": "extensions.corpora.text_files",
    "data.text.text_records": "extensions.corpora.text_records",
    "data.tokenizers.vocabulary_training": "extensions.corpora.vocabulary_training",
    "planning.dry_run": "extensions.dry_run.dry_run",
    "planning.bytes_text": "extensions.dry_run.bytes_text",
    "planning.context_text": "extensions.dry_run.context_text",
    "planning.expert_text": "extensions.dry_run.expert_text",
    "planning.grid_text": "extensions.dry_run.grid_text",
    "planning.plan_tables": "extensions.dry_run.plan_tables",
    "planning.device_fit": "extensions.dry_run.device_fit",
    "planning.longest_sequence": "extensions.dry_run.longest_sequence",
    "commands.find_longest_sequence": "extensions.dry_run.find_longest_sequence",
    "models.bert": "extensions.bert.bert",
    "data.samples.bert_data": "extensions.bert.bert_data",
    "data.samples.bert_maps": "extensions.bert.bert_maps",
    "data.samples.masking": "extensions.bert.masking",
    "checkpoint.upcycling": "extensions.upcycling.upcycling",
    "commands.upcycle_checkpoint": "extensions.upcycling.upcycle_checkpoint",
    "training.observe.comet_log": "extensions.services.comet_log",
    "training.observe.mlflow_log": "extensions.services.mlflow_log",
    "training.observe.otel_log": "extensions.services.otel_log",
    "training.observe.wandb_log": "extensions.services.wandb_log",
    "progress.difficulty": "extensions.data_efficiency.difficulty",
    "config.options.data_efficiency_options": "extensions.data_efficiency.data_efficiency_options",
    "models.generation": "extensions.generation.requests",
    "models.random_ltd": "extensions.data_efficiency.random_ltd",
    "data.batch": "batch.batch",
    "data.documents": "batch.documents",
    "data.ledger": "batch.ledger",
    "training.prepared_kernels": "extensions.kernels.prepared_kernels",
    "training.metrics_file": "training.observe.metrics_file",
    "config.options.sparse_options": "extensions.sparse_layouts.sparse_options",
    "config.rules.sparse_rules": "extensions.sparse_layouts.sparse_rules",
    "ops.cpu.kept_probabilities": "ops.kept_probabilities",
    "ops.cpu.widened_products": "ops.widened_products",
    "ops.sparse_layouts": "extensions.sparse_layouts.sparse_layouts",
    "config.options.onebit_options": "extensions.onebit.onebit_options",
    "optim.onebit_adam": "extensions.onebit.onebit_adam",
    "optim.onebit_base": "extensions.onebit.compressed_optimizer",
    "optim.onebit_lamb": "extensions.onebit.onebit_lamb",
    "optim.onebit_phases": "extensions.onebit.phases",
    "optim.onebit_zero_one": "extensions.onebit.zero_one_adam",
    "zero.compressed_exchange": "extensions.onebit.switched_exchange",
    "zero.compressed_mean": "extensions.onebit.compressed_mean",
    "zero.compressed_signs": "extensions.onebit.signs",
    "zero.compressed_state": "extensions.onebit.compressed_set",
    "zero.compressed_units": "extensions.onebit.units",
    "zero.compressed_update": "extensions.onebit.compressed_update",
}


def new_path(name: str) -> str | None:
    """The module that `megatron_ds.NAME` names now; None if it has not moved."""
    package, _, inner = name.partition(".")
    if package != PACKAGE:
        return None
    if inner in MOVED:
        return f"{PACKAGE}.{MOVED[inner]}"
    for old, new in MOVED_PACKAGES.items():
        if f"{inner}.".startswith(f"{old}."):
            return f"{PACKAGE}.{new}{inner[len(old) :]}"
    return None


class MovedFinder:
    """Finds a module under its old path."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of an alias, for the import system (`importlib.abc.MetaPathFinder`)."""
        moved = new_path(name)
        if moved is None:
            return None
        if MovedFinder not in sys.meta_path:
            # The alias of a package has the package's folder as its path: without this finder at the front,
            # the import system would load the files of the folder a second time, under their old names.
            sys.meta_path.insert(0, MovedFinder)
        return alias_spec(name, moved)


def alias_spec(name: str, target: str) -> ModuleSpec:
    """A spec by which the module `target` itself is imported under another name."""
    return ModuleSpec(name, _AliasLoader(target), origin=__file__, is_package=True)


class _AliasLoader:
    """Puts a module under another name. The import system returns what sys.modules has after `exec_module`."""

    def __init__(self, target: str):
        self._target = target

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(self._target)
