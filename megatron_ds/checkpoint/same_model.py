"""Is this a checkpoint of the model that is to be filled?"""

import json
from collections.abc import Iterator, Mapping

from ..errors import CheckpointError

_ABSENT = "(absent)"


def check_same_model(saved: Mapping, current: Mapping) -> None:
    """Compare two nested dicts of plain values. Raises CheckpointError naming each differing field with both values."""
    theirs, ours = dict(_flat(saved)), dict(_flat(current))
    differing = [name for name in sorted(theirs | ours) if theirs.get(name, _ABSENT) != ours.get(name, _ABSENT)]
    if differing:
        told = "; ".join(f"{name}: checkpoint {_show(theirs, name)}, this run {_show(ours, name)}" for name in differing)
        raise CheckpointError(f"the checkpoint belongs to another run: {told}. Loading it would train a different model or on "
                              "different data. Give the flags it was saved with (its run.json works as --config), or another "
                              "--load.")


def _flat(values: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.loads(json.dumps(value))      # as JSON keeps it: a tuple becomes a list


def _show(values: Mapping, name: str) -> str:
    return repr(values[name]) if name in values else _ABSENT
