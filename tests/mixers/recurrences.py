"""Plain references of the mixers' operations: token by token, one document at a time, in double precision."""

import torch


def recurrence(q, k, v, decay, beta=None, documents=None):
    """`linear_scan` by its definition. Arguments as there, q and k for groups of heads."""
    times = v.shape[2] // q.shape[2]
    q = q.repeat_interleave(times, 2)
    k = k.repeat_interleave(times, 2)
    rows = []
    for sample in range(q.shape[1]):
        state = v.new_zeros(v.shape[2], q.shape[3], v.shape[3])
        outputs = []
        for t in range(len(q)):
            is_new = t and documents is not None
            if is_new and documents[sample, t] != documents[sample, t - 1]:
                state = torch.zeros_like(state)
            key = k[t, sample]
            value = v[t, sample]
            state = state * decay[t, sample].exp()[:, None, None]
            if beta is not None:
                seen = torch.einsum("nkv,nk->nv", state, key)
                value = (value - seen) * beta[t, sample][:, None]
            state = state + key[:, :, None] * value[:, None, :]
            outputs.append(torch.einsum("nkv,nk->nv", state, q[t, sample]))
        rows.append(torch.stack(outputs))
    return torch.stack(rows, 1)


def convolution(x, weight, bias=None, documents=None):
    """`causal_conv` by its definition."""
    taps = weight.shape[1]
    out = torch.zeros_like(x)
    for sample in range(x.shape[1]):
        for t in range(len(x)):
            for back in range(min(taps, t + 1)):
                is_apart = (
                    documents is not None
                    and documents[sample, t] != documents[sample, t - back]
                )
                if not is_apart:
                    out[t, sample] += x[t - back, sample] * weight[:, taps - 1 - back]
    if bias is not None:
        out = out + bias
    return torch.nn.functional.silu(out)


def wide_leaves(tensors):
    """Copies in double precision that require gradients."""
    return [
        None if t is None else t.detach().double().requires_grad_() for t in tensors
    ]
