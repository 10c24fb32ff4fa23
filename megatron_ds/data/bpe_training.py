"""Training a byte-level BPE vocabulary of GPT-2's form on text of one's own."""

import logging
import os
import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from ..errors import ConfigError, DataError
from .tokenizers.gpt2_bpe import EOD

logger = logging.getLogger(__name__)
FILES = ("vocab.json", "merges.txt", "tokenizer.json")
SMALLEST = 257                                              # a letter for each byte, and the end of a document


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int, folder: str | os.PathLike, *, min_frequency: int = 2) -> int:
    """Write tokenizer.json (for HuggingFaceTokenizer) and vocab.json, merges.txt (for GPT2BPETokenizer): the same ids.

    Id 0 is `<|endoftext|>`.  Returns the size reached, smaller than `vocab_size` when the text has too few repeated pairs.
    """
    if vocab_size < SMALLEST:
        raise ConfigError(f"--vocab-size {vocab_size} is too small: {SMALLEST} ids are needed for the 256 bytes and {EOD}.")
    folder = Path(folder)
    beside = folder.with_name(f".{folder.name}.partial")
    try:
        beside.mkdir(parents=True, exist_ok=True)
        texts = iter(texts)
        first = next((text for text in texts if text.strip()), None)
        if first is None:
            raise DataError("the --input files hold no text to learn from. Nothing was written.")
        size = _train(chain([first], texts), vocab_size, min_frequency, beside)
        folder.mkdir(exist_ok=True)
        for name in FILES:
            (beside / name).replace(folder / name)
    except OSError as e:
        raise DataError(f"cannot write {folder}: {e.strerror or e}. Choose another --output.") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    if size < vocab_size:
        logger.warning("only %d of %d entries: the text has no more pairs that occur %d times", size, vocab_size,
                       min_frequency)
    return size


def _train(texts: Iterable[str], vocab_size: int, min_frequency: int, folder: Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=[EOD], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    return tokenizer.get_vocab_size()
