"""Keys of GPT-NeoX → the words of the command line that they stand for."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from .neox_names import INITIAL, POSITIONS, SWITCHES, TOKENIZERS, VALUES

Words = Iterator[tuple[str, list[str]]]  # (key, words)
# The output projections of a block.
OUTPUTS = (
    "*.linear_proj.weight",
    "*.linear_fc2.weight",
)
LARGEST = 2**50  # of a size in a square root


def words_of(block: Mapping[str, Any]) -> Words:
    """Yield (key, the words that it stands for). block: values of the types in `neox_names.TYPES`, by plain key"""
    yield from _value_words(block)
    yield from _switch_words(block)
    yield from _layer_words(block)
    yield from _norm_words(block)
    yield from _rate_words(block)
    yield from _path_words(block)
    yield from _tokenizer_words(block)
    yield from _initial_words(block)


def _value_words(block: Mapping[str, Any]) -> Words:
    """Yield the keys whose value is that of a flag."""
    for key, flag in VALUES.items():
        if key not in block:
            continue
        value = block[key]
        values = value if isinstance(value, list) else [value]
        yield key, [flag, *map(str, values)]
    key = "pipe_parallel_size"
    if key in block:
        # 0 means no pipeline.
        stages = block[key] or 1
        words = ["--pipeline-model-parallel-size", str(stages)]
        yield key, words


def _switch_words(block: Mapping[str, Any]) -> Words:
    """Yield the keys that are true, each of which is a flag without a value."""
    for key, flag in SWITCHES.items():
        if block.get(key) is True:
            yield key, [flag]
    if block.get("checkpoint_activations") is True:
        yield "checkpoint_activations", ["--recompute-granularity", "full"]


def _layer_words(block: Mapping[str, Any]) -> Words:
    """Positions, activation and biases of all layers."""
    positions = block.get("pos_emb", "")
    if positions in POSITIONS:
        yield "pos_emb", ["--position-embedding-type", POSITIONS[positions]]

    # The fused kernel computes the tanh form.
    is_fused = block.get("bias_gelu_fusion") is True
    activation = "gelu" if is_fused else "gelu_exact"
    yield "bias_gelu_fusion", ["--activation", activation]

    # One switch leaves out the biases of all linear layers, another those of attention.
    if block.get("use_bias_in_attn_linear") is False:
        flag = "--disable-bias-in-attn-linear"
        if block.get("use_bias_in_mlp") is False:
            flag = "--disable-bias-linear"
        yield "use_bias_in_attn_linear", [flag]


def _norm_words(block: Mapping[str, Any]) -> Words:
    """Yield the kind of norm, and its epsilon, whose key and default depend on the kind."""
    key = "layernorm_epsilon"
    default = 1e-5
    kind = block.get("norm", "layernorm")
    if kind == "layernorm" and block.get("use_bias_in_norms") is False:
        # RMSNorm has none in any case.
        flag = "--disable-bias-in-norms"
        words = [flag]
        yield "use_bias_in_norms", words
    if block.get("norm") == "rmsnorm":
        yield "norm", ["--normalization", "RMSNorm"]
        key = "rms_norm_epsilon"
        default = 1e-8
    epsilon = block.get(key, default)
    yield key, ["--norm-epsilon", str(epsilon)]


def _rate_words(block: Mapping[str, Any]) -> Words:
    """Yield the decay of the learning rate. Its warm-up begins with the rate of the first step, not with 0."""
    style = block.get("lr_decay_style", "linear")
    is_line_to_0 = style == "linear" and not block.get("min_lr")
    if style not in ("constant", "cosine") and not is_line_to_0:
        return
    words = ["--lr-decay-style", style]
    words += ["--lr-warmup-style", "linear_from_one"]
    yield "lr_decay_style", words


def _path_words(block: Mapping[str, Any]) -> Words:
    """Yield the corpora of each split, with their weights if there is one for each."""
    for part in ("train", "valid", "test"):
        paths = block.get(f"{part}_data_paths")
        weights = block.get(f"{part}_data_weights")
        if not isinstance(paths, list):
            continue
        words = [f"--{part}-data-path"]
        if not isinstance(weights, list):
            words += map(str, paths)
        elif len(weights) == len(paths):
            for weight, path in zip(weights, paths):
                words += [str(weight), str(path)]
        else:
            continue
        yield f"{part}_data_paths", words


def _tokenizer_words(block: Mapping[str, Any]) -> Words:
    """Yield the tokenizer and its file, if the block names one of them."""
    kind = block.get("tokenizer_type", "GPT2BPETokenizer")
    is_given = "tokenizer_type" in block or "vocab_file" in block
    if kind not in TOKENIZERS or not is_given:
        return
    ours, flag = TOKENIZERS[kind]
    yield "tokenizer_type", ["--tokenizer-type", ours]
    file = block.get("vocab_file")
    if file:
        yield "vocab_file", [flag, file]


def _initial_words(block: Mapping[str, Any]) -> Words:
    """Yield the standard deviations of most initial weights, and of those of the output projections of a block. The
    second is the first over sqrt(2 × layers) here.

    small_init: sqrt(2 / (5 h)), Nguyen and Salazar 2019, arXiv:1910.05895, section 2.2; wang_init: 2 / (L
    sqrt(h)), of Wang and Komatsuzaki's GPT-J.
    """
    layers = block.get("num_layers")
    hidden = block.get("hidden_size")
    normal = block.get("init_method_std", 0.02)
    inner = block.get("init_method", "normal")
    output = block.get("output_layer_init_method", "scaled_normal")
    if not _is_size(layers) or not _is_size(hidden):
        return
    if inner not in INITIAL or output not in INITIAL:
        return

    # Both residual branches of a layer add up, hence 2 × layers.
    branches = math.sqrt(2 * layers)
    deviation = {
        "normal": normal,
        "scaled_normal": normal / branches,
        "small_init": math.sqrt(2 / (5 * hidden)),
        "wang_init": 2 / layers / math.sqrt(hidden),
    }
    most = deviation[inner]
    words = ["--init-method-std", repr(most)]
    yield "init_method", words

    # The factor is relative to the deviation that the output projections have without it.
    factor = deviation[output] * branches / most
    if math.isclose(factor, 1.0):
        return
    words = []
    for pattern in OUTPUTS:
        words += ["--param-group", f"{pattern}:init_factor={factor!r}"]
    yield "output_layer_init_method", words


def _is_size(value: Any) -> TypeGuard[int]:
    """Return whether a value is a size whose square root can be taken."""
    return isinstance(value, int) and 0 < value <= LARGEST
