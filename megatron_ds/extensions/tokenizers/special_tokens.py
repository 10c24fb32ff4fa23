"""Special tokens that the files of a Hugging Face tokenizer name, in the order of transformers 5.

tokenizer_config.json    {"eos_token": "</s>" or {"content": "</s>", …}, …}
special_tokens_map.json  the same. Its values come first; it is not read where tokenizer_config.json has
                         added_tokens_decoder, as all later versions of transformers write
"""

import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...host.regular_file import read_text

LARGEST = 512 << 20  # bytes of a file of a tokenizer; public ones have up to 35 MB

logger = logging.getLogger(__name__)
CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"
DECODER = "added_tokens_decoder"
NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Common names of the end-of-document token, of which one is taken where no file names it.
END_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "[SEP]",
)


def special_tokens(folder: Path) -> dict[str, str]:
    """Names, such as "eos_token", and texts of the tokens that the files of a folder name. Raises
    DataError."""
    found = _named(folder / CONFIG)
    if DECODER not in _object_in(folder / CONFIG):
        found |= _named(folder / MAP)
    return {name: text for name, text in found.items() if text is not None}


def _named(path: Path) -> dict[str, str | None]:
    """Return the tokens in one file: a string, or an object with the text under "content"."""
    found = {}
    for name, token in _object_in(path).items():
        text = token.get("content") if isinstance(token, Mapping) else token
        if name in NAMES:
            if token is not None and not isinstance(text, str):
                raise DataError(
                    f"{path}: {name} is {_short(token)}, not a string and not an object with "
                    "one as content. Correct it, or save the tokenizer again with "
                    "save_pretrained of transformers."
                )
            found[name] = text
    return found


def _object_in(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} without the file."""
    if not path.exists():
        return {}
    content = read_json_text(path, str(path))
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a JSON object.")
    return content


def read_json_text(path: str | Path, name: str) -> Any:
    """Return the content of a JSON file that messages call `name`. Raises DataError."""
    try:
        return json.loads(read_text(path, DataError, name, most=LARGEST))
    except ValueError as error:  # JSON and UTF-8 errors are both ValueErrors
        raise DataError(f"{name} is not JSON text: {error}.") from None
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}.") from None
    except RecursionError:
        raise DataError(
            f"{name} is not a file of a tokenizer: its JSON is nested too deeply."
        ) from None


def _short(value: object, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


def end_of_document(file: str, vocabulary: Mapping[str, int]) -> int:
    """Return the id of the token that ends a document, for a tokenizer.json: the eos_token of the files beside it.

    Without one, the only token of END_NAMES in the vocabulary. Raises DataError if there are none or several,
    or if the eos_token is not in the vocabulary: transformers would give it a new id behind all others.
    """
    folder = Path(file).parent
    _check_added(folder / CONFIG, vocabulary)
    named = special_tokens(folder).get("eos_token")
    if named is not None:
        if named not in vocabulary:
            raise DataError(
                f"the files beside {file} name {named!r} as eos_token, which ends a document, "
                f"and the vocabulary of {len(vocabulary)} tokens lacks it. Give the "
                f"tokenizer.json that belongs to them, or correct eos_token in {CONFIG}."
            )
        return vocabulary[named]
    candidates = [name for name in END_NAMES if name in vocabulary]
    if len(candidates) == 1:
        _log_candidate(file, candidates[0], vocabulary[candidates[0]])
        return vocabulary[candidates[0]]
    what = (
        f"no end-of-document token: none of {', '.join(END_NAMES)}"
        if not candidates
        else f"{len(candidates)} tokens that may end a document: {', '.join(candidates)}"
    )
    raise DataError(
        f"{file} has {what}. Name one as eos_token in a {CONFIG} next to it."
    )


def _check_added(path: Path, vocabulary: Mapping[str, int]) -> None:
    """Raises DataError for added tokens that tokenizer.json lacks: transformers adds them, and texts that contain
    them would have other ids there."""
    added = _object_in(path).get(DECODER)
    if added is None:
        return
    if not isinstance(added, Mapping) or not all(
        isinstance(token, Mapping) and isinstance(token.get("content"), str)
        for token in added.values()
    ):
        raise DataError(
            f"{path}: {DECODER} is not a table from id to objects with a content."
        )
    if absent := [
        token["content"]
        for token in added.values()
        if token["content"] not in vocabulary
    ]:
        raise DataError(
            f"{path} adds {len(absent)} tokens that tokenizer.json lacks, first {absent[0]!r}: "
            "the files do not belong together. Save the tokenizer again with save_pretrained of "
            "transformers."
        )


@functools.cache  # once for each file
def _log_candidate(file: str, name: str, number: int) -> None:
    logger.info(
        "%s, id %d, ends a document: no file beside %s names an eos_token",
        name,
        number,
        file,
    )
