"""Which rules a configuration has to meet: those of options that have their defaults are not loaded."""

from collections.abc import Iterator, Sequence
from importlib import import_module

from ..messages import Rule
from ..options.moe import MOE_PATHS
from ..options.parallel import ACCOUNTS, COUNTS
from ..run import RunConfig, options_in
from .layout import PLACE_RULES, SHAPE_RULES

# Module of rules, its list, and the options of which one has another value than its default.
CONTEXT = ("context_parallel", "CONTEXT_RULES", ("parallel.context_parallel_size",))
PIPELINE = (
    "pipeline",
    "PIPELINE_RULES",
    (
        "parallel.pipeline_model_parallel_size",
        "parallel.pipeline_layout",
        "parallel.pipeline_cut",
        "parallel.num_virtual_stages_per_pipeline_rank",
        "parallel.num_layers_per_virtual_pipeline_stage",
        *COUNTS,
        *ACCOUNTS,
    ),
)
ATTENTION = ("attention", "ATTENTION_RULES", ("model.window_size",))
EXPERTS = ("moe", "MOE_RULES", (*MOE_PATHS, "parallel.expert_tensor_parallel_size"))


def layout_rules(config: RunConfig) -> Iterator[Rule]:
    """Yield the rules about the shapes of a model, and about its distribution over ranks."""
    yield from SHAPE_RULES
    yield from _of(config, *CONTEXT)
    yield from _of(config, "zero", "ZERO_RULES", _paths_of_zero())
    yield from PLACE_RULES
    yield from _of(config, *PIPELINE)


def model_rules(config: RunConfig) -> Iterator[Rule]:
    """Yield the rules about layers that only some models have."""
    yield from _of(config, *ATTENTION)
    yield from _of(config, *EXPERTS)


def _of(
    config: RunConfig, module: str, name: str, paths: Sequence[str]
) -> Sequence[Rule]:
    if all(map(config.is_default, paths)):
        return ()
    return getattr(import_module(f".{module}", __package__), name)


def _paths_of_zero() -> list[str]:
    paths = [option.path for option in options_in("zero")]
    return [*paths, "optimizer.main_grads_dtype"]
