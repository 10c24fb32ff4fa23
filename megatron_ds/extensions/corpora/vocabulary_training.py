"""Training a vocabulary on your own text: byte-level BPE of GPT-2's form, or BERT's WordPiece."""

import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigError, DataError
from ..tokenizers.file_tokenizers import EOD, WORD_PIECE_TOKENS, byte_level, word_piece

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.trainers import BpeTrainer, WordPieceTrainer

logger = logging.getLogger(__name__)
SMALLEST = 257  # a letter for each byte, and the end of a document
PIECE = 1 << 20


def train_byte_level_bpe(
    texts: Iterable[str],
    vocab_size: int,
    folder: str | os.PathLike,
    *,
    min_frequency: int = 2,
) -> int:
    """Write tokenizer.json (for HuggingFaceTokenizer), and vocab.json and merges.txt (for GPT2BPETokenizer).

    Id 0 is `<|endoftext|>`.  Returns the size, below `vocab_size` where the text has too few repeated pairs.
    """
    if vocab_size < SMALLEST:
        raise ConfigError(
            f"--vocab-size {vocab_size} is too small: the 256 bytes and {EOD} need {SMALLEST} "
            "ids."
        )

    from tokenizers import models, pre_tokenizers, trainers

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[EOD],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    files = ("vocab.json", "merges.txt", "tokenizer.json")
    return _learn(texts, folder, files, byte_level(models.BPE()), trainer)


def train_word_pieces(
    texts: Iterable[str],
    vocab_size: int,
    folder: str | os.PathLike,
    *,
    min_frequency: int = 2,
    lower: bool = True,
) -> int:
    """Write vocab.txt (for BertWordPieceLowerCase or …Case) and tokenizer.json (for HuggingFaceTokenizer).

    Ids 0 to 4 are [PAD] [UNK] [CLS] [SEP] [MASK].  Returns the size.
    """
    if vocab_size <= len(WORD_PIECE_TOKENS):
        raise ConfigError(
            f"--vocab-size {vocab_size} is too small: {', '.join(WORD_PIECE_TOKENS)} alone are "
            f"{len(WORD_PIECE_TOKENS)}. Use a thousand for a toy model; BERT has 30,522."
        )

    from tokenizers import models, trainers

    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(WORD_PIECE_TOKENS),
        show_progress=False,
    )
    tokenizer = word_piece(models.WordPiece(unk_token="[UNK]"), lower)
    return _learn(texts, folder, ("vocab.txt", "tokenizer.json"), tokenizer, trainer)


def _pieces(text: str) -> Iterator[str]:
    """Yield the text, cut at white space into pieces of PIECE characters: the library takes 150 bytes for each."""
    while len(text) > PIECE:
        at = max(text.rfind(" ", 0, PIECE), text.rfind("\n", 0, PIECE))
        at = at if at > 0 else PIECE
        yield text[:at]
        text = text[at:]
    yield text


def _save(tokenizer: "Tokenizer", folder: Path) -> None:
    """Write the files of a tokenizer. Raises OSError."""
    try:
        tokenizer.save(str(folder / "tokenizer.json"))
        tokenizer.model.save(str(folder))
    except Exception as error:  # the library raises plain Exception for everything
        raise OSError(str(error)) from None


def _learn(
    texts: Iterable[str],
    folder: str | os.PathLike,
    files: tuple[str, ...],
    tokenizer: "Tokenizer",
    trainer: "BpeTrainer | WordPieceTrainer",
) -> int:
    """Train a tokenizer of the library, write these files to a temporary folder, rename."""
    folder = Path(folder)
    beside = folder.with_name(f".{folder.name}.partial")
    # A folder beside it is renamed into place file by file, so an error leaves nothing.
    try:
        beside.mkdir(parents=True, exist_ok=True)
        texts = iter(texts)
        first = next((text for text in texts if text.strip()), None)
        if first is None:
            raise DataError(
                "the --input files hold no text to learn from. Nothing was written."
            )
        pieces = (piece for text in chain([first], texts) for piece in _pieces(text))
        tokenizer.train_from_iterator(pieces, trainer)
        _save(tokenizer, beside)
        folder.mkdir(exist_ok=True)
        for name in files:
            (beside / name).replace(folder / name)
    except OSError as e:
        raise DataError(
            f"cannot write {folder}: {e.strerror or e}. Choose another --output."
        ) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    # A short text has too few pairs.
    size = tokenizer.get_vocab_size()
    if size < trainer.vocab_size:
        logger.warning(
            "the vocabulary has only %d of %d entries: no other pairs occur %d times in the text",
            size,
            trainer.vocab_size,
            trainer.min_frequency,
        )
    return size
