"""Parameters that are filled from a checkpoint, without an optimizer."""

from collections.abc import Iterable
from pathlib import Path

from torch import nn

from megatron_ds.checkpoint.load import load
from megatron_ds.mpu.group import Group
from megatron_ds.mpu.parameter_piece import ParameterPiece


def load_weights(
    folder: Path, step: int, parameters: Iterable[nn.Parameter], tp: Group
) -> None:
    """Fill parameters that have a `.spec` from the saved weights, cast to the dtype of each. Collective over `tp`."""
    pieces = [ParameterPiece(p.spec, p.detach().view(-1)) for p in parameters]
    load(
        folder,
        step,
        pieces,
        coordinates=dict.fromkeys(("tp", "etp"), (tp.rank, tp.size)),
        world=tp,
        exact=False,
    )
