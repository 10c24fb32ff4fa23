"""How a text enters a model, and which tokens end one: the same for every command and every endpoint.

A text gets the ids that `tokenizer(text)` of transformers gives it: those that the tokenizer's file puts in front, then
its own. A text that already begins with them has them once. An empty text, where nothing is put in front, follows
the end of another one.

Texts are encoded as batches of one: the tokenizers library then lets other threads run, which serve other clients.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoint.tokenizer_files import ENDS
from ...config import DataConfig
from ...data.tokenizers import Tokenizer
from ...errors import DataError
from ...host.regular_file import read_regular

KEY = "eos_token_id"


def beginning_of(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that begin each text; [] for a tokenizer without any."""
    return list(getattr(tokenizer, "beginning", ()))


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text that follows another one, without those that begin a text."""
    (ids,) = tokenizer.encode_batch([text])
    begin = beginning_of(tokenizer)
    return ids[len(begin) :] if ids[: len(begin)] == begin else ids


def rendered_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the ids of a text of a chat template, which itself writes the beginning of a text."""
    (ids,) = tokenizer.encode_batch([text])
    return tuple(ids)


def text_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the ids with which a model reads a text from its beginning, at least one."""
    ids = [*beginning_of(tokenizer), *plain_ids(tokenizer, text)]
    return tuple(ids) or (tokenizer.eod,)


def end_tokens(tokenizer: Tokenizer, data: DataConfig) -> frozenset[int]:
    """Return the tokens that end a text: the end of a document, and those that the files beside the tokenizer name.
    Raises DataError for a file that is damaged."""
    named = _named_ends(data.tokenizer_model or data.vocab_file)
    # An id beyond the vocabulary ends no text.
    known = [number for number in named if number < tokenizer.vocab_size]
    return frozenset((tokenizer.eod, *known))


def _named_ends(place: str | None) -> list[int]:
    """Return the ids in a folder, or beside a file. As in transformers, settings of the model count only if there are
    none of generation."""
    if place is None:
        return []
    folder = Path(place)
    if not folder.is_dir():
        folder = folder.parent
    for name in ENDS:
        path = folder / name
        if path.exists():
            return _ends_in(path)
    return []


def _ends_in(path: Path) -> list[int]:
    found = _object_in(path).get(KEY)
    if found is None:
        return []
    ends = found if isinstance(found, list) else [found]
    if not all(type(end) is int and end >= 0 for end in ends):
        raise DataError(
            f"{path}: {KEY} is {str(found)[:60]}, and the tokens that end a text are ids, one or a list. Correct it."
        )
    return ends


def _object_in(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(read_regular(path, DataError))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a JSON object.")
    return content
