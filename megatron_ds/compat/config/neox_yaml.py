"""YAML files of GPT-NeoX → the same settings as flags and a DeepSpeed JSON.

    --config 125M.yml local_setup.yml

Names may have hyphens or underscores. All files of a run are one configuration, as GPT-NeoX merges them; keys
that are absent or empty have GPT-NeoX's defaults where those differ (`neox_names.DEFAULTS`). Blocks of
DeepSpeed are read as its JSON. A key is refused where its effect on a number is not reproduced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...config.run import Source
from ...config.sources.config_files import read_yaml, text_of
from ...config.sources.flags import read_flags
from ...config.sources.reading import SourceReading
from ...errors import ConfigError
from .deepspeed_json import reading_of
from .neox_names import (
    DEFAULTS,
    INITIAL,
    MARKS,
    OF_DEEPSPEED,
    ONLY,
    POSITIONS,
    SWITCHES,
    TOKENIZERS,
    TYPES,
    VALUES,
    WITHOUT_EFFECT,
)
from .neox_words import words_of

Block = Mapping[str, Any]
ATTENTION = ("flash", "global")  # kinds of attention_config that are softmax attention
PARTS = ("train", "valid", "test")
# Keys that `neox_words` reads with others, and those of the JSON's precision.
OTHERS = frozenset(
    (
        "bias_gelu_fusion",
        "checkpoint_activations",
        "init_method",
        "init_method_std",
        "layernorm_epsilon",
        "output_layer_init_method",
        "pipe_parallel_size",
        "precision",
        "rms_norm_epsilon",
        "use_bias_in_attn_linear",
        "use_bias_in_mlp",
        "use_bias_in_norms",
    )
)
READ = frozenset(
    (
        *VALUES,
        *SWITCHES,
        *OF_DEEPSPEED,
        *OTHERS,
        *(f"{part}_data_paths" for part in PARTS),
        *(f"{part}_data_weights" for part in PARTS),
    )
)


def is_neox(root: Any) -> bool:
    """Return whether a parsed YAML file is GPT-NeoX's."""
    return isinstance(root, dict) and len(MARKS & {_plain(name) for name in root}) >= 2


def read_neox(name: str, roots: Sequence[Block]) -> SourceReading:
    """Return the settings and problems of the files of one run. name: of the files, for messages."""
    reading = SourceReading()
    block = _checked(name, _merged(name, roots, reading), reading)
    _read_flags(name, block, reading)
    _read_json(name, block, reading)
    _read_rest(name, block, reading)
    return reading


def read_yamls(paths: Sequence[str]) -> list[SourceReading]:
    """Return the readings of the files of --config: one for all of them if one is GPT-NeoX's, else one for each."""
    roots = [_root(path) for path in paths]
    are_blocks = all(isinstance(root, dict) for root in roots)
    if are_blocks and any(map(is_neox, roots)):
        return [read_neox(", ".join(paths), roots)]
    return list(map(read_yaml, paths))


def _root(path: str) -> Any:
    """Return the content of a YAML file; None if it cannot be read, which `read_yaml` reports."""
    from ...config.sources.bounded_yaml import load_yaml

    try:
        return load_yaml(text_of(path, "--config"))
    except (ConfigError, RecursionError):
        return None


def _plain(name: object) -> str:
    return str(name).replace("-", "_")


def _merged(
    name: str, roots: Sequence[Block], reading: SourceReading
) -> dict[str, Any]:
    """Return the keys with a value of all files, spelt with underscores."""
    block: dict[str, Any] = {}
    for root in roots:
        for key, value in root.items():
            key = _plain(key)
            if value is None:
                continue
            if key in block and block[key] != value:
                reading.refuse(
                    f"{name}: {key} is given twice, as {_shown(block[key])} and {_shown(value)}."
                )
            block[key] = value
    return block


def _checked(name: str, block: Block, reading: SourceReading) -> dict[str, Any]:
    """Return the block without values of another type than their key's, each of which is a problem."""
    kept = {}
    for key, value in block.items():
        noun, fits = TYPES.get(key, ("", None))
        if fits is None or fits(value):
            kept[key] = value
        else:
            reading.refuse(f'{name}: "{key}" should be {noun}, not {_shown(value)}.')
    return kept


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


# --------------------------------------------------------------------------------------------- flags
def _read_flags(name: str, block: Block, reading: SourceReading) -> None:
    """Settings of the keys that stand for flags."""
    for key, words in words_of({**DEFAULTS, **block}):
        line = read_flags(words)
        source = Source(
            "yaml", f"{name} {key}" if key in block else f"GPT-NeoX's default of {key}"
        )
        reading.settings += [
            replace(setting, source=source) for setting in line.settings
        ]
        reading.unread |= line.unread
        for problem in line.problems:
            reading.refuse(f'{name}: "{key}": {problem}')


# ------------------------------------------------------------------------------- DeepSpeed and the rest
def _read_json(name: str, block: Block, reading: SourceReading) -> None:
    """Settings of the blocks that DeepSpeed reads."""
    inner = {
        key: _with_text_keys(value)
        for key, value in block.items()
        if key in OF_DEEPSPEED
    }
    _set_precision(inner, block.get("precision"))
    zero = inner.get("zero_optimization", {})
    if zero.get("cpu_offload") is False:
        del zero["cpu_offload"]
    try:
        found = reading_of(name, inner)
    except ConfigError as error:
        reading.refuse(error)
        return
    reading.settings += found.settings
    reading.problems += found.problems
    reading.unread |= found.unread
    reading.without_effect |= found.without_effect


def _with_text_keys(value: Any) -> Any:
    """Return a copy of the value, with the keys that a JSON would have."""
    if isinstance(value, list):
        return [_with_text_keys(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {str(key): _with_text_keys(item) for key, item in value.items()}


def _set_precision(inner: dict[str, Any], precision: str | None) -> None:
    """Write the blocks fp16 and bf16 as DeepSpeed has them."""
    half = inner.pop("fp16", {})
    kind = half.pop("type", None)
    half.pop("fp16", None)  # the same as "enabled"
    if "bfloat16" in (kind, precision):
        inner["bf16"] = {"enabled": True}
    elif half:
        inner["fp16"] = half
    elif precision == "fp16":
        inner["fp16"] = {"enabled": True}

    if "bf16" in inner:  # bf16 has no loss scale
        bf16 = inner["bf16"]
        inner["bf16"] = {"enabled": bf16.get("enabled", bf16.get("bf16", True))}


def _read_rest(name: str, block: Block, reading: SourceReading) -> None:
    """Notes of keys that change nothing, and problems of those that are not reproduced."""
    for key, value in block.items():
        if key in WITHOUT_EFFECT:
            reading.without_effect[f"{name} {key}"] = WITHOUT_EFFECT[key]
        elif key in READ:
            continue
        elif reason := _refusal(key, value, block):
            reading.refuse(f'{name}: "{key}" {str(value)[:40]}: {reason}.')
        elif key in ONLY:
            reading.without_effect[f"{name} {key}"] = ONLY[key][1]
    _check_pairs(name, block, reading)


def _refusal(key: str, value: Any, block: Block) -> str | None:
    """Return why the value of a key is refused; None if it is not."""
    if key == "attention_config":
        is_softmax = _attention_kinds(value) <= set(ATTENTION)
        return None if is_softmax else ONLY[key][1]
    if key in ONLY:
        allowed, reason = ONLY[key]
        return None if value in allowed else reason
    tables = {"pos_emb": POSITIONS, "tokenizer_type": TOKENIZERS}
    if key in tables:
        known = ", ".join(tables[key])
        return None if value in tables[key] else f"it is not available; {known} are"
    if key in ("lr_decay_style", "vocab_file") or value is False:
        return None
    return "this key of GPT-NeoX has no option here"


def _attention_kinds(value: Any) -> set[str]:
    """Return the kinds in `[[["flash", "rwkv"], 6], …]`; {"?"} for a value of another form."""
    kinds: set[str] = set()
    for entry in value if isinstance(value, list) else [None]:
        if not isinstance(entry, list) or not entry or not isinstance(entry[0], list):
            return {"?"}
        kinds |= set(map(str, entry[0]))
    return kinds


def _check_pairs(name: str, block: Block, reading: SourceReading) -> None:
    """Problems between keys."""
    style = block.get("lr_decay_style", "linear")
    lowest = block.get("min_lr")
    if style == "exponential" or style == "linear" and lowest:
        reading.refuse(
            f'{name}: "lr_decay_style" {style} is another curve in GPT-NeoX, which cuts it off at '
            "min_lr. Use cosine or constant.",
            "optimizer.lr_decay_style",
        )

    for key in ("init_method", "output_layer_init_method"):
        if block.get(key, "normal") not in INITIAL:
            reading.refuse(
                f'{name}: "{key}" {block[key]} is not available. Use one of '
                f"{', '.join(INITIAL)}."
            )

    # One switch removes all biases here, and another those of attention.
    mlp = block.get("use_bias_in_mlp", True)
    attention = block.get("use_bias_in_attn_linear", True)
    if attention and not mlp:
        reading.refuse(
            f'{name}: "use_bias_in_mlp" {mlp} and "use_bias_in_attn_linear" {attention}: where the '
            "layers of attention have biases, those of the feed-forward have them too. Make both equal."
        )

    if block.get("save_interval") and block.get("checkpoint_factor"):
        reading.refuse(
            f'{name}: "save_interval" and "checkpoint_factor" both set how often to save.'
        )
