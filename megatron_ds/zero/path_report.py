"""What ranks did that took different paths through the model, in words."""

import logging
from collections.abc import Iterable, Mapping, Sequence

from ..errors import CallError, CommunicationError, MegatronDSError
from ..mpu.collectives import all_gather_object
from ..mpu.group import Group
from .unused import Rule

MOST_NAMED = 8
logger = logging.getLogger(__name__)


def report_paths(
    rule: Rule,
    received: dict[str, bool],
    path: Sequence[str],
    data: Group,
    model: Group,
) -> None:
    """Raise the error that names parameters or layers and ranks; where gradients count as zeros, log a warning on
    the first rank. Collective over the groups.

    received: whether each parameter has a gradient. path: the layers that this rank used, if noted
    """
    # Which ranks have no gradient of which parameter.
    of_ranks = all_gather_object(dict(received), data)
    # In the order of forward, which is the reverse of that of the buckets.
    without = {
        name: [rank for rank, theirs in zip(data.ranks, of_ranks) if not theirs[name]]
        for name in reversed(received)
    }
    chosen = _refused(without) if rule == "refused" else _different(without, data)
    found = _first(chosen, model)
    # Errors: any unused parameter, layers out of order, then different paths.
    if rule == "refused" and found:
        raise CallError(
            f'{found}. "ignore_unused_parameters" is false, which makes unused parameters an error. '
            "Use them in the loss, freeze them with requires_grad_(False), or set it to true: gradients "
            "are then zero where a parameter is not used."
        )
    if path:
        _report_layers(path, data, model)
    found = found or "the parameters with a gradient differ"
    if rule != "zeros":
        raise MegatronDSError(
            f"data-parallel ranks took different paths through the model: {found}. The sum of their "
            "gradients would be incomplete. Every rank must use the same parameters in each step, if "
            "necessary with a factor of zero."
        )
    if data.rank == model.rank == 0:
        logger.warning(
            "%s: the gradient of a parameter is zero on ranks that do not use it, in this and "
            "in later updates",
            found,
        )


def _report_layers(path: Sequence[str], data: Group, model: Group) -> None:
    paths = all_gather_object(list(path), data)
    found = _first(_first_difference(paths, data.ranks), model)
    raise CommunicationError(
        f"data-parallel ranks used different layers, or in another order: {found or 'on other ranks'}. "
        "What they gathered belongs to other layers, so nothing was updated."
    )


def _first(text: str | None, model: Group) -> str | None:
    """Return the text of the first model-parallel rank that has one."""
    return next(filter(None, all_gather_object(text, model)), None)


def _first_difference(
    paths: Sequence[Sequence[str]], ranks: Sequence[int]
) -> str | None:
    for at in range(max(map(len, paths))):
        here = [path[at] if at < len(path) else "no layer" for path in paths]
        other = next((i for i, layer in enumerate(here) if layer != here[0]), None)
        if other is not None:
            return f"rank {ranks[0]} used {here[0]} where rank {ranks[other]} used {here[other]}"
    return None


def _different(without: Mapping[str, list[int]], data: Group) -> str | None:
    """Return the first parameter that some of the ranks have not used."""
    for name, ranks in without.items():
        if ranks and len(ranks) < data.size:
            having = set(data.ranks) - set(ranks)
            return f"{name} received a gradient on rank(s) {_list(having)} but not on {_list(ranks)}"
    return None


def _refused(without: Mapping[str, list[int]]) -> str | None:
    """Return the parameters that a rank has not used."""
    missing = [
        f"{name} on rank(s) {_list(ranks)}" for name, ranks in without.items() if ranks
    ]
    if not missing:
        return None
    more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
    return (
        f"{len(missing)} of {len(without)} parameters received no gradient in this update: "
        f"{', '.join(missing[:MOST_NAMED])}{more}"
    )


def _list(ranks: Iterable[int]) -> str:
    ranks = sorted(ranks)
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return ", ".join(map(str, ranks[:MOST_NAMED])) + more
