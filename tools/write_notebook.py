"""Write docs/start/tutorial.ipynb from docs/start/tutorial.md: the same text, its commands as cells, without outputs.

python tools/write_notebook.py
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_ds.cli import Arguments, main_guard  # noqa: E402

PAGE = ROOT / "docs" / "start" / "tutorial.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")
# A fenced block, with the comment above it that decides what it becomes (tests/harness/documents.py).
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^>]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$\n?",
    re.MULTILINE | re.DOTALL,
)
START = """\
import os
import shutil
import sys
from pathlib import Path

# The commands of this Python, unless another environment is active; in the root of the checkout.
if shutil.which("megatron-ds") is None:
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
while not Path("pyproject.toml").exists() and Path.cwd() != Path("/"):
    os.chdir("..")
"""


def cell(kind: str, text: str, number: int) -> dict:
    """Return a cell of format 4.5."""
    made = {
        "cell_type": kind,
        "id": f"cell-{number:02d}",
        "metadata": {},
        "source": text.splitlines(keepends=True),
    }
    if kind == "code":
        made |= {"execution_count": None, "outputs": []}
    return made


def code_of(block: re.Match[str]) -> str | None:
    """Return the code of a cell; None for a block that stays part of the text."""
    mark, language = block["mark"] or "", block["language"]
    text = block["text"].rstrip("\n")
    if mark.startswith("file: "):
        return f"%%writefile {mark.removeprefix('file: ')}\n{text}"
    if mark or language not in ("bash", "python"):
        return None
    return f"%%bash\nset -e\n{text}" if language == "bash" else text


def cells(page: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each cell of a page."""
    yield "code", START.rstrip("\n")
    said = ""
    at = 0
    for block in BLOCK.finditer(page):
        said += page[at : block.start()]
        at = block.end()
        code = code_of(block)
        if code is None:
            said += block[0].partition("-->\n")[2] or block[0]
            continue
        if said.strip():
            yield "markdown", said.strip()
        yield "code", code
        said = ""
    said += page[at:]
    yield "markdown", said.strip()


def notebook(page: str) -> str:
    """Return the text of the notebook of a page."""
    title, _, rest = page.partition("\n## ")
    made = [cell("markdown", title.strip(), 0)]
    made += [
        cell(kind, text, number + 1)
        for number, (kind, text) in enumerate(cells(f"## {rest}"))
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return (
        json.dumps(
            {
                "cells": made,
                "metadata": {
                    "kernelspec": kernel,
                    "language_info": {"name": "python"},
                },
                "nbformat": 4,
                "nbformat_minor": 5,
            },
            indent=1,
            ensure_ascii=False,
        )
        + "\n"
    )


def main(args: argparse.Namespace) -> int:
    """Write the notebook."""
    args.output.write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {args.output}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument(
        "--output",
        type=Path,
        default=NOTEBOOK,
        help="notebook to write (default: %(default)s)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main_guard(lambda: main(parse_arguments())))
