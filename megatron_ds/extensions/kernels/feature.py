"""Operations in C++ and CUDA: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "kernels",
        prepared=own(".prepared_kernels:prepare_kernels"),
        provides={
            "attention kernel": own(".cpu.compiled_attention"),
            "attention tiles": own(".gpu.flash_tiles"),
            "grouped products": own(".cpu.compiled_grouped"),
            "kernels": own(".registered"),
        },
    )
]
