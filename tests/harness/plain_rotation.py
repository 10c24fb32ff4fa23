"""Rotary positions as the papers write them, of the heads of `plain_gpt`."""

import math

import torch


def rotated(x, position_ids, config):
    """Su et al. 2021 (arXiv:2104.09864), pairs (i, i + d/2): a complex number turned by position /
    base^(2i/d)."""
    turned = int(x.shape[-1] * config.rotary_percent)
    half = turned // 2
    base, size = config.rotary_base, 1.0
    if config.rotary_ntk_factor:  # the slowest of the pairs is slowed down by `stretch`
        stretch = 1 + config.rotary_ntk_factor * (
            config.positions / config.original_max_position_embeddings - 1
        )
        base *= stretch ** (half / (half - 1))
    frequencies = base ** (-torch.arange(half, dtype=x.dtype) / half)
    if config.use_rope_scaling:
        frequencies = torch.stack(
            [_llama3(f, config.rope_scaling_factor) for f in frequencies]
        )
    if config.position_embedding_type == "yarn":
        frequencies = torch.stack(
            [_yarn(f, i, half, config) for i, f in enumerate(frequencies)]
        )
        log = math.log(config.yarn_factor)
        size = (0.1 * config.yarn_mscale * log + 1) / (
            0.1 * config.yarn_mscale_all_dim * log + 1
        )
    angles = (
        position_ids[..., None]
        / (config.rotary_seq_len_interpolation_factor or 1)
        * frequencies
    )
    pairs = (
        (x[..., 0:turned:2], x[..., 1:turned:2])
        if config.rotary_interleaved
        else (x[..., :half], x[..., half:turned])
    )
    z = torch.complex(*pairs) * torch.polar(torch.full_like(angles, size), angles)
    y = (
        torch.view_as_real(z)
        if config.rotary_interleaved
        else torch.stack([z.real, z.imag], dim=-2)
    )
    return torch.cat([y.flatten(-2), x[..., turned:]], dim=-1)


def _yarn(frequency, i, half, config):
    """Peng et al. 2023 (arXiv:2309.00071), with the bounds of the authors' code: pair i of `half`."""
    bounds = []
    for turns in (
        config.yarn_beta_fast,
        config.yarn_beta_slow,
    ):  # the pair that turns so often
        wave = config.original_max_position_embeddings / turns
        bounds.append(half * math.log(wave / (2 * math.pi), config.rotary_base))
    if config.yarn_correction_range_round_to_int:
        bounds = math.floor(bounds[0]), math.ceil(bounds[1])
    low, high = max(bounds[0], 0), min(bounds[1], 2 * half - 1)
    share = min(max((i - low) / (high - low), 0), 1)
    return (1 - share) * frequency + share * frequency / config.yarn_factor


def _llama3(frequency, factor, low=1, high=4, original=8192):
    """Llama 3.1's rule, by the length of the wave in tokens."""
    wave = 2 * math.pi / frequency
    if wave < original / high:
        return frequency
    if wave > original / low:
        return frequency / factor
    share = (original / wave - low) / (high - low)
    return (1 - share) * frequency / factor + share * frequency
