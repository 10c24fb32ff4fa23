"""Build the documentation site from the pages of this checkout.

python tools/build_site.py              write build/site, whose first page is build/site/index.html

The pages are copied to build/site-source, where links fit a site: to README.md they lead to its first page, to a folder
to its README.md, to a source file to a page that shows it. docs/site/site.yaml has the menu, and the modules whose
docstrings become pages. Warnings of Sphinx and links that lead nowhere end the command with code 1. It needs
`pip install '.[site]'`, and no network.
"""

import argparse
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_ds.cli import Arguments, main_guard  # noqa: E402
from megatron_ds.errors import ConfigError, DataError  # noqa: E402

SETTINGS = ROOT / "docs" / "site"
API = PurePosixPath("docs/reference/api")
FIRST = PurePosixPath("README.md")
INDEX = PurePosixPath("index.md")
# A link of Markdown: its text stays.
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
# Files that a page shows or offers, and which have no page of their own.
AS_THEY_ARE = (".svg", ".png", ".ipynb")
LANGUAGES = {
    ".py": "python",
    ".sh": "bash",
    ".sbatch": "bash",
    ".yaml": "yaml",
    ".toml": "toml",
    ".cpp": "cpp",
    ".h": "cpp",
    ".json": "json",
}


@dataclass
class Source:
    """The folder from which Sphinx builds. staged: paths that are there, relative to the checkout."""

    folder: Path
    staged: set[PurePosixPath] = field(default_factory=set)

    def add(self, path: PurePosixPath) -> PurePosixPath:
        """Copy a file of the checkout, with what it links to; return the path that links to it need."""
        if (ROOT / path).is_dir():
            path = path / "README.md"
        if not (ROOT / path).is_file():
            raise DataError(
                f"a page links to {path}, which is not in this checkout. Correct the link."
            )
        if path not in self.staged:
            self.staged.add(path)
            self._copy(path)
        if path == FIRST:
            return INDEX
        if path.suffix in (".md", *AS_THEY_ARE):
            return path
        return shown_at(path)

    def _copy(self, path: PurePosixPath) -> None:
        if path.suffix == ".md":
            text = (ROOT / path).read_text(encoding="utf-8")
            self.write(INDEX if path == FIRST else path, self._with_links(path, text))
            return
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, target)
        if path.suffix not in AS_THEY_ARE:
            self.write(shown_at(path), page_of_file(path))

    def _with_links(self, page: PurePosixPath, text: str) -> str:
        """Return the page with links that fit the site. A link in code is none: its file does not exist."""

        def fitting(link: re.Match[str]) -> str:
            linked = (ROOT / page.parent / link[2]).resolve()
            if not linked.exists():
                return link[0]
            there = relative(self.add(in_checkout(linked)), page)
            return f"{link[1]}{there}{link[3]}"

        return LINK.sub(fitting, text)

    def write(self, path: PurePosixPath, text: str) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def in_checkout(path: Path) -> PurePosixPath:
    """Return a path relative to the checkout."""
    return PurePosixPath(path.relative_to(ROOT).as_posix())


def relative(path: PurePosixPath, page: PurePosixPath) -> str:
    """Return the link from a page to a path, both relative to the same folder."""
    return os.path.relpath(path, page.parent).replace(os.sep, "/")


def shown_at(path: PurePosixPath) -> PurePosixPath:
    """Return the page that shows a source file."""
    return path.with_name(f"{path.name}.md")


def page_of_file(path: PurePosixPath) -> str:
    """Return the text of the page that shows a source file."""
    language = LANGUAGES.get(path.suffix, "text")
    shown = f"```{{literalinclude}} {path.name}\n:language: {language}\n```"
    return f"---\norphan: true\n---\n\n# {path}\n\n{shown}\n"


def menu(parts: dict[str, list[str]]) -> str:
    """Return the tables of contents that the first page has, one a part."""
    return "\n".join(
        "```{toctree}\n:hidden:\n:glob:\n"
        f":caption: {name}\n\n" + "\n".join(pages) + "\n```\n"
        for name, pages in parts.items()
    )


def api_pages(tables: list[dict]) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield the path and the text of each API page."""
    for table in tables:
        lines = [f"# {table['title']}", "", table["about"], ""]
        for name in table.get("functions", ()):
            lines += directive("autofunction", name)
        for module in table["modules"]:
            lines += [f"## {module}", ""]
            lines += directive("automodule", module, "members")
        name = table["title"].lower().replace(" ", "_")
        yield API / f"{name}.md", "\n".join(lines)


def directive(kind: str, name: str, *options: str) -> list[str]:
    """Return the lines of a directive of autodoc, which reads reStructuredText."""
    return [
        "```{eval-rst}",
        f".. {kind}:: {name}",
        *(f"   :{option}:" for option in options),
        "```",
        "",
    ]


def stage(folder: Path) -> None:
    """Write the sources of the site to an empty folder."""
    site = yaml.safe_load((SETTINGS / "site.yaml").read_text(encoding="utf-8"))
    source = Source(folder)

    # The pages of the checkout: those of the menu, and others by links.
    source.add(FIRST)
    for page in sorted(ROOT.glob("docs/**/*.md")):
        source.add(in_checkout(page))
    first = (folder / INDEX).read_text(encoding="utf-8")
    source.write(INDEX, f"{first}\n{menu(site['menu'])}")

    # Pages that only the site has, and Sphinx's settings.
    for path, text in api_pages(site["api"]):
        source.write(path, text)
    for path in SETTINGS.glob("*.py"):
        shutil.copyfile(path, folder / path.name)
    shutil.copytree(SETTINGS / "static", folder / "static")


def build(output: Path, work: Path, jobs: int) -> int:
    """Build the site; returns the exit code of Sphinx, which is not 0 after a warning."""
    try:
        from sphinx.cmd.build import main as sphinx
    except ImportError as error:
        raise ConfigError(
            f"{error}. The site is built by Sphinx: pip install '.[site]'"
        ) from error
    for folder in (output, work):
        shutil.rmtree(folder, ignore_errors=True)
    source = work / "source"
    source.mkdir(parents=True)
    stage(source)
    words = ["-W", "--keep-going", "-q", "-b", "html", "-j", str(jobs)]
    return sphinx([*words, "-d", str(work / "doctrees"), str(source), str(output)])


def main(args: argparse.Namespace) -> int:
    """Build and check."""
    from tools.check_site import problems

    code = build(args.output, args.work, args.jobs)
    lost = list(problems(args.output))
    print(*lost, sep="\n", end="\n" if lost else "")
    pages = len(list(args.output.rglob("*.html")))
    print(f"{args.output / 'index.html'}: {pages} pages, {len(lost)} dead links")
    return 1 if code or lost else 0


def parse_arguments() -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "build" / "site",
        help="folder of the site; it is replaced (default: %(default)s)",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "build" / "site-work",
        help="folder of sources and caches; it is replaced (default: %(default)s)",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes of Sphinx")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main_guard(lambda: main(parse_arguments())))
