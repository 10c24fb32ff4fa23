"""`SentencePieceTokenizer`: a `.model` file of the sentencepiece library."""

from collections.abc import Sequence

from ...errors import DataError
from .base import TOKENIZERS, TokenizerOptions, fingerprint_of, required_file


@TOKENIZERS.register("SentencePieceTokenizer", "GPTSentencePieceTokenizer")
class SentencePieceTokenizer:
    """Ids of the text alone, without begin and end tokens; the end of a document is the model's end of sentence."""

    def __init__(self, path: str):
        import sentencepiece
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=path)
        except (RuntimeError, OSError) as e:
            raise DataError(f"--tokenizer-model {path} cannot be read as a sentencepiece model: {e}.") from None
        self.vocab_size = self._processor.vocab_size()
        self.eod = self._processor.eos_id()
        if self.eod < 0:
            raise DataError(f"--tokenizer-model {path} has no end of sentence token (eos_id is off), which ends a document.")
        self.fingerprint = fingerprint_of("SentencePieceTokenizer", self._processor.serialized_model_proto())

    @classmethod
    def from_options(cls, options: TokenizerOptions) -> "SentencePieceTokenizer":
        return cls(required_file(options, "tokenizer_model", "SentencePieceTokenizer"))

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts))

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode(list(map(int, ids)))
