"""How much of two answers a row keeps."""

import logging

import numpy as np

from ...data.text.mask_file import LossMasks
from ...errors import DataError

logger = logging.getLogger(__name__)


def kept_lengths(lengths: np.ndarray, room: int) -> np.ndarray:
    """int [n, 2], the tokens of the sequences of each pair → those that a row of `room` tokens keeps, int64 [n, 2].

    A sequence that needs less than half of the room leaves the rest to the other one.
    """
    lengths = lengths.astype(np.int64)
    half = np.array([room // 2, room - room // 2])
    others = lengths[:, ::-1]
    return np.minimum(lengths, np.maximum(half, room - others))


def report_cut_pairs(masks: LossMasks, pairs: range, kept: np.ndarray) -> None:
    """Warn of pairs that are longer than a row. Raises DataError if no pair keeps tokens of both answers."""
    corpus = masks.corpus
    lengths = corpus.lengths[2 * pairs.start : 2 * pairs.stop].reshape(-1, 2)
    cut = np.flatnonzero((lengths > kept).any(1))
    if not len(cut):
        return
    # The first token of a sequence is not predicted.
    empty = 0
    for number in cut.tolist():
        first = 2 * (pairs.start + number)
        learned = [
            masks.get(first + answer, 0, int(length))[1:].any()
            for answer, length in enumerate(kept[number])
        ]
        empty += not all(learned)
    if empty == len(pairs):
        raise DataError(
            f"{corpus.prefix}: in all {empty} pairs an answer begins behind its part of the row, so that none could be "
            "compared. Use a larger --seq-length: a row holds both answers, each with its prompt."
        )
    logger.warning(
        "%s: %d of %d pairs do not fit into a row, and their answers lose their ends, %d of them all of an answer. Use "
        "a larger --seq-length to keep them",
        corpus.prefix,
        len(cut),
        len(pairs),
        empty,
    )
