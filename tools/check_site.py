"""Find links of a built site that lead nowhere, and what it would load from a network.

python tools/check_site.py build/site
"""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_ds.cli import Arguments, main_guard  # noqa: E402

# Attributes whose address a browser loads by itself. A reader follows those of <a>.
LOADED = {"src", "srcset", "poster", "data"}
# Relations of <link> whose address it does not load.
FOLLOWED = {"index", "search", "next", "prev"}
IN_STYLES = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")


@dataclass
class Page(HTMLParser):
    """What a page has: names that links can end with, addresses that it links to, and those that it loads."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self):
        super().__init__()

    def handle_starttag(
        self,
        tag: str,
        attrs: list[tuple[str, str | None]],
    ) -> None:
        """Keep the addresses and names of a tag."""
        for name, value in attrs:
            if value is None:
                continue
            if name == "id":
                self.anchors.add(value)
            elif name == "href":
                self.place(tag, dict(attrs)).append(value)
            elif name in LOADED:
                self.loads.append(value)

    def place(self, tag: str, attributes: dict[str, str | None]) -> list[str]:
        """Return the list that the `href` of a tag belongs to."""
        if tag == "a" or attributes.get("rel") in FOLLOWED:
            return self.links
        return self.loads


def read(path: Path) -> Page:
    """Read a page."""
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def is_elsewhere(address: str) -> bool:
    """Whether a browser needs a network for it."""
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme in ("http", "https")


def problems(site: Path) -> Iterator[str]:
    """Yield a line for each link without its file or its anchor, and for each address that is loaded from elsewhere."""
    site = site.resolve()
    pages = {path: read(path) for path in sorted(site.rglob("*.html"))}
    for path in pages:
        for problem in problems_of_page(path, pages):
            yield f"{path.relative_to(site)}: {problem}"
    yield from problems_of_styles(site)


def problems_of_page(path: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """Yield what is wrong with the addresses of a page."""
    page = pages[path]

    # A browser needs no network.
    for address in filter(is_elsewhere, page.loads):
        yield f"loads {address} from a network"

    # Links within the site. Others, such as mailto:, are not followed.
    for address in [*page.links, *page.loads]:
        if urlsplit(address).scheme or is_elsewhere(address):
            continue
        if not leads_somewhere(path, address, pages):
            yield f"{address} leads nowhere"


def leads_somewhere(path: Path, address: str, pages: dict[Path, Page]) -> bool:
    """Whether the file of a link exists, and its page has the anchor."""
    parts = urlsplit(address)
    name = unquote(parts.path)
    anchor = unquote(parts.fragment)

    # An address without a path is of the same page.
    target = path
    if name:
        target = (path.parent / name).resolve()
    if not anchor:
        return target.is_file()
    if target not in pages:
        return False
    return anchor in pages[target].anchors


# Style sheets have no anchors.
NO_PAGES: dict[Path, Page] = {}


def problems_of_styles(site: Path) -> Iterator[str]:
    """Yield a line for each address in a style sheet that is missing or elsewhere."""
    for path in sorted(site.rglob("*.css")):
        text = path.read_text(encoding="utf-8")
        for in_url, imported in IN_STYLES.findall(text):
            address = in_url or imported
            if address.startswith(("data:", "#")):
                continue
            if not leads_somewhere(path, address, NO_PAGES):
                yield f"{path.relative_to(site)}: {address} leads nowhere"


def main(args: argparse.Namespace) -> int:
    """Print the problems; 1 if there are any."""
    found = list(problems(args.site))
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{args.site}: {len(found)} problems")
    return 1 if found else 0


def parse_arguments() -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("site", type=Path, metavar="FOLDER", help="a built site")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main_guard(lambda: main(parse_arguments())))
