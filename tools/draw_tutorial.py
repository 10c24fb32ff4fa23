"""Make the pictures of docs/start/tutorial.md from the folder that its commands have written.

python tools/draw_tutorial.py                       all, from tutorial/ into docs/start/pictures
python tools/draw_tutorial.py --only chat           the chat page alone, after a change of it

The picture of the loss is the tutorial's own; the others are what headless Chromium shows: the report, the
terminal with `megatron-ds watch`, and the page of `megatron-ds serve`, which is started here, with a question and
its answer.
"""

import argparse
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_ds.cli import Arguments, main_guard  # noqa: E402
from megatron_ds.errors import DataError  # noqa: E402
from tools.browser import Browser, Tab  # noqa: E402

QUESTION = "What does math.sqrt do?"
# Pixels.
WIDTH = 1100
HEIGHT = 760
COLUMNS = 80
# An answer that has not grown for as long is complete.
WRITTEN_SECONDS = 4.0
COMMAND = [sys.executable, "-m", "megatron_ds"]
TERMINAL = """<body style="background: #16181d; color: #d8dee9; margin: 0; padding: 16px 20px">
<pre style="font: 14px/1.35 'DejaVu Sans Mono', monospace; margin: 0">{}</pre></body>"""
# The box for messages is the last that is visible: a chat may have others, folded away.
BOX = (
    "[...document.querySelectorAll('textarea')].filter(box => box.offsetParent).at(-1)"
)


def draw_loss(folder: Path, picture: Path) -> None:
    """Copy the loss curve."""
    shutil.copyfile(folder / "loss.png", picture)


def draw_report(folder: Path, picture: Path) -> None:
    """Show the top of the report."""
    with Browser() as browser:
        page = (folder / "report.html").resolve().as_uri()
        browser.open(page, WIDTH, HEIGHT).picture(picture)


def draw_watch(folder: Path, picture: Path) -> None:
    """Show the run in a terminal of 80 columns."""
    run = f"{folder.name}/text"
    done = subprocess.run(
        [*COMMAND, "watch", "--once", run],
        cwd=folder.resolve().parent,
        env=os.environ | {"COLUMNS": str(COLUMNS)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = f"$ megatron-ds watch {run}\n{done.stdout}".rstrip()
    with tempfile.TemporaryDirectory() as there, Browser() as browser:
        page = Path(there, "terminal.html")
        page.write_text(TERMINAL.format(html.escape(lines)), encoding="utf-8")
        height = 32 + 19 * (lines.count("\n") + 1)
        browser.open(page.as_uri(), 9 * COLUMNS, height).picture(picture)


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The address of a server of the model, which ends with the context."""
    words = ["serve", "--load", str(model), "--port", "0"]
    with subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                address = re.search(r"http://[\d.]+:\d+", line)
                if address:
                    yield address[0]
                    break
            else:
                raise DataError(f"the server of {model} ended before it served.")
        finally:
            server.terminate()


def ask(tab: Tab) -> None:
    """Ask the question in the page, and wait until the answer is no longer written."""
    tab.wait_until(f"{BOX} !== undefined")
    # The likeliest answer: the same picture each time.
    tab.run("document.querySelector('[name=temperature]').value = 0")
    tab.run(f"{BOX}.focus(), {BOX}.select()")
    tab.call("Input.insertText", text=QUESTION)
    # Enter sends the message of a chat. A page with a button has a form.
    key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
    tab.call("Input.dispatchKeyEvent", type="keyDown", **key)
    tab.run(f"{BOX}.value.trim() && {BOX}.form && {BOX}.form.requestSubmit()")
    before = None
    while (shown := tab.run("document.body.innerText")) != before:
        before = shown
        time.sleep(WRITTEN_SECONDS)


def draw_chat(folder: Path, picture: Path) -> None:
    """Show the chat page with a question and its answer."""
    with served(folder / "chat") as address, Browser() as browser:
        tab = browser.open(address, WIDTH, HEIGHT)
        ask(tab)
        tab.picture(picture)


PICTURES: dict[str, Callable[[Path, Path], None]] = {
    "loss": draw_loss,
    "report": draw_report,
    "watch": draw_watch,
    "chat": draw_chat,
}


def main(args: argparse.Namespace) -> int:
    """Make the pictures."""
    args.pictures.mkdir(parents=True, exist_ok=True)
    for name in args.only or PICTURES:
        picture = args.pictures / f"{name}.png"
        PICTURES[name](args.folder, picture)
        print(f"wrote {picture}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("tutorial"),
        help="what the commands of the tutorial have written (default: %(default)s)",
    )
    parser.add_argument(
        "--pictures",
        type=Path,
        default=ROOT / "docs" / "start" / "pictures",
        help="folder of the pictures (default: %(default)s)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=[*PICTURES], help="some of the pictures"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main_guard(lambda: main(parse_arguments())))
