"""Keys of GPT-NeoX → the words of the command line that they stand for."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from .neox_names import INITIAL, POSITIONS, SWITCHES, TOKENIZERS, VALUES

Words = Iterator[tuple[str, list[str]]]  # (key, words)
OUTPUTS = (
    "*.linear_proj.weight",
    "*.linear_fc2.weight",
)  # the output projections of a block
LARGEST = 2**50  # of a size in a square root


def words_of(block: Mapping[str, Any]) -> Words:
    """(key, the words that it stands for). block: values of the types in `neox_names.TYPES`, by plain key"""
    yield from _value_words(block)
    yield from _switch_words(block)
    yield from _layer_words(block)
    yield from _norm_words(block)
    yield from _rate_words(block)
    yield from _path_words(block)
    yield from _tokenizer_words(block)
    yield from _initial_words(block)


def _value_words(block: Mapping[str, Any]) -> Words:
    """Keys whose value is that of a flag."""
    for key, flag in VALUES.items():
        if key in block:
            value = block[key]
            values = value if isinstance(value, list) else [value]
            yield key, [flag, *map(str, values)]
    if "pipe_parallel_size" in block:  # 0: no pipeline
        stages = block["pipe_parallel_size"] or 1
        yield "pipe_parallel_size", ["--pipeline-model-parallel-size", str(stages)]


def _switch_words(block: Mapping[str, Any]) -> Words:
    for key, flag in SWITCHES.items():
        if block.get(key) is True:
            yield key, [flag]
    if block.get("checkpoint_activations") is True:
        yield "checkpoint_activations", ["--recompute-granularity", "full"]


def _layer_words(block: Mapping[str, Any]) -> Words:
    positions = block.get("pos_emb")
    if positions in POSITIONS:
        yield "pos_emb", ["--position-embedding-type", POSITIONS[positions]]

    is_fused = (
        block.get("bias_gelu_fusion") is True
    )  # the fused kernel computes the tanh form
    yield "bias_gelu_fusion", ["--activation", "gelu" if is_fused else "gelu_exact"]

    biases = [block.get("use_bias_in_mlp"), block.get("use_bias_in_attn_linear")]
    if all(bias is False for bias in biases):
        yield "use_bias_in_mlp", ["--disable-bias-linear"]


def _norm_words(block: Mapping[str, Any]) -> Words:
    key = "layernorm_epsilon"
    default = 1e-5
    if block.get("norm") == "rmsnorm":
        yield "norm", ["--normalization", "RMSNorm"]
        key = "rms_norm_epsilon"
        default = 1e-8
    yield key, ["--norm-epsilon", str(block.get(key, default))]


def _rate_words(block: Mapping[str, Any]) -> Words:
    """The decay of the learning rate. Its warm-up begins with the rate of the first step, not with 0."""
    style = block.get("lr_decay_style", "linear")
    is_line_to_0 = style == "linear" and not block.get("min_lr")
    if style in ("constant", "cosine") or is_line_to_0:
        yield (
            "lr_decay_style",
            ["--lr-decay-style", style, "--lr-warmup-style", "linear_from_one"],
        )


def _path_words(block: Mapping[str, Any]) -> Words:
    """The corpora of each split, with their weights if there is one for each."""
    for part in ("train", "valid", "test"):
        paths = block.get(f"{part}_data_paths")
        weights = block.get(f"{part}_data_weights")
        if not isinstance(paths, list):
            continue
        words = list(map(str, paths))
        if isinstance(weights, list):
            if len(weights) != len(paths):
                continue
            words = [str(word) for pair in zip(weights, paths) for word in pair]
        yield f"{part}_data_paths", [f"--{part}-data-path", *words]


def _tokenizer_words(block: Mapping[str, Any]) -> Words:
    kind = block.get("tokenizer_type", "GPT2BPETokenizer")
    is_given = "tokenizer_type" in block or "vocab_file" in block
    if kind not in TOKENIZERS or not is_given:
        return
    ours, flag = TOKENIZERS[kind]
    yield "tokenizer_type", ["--tokenizer-type", ours]
    if block.get("vocab_file"):
        yield "vocab_file", [flag, block["vocab_file"]]


def _initial_words(block: Mapping[str, Any]) -> Words:
    """Standard deviations of initial weights: that of most, and that of the output projections of a block,
    which is the first over sqrt(2 × layers) here.

    small_init: sqrt(2 / (5 h)), Nguyen and Salazar 2019, arXiv:1910.05895, section 2.2;
    wang_init: 2 / (L sqrt(h)), of Wang and Komatsuzaki's GPT-J.
    """
    layers = block.get("num_layers")
    hidden = block.get("hidden_size")
    normal = block.get("init_method_std", 0.02)
    inner = block.get("init_method", "normal")
    output = block.get("output_layer_init_method", "scaled_normal")
    sizes_are_known = all(
        isinstance(size, int) and 0 < size <= LARGEST for size in (layers, hidden)
    )
    if not sizes_are_known or inner not in INITIAL or output not in INITIAL:
        return

    deviation = {
        "normal": normal,
        "scaled_normal": normal / math.sqrt(2 * layers),
        "small_init": math.sqrt(2 / (5 * hidden)),
        "wang_init": 2 / layers / math.sqrt(hidden),
    }
    yield "init_method", ["--init-method-std", repr(deviation[inner])]

    factor = deviation[output] * math.sqrt(2 * layers) / deviation[inner]
    if not math.isclose(factor, 1.0):
        groups = [f"{pattern}:init_factor={factor!r}" for pattern in OUTPUTS]
        yield (
            "output_layer_init_method",
            ["--param-group", groups[0], "--param-group", groups[1]],
        )
