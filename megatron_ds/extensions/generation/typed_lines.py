"""Lines that a person types, or a program writes, while something else must happen each second."""

import os
import select
from collections.abc import Callable, Iterator

AT_ONCE = 65536  # bytes


def typed_lines(
    file: int, ask: Callable[[], None], wait: Callable[[], object]
) -> Iterator[str]:
    """Lines of a file descriptor that are not blank, until its end.

    ask   called before each line, as to print a prompt
    wait  called each second in which nothing comes
    """
    unread = b""
    is_over = False
    while not is_over:
        ask()
        # The last line may have no end.
        while b"\n" not in unread and not is_over:
            while not select.select([file], [], [], 1.0)[0]:
                wait()
            new = os.read(file, AT_ONCE)
            is_over = not new
            unread += new
        # Several lines may have come together.
        line, _, unread = unread.partition(b"\n")
        text = line.decode(errors="replace").strip()
        if text:
            yield text
    yield from filter(
        None, map(str.strip, unread.decode(errors="replace").splitlines())
    )
