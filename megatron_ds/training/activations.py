"""How many bytes of activations a rank may keep, roughly: an allowance, for decisions that must not run out of memory.

Korthikanti et al. 2022 (arXiv:2205.05198), equations 1, 2 and 4: what a block keeps for backward. Their 34 s b h with 16-bit
activations is here 10 s b h for norms, dropouts and inputs of linear layers, split by sequence parallelism only, 8 s b h for
attention and 4 s b f for the feed-forward block (6 s b f where it is gated), split by tensor parallelism. 5 a s² b for scores
is counted though fused attention keeps none.
"""


def activation_allowance(model, *, micro_batch: int, tp: int, sequence_parallel: bool, recompute: str | None, recomputed: int,
                         blocks: int, has_head: bool, live: int, itemsize: int, vocab_size: int) -> int:
    """Bytes. model: a ModelConfig.

    recompute, recomputed  None, "full" or "selective", and how many blocks of this rank do so
    blocks, has_head       on this rank
    live                   micro-batches whose activations are kept at a time
    vocab_size             padded
    """
    s, b = model.seq_length, micro_batch
    hidden, split = s * b * model.hidden_size, tp if sequence_parallel else 1
    wide = (6 if model.activation == "swiglu" else 4) * s * b * model.ffn_size
    lean = 10 * hidden // split + (8 * hidden + wide) // tp
    scores = 5 * model.num_attention_heads * s * s * b // tp
    kept = {None: lean + scores, "selective": lean, "full": 2 * hidden // split}[recompute]
    stage = recomputed * kept + (blocks - recomputed) * (lean + scores)
    at_work = lean + scores                                             # one block is being recomputed, or computed
    logits = s * b * vocab_size // tp * (itemsize + 8) if has_head else 0     # as computed, and two buffers of fp32
    return (live * stage + at_work) * itemsize // 2 + live * logits
