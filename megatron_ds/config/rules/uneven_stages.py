"""The pipeline layout of options that give the first and last stages other numbers of layers."""

from collections.abc import Sequence

from ..options.parallel import ACCOUNTS, COUNTS
from ..run import RunConfig


def given_of(config: RunConfig, paths: Sequence[str]) -> list[str]:
    """The paths that do not have their default."""
    return [path for path in paths if not config.is_default(path)]


def uneven_layout(config: RunConfig) -> str | None:
    """The value for --pipeline-layout; None without such options, or if they cannot be met.

    `rules.layout.uneven_pipeline` reports options that cannot be met.
    """
    layers = config.model.num_layers
    ranks = config.parallel.pipeline_model_parallel_size
    counts = given_of(config, COUNTS)
    accounts = given_of(config, ACCOUNTS)
    chunks = config.pipeline_chunks or 1
    has_one_kind = bool(counts) != bool(accounts)
    if not layers or ranks < 2 or not has_one_kind:
        return None
    # A count is that of a rank, which has one stage only without chunks.
    if counts and chunks > 1:
        return None

    divide = _with_counts if counts else _with_accounts
    stages = divide(config, layers, ranks * chunks)
    if not stages:
        return None
    body = "|".join("t" * count for count in stages)
    return f"E{body}L"


def _with_counts(config: RunConfig, layers: int, stages: int) -> list[int] | None:
    """Decoder layers of each stage; None if the other stages cannot share the rest evenly."""
    first, last = (config.get(path) for path in COUNTS)
    stated = [count for count in (first, last) if count is not None]
    middle = layers - sum(stated)
    others = stages - len(stated)
    each, rest = divmod(middle, others) if others else (0, middle)
    if middle < 0 or rest:
        return None

    divided = [each] * others
    if first is not None:
        divided.insert(0, first)
    if last is not None:
        divided.append(last)
    return divided


def _with_accounts(config: RunConfig, layers: int, stages: int) -> list[int] | None:
    """Decoder layers of each stage; None if layers and what counts as one cannot be shared evenly."""
    with_first, with_last = (config.get(path) for path in ACCOUNTS)
    # The embedding and the loss each count as a layer, in the first and in the last stage.
    each, rest = divmod(layers + with_first + with_last, stages)
    if rest:
        return None
    divided = [each] * stages
    divided[0] -= with_first
    divided[-1] -= with_last
    return divided
