"""`HuggingFaceTokenizer`: any `tokenizer.json`, or a folder that holds one."""

import json
import os
from collections.abc import Sequence

from ...errors import DataError
from .backend import Backend
from .base import TOKENIZERS, Arrays, TokenizerOptions, fingerprint_of, required_file

# Names that tokenizers give to the end of a document, tried when no tokenizer_config.json names it.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")


@TOKENIZERS.register("HuggingFaceTokenizer", "HFTokenizer")
class HuggingFaceTokenizer:
    """Ids of the text alone: the template of the file (a begin token, `[CLS] … [SEP]`) is not applied."""

    has_backends = True

    def __init__(self, path: str, backend: str = "auto"):
        from tokenizers import Tokenizer
        file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        try:
            self._tokenizer = Tokenizer.from_file(file)
        except Exception as e:                              # the library raises plain Exception for everything
            raise DataError(f"--tokenizer-model {path}: {file} cannot be read as a tokenizer: {e}.") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._backend = Backend(self._tokenizer, backend)
        self.vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self.vocab.values()) + 1
        self.eod = self._end_of_document(file)
        self.fingerprint = fingerprint_of("HuggingFaceTokenizer", self._tokenizer.to_str().encode())

    @classmethod
    def from_options(cls, options: TokenizerOptions) -> "HuggingFaceTokenizer":
        return cls(required_file(options, "tokenizer_model", "HuggingFaceTokenizer", folder_ok=True), options.backend)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        return self._backend.encode_arrays(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _end_of_document(self, file: str) -> int:
        named = _configured_end(os.path.join(os.path.dirname(file), "tokenizer_config.json"))
        names = (named, *END_NAMES) if named else END_NAMES
        ids = (self._tokenizer.token_to_id(name) for name in names)
        found = next((i for i in ids if i is not None), None)
        if found is None:
            raise DataError(f"{file} has no end-of-document token: none of {', '.join(names)}. Name one as eos_token "
                            "in a tokenizer_config.json next to it.")
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
