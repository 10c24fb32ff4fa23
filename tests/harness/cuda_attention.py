"""torch's memory-efficient attention and FlashAttention of CUDA in plain operations, with what CUDA demands of
their arguments.

`IN_PLACE_OF` has these functions by the operation of aten, for a fake GPU (fake_cuda.py). The rules are those
of torch's sources, aten/src/ATen/native/transformers/cuda: a bias has the dtype of the queries, its last
dimension is contiguous, and its address and other strides are multiples of 16 bytes where they are used; the
log-sum-exp has a multiple of 32 rows, of which the last ones are infinite. torch's own callers pad the bias;
the operation of aten, called directly, refuses it.

Letters: b samples, n heads, q and k rows, d channels.
"""

import math

import torch
import torch.nn.functional as F

aten = torch.ops.aten
ALIGNMENT, ROWS = 16, 32  # bytes; of the log-sum-exp


def forward(
    q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    """→ out [b, n, q, d], log-sum-exp fp32 [b, n, rows], seed and offset of a dropout."""
    _check(q, k, v, bias)
    assert not dropout_p, "dropout is not imitated"
    scores, state = (
        _scores(q, k, bias, is_causal, scale),
        q.new_zeros((), dtype=torch.int64),
    )
    sums = F.pad(scores.logsumexp(-1), (0, -q.shape[2] % ROWS), value=math.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ v.float()  # 0 for a query without keys
    return _in_order_of_rows(out.to(q.dtype)), sums, state, state.clone()


def backward(
    dout,
    q,
    k,
    v,
    bias,
    out,
    sums,
    seed,
    offset,
    dropout_p,
    wanted,
    is_causal=False,
    *,
    scale=None,
):
    """→ dq, dk, dv, and None for the gradient of the bias."""
    _check(q, k, v, bias)
    assert out.shape == dout.shape == q.shape and not dropout_p and not wanted[3]
    rows = -(-q.shape[2] // ROWS) * ROWS
    assert (
        sums.shape == (*q.shape[:2], rows)
        and sums.is_contiguous()
        and sums.dtype == torch.float32
    )
    of_rows = sums[:, :, : q.shape[2]]
    parts = _gradients(dout, q, k, v, out, of_rows, bias, is_causal, scale)
    return *(_in_order_of_rows(part.to(q.dtype)) for part in parts), None


def _gradients(dout, q, k, v, out, sums, bias, is_causal, scale):
    """fp32 dq, dk and dv, from the log-sum-exp [b, n, q] of all keys."""
    factor = scale or 1 / math.sqrt(q.shape[-1])
    p = (_scores(q, k, bias, is_causal, scale) - sums[..., None]).exp()
    d = (dout.float() * out.float()).sum(-1, keepdim=True)
    ds = p * (dout.float() @ v.float().transpose(-1, -2) - d) * factor
    return (
        ds @ k.float(),
        ds.transpose(-1, -2) @ q.float(),
        p.transpose(-1, -2) @ dout.float(),
    )


def flash_forward(
    q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    """→ out [b, n, q, d], log-sum-exp fp32 [b, n, q], and what a caller without dropout does not use."""
    _check_flash(q, k, v)
    assert not dropout_p, "dropout is not imitated"
    keys, values = _of_query_heads(q, k, v)
    scores = _scores(q, keys, None, is_causal, scale)
    out = _in_order_of_rows((scores.softmax(-1) @ values.float()).to(q.dtype))
    state = q.new_zeros((), dtype=torch.int64)
    return out, scores.logsumexp(-1), None, None, 0, 0, state, state.clone(), state


def flash_backward(
    dout,
    q,
    k,
    v,
    out,
    sums,
    cum_q,
    cum_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    seed,
    offset,
    *,
    scale=None,
):
    """→ dq, and dk and dv of the key-value heads."""
    _check_flash(q, k, v)
    assert out.shape == dout.shape == q.shape and not dropout_p
    assert cum_q is None and cum_k is None
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    assert sums.shape == q.shape[:3] and sums.is_contiguous()
    keys, values = _of_query_heads(q, k, v)
    parts = _gradients(dout, q, keys, values, out, sums, None, is_causal, scale)
    groups = k.shape[1]
    dq, dk, dv = parts
    dk, dv = (t.unflatten(1, (groups, -1)).sum(2) for t in (dk, dv))
    return tuple(_in_order_of_rows(part.to(q.dtype)) for part in (dq, dk, dv))


def _check_flash(q, k, v):
    assert q.dtype == k.dtype == v.dtype and q.itemsize == 2, "16 bits"
    assert k.shape == v.shape and q.shape[1] % k.shape[1] == 0, "heads"
    assert q.shape[3] == k.shape[3] and q.shape[3] % 8 == 0, "channels"
    assert all(t.stride(3) == 1 for t in (q, k, v)), "channels are contiguous"


def _of_query_heads(q, k, v):
    repeats = q.shape[1] // k.shape[1]
    return (t.repeat_interleave(repeats, 1) for t in (k, v))


IN_PLACE_OF = {
    aten._scaled_dot_product_flash_attention: flash_forward,
    aten._scaled_dot_product_flash_attention_backward: flash_backward,
    aten._scaled_dot_product_efficient_attention: forward,
    aten._scaled_dot_product_efficient_attention_backward: backward,
}


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
) -> None:
    assert (
        q.dtype == k.dtype == v.dtype and q.shape[:2] == k.shape[:2] == v.shape[:2]
    ), "one shape and dtype"
    assert all(t.stride(3) == 1 for t in (q, k, v)), "channels are contiguous"
    if bias is None:
        return
    assert bias.dtype == q.dtype, "invalid dtype for bias - should match query's dtype"
    assert (
        bias.shape == (*q.shape[:2], q.shape[2], k.shape[2]) and bias.stride(3) == 1
    ), "shape of bias"
    assert bias.data_ptr() % ALIGNMENT == 0, "attn_bias is not correctly aligned"
    for dim, name in enumerate(("strideB", "strideH", "strideM")):
        is_aligned = (
            bias.shape[dim] == 1 or bias.stride(dim) * bias.itemsize % ALIGNMENT == 0
        )
        assert is_aligned, f"attn_bias is not correctly aligned ({name})"


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    scores = (
        q.float() @ k.float().transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    )
    if is_causal:
        scores.masked_fill_(
            torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf
        )
    return scores if bias is None else scores + bias.float()


def _in_order_of_rows(t: torch.Tensor) -> torch.Tensor:
    """[b, n, rows, d] in the memory order [b, rows, n, d], as CUDA's results are."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)
