"""`PREFIX.mask.bin`, the loss mask of a corpus of conversations: a byte for each token of `PREFIX.bin`.

0  the token is given         1  the token is learned: its prediction counts in the loss
"""

import os
from pathlib import Path

import numpy as np

from ...errors import DataError
from ...host.regular_file import create_again, discard
from .indexed import IndexedDataset, corpus_paths

CHECKED = 1 << 24  # bytes read together


def mask_path(prefix: str | os.PathLike) -> Path:
    """Return the path of the masks of a corpus."""
    return Path(str(corpus_paths(prefix)[0])[:-4] + ".mask.bin")


class LossMasks:
    """The masks of a corpus, mapped into memory.

    Raises DataError if there are none, or not as many as the corpus has tokens.
    """

    def __init__(self, corpus: IndexedDataset):
        self.corpus = corpus
        self.path = mask_path(corpus.prefix)
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            raise DataError(
                f"{self.path} does not exist: the tokens of answers are not known. Make "
                "it with megatron-ds preprocess --chat, or train on all tokens, without --sft."
            ) from None
        if size != corpus.num_tokens:
            raise DataError(
                f"{self.path} has {size} masks, and {corpus.bin_path} has {corpus.num_tokens} tokens: "
                "they do not belong together. Copy both again, or make them again with megatron-ds "
                "preprocess --chat."
            )
        self._masks = (
            np.memmap(self.path, np.uint8, "r") if size else np.zeros(0, np.uint8)
        )

    def get(self, i: int, start: int = 0, length: int | None = None) -> np.ndarray:
        """Return the masks of `length` tokens of sequence i from token `start` on, uint8; to its end for None.

        Raises DataError for a value that is no mask.
        """
        if length is None:
            length = int(self.corpus.lengths[i]) - start
        at = int(self.corpus.offsets[i]) // self.corpus.dtype.itemsize + start
        return self._checked(at, at + length)

    def count(self) -> int:
        """Return the number of tokens that are learned. Reads all masks; raises DataError for a value that is no
        mask."""
        total = 0
        for first in range(0, len(self._masks), CHECKED):
            block = self._checked(first, first + CHECKED)
            total += int(block.sum(dtype=np.int64))
        return total

    def _checked(self, start: int, stop: int) -> np.ndarray:
        """Return a range of the masks. Raises DataError."""
        found = self._masks[start:stop]
        if found.max(initial=0) > 1:
            at = start + int(np.argmax(found > 1))
            raise DataError(
                f"{self.path} is damaged: byte {at} is {int(self._masks[at])}, and a mask is 0 or 1. "
                "Copy it again."
            )
        return found


class MaskWriter:
    """Writes masks under a temporary name and renames the file at the end.

    A context manager: an exception inside removes what was written.
    """

    def __init__(self, prefix: str | os.PathLike):
        self.path = mask_path(prefix)
        self._partial = Path(f"{self.path}.partial")
        self._file = create_again(self._partial)
        self._is_finished = False

    def add(self, mask: np.ndarray) -> None:
        """Add the masks of the next tokens.  mask: uint8. Raises DataError."""
        assert mask.dtype == np.uint8
        try:
            self._file.write(mask.data)
        except OSError as error:
            raise self._failure(error) from None

    def withdraw(self) -> None:
        """Remove the finished file, because the corpus that it belongs to could not be written."""
        if self._is_finished:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> "MaskWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as error:
            raise self._failure(error) from None
        finally:
            discard(self._file, self._partial)

    def _finish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._partial.replace(self.path)
        self._is_finished = True

    def _failure(self, error: OSError) -> DataError:
        return DataError(
            f"cannot write {self.path}: {error.strerror}. Nothing was kept; free some space, or choose another "
            "--output-prefix."
        )
