"""Tokenizers: text ↔ ids, made from the tokenizer flags by `make_tokenizer`.

To add one: a file here with a class that has the members of `Tokenizer` and a `from_options`, registered in TOKENIZERS.
"""

from ...errors import ConfigError
from . import bert_wordpiece, gpt2_bpe, huggingface, null, sentence_piece  # noqa: F401  each registers itself
from .base import TOKENIZERS, Tokenizer, TokenizerOptions, arrays_of

__all__ = ["TOKENIZERS", "Tokenizer", "TokenizerOptions", "arrays_of", "build_tokenizer", "make_tokenizer"]


def build_tokenizer(data, model) -> Tokenizer:
    """The tokenizer that a run's flags ask for: `data` and `model` are the sections of its config."""
    if data.tokenizer_type is None:
        raise ConfigError(f"no tokenizer is given: add --tokenizer-type, one of {', '.join(TOKENIZERS.names())}, the one "
                          "that the corpus was made with. For mock data, NullTokenizer with --vocab-size is enough.")
    return make_tokenizer(data.tokenizer_type, vocab_file=data.vocab_file, merge_file=data.merge_file,
                          tokenizer_model=data.tokenizer_model, vocab_size=model.vocab_size)


def make_tokenizer(tokenizer_type: str, *, vocab_file: str | None = None, merge_file: str | None = None,
                   tokenizer_model: str | None = None, vocab_size: int | None = None,
                   backend: str = "auto") -> Tokenizer:
    """Raises ConfigError for an unknown type or a missing flag or file, DataError for a file that is not what it should be.

    vocab_size: only `NullTokenizer` reads it.  backend: what encodes (backend.py); the ids do not depend on it.
    """
    kind = TOKENIZERS[tokenizer_type]
    if backend != "auto" and not getattr(kind, "has_backends", False):
        raise ConfigError(f"--tokenizer-backend {backend}: {tokenizer_type} has only one encoder; leave the flag out.")
    return kind.from_options(TokenizerOptions(vocab_file, merge_file, tokenizer_model, vocab_size, backend))
