"""YAML files of GPT-NeoX → the same settings as flags and a DeepSpeed JSON.

    --config 125M.yml local_setup.yml

Names may have hyphens or underscores. All files of a run are one configuration, as GPT-NeoX merges them; keys
that are absent have GPT-NeoX's defaults where those differ (`neox_names.DEFAULTS`). Blocks of DeepSpeed are
read as its JSON. A key is refused where its effect on a number is not reproduced.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from .config_files import read_yaml, text_of
from .deepspeed_json import reading_of
from .flags import read_flags
from .neox_names import (
    DEFAULTS,
    MARKS,
    OF_DEEPSPEED,
    ONLY,
    POSITIONS,
    SWITCHES,
    TOKENIZERS,
    VALUES,
    WITHOUT_EFFECT,
)
from .reading import Reading
from .run import Source

Block = Mapping[str, Any]
OUTPUTS = ("*.linear_proj.weight", "*.linear_fc2.weight")      # the output projections of a block
ATTENTION = ("flash", "global")          # kinds of attention_config that are softmax attention


def is_neox(root: Any) -> bool:
    """Whether a parsed YAML file is GPT-NeoX's."""
    return isinstance(root, dict) and len(MARKS & {_plain(name) for name in root}) >= 2


def read_neox(name: str, roots: Sequence[Block]) -> Reading:
    """The settings and problems of the files of one run. name: of the files, for messages."""
    reading = Reading()
    block: dict[str, Any] = {}
    for root in roots:
        for key, value in root.items():
            key = _plain(key)
            if key in block and block[key] != value:
                reading.refuse(f"{name}: {key} is given twice, as {block[key]!r} and {value!r}.")
            block[key] = value
    _read_flags(name, block, reading)
    _read_json(name, block, reading)
    _read_rest(name, block, reading)
    return reading


def read_yamls(paths: Sequence[str]) -> list[Reading]:
    """The readings of the files of --config: one for all of them if one is GPT-NeoX's, else one for each."""
    roots = [] if not paths else [_root(path) for path in paths]
    if not any(map(is_neox, roots)) or not all(isinstance(root, dict) for root in roots):
        return list(map(read_yaml, paths))
    return [read_neox(", ".join(paths), roots)]


def _root(path: str) -> Any:
    """The content of a YAML file; None if it cannot be read, which `read_yaml` reports."""
    import yaml
    try:
        return yaml.safe_load(text_of(path, "--config"))
    except (ConfigError, yaml.YAMLError, RecursionError, ValueError):     # ValueError: `!!float x`
        return None


def _plain(name: object) -> str:
    return str(name).replace("-", "_")


# --------------------------------------------------------------------------------------------- flags
def _read_flags(name: str, block: Block, reading: Reading) -> None:
    """Settings of the keys that stand for flags."""
    for key, words in _words({**DEFAULTS, **block}):
        line = read_flags(words)
        source = Source("yaml", f"{name} {key}" if key in block else f"GPT-NeoX's default of {key}")
        reading.settings += [replace(setting, source=source) for setting in line.settings]
        reading.unread |= line.unread
        for problem in line.problems:
            reading.refuse(f'{name}: "{key}": {problem}')


def _words(block: Block) -> Iterator[tuple[str, list[str]]]:
    """(key, the words of the command line that it stands for)."""
    for key, flag in VALUES.items():
        if block.get(key) is not None:
            values = block[key] if isinstance(block[key], list) else [block[key]]
            yield key, [flag, *map(str, values)]
    yield from ((key, [flag]) for key, flag in SWITCHES.items() if block.get(key) is True)
    if (stages := block.get("pipe_parallel_size")) is not None:
        yield "pipe_parallel_size", ["--pipeline-model-parallel-size", str(stages or 1)]
    if block.get("checkpoint_activations") is True:
        yield "checkpoint_activations", ["--recompute-granularity", "full"]
    if (kind := block.get("pos_emb")) in POSITIONS:
        yield "pos_emb", ["--position-embedding-type", POSITIONS[kind]]
    gelu = "gelu" if block.get("bias_gelu_fusion") is True else "gelu_exact"      # fused: the tanh form
    yield "bias_gelu_fusion", ["--activation", gelu]
    if block.get("use_bias_in_mlp") is block.get("use_bias_in_attn_linear") is False:
        yield "use_bias_in_mlp", ["--disable-bias-linear"]
    yield from _norm_words(block)
    yield from _rate_words(block)
    yield from _data_words(block)
    yield from _initial_words(block)


def _norm_words(block: Block) -> Iterator[tuple[str, list[str]]]:
    key, default = "layernorm_epsilon", 1e-5
    if block.get("norm") == "rmsnorm":
        yield "norm", ["--normalization", "RMSNorm"]
        key, default = "rms_norm_epsilon", 1e-8
    yield key, ["--norm-epsilon", str(block.get(key, default))]


def _rate_words(block: Block) -> Iterator[tuple[str, list[str]]]:
    """The decay of the learning rate. Its warm-up begins with the rate of the first step, not with 0."""
    style = block.get("lr_decay_style", "linear")
    if style in ("constant", "cosine") or style == "linear" and not block.get("min_lr"):
        yield "lr_decay_style", ["--lr-decay-style", style, "--lr-warmup-style", "linear_from_one"]


def _data_words(block: Block) -> Iterator[tuple[str, list[str]]]:
    for part in ("train", "valid", "test"):
        paths, weights = block.get(f"{part}_data_paths"), block.get(f"{part}_data_weights")
        if isinstance(paths, list) and (not isinstance(weights, list) or len(weights) == len(paths)):
            pairs = zip(weights, paths) if isinstance(weights, list) else ((path,) for path in paths)
            words = [str(word) for pair in pairs for word in pair]
            yield f"{part}_data_paths", [f"--{part}-data-path", *words]
    kind = block.get("tokenizer_type", "GPT2BPETokenizer")
    if kind in TOKENIZERS and (block.get("vocab_file") or "tokenizer_type" in block):
        ours, flag = TOKENIZERS[kind]
        yield "tokenizer_type", ["--tokenizer-type", ours]
        if block.get("vocab_file"):
            yield "vocab_file", [flag, str(block["vocab_file"])]


def _initial_words(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Standard deviations of initial weights: that of most, and that of the output projections of a block,
    which is the first over sqrt(2 × layers) here.

    small_init: sqrt(2 / (5 h)), Nguyen and Salazar 2019, arXiv:1910.05895, section 2.2;
    wang_init: 2 / (L sqrt(h)), of Wang and Komatsuzaki's GPT-J.
    """
    layers, hidden = block.get("num_layers"), block.get("hidden_size")
    normal = block.get("init_method_std", 0.02)
    inner = block.get("init_method", "normal")
    output = block.get("output_layer_init_method", "scaled_normal")
    known = {inner, output} <= {"normal", "scaled_normal", "small_init", "wang_init"}
    if not known or not all(isinstance(n, int) and n > 0 for n in (layers, hidden)):
        return
    deviation = {"normal": normal, "scaled_normal": normal / math.sqrt(2 * layers),
                 "small_init": math.sqrt(2 / (5 * hidden)), "wang_init": 2 / layers / math.sqrt(hidden)}
    yield "init_method", ["--init-method-std", repr(deviation[inner])]
    factor = deviation[output] * math.sqrt(2 * layers) / deviation[inner]
    if not math.isclose(factor, 1.0):
        groups = [f"{pattern}:init_factor={factor!r}" for pattern in OUTPUTS]
        yield "output_layer_init_method", ["--param-group", groups[0], "--param-group", groups[1]]


# ------------------------------------------------------------------------------- DeepSpeed and the rest
def _read_json(name: str, block: Block, reading: Reading) -> None:
    """Settings of the blocks that DeepSpeed reads."""
    inner = {key: value for key, value in block.items() if key in OF_DEEPSPEED}
    half = dict(inner.get("fp16") or {})
    is_bf16 = half.pop("type", None) == "bfloat16" or block.get("precision") == "bfloat16"
    half.pop("fp16", None)                                     # the same as "enabled"
    if is_bf16:
        inner.pop("fp16", None)
        inner["bf16"] = {"enabled": True}
    elif half:
        inner["fp16"] = half
    elif block.get("precision") == "fp16":
        inner["fp16"] = {"enabled": True}
    if isinstance(inner.get("bf16"), dict):                    # bf16 has no loss scale
        inner["bf16"] = {"enabled": inner["bf16"].get("enabled", inner["bf16"].get("bf16", True))}
    if isinstance(zero := inner.get("zero_optimization"), dict) and zero.get("cpu_offload") is False:
        inner["zero_optimization"] = {key: value for key, value in zero.items() if key != "cpu_offload"}
    try:
        found = reading_of(name, inner)
    except ConfigError as error:
        reading.refuse(error)
        return
    reading.settings += found.settings
    reading.problems += found.problems
    reading.unread |= found.unread
    reading.without_effect |= found.without_effect


OTHERS = {"bias_gelu_fusion", "checkpoint_activations", "init_method", "init_method_std",
          "layernorm_epsilon", "output_layer_init_method", "pipe_parallel_size", "precision",
          "rms_norm_epsilon", "test_data_weights", "train_data_weights", "use_bias_in_attn_linear",
          "use_bias_in_mlp", "valid_data_weights"}


def _read_rest(name: str, block: Block, reading: Reading) -> None:
    """Notes of keys that change nothing, and problems of those that are not reproduced."""
    read = {*VALUES, *SWITCHES, *OF_DEEPSPEED, *OTHERS, *(f"{part}_data_paths" for part in
                                                           ("train", "valid", "test"))}
    for key, value in block.items():
        if key in WITHOUT_EFFECT:
            reading.without_effect[f"{name} {key}"] = WITHOUT_EFFECT[key]
        elif key in read or value is None:
            continue
        elif reason := _refusal(key, value, block):
            reading.refuse(f'{name}: "{key}" {str(value)[:40]}: {reason}.')
        elif key in ONLY:
            reading.without_effect[f"{name} {key}"] = ONLY[key][1]
    _check_pairs(name, block, reading)


def _refusal(key: str, value: Any, block: Block) -> str | None:
    """Why the value of a key is refused; None if it is not."""
    if key == "attention_config":
        kinds = {str(kind) for entry in value for kind in entry[0]} if isinstance(value, list) and all(
            isinstance(entry, list) and entry and isinstance(entry[0], list) for entry in value) else {"?"}
        return None if kinds <= set(ATTENTION) else ONLY[key][1]
    if key in ("use_bias_in_norms", "activation") and block.get("norm") == "rmsnorm" and value is False:
        return None                                            # RMSNorm has no bias
    if key in ONLY:
        return None if value in ONLY[key][0] else ONLY[key][1]
    tables = {"pos_emb": POSITIONS, "tokenizer_type": TOKENIZERS}
    if key in tables:
        known = ", ".join(tables[key])
        return None if value in tables[key] else f"it is not available; {known} are"
    if key in ("lr_decay_style", "vocab_file") or value is False:
        return None
    return "this key of GPT-NeoX has no option here"


def _check_pairs(name: str, block: Block, reading: Reading) -> None:
    """Problems between keys."""
    style, lowest = block.get("lr_decay_style", "linear"), block.get("min_lr")
    if style == "exponential" or style == "linear" and lowest:
        reading.refuse(f'{name}: "lr_decay_style" {style} is another curve in GPT-NeoX, which cuts it off at '
                       "min_lr. Use cosine or constant.", "optimizer.lr_decay_style")
    known = {"normal", "scaled_normal", "small_init", "wang_init"}
    for key in ("init_method", "output_layer_init_method"):
        if block.get(key, "normal") not in known:
            reading.refuse(f'{name}: "{key}" {block[key]} is not available. Use one of '
                           f"{', '.join(sorted(known))}.")
    mlp, attention = block.get("use_bias_in_mlp", True), block.get("use_bias_in_attn_linear", True)
    if mlp != attention:
        reading.refuse(f'{name}: "use_bias_in_mlp" {mlp} and "use_bias_in_attn_linear" {attention}: linear '
                       "layers all have biases or none. Make them equal.")
    if block.get("save_interval") and block.get("checkpoint_factor"):
        reading.refuse(f'{name}: "save_interval" and "checkpoint_factor" both set how often to save.')
