"""Flags of Megatron-LM itself that stand for options here in another form."""

from collections.abc import Mapping
from functools import partial

from ...config.sources.foreign_words import Reader
from ...features import Later

own = partial(Later, __package__)
PATTERN = ("--num-layers", own(".hybrid_pattern:settings_of_pattern"))
# Names of the pattern of a hybrid model; the second is the older one.
PATTERN_FLAGS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")

MEGATRON_READERS: Mapping[str, tuple[str, Reader]] = dict.fromkeys(
    PATTERN_FLAGS, PATTERN
)
