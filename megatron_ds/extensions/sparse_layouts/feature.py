"""DeepSpeed's layouts of sparse attention: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later, rules_if
from .sparse_options import SparseOptions

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "sparse_layouts",
        rules=rules_if(
            lambda config: config.model.sparse_attention is not None,
            own(".sparse_rules:sparse_shapes"),
            own(".sparse_rules:sparse_direction"),
            own(".sparse_rules:sparse_composition"),
        ),
        extends={"model": SparseOptions},
        layouts=own(".layer_layouts:sparse_layouts"),
        provides={
            "layouts of heads": own(".sparse_layouts:LAYOUTS"),
            "attention options": own(".sparse_options:SparseOptions"),
        },
    )
]
