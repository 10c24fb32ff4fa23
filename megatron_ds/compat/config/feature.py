"""Flags and files of other programs: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "dialects",
        provides={
            "foreign json": own(".deepspeed_json:load_json"),
            "foreign words": own(".installed_words:WORDS"),
        },
    )
]
