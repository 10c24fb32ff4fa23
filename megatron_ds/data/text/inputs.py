"""The inputs of a tool: files as they are named, and folders as the files in them.

Of a folder all files below it whose names end in TAKEN are read, ordered by their path; hidden files and folders (those whose
names begin with a dot) and tokenizers (folders that hold a tokenizer.json) are left out. So is anything else, which the log
reports. Links to folders are not followed.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence

from ...errors import DataError
from .text_files import COMPRESSED, PLAIN, TABLES, is_plain_text, without_compression

logger = logging.getLogger(__name__)
TAKEN = (*PLAIN, ".jsonl", *TABLES)
INPUT_HELP = ("plain text (.txt, .md); JSON lines (.jsonl and other names; - for standard input); either of them compressed "
              "(.gz, .bz2, .xz, .zst); tables (.parquet, .h5); or folders, of which all such files are read, ordered by path")
SHOWN = 3                                                   # names of files that are left out, in a message


def files_of(inputs: Sequence[str]) -> list[str]:
    """Every folder replaced by its files. Raises DataError for a folder that cannot be read or has no file to take."""
    return [path for given in inputs for path in (_files_below(given) if os.path.isdir(given) else [given])]


def is_taken(name: str) -> bool:
    """Whether a file of this name is read when its folder is given."""
    return is_plain_text(name) or without_compression(name).endswith(".jsonl") or name.endswith(TABLES)


def _files_below(folder: str) -> list[str]:
    found = list(_walk(folder))
    taken = sorted((path for path in found if is_taken(path)), key=lambda path: path.split(os.sep))
    left = sorted(set(found) - set(taken))
    examples = f"{', '.join(left[:SHOWN])}{' …' * (len(left) > SHOWN)}"
    if not taken:
        raise DataError(f"--input {folder}: this folder has no text{f', but {examples}' if left else ''}. Of a folder, files "
                        f"whose names end in {' '.join(TAKEN)} are read, the first three also compressed "
                        f"({' '.join(COMPRESSED)}). Name other files one by one.")
    kinds = Counter(os.path.splitext(path)[1].lower() for path in taken)
    logger.info("%s: %s%s", folder, ", ".join(f"{count:,} {end}" for end, count in kinds.most_common()),
                f"; {len(left):,} other files are left out: {examples}" if left else "")
    return taken


def _walk(folder: str) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise DataError(f"--input {folder}: {error.filename} cannot be read: {error.strerror}.")

    for place, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if "tokenizer.json" in files and place != folder:   # its vocab.txt and merges.txt are no text
            folders.clear()
            continue
        yield from (os.path.join(place, name) for name in files if not name.startswith("."))
