"""The tokenizer of a run, and the size of the vocabulary that follows from it."""

from ..config import RunConfig, Source
from ..data.tokenizers import Tokenizer, build_tokenizer
from ..errors import ConfigError


def with_tokenizer(config: RunConfig) -> tuple[RunConfig, Tokenizer]:
    """(config with the size of the vocabulary, tokenizer). Reads files; not collective.

    A --vocab-size above the tokenizer's is kept: models may have rows that no token uses.
    """
    tokenizer = build_tokenizer(config.data, config.model)
    size = _vocabulary(config, tokenizer)
    if (config.model.vocab_size or 0) < size:
        source = Source("derived", "the tokenizer")
        config = config.with_values({"model.vocab_size": size}, source)
    return config, tokenizer


def _vocabulary(config: RunConfig, tokenizer: Tokenizer) -> int:
    """Size of the tokenizer's vocabulary, with the rows of --extra-vocab-size. Raises ConfigError."""
    extra = config.data.extra_vocab_size
    if extra is None:
        return tokenizer.vocab_size
    base = getattr(tokenizer, "base_size", None)
    if base is None:
        raise ConfigError(
            f"--extra-vocab-size {extra} counts from the vocabulary of a HuggingFaceTokenizer, "
            f"but --tokenizer-type is {config.data.tokenizer_type}. Use --padded-vocab-size."
        )
    return max(tokenizer.vocab_size, base + extra)
