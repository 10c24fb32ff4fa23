"""Tokenizers of Megatron's forks that differ from those of `file_tokenizers` in a detail.

TokenizerFromFileWithFIM   BigCode: a `tokenizer.json` to which the tokens of fill in the middle are added
JapaneseSentencePiece      a sentencepiece model with a token for the end of a line, and another end of document
"""

from collections.abc import Sequence

from ...data.tokenizers.base import TOKENIZERS, TokenizerOptions, required_files
from ...errors import DataError
from .file_tokenizers import EOD, HuggingFaceTokenizer, SentencePieceTokenizer

END_OF_LINE = "<|endofline|>"


@TOKENIZERS.register("TokenizerFromFileWithFIM")
class TokenizerFromFileWithFIM(HuggingFaceTokenizer):
    """A `tokenizer.json` with BigCode's tokens of fill in the middle; those that it lacks have the next ids."""

    kind = "TokenizerFromFileWithFIM"
    added = (EOD, "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")


@TOKENIZERS.register("JapaneseSentencePiece")
class JapaneseSentencePiece(SentencePieceTokenizer):
    """A sentencepiece model in --vocab-file. `<|endoftext|>` ends a document, `<|endofline|>` stands for a line
    break.
    """

    kind = "JapaneseSentencePiece"

    def end_of_document(self, path: str) -> int:
        """Return the token that ends a document. Raises DataError if the model has none."""
        end = self._processor.piece_to_id(EOD)
        if end == self._processor.unk_id():
            raise DataError(
                f"--vocab-file {path} has no token {EOD}, which ends a document. Train the model with it as a user "
                "defined symbol, or use SentencePieceTokenizer."
            )
        return end

    @classmethod
    def from_options(cls, options: TokenizerOptions) -> "JapaneseSentencePiece":
        return cls(*required_files(options, ("vocab_file",), cls.__name__))

    def encode(self, text: str) -> list[int]:
        return super().encode(text.replace("\n", END_OF_LINE))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return super().encode_batch([text.replace("\n", END_OF_LINE) for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).replace(END_OF_LINE, "\n")
