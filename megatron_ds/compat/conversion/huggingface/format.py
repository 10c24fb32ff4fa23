"""Folders of Hugging Face: `from_pretrained` of transformers reads them, `save_pretrained` writes them.

config.json                      model_type, sizes                        huggingface/settings.py
generation_config.json           ids of special tokens
model.safetensors, or model-00001-of-0000N.safetensors and an index       huggingface/families.py
tokenizer.json, tokenizer_config.json, …                                  copied
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .... import __version__
from ....checkpoint.folder import write_durably
from ....checkpoint.safetensors_folder import INDEX, SINGLE, TensorEntry, write_folder
from ....checkpoint.tokenizer_files import OF_A_FOLDER
from ....config.options.model import ModelConfig
from ....errors import CheckpointError, DataError
from ....features import Provided
from ....models.identity import model_identity
from ....mpu.group import solo
from ....registry import did_you_mean
from ..family import (
    Family,
    entries_of,
    initial,
    listing,
    matches,
    missing,
    model_of,
    replaced,
    to_ours,
    to_theirs,
    unused,
)
from ..files.read_ahead import ReadAhead
from ..files.safetensors_reader import read_folder, read_json
from ..files.stored_tensor import WEIGHT, LogicalCheckpoint, RawCheckpoint, StoredTensor
from ..formats import Format, Wishes
from ..malformed import WRONG_KIND
from ..published import published
from ..run_values import LOWER_CASE, TOKENIZER_CONFIG
from .block_scales import QUANTIZED, without_scales
from .families import FAMILIES, REFUSED
from .keys import ROTARY_KEYS
from .predictions import OTHER_NAME, left_out, number_of, options_of_depths
from .rules import layer_frequency
from .windows import skip_frequency

# A module of `special_tokens` and `END_NAMES`.
SPECIAL_TOKENS: Provided[Any] = Provided("special tokens")
NAME = "huggingface"
CONFIG = "config.json"
GENERATION = "generation_config.json"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Weights that are added to those of a model, as peft writes them.
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


# ------------------------------------------------------------------ reading
def detect(folder: Path) -> bool:
    """Return whether the folder has a config.json and tensors beside it, or an adapter, which `read` refuses."""
    has_tensors = any((folder / name).is_file() for name in (SINGLE, INDEX)) or any(
        folder.glob("pytorch_model*.bin")
    )
    return has_tensors and (folder / CONFIG).is_file() or bool(adapter_files(folder))


def expects(folder: Path) -> bool:
    """Return whether a config.json names a model, whose weights are not there."""
    if not (folder / CONFIG).is_file():
        return False
    try:
        return "model_type" in read_json(folder / CONFIG)
    except CheckpointError:
        return False


def read_raw(folder: Path) -> RawCheckpoint:
    """Return the settings and tensors as they are in the files. Raises CheckpointError."""
    check_adapter(folder)
    settings = read_json(folder / CONFIG)
    return RawCheckpoint(folder, {WEIGHT: read_folder(folder)}, settings)


def adapter_files(folder: Path) -> list[str]:
    """Return the names of the files of an adapter in the folder."""
    return [name for name in ADAPTER if (folder / name).is_file()]


def check_adapter(folder: Path) -> None:
    """Raises CheckpointError if the folder holds an adapter, alone or beside a model."""
    if found := adapter_files(folder):
        raise CheckpointError(
            f"{folder} holds an adapter ({found[0]}), whose weights are added to those of a model. Read it as that: "
            "--from peft (--load-format peft in training). To use a model beside it without the adapter, remove the "
            "files of the adapter."
        )


def family_of(settings: Mapping[str, Any], folder: Path) -> Family:
    """Return the family of a config.json. Raises CheckpointError with the reason for those that are not computed."""
    name = settings.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    why = REFUSED.get(name) if isinstance(name, str) else None
    raise CheckpointError(
        f"{folder / CONFIG}: model_type {name!r} is not supported"
        f"{f': {why}' if why else did_you_mean(str(name), [*FAMILIES])}. Supported: "
        f"{', '.join(FAMILIES)}."
    )


def read(folder: Path, wishes: Wishes) -> LogicalCheckpoint:
    """Return the checkpoint in our terms. Raises CheckpointError."""
    # The settings decide the family, and whether its weights can be trained.
    raw = read_raw(folder)
    family = family_of(raw.settings, folder)
    for key in ("dtype", "torch_dtype"):
        if not isinstance(raw.settings.get(key), str | None):
            raise CheckpointError(
                f"{folder / CONFIG} is damaged: {key} is {raw.settings[key]!r}, not a "
                "name."
            )
    # Damaged settings raise any error, which is reported with the file.
    try:
        options = family.options(raw.settings)
        options |= options_of_depths(wishes.mtp_num_layers, family, raw.settings)
    except WRONG_KIND as error:
        raise CheckpointError(
            f"{folder / CONFIG} is damaged: {type(error).__name__} {error}."
        ) from error
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder / CONFIG}, model_type {family.name}: {error}."
        ) from error
    # The weights are renamed and packed; a missing, unused or misshapen tensor is an error.
    model = model_of(options, folder / CONFIG)
    stored = without_scales(raw.settings, raw.tensors[WEIGHT], folder / CONFIG)
    tensors = with_prefix(stored, family)
    options, tensors = check_tied(options, tensors, model, family)
    model = model_of(options, folder / CONFIG)
    entries = entries_of(family, model)
    absent = missing(entries, tensors, wishes.allow_missing)
    allowed = (*wishes.allow_unused, *left_out(family, model, raw.settings))
    left = unused(entries, tensors, family, allowed)
    ours = to_ours(entries, tensors, model)
    ours |= initial(entries, {entry.ours for entry in entries} - ours.keys())
    # Tokenizer and generation settings are kept for a conversion back.
    files = {name: folder / name for name in OF_A_FOLDER if (folder / name).is_file()}
    source = {"format": NAME, "family": family.name, "settings": dict(raw.settings)}
    if (folder / GENERATION).is_file():
        source["generation"] = read_json(folder / GENERATION)
    ignored = (
        *(f"{name} (missing)" for name in absent),
        *(
            f"{name} (replaced by new values, as other parts of its tensor are missing)"
            for name in replaced(entries, tensors)
        ),
    )
    return LogicalCheckpoint(
        folder,
        options,
        {WEIGHT: ours},
        tokenizer=files,
        source=source,
        ignored=ignored,
        unused=tuple(left),
        notes=tuple(family.notes(raw.settings)),
    )


def with_prefix(
    tensors: Mapping[str, StoredTensor], family: Family
) -> Mapping[str, StoredTensor]:
    """Return the tensors under the names of the family's rows, of a model with a head, also if the files hold the bare
    model."""
    for pattern, known in family.aliases:
        tensors = {re.sub(pattern, known, name): t for name, t in tensors.items()}
    if not family.prefix or any(name.startswith(family.prefix) for name in tensors):
        return tensors
    heads = {name for name, _ in family.tied}
    return {
        name if name in heads else family.prefix + name: tensor
        for name, tensor in tensors.items()
    }


def check_tied(
    options: dict,
    tensors: Mapping[str, StoredTensor],
    model: ModelConfig,
    family: Family,
) -> tuple[dict, Mapping[str, StoredTensor]]:
    """Return the tensors without heads that equal embeddings, and without other copies. Raises CheckpointError if one
    of them differs."""
    for copy, original in family.copies(model).items():
        tensors = _without_copy(
            copy,
            original,
            tensors,
            "which each layer that predicts later tokens shares with the model. Such a layer with weights of its own "
            "is not computed: omit --mtp-num-layers.",
        )
    if model.untie_embeddings_and_output_weights:
        return options, tensors
    for head, original in family.tied:
        tensors = _without_copy(
            head,
            original,
            tensors,
            "although tie_word_embeddings is true. Set it to false in config.json if the model has an output layer of "
            "its own; remove the tensor if it has not.",
        )
    return options, tensors


def _without_copy(
    copy: str, original: str, tensors: Mapping[str, StoredTensor], why: str
) -> Mapping[str, StoredTensor]:
    """Return the tensors without a copy of another one. why: end of the message of the CheckpointError where it
    differs"""
    if copy not in tensors or original not in tensors:
        return tensors
    if not torch.equal(tensors[copy].read(), tensors[original].read()):
        raise CheckpointError(f"{tensors[copy].place} differs from {original}, {why}")
    return {name: tensor for name, tensor in tensors.items() if name != copy}


# ------------------------------------------------------------------ writing
def family_for(
    checkpoint: LogicalCheckpoint, model: ModelConfig, wishes: Wishes
) -> Family:
    """Return the family to write: --family, else the source's, else the first that expresses the model.

    Raises CheckpointError naming the options that the nearest family lacks.
    """
    if wishes.family is not None and wishes.family not in FAMILIES:
        raise CheckpointError(
            f"--family {wishes.family} is not known"
            f"{did_you_mean(wishes.family, [*FAMILIES]) or '.'} Known: "
            f"{', '.join(FAMILIES)}."
        )
    # The nearest family, the preferred one first.
    preferred = wishes.family or checkpoint.source.get("family")
    names = (
        [wishes.family]
        if wishes.family
        else sorted(FAMILIES, key=lambda name: name != preferred)
    )
    differences = {name: _differences(FAMILIES[name], model) for name in names}
    name = min(names, key=lambda name: len(differences[name]))
    if differences[name]:
        what = (
            f"--family {name} differs"
            if wishes.family
            else f"no family of Hugging Face computes what this model does. The nearest, {name}, differs"
        )
        raise CheckpointError(
            f"{what} from this model in {listing(differences[name])}. Export it with "
            "megatron-ds export, whose tensors keep our names."
        )
    return FAMILIES[name]


def _differences(family: Family, model: ModelConfig) -> list[str]:
    """Return the options that differ after a round trip through the settings of a family."""
    wanted = _identity(model)
    try:
        settings = {**family.settings(model), **family.about}
        options = family.options(settings)
        options |= options_of_depths(number_of(settings), family, settings)
        found = _identity(model_of(options, family.name))
    except (CheckpointError, TypeError, KeyError, ValueError) as error:
        return [str(error), *map(str, range(9))]
    return [
        f"{name} ({wanted.get(name)!r}, there {found.get(name)!r})"
        for name in sorted(wanted | found)
        if wanted.get(name) != found.get(name)
    ]


def _identity(model: ModelConfig) -> dict[str, Any]:
    """Return `model_identity`, with one spelling of the layers that have a window, and of those without positions."""
    if any(model.windowed):
        model = replace(model, window_attn_skip_freq=skip_frequency(model.windowed))
    if any(model.unrotated):
        model = replace(model, no_rope_freq=layer_frequency(model.unrotated))
    return model_identity(model)


def write(checkpoint: LogicalCheckpoint, folder: Path, wishes: Wishes) -> list[str]:
    """Write the weights as a folder for `from_pretrained`, complete or not at all. Raises CheckpointError."""
    # The family gives the names of the tensors and the settings of the model.
    model = model_of(checkpoint.model, checkpoint.folder)
    family = family_for(checkpoint, model, wishes)
    theirs = to_theirs(entries_of(family, model), checkpoint.tensors[WEIGHT], model)
    for copy, original in family.copies(model).items():
        theirs[copy] = theirs[original]
    settings = config_of(checkpoint, family, model)
    # Without --dtype the weights take the dtype of the source's config.json.
    default = settings.get("dtype") or settings.get("torch_dtype")
    name = wishes.dtype or (default if default in DTYPES else "float32")
    entries = [
        TensorEntry(key, tensor.shape, _dtype_of(key, tensor, DTYPES[name], family))
        for key, tensor in theirs.items()
    ]
    rounded = sum(
        tensor.dtype == torch.float32 != entry.dtype
        for entry, tensor in zip(entries, theirs.values(), strict=True)
    )
    # Readers see the folder only when it is complete.
    with published(folder) as hidden:
        write_folder(
            hidden,
            entries,
            lambda ordered: _values(ordered, theirs, wishes),
            solo(),
            wishes.shard_bytes,
        )
        _write_json(hidden / CONFIG, settings | {"dtype": name, "torch_dtype": name})
        if model.model == "gpt":
            _write_json(hidden / GENERATION, _generation_of(checkpoint, settings))
        files = _write_tokenizer(checkpoint, hidden)
    lines = [
        f"wrote {len(entries)} tensors, {sum(entry.nbytes for entry in entries) / 2**20:.1f} MiB of "
        f"{name}, as {family.about['architectures'][0]} to {folder}",
        f"tokenizer: {', '.join(files)}"
        if files
        else "no tokenizer: the source has no files of one",
    ]
    if rounded and wishes.dtype is None:
        lines.append(
            f"{rounded} float32 tensors were rounded to {name}, the dtype of the source's "
            "config.json; --dtype float32 keeps their values"
        )
    others = sorted(kind for kind in checkpoint.tensors if kind != WEIGHT)
    if others:
        lines.append(
            f"left out, because the format has no place for it: {', '.join(others)}"
        )
    return lines


def _dtype_of(
    name: str, tensor: StoredTensor, wanted: torch.dtype, family: Family
) -> torch.dtype:
    is_kept = tensor.dtype == torch.float32 and matches(name, family.precise)
    return tensor.dtype if is_kept or not tensor.dtype.is_floating_point else wanted


def _values(
    entries: Sequence[TensorEntry], theirs: Mapping[str, StoredTensor], wishes: Wishes
) -> Iterator[torch.Tensor]:
    with ReadAhead(
        [theirs[entry.name] for entry in entries],
        [entry.dtype for entry in entries],
        wishes.done,
    ) as ahead:
        for index in range(len(entries)):
            yield ahead.take(index)


def config_of(
    checkpoint: LogicalCheckpoint, family: Family, model: ModelConfig
) -> dict[str, Any]:
    """Return config.json: settings of the source, where it is of the family, overwritten by those of the model."""
    source = checkpoint.source if checkpoint.source.get("family") == family.name else {}
    kept = {
        name: value
        for name, value in source.get("settings", {}).items()
        if name not in {*ROTARY_KEYS, QUANTIZED, OTHER_NAME}
    }
    settings = kept | family.settings(model) | dict(family.about)
    if kept:
        settings["architectures"] = kept.get("architectures", settings["architectures"])
    return (
        settings
        | {"use_cache": True, "converted_by": f"megatron_ds {__version__}"}
        | ({} if any(name in kept for name in TOKENS) else token_ids(checkpoint))
    )


def token_ids(checkpoint: LogicalCheckpoint) -> dict[str, int | None]:
    """Return the ids of the tokens that begin and end a text, from the files of the tokenizer; {} without these
    files.

    A token that they do not name has None: transformers would fill in the id of the family's first model.
    """
    if "tokenizer.json" not in checkpoint.tokenizer:
        return {}
    path = checkpoint.tokenizer["tokenizer.json"]
    ids = _vocabulary(path)
    named = _named_tokens(path)
    texts = {key: named.get(key.removesuffix("_id")) for key in TOKENS}
    return {key: None if text is None else ids.get(text) for key, text in texts.items()}


def _named_tokens(path: Path) -> dict[str, str]:
    """Return the special tokens of a tokenizer.json: those that the files beside it name. If no file names the end
    of a document, it is the only token that may be one. Raises CheckpointError."""
    try:
        named = SPECIAL_TOKENS.get().special_tokens(path.parent)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    ends = [
        name for name in SPECIAL_TOKENS.get().END_NAMES if name in _vocabulary(path)
    ]
    return {**({"eos_token": ends[0]} if len(ends) == 1 else {}), **named}


def _vocabulary(path: Path) -> dict[str, int]:
    """Return the mapping token → id of a tokenizer.json, with added tokens; {} for another kind of content."""
    content = read_json(path)
    model = content.get("model")
    added = content.get("added_tokens")
    found = (
        dict(model["vocab"])
        if isinstance(model, dict) and isinstance(model.get("vocab"), dict)
        else {}
    )
    return found | {
        token["content"]: token["id"]
        for token in added or ()
        if isinstance(token, dict) and {"content", "id"} <= token.keys()
    }


def _generation_of(
    checkpoint: LogicalCheckpoint, settings: Mapping[str, Any]
) -> dict[str, Any]:
    kept = checkpoint.source.get("generation")
    return (
        dict(kept)
        if kept
        else {
            "_from_model_config": True,
            **{
                name: settings[name]
                for name in TOKENS
                if settings.get(name) is not None
            },
        }
    )


def _write_tokenizer(checkpoint: LogicalCheckpoint, folder: Path) -> list[str]:
    # The files of the source are copied unchanged.
    for name, path in checkpoint.tokenizer.items():
        shutil.copyfile(path, folder / name)
    # transformers reads from the settings whether a vocab.txt is of lower case.
    if checkpoint.tokenizer_type in LOWER_CASE and "vocab.txt" in checkpoint.tokenizer:
        kept = (
            read_json(folder / TOKENIZER_CONFIG)
            if TOKENIZER_CONFIG in checkpoint.tokenizer
            else {}
        )
        _write_json(
            folder / TOKENIZER_CONFIG,
            {
                "tokenizer_class": "BertTokenizer",
                **kept,
                "do_lower_case": LOWER_CASE[checkpoint.tokenizer_type],
            },
        )
    # A tokenizer.json alone lacks the class and the end of text that transformers needs.
    if (
        "tokenizer.json" in checkpoint.tokenizer
        and TOKENIZER_CONFIG not in checkpoint.tokenizer
    ):
        end = _named_tokens(folder / "tokenizer.json").get("eos_token")
        _write_json(
            folder / TOKENIZER_CONFIG,
            {"tokenizer_class": "PreTrainedTokenizerFast"}
            | ({"eos_token": end} if end else {}),
        )
    return sorted(checkpoint.tokenizer)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_durably(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


FORMAT = Format(
    NAME,
    "folder of Hugging Face",
    detect,
    read,
    write,
    reads=("allow_missing", "allow_unused", "mtp_num_layers"),
    writes=("dtype", "family", "shard_bytes"),
    expects=expects,
)
