"""Model FLOPs by Megatron's formula, their fraction of the device's peak (MFU), and the savings of
random-LTD.

Matrix multiplications of forward and backward count (backward costs twice the forward), causal attention with
half its full matrix, and recomputation not at all: these are the FLOPs of the *model*, not of an
implementation. A layer with experts counts, for each token, the experts that its router chooses: neither
dropped tokens nor the empty rows of padded experts change the number. Each layer of a model has its own
formula (`models.Layer.flops`).
"""

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import cache

import torch

from ..config import RunConfig
from ..config.options.adapter_choice import Adapters
from ..config.options.model import ModelConfig
from ..config.training_schedule import make_batch_size
from ..models import Layer
from ..mpu.context import ParallelContext
from ..progress.token_drop import TokenDrop
from .run_model import model_layers
from .training_length import planned_steps

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


NO_ADAPTERS = Adapters()


@cache
def layers_of(
    model: ModelConfig, adapters: Adapters = NO_ADAPTERS
) -> tuple[Layer, ...]:
    """The layers of a model on a single rank, not built."""
    return tuple(model_layers(model, adapters, ParallelContext()))


def model_flops(
    model: ModelConfig,
    samples: int,
    seq_length: int,
    vocab_size: int,
    dropping: tuple[int, ...] = (),
    kept: int = 0,
    adapters: Adapters = NO_ADAPTERS,
) -> float:
    """FLOPs of one optimizer step over `samples` sequences. vocab_size: rows of the padded vocabulary.

    dropping: numbers of the blocks that see only `kept` tokens of each sequence
    adapters: what is trained in place of the model's weights, if they are on
    """
    return samples * sum(
        count * layer.flops(kept if drops else seq_length, vocab_size).total
        for layer, drops, count in _one_of_each_kind(model, adapters, dropping)
    )


@cache
def _one_of_each_kind(
    model: ModelConfig, adapters: Adapters, dropping: tuple[int, ...]
) -> tuple[tuple[Layer, bool, int], ...]:
    """(a layer, whether it drops tokens, number of such layers) for each kind."""
    layers = {}
    blocks = itertools.count()
    kinds = Counter()
    for layer in layers_of(model, adapters):
        kind = layer.kind, layer.is_block and next(blocks) in dropping
        layers.setdefault(kind, layer)
        kinds[kind] += 1
    return tuple((layers[kind], kind[1], count) for kind, count in kinds.items())


@dataclass(frozen=True)
class TokenDropSavings:
    """What random-LTD saves over a whole run.

    first, last              tokens that a dropping block keeps of a sequence in the first and the last step
    layer_tokens             tokens that blocks process over the run
    token_share, flop_share  ratio to a run that drops nothing
    """

    first: int
    last: int
    layer_tokens: int
    token_share: float
    flop_share: float


def token_drop_savings(config: RunConfig, drop: TokenDrop) -> TokenDropSavings:
    """Counted step by step, as the batch size and the kept tokens change."""
    model = config.model
    length = config.model.seq_length
    batch_size = make_batch_size(config)
    vocab = config.padded_vocab_size
    # Steps that keep equally many tokens are counted together.
    samples_at = Counter()  # kept tokens → samples of such steps
    samples = 0
    steps = planned_steps(config)
    for step in range(steps):
        size = batch_size.at(samples)
        samples_at[drop.kept_at(step, length)] += size
        samples += size
    # Tokens and FLOPs of all steps, as shares of those without dropping.
    dropping = len(drop.blocks)
    adapters = config.adapters
    flops = sum(
        model_flops(model, n, length, vocab, drop.blocks, kept, adapters)
        for kept, n in samples_at.items()
    )
    tokens = sum(
        n * (dropping * kept + (drop.num_blocks - dropping) * length)
        for kept, n in samples_at.items()
    )
    return TokenDropSavings(
        drop.kept_at(0, length),
        drop.kept_at(max(0, steps - 1), length),
        tokens,
        tokens / max(1, samples * drop.num_blocks * length),
        flops / max(1.0, model_flops(model, samples, length, vocab, adapters=adapters)),
    )


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
