"""`AttentionLayouts`: which blocks of keys the blocks of queries of a layer see, where options restrict them.

The layouts are those of a feature. Without one, attention has no layout.
"""

from ..config.options.model import ModelConfig
from ..features import features
from ..ops.block_layout import BlockLayout


class AttentionLayouts:
    """The interface, and a package without layouts.

    fields  names of the options, of `ModelConfig`, that describe a layout
    """

    fields: tuple[str, ...] = ()

    def of_layer(
        self, config: ModelConfig, name: str, seed: int, causal: bool
    ) -> BlockLayout | None:
        """Return the layout of the heads of a layer, for the longest sequence; None: tokens see all keys."""
        return None

    def block_length(self, config: ModelConfig) -> int:
        """Tokens of a block: the length of a sequence is a multiple of it."""
        return 1

    def least_length(self, config: ModelConfig) -> int:
        """Return the shortest sequence that has all blocks that the options name."""
        return 1


NONE = AttentionLayouts()


def attention_layouts() -> AttentionLayouts:
    """Return the layouts that a feature has."""
    found = (f.layouts() for f in features() if f.layouts is not None)
    return next(found, NONE)
