"""`PredictionOptions`: the part of `ModelConfig` that lets a model predict more than the next token."""

from dataclasses import dataclass

from ...config.options.need import need
from ...config.options.option import option


@dataclass(frozen=True)
class PredictionOptions:
    """Multi-token prediction of DeepSeek-V3; names and defaults are Megatron's."""

    mtp_num_layers: int = option(
        0,
        at_least=0,
        help="Depths of multi-token prediction: blocks behind the last one, of which the k-th predicts the token "
        "k places after the next one, in training alone.",
        avoid="Each costs as much as a block and an output layer more.",
    )
    mtp_loss_scaling_factor: float = option(
        0.1,
        at_least=0,
        needs=need("model.mtp_num_layers"),
        help="Weight of the mean of the losses of all depths, beside the loss of the next token.",
    )
