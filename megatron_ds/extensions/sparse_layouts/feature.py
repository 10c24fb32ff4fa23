"""DeepSpeed's layouts of sparse attention: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "sparse_layouts",
        rules=(
            own(".sparse_rules:sparse_shapes"),
            own(".sparse_rules:sparse_direction"),
            own(".sparse_rules:sparse_composition"),
        ),
        provides={
            "attention layouts": own(".layer_layouts:LAYOUTS"),
            "layouts of heads": own(".sparse_layouts:LAYOUTS"),
            "attention options": own(".sparse_options:SparseOptions"),
        },
    )
]
