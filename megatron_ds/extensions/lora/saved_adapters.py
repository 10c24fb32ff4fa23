"""Which weights of a checkpoint a run with adapters, or without, can load."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...checkpoint.load import differences
from .options import NOUN


def unloadable(
    saved: Mapping[str, Any], current: Mapping[str, Any] | None, folder: str | Path
) -> Iterator[str]:
    """Yield why weights cannot be loaded: both or neither must be of adapters, of the same kind.

    saved, current: identities of the checkpoint and of the run; None where a whole model is wanted
    """
    theirs = saved.get(NOUN)
    ours = None if current is None else current.get(NOUN)
    if theirs == ours:
        return
    if theirs is None:
        yield (
            f"--load {folder} holds the weights of a whole model, and a run with --lora-rank loads adapters. Give "
            f"--pretrained-checkpoint {folder} in place of --load."
        )
    elif current is None:
        yield (
            f"--load {folder} holds adapters and not the weights of a model. Add them to the weights with megatron-ds "
            f"merge-adapter --load {folder} --save DIR, and give --load DIR."
        )
    elif ours is None:
        yield (
            f"--load {folder} holds adapters of rank {theirs.get('rank')} and not the weights of a model. Give "
            "--lora-rank and --pretrained-checkpoint as in the run that saved them, or add them to the weights with "
            f"megatron-ds merge-adapter --load {folder} --save DIR."
        )
    else:
        differing = "; ".join(differences(theirs, ours))
        yield f"--load {folder} holds other adapters: {differing}. Give the options of the run that saved them."
