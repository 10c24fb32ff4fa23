"""`NullTokenizer`: text that is already ids, in decimal, between spaces. For made-up data and for tests."""

from collections.abc import Sequence

from ...errors import ConfigError, DataError
from .base import TOKENIZERS, TokenizerOptions


@TOKENIZERS.register("NullTokenizer")
class NullTokenizer:
    """Ids 0 … N − 1 for `--vocab-size N`; the end of a document is one more id, N, as in Megatron."""

    def __init__(self, num_ids: int):
        self.eod = num_ids
        self.vocab_size = num_ids + 1
        self.fingerprint = f"NullTokenizer:{num_ids}"

    @classmethod
    def from_options(cls, options: TokenizerOptions) -> "NullTokenizer":
        if not options.vocab_size:
            raise ConfigError("NullTokenizer needs --vocab-size, the number of different ids in the data.")
        return cls(options.vocab_size)

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as e:
            raise DataError(f"NullTokenizer reads decimal ids separated by spaces: {e}.") from None
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise DataError(f"ids from {min(ids)} to {max(ids)} are not all in [0, {self.vocab_size}), the range that "
                            f"--vocab-size {self.eod} gives.")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))
