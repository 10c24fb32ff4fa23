"""Rules about the stages of a pipeline."""

import re
from collections.abc import Iterator

from ..messages import divisors, either, given
from ..options.parallel import ACCOUNTS, COUNTS
from ..run import RunConfig
from .uneven_stages import given_of, uneven_layout

PP = "--pipeline-model-parallel-size"
CHUNKS = "parallel.num_virtual_stages_per_pipeline_rank"
CHUNK_LAYERS = "parallel.num_layers_per_virtual_pipeline_stage"


def pipeline(config: RunConfig) -> Iterator[str]:
    """Each stage has a layer, and an explicit layout has all layers."""
    # The number of stages.
    layers = config.model.num_layers
    ranks = config.parallel.pipeline_model_parallel_size
    cut = config.parallel.pipeline_layout
    stages = ranks * (config.pipeline_chunks or 1)
    several = f" × [{_chunks(config)}]" if config.pipeline_chunks else ""
    # Without a layout each stage has a layer.
    if layers and cut is None and layers < stages:
        fits = f"at most {layers} stages in all"
        if stages == ranks:
            fits = f"{PP} {either(range(1, layers + 1))}"
        yield (
            f"[num_layers] is less than [pipeline_model_parallel_size]{several}: each stage needs at "
            f"least one layer. Use {fits}, or --pipeline-layout, which can give the embedding its own "
            "stage."
        )
    # A layout of numbers; others are checked where they are read.
    elif layers and cut is not None and re.fullmatch(r"\d+(,\d+)*", cut):
        counts = [int(count) for count in cut.split(",")]
        are_stages = (
            len(counts) == stages
            if config.pipeline_chunks
            else len(counts) % ranks == 0
        )
        if not are_stages or sum(counts) != layers:
            yield (
                f"[pipeline_layout] has {len(counts)} stages and {sum(counts)} layers, but there are "
                f"[pipeline_model_parallel_size]{several} and [num_layers]. Use "
                f"{_example_layout(layers, stages)}."
            )


def _example_layout(layers: int, stages: int) -> str:
    """Embedding, decoder layers and head on that many stages, with something on each of them."""
    if layers + 2 < stages:
        return f"at most {layers + 2} stages in all: the embedding, each layer and the head on one of its own"
    if layers < stages:
        text = "|".join(["E", *"t" * layers, *"L" * (stages - layers - 1)])
    else:
        text = ",".join(
            str(layers // stages + (i < layers % stages)) for i in range(stages)
        )
    return f"for instance --pipeline-layout {text}"


def uneven_pipeline(config: RunConfig) -> Iterator[str]:
    """First and last stages of another number of layers leave the same number to all others."""
    # `wanted` has become the layout where the options can be met.
    parallel = config.parallel
    wanted = uneven_layout(config)
    counts = given_of(config, COUNTS)
    accounts = given_of(config, ACCOUNTS)
    if (
        not config.model.num_layers
        or not counts + accounts
        or wanted
        and wanted == parallel.pipeline_layout
    ):
        return
    # The reason why they cannot, the most general one first.
    if parallel.pipeline_layout is not None:
        yield from given(
            config,
            [*counts, *accounts],
            "changes the layers of stages, which "
            "[pipeline_layout] states. Give only one of the two.",
        )
    elif parallel.pipeline_model_parallel_size == 1:
        yield from given(
            config,
            counts,
            "without --pipeline-model-parallel-size: there is one stage. Remove it.",
        )
    elif counts and accounts:
        yield from given(
            config,
            accounts,
            f"cannot be combined with [{counts[0]}], which states the layers "
            "of a stage. Give only one of the two.",
        )
    elif counts and (config.pipeline_chunks or 1) > 1:
        yield from given(
            config,
            counts,
            f"is the layers of a rank, which [{_chunks(config)}] divides into "
            "several stages. Use --pipeline-layout, which states the layers of each stage.",
        )
    elif counts:
        yield from given(
            config,
            counts,
            "cannot be the layers of a stage: the other stages cannot share "
            "the rest of [num_layers] evenly. Use --pipeline-layout, which states the layers "
            "of each stage.",
        )
    else:
        yield _uneven_accounts(config, accounts)


def _uneven_accounts(config: RunConfig, accounts: list[str]) -> str:
    stages = config.parallel.pipeline_model_parallel_size * (
        config.pipeline_chunks or 1
    )
    several = f" × [{_chunks(config)}]" if config.pipeline_chunks else ""
    total = config.model.num_layers + len(accounts)
    fits = either(
        [
            n - len(accounts)
            for n in (total // stages * stages, (total // stages + 1) * stages)
            if n > len(accounts)
        ]
    )
    names = " and ".join(f"[{path}]" for path in accounts)
    return (
        f"{names} with [num_layers] makes {total} layers, which {stages} stages, "
        f"[pipeline_model_parallel_size]{several}, cannot share evenly. Use --num-layers {fits}, or "
        "--pipeline-layout, which states the layers of each stage."
    )


def _chunks(config: RunConfig) -> str:
    """The option that sets the number of stages on each rank."""
    return (
        CHUNKS if config.parallel.num_virtual_stages_per_pipeline_rank else CHUNK_LAYERS
    )


def virtual_stages(config: RunConfig) -> Iterator[str]:
    """Options that put several stages on each pipeline rank."""
    # One of the two options.
    parallel = config.parallel
    layers = config.model.num_layers
    chosen = [path for path in (CHUNKS, CHUNK_LAYERS) if config.get(path) is not None]
    if len(chosen) == 2:
        yield f"[{CHUNKS}] and [{CHUNK_LAYERS}] both set the number of stages per rank. Give only one."
        return
    # Stages of equal size on several ranks.
    ranks = parallel.pipeline_model_parallel_size
    thick = parallel.num_layers_per_virtual_pipeline_stage
    if chosen and ranks == 1:
        yield (
            f"[{chosen[0]}] puts several stages on each pipeline rank, to shorten the idle time of the "
            f"pipeline, but [pipeline_model_parallel_size]. Remove it, or use {PP} 2 or more."
        )
    elif thick and layers and layers % (ranks * thick):
        even = divisors(layers // ranks) if layers % ranks == 0 else []
        advice = (
            f"Use --num-layers-per-virtual-pipeline-stage {either(even)}"
            if even
            else (f"Use {PP} {either([p for p in divisors(layers) if p > 1] or [1])}")
        )
        yield (
            f"[num_layers] is not a multiple of [pipeline_model_parallel_size] × [{CHUNK_LAYERS}] = "
            f"{ranks * thick}: every rank holds the same number of stages. {advice}, or set the number of "
            "stages with --num-virtual-stages-per-pipeline-rank, with which stages may differ in their "
            "number of layers."
        )


def pipeline_tuning(config: RunConfig) -> Iterator[str]:
    """Options of a cut that is not used would have no effect."""
    parallel = config.parallel
    if parallel.pipeline_layout and not config.is_default("parallel.pipeline_cut"):
        yield "[pipeline_cut] and [pipeline_layout] both assign the layers to stages. Give only one."


PIPELINE_RULES = (pipeline, uneven_pipeline, virtual_stages, pipeline_tuning)
