"""Operations in C++ and CUDA: the declaration of the feature."""

from functools import partial
from typing import Any

from ...features import Feature, Later

own = partial(Later, __package__)
PREPARE = own(".prepared_kernels:prepare_kernels")


def _prepared(replica: Any) -> str:
    """Compile the kernels of a run on GPUs."""
    if replica.mesh.device.type != "cuda":
        return ""
    return PREPARE(replica)


FEATURES = [
    Feature(
        "kernels",
        prepared=_prepared,
        provides={
            "attention kernel": own(".cpu.compiled_attention"),
            "attention tiles": own(".gpu.flash_tiles"),
            "grouped products": own(".cpu.compiled_grouped"),
            "gpu kernels": own(".registered_gpu"),
            "kernels": own(".registered"),
        },
    )
]
