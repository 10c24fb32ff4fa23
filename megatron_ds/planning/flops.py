"""Model FLOPs by Megatron's formula, and which fraction of the device's peak they are (MFU).

Counted are the matrix multiplications of forward and backward (backward costs twice the forward), causal attention at half
its full matrix, nothing for recomputation: the FLOPs of the *model*, whatever the implementation does.
"""

import torch

from ..models import MODELS

# Dense peak of one device, FLOP/s, from the vendors' data sheets; (16-bit, fp32 as torch runs it without TF32).
DEVICE_PEAKS = {
    "V100": (125e12, 15.7e12), "A100": (312e12, 19.5e12), "A800": (312e12, 19.5e12), "L40S": (362e12, 91.6e12),
    "H100 PCIe": (756e12, 51e12), "H100 NVL": (835e12, 60e12), "H100": (989e12, 67e12), "H800": (989e12, 67e12),
    "H200": (989e12, 67e12), "H20": (148e12, 44e12), "B200": (2250e12, 75e12), "B100": (1750e12, 60e12),
}


def layer_flops(model, kind: str, seq_length: int, vocab_size: int) -> float:
    """FLOPs of one sequence through one layer, forward and backward.

    model: a ModelConfig.  kind: as `models.Layer.kind` has it; one that is not named here multiplies no matrices.
    """
    s, h = seq_length, model.hidden_size
    if kind == "block":
        queries = model.num_attention_heads * model.head_dim
        keys_values = 2 * model.query_groups * model.head_dim
        fc = 3 if model.activation == "swiglu" else 2
        projections = 6 * (h * (queries + keys_values) + queries * h)
        return s * (projections + 6 * h * model.ffn_size * fc) + attention_flops(model, s)
    if kind == "head":
        return 6.0 * s * h * vocab_size
    if kind == "bert_head":
        order = 6.0 * h * (h + 2) if model.bert_binary_head else 0.0          # of the first position
        return 6.0 * s * h * (h + vocab_size) + order
    return 0.0


def attention_flops(model, seq_length: int) -> float:
    """Of these, the scores of one block's attention and what they weigh: products without weights of the model's."""
    seen = 0.5 if MODELS[model.model].causal else 1.0
    return 12.0 * seen * seq_length * seq_length * model.num_attention_heads * model.head_dim


def model_flops(model, samples: int, seq_length: int, vocab_size: int, dropping: int = 0, kept: int = 0) -> float:
    """FLOPs of one optimizer step over `samples` sequences. vocab_size: the padded vocabulary.

    dropping: of the blocks, so many see only `kept` tokens of each sequence
    """
    blocks = (model.num_layers - dropping) * layer_flops(model, "block", seq_length, vocab_size)
    blocks += dropping * layer_flops(model, "block", kept, vocab_size)
    return samples * (blocks + layer_flops(model, MODELS[model.model].head, seq_length, vocab_size))


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of this rank's device by its data sheet; None for a CPU and for a GPU that is not in the table.

    No peak is measured: on a busy machine the measurement comes out below what the run itself achieves later.
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

    None without a peak, and where the fraction exceeds 1: the peak is then another arithmetic's (fp32 weights multiplied in
    TF32), so the fraction means nothing.
    """
    return flops / peak if peak and flops <= peak else None
