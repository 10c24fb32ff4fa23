"""Cross entropy of logits with padded columns: the plain reference. The one that trains is tensor_parallel.cross_entropy."""

import torch


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, label_smoothing: float = 0.0) -> torch.Tensor:
    """Loss per position, fp32 [..]: logits [.., V'], V' >= vocab_size, columns from vocab_size on ignored; labels [..].

    Smoothing as in Megatron: the label's target is 1 - e, every other token's e / (vocab_size - 1). (torch spreads e over
    all tokens, the label included: its e is Megatron's times vocab_size / (vocab_size - 1).)
    """
    log_p = torch.log_softmax(logits[..., :vocab_size].float(), dim=-1)
    loss = -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        e = smoothing_weight(label_smoothing, vocab_size)
        loss = (1 - e) * loss - e * log_p.mean(-1)
    return loss


def smoothing_weight(label_smoothing: float, vocab_size: int) -> float:
    """Weight of the mean over all tokens that gives each token but the label label_smoothing / (vocab_size - 1)."""
    return label_smoothing * vocab_size / (vocab_size - 1)
