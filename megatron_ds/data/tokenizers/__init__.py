"""Tokenizers: text ↔ ids, made from the tokenizer flags by `make_tokenizer`.

Those that read files are a feature (extensions/tokenizers); a feature may have others in `registers`.
"""

from typing import TYPE_CHECKING

from ...errors import ConfigError
from .base import TOKENIZERS, NullTokenizer, Tokenizer, TokenizerOptions, arrays_of

if TYPE_CHECKING:
    from ...config import DataConfig, ModelConfig

__all__ = [
    "TOKENIZERS",
    "NullTokenizer",
    "Tokenizer",
    "TokenizerOptions",
    "arrays_of",
    "build_tokenizer",
    "make_tokenizer",
]


def build_tokenizer(data: "DataConfig", model: "ModelConfig") -> Tokenizer:
    """Return the tokenizer of a run. Raises as `make_tokenizer`, and ConfigError without --tokenizer-type."""
    if data.tokenizer_type is None:
        raise ConfigError(
            "no tokenizer is given: add --tokenizer-type, one of "
            f"{', '.join(TOKENIZERS.names())}, with which the corpus was made. For mock data, "
            "NullTokenizer with --vocab-size is enough."
        )
    return make_tokenizer(
        data.tokenizer_type,
        vocab_file=data.vocab_file,
        merge_file=data.merge_file,
        tokenizer_model=data.tokenizer_model,
        vocab_size=model.vocab_size,
    )


def make_tokenizer(
    tokenizer_type: str,
    *,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
    backend: str = "auto",
) -> Tokenizer:
    """Return a tokenizer by its type.

    vocab_size: read by `NullTokenizer` only.  backend: the encoder; the ids do not depend on it.
    Raises ConfigError for an unknown type or a missing flag or file, DataError for a file with other
    contents.
    """
    kind = TOKENIZERS[tokenizer_type]
    if backend != "auto" and not getattr(kind, "has_backends", False):
        raise ConfigError(
            f"--tokenizer-backend {backend}: {tokenizer_type} has only one encoder. Remove the "
            "flag."
        )
    return kind.from_options(
        TokenizerOptions(vocab_file, merge_file, tokenizer_model, vocab_size, backend)
    )
