"""Text for terminals and log files: characters that could forge lines are escaped, failed writes are counted, lines
fit a terminal.

A path may contain any character except NUL, so a folder named "a\\nerror: no" would add a line to a log, and
an escape sequence would change a terminal. Paths in logs and errors are therefore shown with `one_line`.
"""

import errno
import logging
import os
import re
import sys
import textwrap
from contextlib import suppress
from pathlib import PurePath
from typing import Any, TextIO

# C0 and C1 controls except line feed and tab, DEL, line separators, bytes that are not UTF-8 (surrogates).
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
MOST_CHARACTERS = 200  # characters of a value that messages show
DEFAULT_COLUMNS = 80  # of a terminal that does not know its size
# Not before an item of a numbered list of problems.
_NEWLINE_IN_PROBLEM = re.compile(r"\n(?!  \d+\. )")


def printable(text: str) -> str:
    """Return the text with control characters as escapes such as \\x1b; lines stay lines."""
    return _CONTROLS.sub(lambda found: _escape(found[0]), text)


def one_line(text: str) -> str:
    """`printable`, with line feeds and tabs as \\n and \\t."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def paragraph(text: str) -> str:
    """Return an error for a terminal: one line, or one line for each item of a numbered list."""
    return printable(_NEWLINE_IN_PROBLEM.sub(r"\\n", text))


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return the text; of a longer one its beginning and its length."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def columns(stream: Any) -> int | None:
    """Return the columns of the terminal that the stream writes to; None for a file or a pipe."""
    try:
        if not stream.isatty():
            return None
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_COLUMNS
    except (AttributeError, OSError, ValueError):  # a stand-in, or a closed terminal
        return None


def wrapped(text: str, width: int) -> str:
    """Return the text in lines of at most so many columns: lines break between words, and go on further in.

    A word that is longer stays whole, so that a path can be copied.
    """
    lines: list[str] = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())] + "  "
        parts = textwrap.wrap(
            line,
            width,
            subsequent_indent=indent,
            replace_whitespace=False,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += parts or [""]
    return "\n".join(lines)


def _escape(character: str) -> str:
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # a byte of a file name, as os.fsdecode reads it
        number -= 0xDC00
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


class _Formatter(logging.Formatter):
    """Escapes what stands for a value in a message.

    An argument is shown on one line, unless the message is nothing but that argument: a table.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format the record with escaped arguments."""
        if isinstance(record.args, tuple) and record.msg != "%s":
            record = logging.makeLogRecord(
                record.__dict__ | {"args": tuple(map(_value, record.args))}
            )
        return printable(super().format(record))


def _value(argument: Any) -> Any:
    is_text = isinstance(argument, str | PurePath | BaseException)
    return one_line(str(argument)) if is_text else argument


class _Handler(logging.StreamHandler):
    """Loses records that cannot be written (a full disk, a closed pipe), and warns once on stderr."""

    has_warned = False

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record; on a terminal it fits the width."""
        text = super().format(record)
        width = columns(self.stream)
        return text if width is None else wrapped(text, width)

    def handleError(self, record: logging.LogRecord) -> None:
        """Count the lost record, without the traceback that logging would print."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError | ValueError):
            super().handleError(record)
            return
        if not self.has_warned and self.stream is not sys.stderr:
            self.has_warned = True
            reason = getattr(error, "strerror", None) or error
            try:
                print(
                    f"warning: log lines cannot be written ({reason}) and are lost; the run goes on",
                    file=sys.stderr,
                    flush=True,
                )
            except (OSError, ValueError):
                pass  # stderr is on the same disk


def set_up_logging(
    level: int,
    form: str = "%(message)s",
    stream: TextIO | None = None,
    replaces: bool = True,
) -> None:
    """Log to `stream` (default: stdout). Characters it cannot encode are escaped.

    replaces: remove the handlers that there are; False: a program that has set up logging keeps its own
    """
    stream = sys.stdout if stream is None else stream
    escape_unknown(stream)
    handler = _Handler(stream)
    handler.setFormatter(_Formatter(form))
    logging.basicConfig(level=level, handlers=[handler], force=replaces)


def escape_unknown(stream: TextIO) -> None:
    """Let the stream write characters that its encoding lacks as escapes, which would otherwise be an error."""
    if getattr(stream, "errors", "") == "strict" and hasattr(stream, "reconfigure"):
        # This asks for a position, which a descriptor lacks that was replaced by a pipe after Python started.
        with suppress(OSError):
            stream.reconfigure(errors="backslashreplace")


def is_name_too_long(error: BaseException) -> bool:
    """Return whether the system refused the length of a path."""
    return isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
