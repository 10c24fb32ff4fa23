"""Model FLOPs by Megatron's formula, and their fraction of the device's peak (MFU).

Matrix multiplications of forward and backward count (backward costs twice the forward), causal attention with
half its full matrix, and recomputation not at all: these are the FLOPs of the *model*, not of an
implementation. A layer with experts counts, for each token, the experts that its router chooses: neither
dropped tokens nor the empty rows of padded experts change the number. Each layer of a model has its own
formula (`models.Layer.flops`).
"""

from collections.abc import Iterable
from functools import cache

import torch

from ..config import RunConfig
from ..config.options.model import ModelConfig
from ..models import MODELS, Layer
from ..mpu.context import ParallelContext
from .run_model import model_layers

# Dense peak of one device, FLOP/s, from the vendors' data sheets: (16-bit, fp32 without TF32).
DEVICE_PEAKS = {
    "V100": (125e12, 15.7e12),
    "A100": (312e12, 19.5e12),
    "A800": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "H100 PCIe": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "H800": (989e12, 67e12),
    "H200 NVL": (835e12, 60e12),
    "H200": (989e12, 67e12),
    "H20": (148e12, 44e12),
    "GB300": (2500e12, 80e12),
    "B300": (2250e12, 75e12),
    "GB200": (2500e12, 80e12),
    "B200": (2250e12, 75e12),
    "B100": (1750e12, 60e12),
}


@cache
def layers_of(model: ModelConfig) -> tuple[Layer, ...]:
    """Return the layers of a model on a single rank, not built."""
    return tuple(MODELS[model.model](model, ParallelContext()))


def layers_of_run(config: RunConfig) -> tuple[Layer, ...]:
    """Return the layers of a run on a single rank, not built, with what features make of them."""
    return tuple(model_layers(config, ParallelContext()))


def model_flops(
    layers: Iterable[Layer],
    samples: int,
    seq_length: int,
    vocab_size: int,
    kept: int | None = None,
) -> float:
    """FLOPs of one optimizer step over `samples` sequences. vocab_size: rows of the padded vocabulary.

    kept: tokens of each sequence that the layers see which drop some; None: all
    """
    counts: dict[str, int] = {}
    one: dict[str, Layer] = {}
    for layer in layers:
        one.setdefault(layer.sort, layer)
        counts[layer.sort] = counts.get(layer.sort, 0) + 1
    return samples * sum(
        counts[sort] * layer.flops(tokens_of(layer, seq_length, kept), vocab_size).total
        for sort, layer in one.items()
    )


def tokens_of(layer: Layer, seq_length: int, kept: int | None) -> int:
    """Return the tokens of a sequence that a layer sees; kept: as of `model_flops`."""
    return seq_length if kept is None or not layer.drops_tokens else kept


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of this rank's device by its data sheet; None for a CPU and for a GPU that is not listed.

    No peak is measured: on a busy machine the measurement is lower than what the run achieves later.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for model in sorted(DEVICE_PEAKS, key=len, reverse=True):
        if all(word in name for word in model.split()):
            return DEVICE_PEAKS[model][0 if dtype != torch.float32 else 1]
    return None


def utilization(flops: float, peak: float | None) -> float | None:
    """MFU: model FLOP/s as a fraction of the peak, at most 1.

    None without a peak, and if the fraction exceeds 1: the peak is then that of another arithmetic (fp32
    weights multiplied in TF32), so the fraction means nothing.
    """
    return flops / peak if peak and flops <= peak else None
