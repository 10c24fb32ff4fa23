"""`GoldfishOptions`: the part of `DataConfig` of the goldfish loss."""

from dataclasses import dataclass

from ...config.options.need import need
from ...config.options.option import option

GOLDFISH = need("data.goldfish_loss")


@dataclass(frozen=True)
class GoldfishOptions:
    """Names and defaults are those of swiss-ai's fork of Megatron-LM."""

    goldfish_loss: bool = option(
        False,
        help="Leave one token in --goldfish-k out of the loss, always the same after the same tokens, so that the "
        "model cannot repeat long passages of its corpus.",
        avoid="Fewer tokens count in a step.",
    )
    goldfish_k: int = option(
        50,
        at_least=1,
        needs=GOLDFISH,
        help="One token in K does not count (in the mean over all contexts).",
    )
    goldfish_h: int = option(
        50,
        at_least=1,
        unit="tokens",
        needs=GOLDFISH,
        help="Length of the context that decides, the token itself included.",
        avoid="A short context treats the ends of common phrases alike in all texts.",
    )
