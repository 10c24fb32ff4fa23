"""Tokenizers of one file, `--tokenizer-model`: `HuggingFaceTokenizer` and `SentencePieceTokenizer`."""

import json
import os
from collections.abc import Sequence

from ...errors import DataError
from .backend import LibraryTokenizer
from .base import TOKENIZERS, TokenizerOptions, fingerprint_of, required_files

# Common names of the end-of-document token, tried when no tokenizer_config.json names it.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")


@TOKENIZERS.register("HuggingFaceTokenizer", "HFTokenizer")
class HuggingFaceTokenizer(LibraryTokenizer):
    """Any `tokenizer.json`, or a folder with one. Its template (such as `[CLS] … [SEP]`) is not applied."""

    has_backends = True

    def __init__(self, path: str, backend: str = "auto"):
        from tokenizers import Tokenizer
        file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        try:
            tokenizer = Tokenizer.from_file(file)
        except Exception as e:                             # the library raises plain Exception for everything
            raise DataError(f"--tokenizer-model {path}: {file} cannot be read as a tokenizer: {e}.") from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        super().__init__(tokenizer, backend)
        self.vocab = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self.vocab.values()) + 1
        self.eod = self._end_of_document(file)
        self.fingerprint = fingerprint_of("HuggingFaceTokenizer", tokenizer.to_str().encode())

    @classmethod
    def from_options(cls, options: TokenizerOptions) -> "HuggingFaceTokenizer":
        path, = required_files(options, ("tokenizer_model",), "HuggingFaceTokenizer", folder_ok=True)
        return cls(path, options.backend)

    def _end_of_document(self, file: str) -> int:
        named = _configured_end(os.path.join(os.path.dirname(file), "tokenizer_config.json"))
        names = (named, *END_NAMES) if named else END_NAMES
        ids = (self._tokenizer.token_to_id(name) for name in names)
        found = next((i for i in ids if i is not None), None)
        if found is None:
            raise DataError(f"{file} has no end-of-document token: none of {', '.join(names)}. Name one as "
                            "eos_token in a tokenizer_config.json next to it.")
        return found


def _configured_end(config_file: str) -> str | None:
    """`eos_token` of a tokenizer_config.json: a string, or an object with its text under "content"."""
    if not os.path.isfile(config_file):
        return None
    try:
        with open(config_file, encoding="utf-8") as f:
            token = json.load(f).get("eos_token")
    except (ValueError, AttributeError) as e:
        raise DataError(f"{config_file} is not a JSON object: {e}.") from None
    return token.get("content") if isinstance(token, dict) else token


@TOKENIZERS.register("SentencePieceTokenizer", "GPTSentencePieceTokenizer")
class SentencePieceTokenizer:
    """A sentencepiece `.model`. No begin and end tokens are added; end of sentence ends a document."""

    def __init__(self, path: str):
        import sentencepiece
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=path)
        except (RuntimeError, OSError) as e:
            raise DataError(f"--tokenizer-model {path} cannot be read as a sentencepiece model: "
                            f"{e}.") from None
        self.vocab_size = self._processor.vocab_size()
        self.eod = self._processor.eos_id()
        if self.eod < 0:
            raise DataError(f"--tokenizer-model {path} has no end of sentence token (eos_id is off), which "
                            "ends a document. Train the model with one.")
        self.fingerprint = fingerprint_of("SentencePieceTokenizer", self._processor.serialized_model_proto())

    @classmethod
    def from_options(cls, options: TokenizerOptions) -> "SentencePieceTokenizer":
        return cls(*required_files(options, ("tokenizer_model",), "SentencePieceTokenizer"))

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts))

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode(list(map(int, ids)))
