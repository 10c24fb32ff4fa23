"""The pipeline layout of options that give the first and last stages other numbers of layers."""

from collections.abc import Sequence

from ..run import RunConfig

# Options that state the layers of a stage, and options that count something else as a layer.
COUNTS = (
    "parallel.decoder_first_pipeline_num_layers",
    "parallel.decoder_last_pipeline_num_layers",
)
ACCOUNTS = (
    "parallel.account_for_embedding_in_pipeline_split",
    "parallel.account_for_loss_in_pipeline_split",
)


def given_of(config: RunConfig, paths: Sequence[str]) -> list[str]:
    """The paths that do not have their default."""
    return [path for path in paths if not config.is_default(path)]


def uneven_layout(config: RunConfig) -> str | None:
    """The value for --pipeline-layout; None without such options, or if they cannot be met.

    `layout_rules.uneven_pipeline` reports options that cannot be met.
    """
    layers = config.model.num_layers
    ranks = config.parallel.pipeline_model_parallel_size
    counts = given_of(config, COUNTS)
    accounts = given_of(config, ACCOUNTS)
    chunks = config.pipeline_chunks or 1
    if (
        not layers
        or ranks < 2
        or bool(counts) == bool(accounts)
        or counts
        and chunks > 1
    ):
        return None
    divide = _with_counts if counts else _with_accounts
    stages = divide(config, layers, ranks * chunks)
    return stages and f"E{'|'.join('t' * count for count in stages)}L"


def _with_counts(config: RunConfig, layers: int, stages: int) -> list[int] | None:
    """Decoder layers of each stage; None if the other stages cannot share the rest evenly."""
    first, last = (config.get(path) for path in COUNTS)
    middle = layers - (first or 0) - (last or 0)
    others = stages - (first is not None) - (last is not None)
    if middle < 0 or (middle % others if others else middle):
        return None
    each = middle // others if others else 0
    return [first] * (first is not None) + [each] * others + [last] * (last is not None)


def _with_accounts(config: RunConfig, layers: int, stages: int) -> list[int] | None:
    """Decoder layers of each stage; None if layers and what counts as one cannot be shared evenly."""
    with_first, with_last = (config.get(path) for path in ACCOUNTS)
    each, rest = divmod(layers + with_first + with_last, stages)
    return (
        None if rest else [each - with_first, *[each] * (stages - 2), each - with_last]
    )
