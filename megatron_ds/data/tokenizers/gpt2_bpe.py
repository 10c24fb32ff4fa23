"""GPT-2's byte-level BPE from `vocab.json` and `merges.txt`, served by one of the backends of `backend.py`.

`ByteLevelBPE` is the same algorithm in plain Python: the reference that the fast path is tested against.
Radford et al. 2019, section 2.2; Sennrich et al. 2016 (arXiv:1508.07909), algorithm 1.
"""

import json
from collections.abc import Mapping, Sequence

from ...errors import DataError
from .backend import Backend
from .base import TOKENIZERS, Arrays, TokenizerOptions, fingerprint_of, required_files
from .byte_letters import byte_letters

EOD = "<|endoftext|>"
Pair = tuple[str, str]

# A word with the space before it, a number, a run of signs, or white space (all of it but the last before a word).
PIECES = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@TOKENIZERS.register("GPT2BPETokenizer")
class GPT2BPETokenizer:
    """GPT-2's tokenizer over any vocabulary of that form. The text `<|endoftext|>` is plain text, not the special id."""

    has_backends = True

    def __init__(self, vocab: dict[str, int], merges: list[Pair], backend: str = "auto"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        self._tokenizer = Tokenizer(models.BPE(vocab, merges))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self._backend = Backend(self._tokenizer, backend)
        self.vocab_size = max(vocab.values()) + 1
        self.eod = vocab[EOD]
        self.fingerprint = fingerprint_of("GPT2BPETokenizer", json.dumps(sorted(vocab.items())).encode(),
                                          json.dumps(merges).encode())

    @classmethod
    def from_options(cls, options: TokenizerOptions) -> "GPT2BPETokenizer":
        files = required_files(options, ("vocab_file", "merge_file"), "GPT2BPETokenizer")
        return cls(*read_bpe_files(*files), options.backend)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        return self._backend.encode_arrays(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class ByteLevelBPE:
    """The reference: cut the text into pieces, spell each piece in bytes, then join the pair that was learned first."""

    def __init__(self, vocab: Mapping[str, int], merges: Sequence[Pair]):
        import regex
        self._ids = dict(vocab)
        self._order = {pair: rank for rank, pair in enumerate(merges)}
        self._pieces = regex.compile(PIECES)
        self._letters = byte_letters()

    def encode(self, text: str) -> list[int]:
        return [self._ids[token] for piece in self._pieces.findall(text) for token in self._join(piece)]

    def decode(self, ids: Sequence[int]) -> str:
        tokens, bytes_of = {i: t for t, i in self._ids.items()}, {c: b for b, c in self._letters.items()}
        return bytes(bytes_of[c] for i in ids for c in tokens[i]).decode("utf-8", errors="replace")

    def _join(self, piece: str) -> list[str]:
        word = [self._letters[b] for b in piece.encode("utf-8")]
        while len(word) > 1:
            first = min(zip(word, word[1:]), key=lambda pair: self._order.get(pair, len(self._order)))
            if first not in self._order:
                break
            word = _merge(word, first)
        return word


def _merge(word: list[str], pair: Pair) -> list[str]:
    """Every place where `pair` stands, from the left, becomes one token."""
    out, i = [], 0
    while i < len(word):
        if tuple(word[i:i + 2]) == pair:
            out.append(word[i] + word[i + 1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


def read_bpe_files(vocab_file: str, merge_file: str) -> tuple[dict[str, int], list[Pair]]:
    """Raises DataError naming the file when one is not what it should be, or has no `<|endoftext|>`."""
    try:
        with open(vocab_file, encoding="utf-8") as f:
            vocab = json.load(f)
    except ValueError as e:                                 # JSON and UTF-8 errors are both ValueErrors
        raise DataError(f"--vocab-file {vocab_file} is not JSON text: {e}.") from None
    if not isinstance(vocab, dict) or not all(isinstance(i, int) for i in vocab.values()):
        raise DataError(f"--vocab-file {vocab_file} is not a JSON object from token to id.")
    if EOD not in vocab:
        raise DataError(f"--vocab-file {vocab_file} has no token {EOD}, which ends a document.")
    return vocab, _read_merges(merge_file, vocab)


def _read_merges(merge_file: str, vocab: Mapping[str, int]) -> list[Pair]:
    try:
        with open(merge_file, encoding="utf-8") as f:
            lines = f.read().split("\n")
    except UnicodeDecodeError as e:
        raise DataError(f"--merge-file {merge_file} is not UTF-8 text: {e}.") from None
    merges = []
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r")
        if not line or number == 1 and line.startswith("#version"):
            continue
        pair = tuple(line.split(" "))
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            raise DataError(f"--merge-file {merge_file}, line {number}: {line!r} is not two tokens that are in the "
                            "vocabulary together with their concatenation. Do --vocab-file and --merge-file belong together?")
        merges.append(pair)
    return merges
