"""Open each page of a built site in headless Chromium, wide and light, then narrow and dark.

python tools/look_at_site.py build/site --pictures build/site-pictures

Errors of a page's scripts, files that do not load and text that is wider than the window are printed, and end
the command with code 1.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_ds.cli import Arguments, main_guard  # noqa: E402
from tools.browser import Browser  # noqa: E402

# Name, width in pixels, whether the colours are dark.
WINDOWS = (("wide-light", 1280, False), ("narrow-dark", 420, True))
# Pixels by which the page is wider than the window.
OVERFLOW = "document.documentElement.scrollWidth - window.innerWidth"
EMPTY_PICTURES = (
    "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
)


def seen(
    browser: Browser,
    path: Path,
    name: str,
    width: int,
    dark: bool,
    picture: Path | None,
) -> Iterator[str]:
    """Yield what is wrong with a page in one window."""
    tab = browser.open(path.resolve().as_uri(), width, dark=dark)
    yield from (f"{name}: {error}" for error in tab.errors)
    yield from (f"{name}: {source} is empty" for source in tab.run(EMPTY_PICTURES))
    too_wide = tab.run(OVERFLOW)
    if too_wide > 0:
        yield f"{name}: {too_wide} pixels wider than the window of {width}"
    if picture is not None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        tab.picture(picture)
    tab.close()


def look(site: Path, pictures: Path | None) -> Iterator[str]:
    """Yield what is wrong with the pages of a site; write a picture of each."""
    with Browser() as browser:
        for path in sorted(site.rglob("*.html")):
            page = path.relative_to(site)
            for name, width, dark in WINDOWS:
                picture = None
                if pictures is not None:
                    picture = pictures / page.with_suffix(f".{name}.png")
                for problem in seen(browser, path, name, width, dark, picture):
                    yield f"{page}: {problem}"


def main(args: argparse.Namespace) -> int:
    """Print what is wrong."""
    found = list(look(args.site, args.pictures))
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{args.site}: {len(found)} problems")
    return 1 if found else 0


def parse_arguments() -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("site", type=Path, metavar="FOLDER", help="a built site")
    parser.add_argument(
        "--pictures", type=Path, help="folder of a picture of each page"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main_guard(lambda: main(parse_arguments())))
