"""--rope-scaling-type of MindSpeed-LLM → the options of scaled rotary positions here.

llama3    --use-rope-scaling, with --rope-scaling-factor
yarn      --position-embedding-type yarn, whose factor is --max-position-embeddings over the original length there,
          whatever --rope-scaling-factor is
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...config.run import RunConfig, all_options
from ...config.sources.reading import Deferred, Setting
from ...errors import ConfigError
from .word_readers import deferred, settings_of, word_of


@dataclass(frozen=True)
class Scaled(Deferred):
    """Rotary positions that are scaled, whatever kind of positions is given beside."""

    kind: str

    def of(self, config: RunConfig) -> str:
        """Return the kind of positions."""
        return self.kind


@dataclass(frozen=True)
class Unread(Deferred):
    """An option that is not read beside another one: its default. path: of the option."""

    path: str

    def of(self, config: RunConfig) -> object:
        """Return the default of the option."""
        return all_options()[self.path].default


def scaled(words: Sequence[str], flag: str) -> list[Setting]:
    """Return the settings of a kind of scaling. Raises ConfigError for one that is not available."""
    kind = word_of(words, flag, "the kind of scaling")
    if kind == "llama3":
        return settings_of(flag, ["--use-rope-scaling"])
    if kind != "yarn":
        raise ConfigError(
            f"{flag} {kind[:20]} is not available. It may be llama3 or yarn."
        )
    factor = Unread("model.rope_scaling_factor")
    return [
        deferred(flag, "--position-embedding-type", Scaled("yarn")),
        deferred(flag, "--rope-scaling-factor", factor),
    ]
