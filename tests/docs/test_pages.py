"""Links between pages, paths of pages in the package, and the pictures of the first page."""

import re

import pytest

from tests.harness.documents import ROOT, pages
from tools.draw_layouts import RUNS, largest_difference, picture, read
from tools.draw_results import PAGE, results
from tools.draw_results import picture as picture_of_results

pytestmark = pytest.mark.plan

FOLDERS = ("megatron_ds", "tools", "examples", "tests", "benchmarks")
SUFFIXES = (".py", ".sh", ".yaml", ".sbatch")
SOURCES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in SUFFIXES
]
NAMED = re.compile(r"\bdocs/[\w/.-]+\.(?:md|svg)")


def anchors(page):
    """What a heading is called in links: lower case, words and hyphens only."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", pages())
def test_links_to_headings_find_them(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)]*)\)", text):
        linked = (ROOT / page).parent / target if target else ROOT / page
        assert anchor in anchors(linked.resolve().relative_to(ROOT)), (
            f"{page}: {target}#{anchor}"
        )


def test_every_page_that_the_sources_name_exists():
    named = {
        (path.relative_to(ROOT), name)
        for path in SOURCES
        for name in NAMED.findall(path.read_text(encoding="utf-8"))
    }
    assert len(named) > 30
    assert [
        (str(path), name) for path, name in sorted(named) if not (ROOT / name).exists()
    ] == []


def test_every_page_is_linked_from_another():
    linked = set()
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#\s:]+\.md)(?:#[^)]*)?\)", text):
            linked.add(((ROOT / page).parent / target).resolve())
    assert [
        page for page in pages() if (ROOT / page) not in linked and page != "README.md"
    ] == []


def test_the_first_picture_is_drawn_from_the_losses_beside_it():
    losses = read(ROOT / "docs/pictures/layouts.json")
    assert (ROOT / "docs/pictures/layouts.svg").read_text(encoding="utf-8") == picture(
        losses
    )
    assert (
        set(losses) == {run.name for run in RUNS} and largest_difference(losses) < 1e-5
    )


def test_the_picture_of_results_has_the_figures_of_the_page():
    rows = results(PAGE.read_text(encoding="utf-8"))
    assert len(rows) >= 15
    assert (ROOT / "docs/pictures/results.svg").read_text(
        encoding="utf-8"
    ) == picture_of_results(rows)


def test_notes_address_no_one_who_ordered_them():
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert not re.search(
            r"\*\*(?:Asked|Goal)|\bthe goals? (?:is|was|of)\b|\| asked \|", text, re.I
        ), page
