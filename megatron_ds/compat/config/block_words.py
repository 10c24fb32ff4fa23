"""Words of forks about the feed-forward and the experts, whose values follow from other options.

--glu-activation swiglu     BigScience: the width is 4 × the hidden size unless it is given
--first-k-dense-replace K   MindSpeed-LLM: the first K layers have no experts
--n-shared-experts N        MindSpeed-LLM: N experts of the width of the others, which every token passes
--norm-topk-prob            MindSpeed-LLM: weights of the chosen experts sum to 1
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...config.run import RunConfig
from ...config.sources.reading import Deferred, Setting
from ...errors import ConfigError
from .word_readers import deferred, number_of, settings_of, word_of

FREQUENCY = "--moe-layer-freq"


@dataclass(frozen=True)
class UngatedWidth(Deferred):
    """The width of a feed-forward without a gate, where no width is given."""

    def of(self, config: RunConfig) -> int | None:
        """Return 4 × the hidden size; None where a width is given."""
        given = config.model.ffn_hidden_size
        return (
            None
            if given or not config.model.hidden_size
            else 4 * config.model.hidden_size
        )


@dataclass(frozen=True)
class FirstDense(Deferred):
    """The layers with experts of a model whose first layers have none."""

    count: int

    def of(self, config: RunConfig) -> str | None:
        """Return the list of --moe-layer-freq: of the layers from `count` on, those that the number there chooses.

        None for a model without experts or layers, and beside a list, which states every layer.
        """
        layers = config.model.num_layers
        frequency = config.model.moe_layer_freq
        if config.model.num_experts is None or not layers or not frequency.isdecimal():
            return None
        every = max(1, int(frequency))
        chosen = [int(i >= self.count and i % every == 0) for i in range(layers)]
        return f"[{','.join(map(str, chosen))}]"


@dataclass(frozen=True)
class SharedWidth(Deferred):
    """The width of several shared experts together."""

    count: int

    def of(self, config: RunConfig) -> int | None:
        """Return their width; None without any, or without the width of an expert."""
        model = config.model
        if not self.count or not model.hidden_size:
            return None
        return self.count * model.expert_ffn_size


@dataclass(frozen=True)
class SumOfOne(Deferred):
    """Weights of the chosen experts that sum to 1: a softmax over these alone, or shares of sigmoids."""

    def of(self, config: RunConfig) -> bool:
        """Return whether the softmax precedes the choice, whatever is given beside."""
        return False


def gated(words: Sequence[str], flag: str) -> list[Setting]:
    """Return the settings of --glu-activation. Raises ConfigError for gates that are not available."""
    kind = word_of(words, flag, "the kind of the gate")
    if kind != "swiglu":
        raise ConfigError(
            f"{flag} {kind[:20]} is not available: it may be swiglu. For geglu write --activation geglu, whose gelu is "
            "the tanh approximation, and --ffn-hidden-size, which is 4 times --hidden-size there unless it is given."
        )
    width = deferred(flag, "--ffn-hidden-size", UngatedWidth())
    return [*settings_of(flag, ["--swiglu"]), width]


def first_dense(words: Sequence[str], flag: str) -> list[Setting]:
    """Return the setting of --first-k-dense-replace; 0 and -1 ask for nothing."""
    if words == ["-1"]:
        return []
    count = number_of(words, flag)
    return [deferred(flag, FREQUENCY, FirstDense(count))] if count else []


def shared_experts(words: Sequence[str], flag: str) -> list[Setting]:
    """Return the setting of --n-shared-experts."""
    width = SharedWidth(number_of(words, flag))
    return [deferred(flag, "--moe-shared-expert-intermediate-size", width)]


def normalized_weights(words: Sequence[str], flag: str) -> list[Setting]:
    """Return the setting of --norm-topk-prob. Raises ConfigError for a word after it."""
    if words:
        raise ConfigError(f"{flag} takes no value, and {words[0][:40]!r} follows it.")
    return [deferred(flag, "--moe-router-pre-softmax", SumOfOne())]


def scaled_weights(config: RunConfig) -> Iterator[str]:
    """Yield a problem of --norm-topk-prob with a factor: some routers divide scaled weights by their sum, others scale
    the quotient.
    """
    if config.model.moe_router_topk_scaling_factor is not None:
        yield (
            "--norm-topk-prob with [moe_router_topk_scaling_factor]: of some routers it undoes the factor. Remove it, "
            "and with --moe-router-load-balancing-type aux_loss also the factor."
        )
