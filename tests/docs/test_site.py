"""The documentation site: it is built without a warning, its links lead somewhere, and a browser shows it without a
network."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.harness.documents import ROOT, pages
from tests.harness.limits import HUNG
from tools.browser import Browser, program
from tools.build_site import SETTINGS, stage
from tools.check_site import problems
from tools.look_at_site import look

MENU = yaml.safe_load((SETTINGS / "site.yaml").read_text(encoding="utf-8"))
needs_chromium = pytest.mark.skipif(
    program() is None, reason="Chromium is not installed"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    words = ["--output", str(folder / "site"), "--work", str(folder / "work")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/build_site.py"), *words],
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"index\.html: \d+ pages, 0 dead links$", done.stdout.strip())
    return folder / "site"


@pytest.mark.rest
def test_the_site_has_every_page_and_what_the_docstrings_of_the_api_say(site):
    for page in set(pages()) - {"README.md"}:
        assert (site / page).with_suffix(".html").is_file(), page
    assert "Where next" in (site / "index.html").read_text(encoding="utf-8")
    schedules = site / "docs/reference/api/pipeline_schedules.html"
    text = re.sub(r"<[^>]*>", "", schedules.read_text(encoding="utf-8"))
    simulate = importlib.import_module("megatron_ds.pipeline.simulate")
    assert simulate.simulate.__doc__.splitlines()[0] in text
    recipe = (ROOT / "examples/gpt_tiny_cpu.sh").read_text(encoding="utf-8")
    shown = (site / "examples/gpt_tiny_cpu.sh.html").read_text(encoding="utf-8")
    shown = re.sub(r"<[^>]*>", "", shown)
    assert recipe.splitlines()[1] in shown


@needs_chromium
@pytest.mark.rest
def test_a_browser_shows_each_page_and_finds_words_without_a_server(site):
    assert list(look(site, None)) == []
    with Browser() as browser:
        tab = browser.open(f"{(site / 'search.html').as_uri()}?q=deadlock")
        tab.wait_until("document.body.innerText.includes('Search finished')")
        found = tab.run(
            "[...document.querySelectorAll('#search-results li a')].map(a => a.textContent)"
        )
        assert "Pipeline schedules" in found and tab.errors == []


@needs_chromium
@pytest.mark.rest
def test_the_look_at_a_page_finds_errors_and_text_beyond_the_window(tmp_path):
    page = "<body><script>throw new Error('early')</script><img src='none.png'></body>"
    (tmp_path / "bad.html").write_text(page)
    (tmp_path / "good.html").write_text("<body>short</body>")
    (tmp_path / "wide.html").write_text("<div style='width: 600px'>wide</div>")
    found = list(look(tmp_path, tmp_path / "pictures"))
    bad = [line for line in found if line.startswith("bad.html: wide-light")]
    assert any("Uncaught" in line for line in bad)
    assert any("none.png" in line for line in bad)
    assert [line for line in found if "bad" not in line] == [
        "wide.html: narrow-dark: 188 pixels wider than the window of 420"
    ]
    assert (tmp_path / "pictures/good.narrow-dark.png").stat().st_size > 100


@pytest.mark.plan
def test_dead_links_missing_anchors_and_addresses_of_a_network_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there">1</a><a href="b.html#gone">2</a><a href="c.html">3</a>'
        '<a href="https://example.org">4</a><script src="https://cdn.example/x.js"></script>'
        '<img src="p.png"><link rel="stylesheet" href="s.css"><a href="#">5</a><a href="#top">6</a>'
    )
    (tmp_path / "b.html").write_text('<h1 id="there">B</h1>')
    (tmp_path / "s.css").write_text("p { background: url(q.png) }")
    assert list(problems(tmp_path)) == [
        "a.html: loads https://cdn.example/x.js from a network",
        "a.html: b.html#gone leads nowhere",
        "a.html: c.html leads nowhere",
        "a.html: #top leads nowhere",
        "a.html: p.png leads nowhere",
        "s.css: q.png leads nowhere",
    ]


@pytest.mark.plan
def test_links_of_staged_pages_fit_the_site(tmp_path):
    stage(tmp_path)
    staged = (tmp_path / "docs/use/launching.md").read_text(encoding="utf-8")
    assert "](../../examples/launch.sbatch.md)" in staged
    first = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert "](examples/README.md)" in first and "![One step" in first
    assert not (tmp_path / "README.md").exists()
    shown = (tmp_path / "examples/launch.sbatch.md").read_text(encoding="utf-8")
    assert "{literalinclude} launch.sbatch" in shown
    assert (tmp_path / "docs/pictures/layouts.svg").is_file()


@pytest.mark.plan
def test_what_the_pages_import_has_an_api_page():
    listed = {module for table in MENU["api"] for module in table["modules"]}
    imports = re.compile(r"^from (megatron_ds\.[\w.]+) import ([\w, ]+)$", re.MULTILINE)
    found = [
        (page, module, name)
        for page in pages()
        for module, names in imports.findall((ROOT / page).read_text(encoding="utf-8"))
        for name in names.split(", ")
    ]
    assert len(found) > 40
    for page, module, name in found:
        value = getattr(importlib.import_module(module), name)
        places = {module, getattr(value, "__module__", module)}
        assert places & listed, f"{page}: {module}.{name}"


PLAIN = """Say what it does, with `a * b` and *args_ of x_, and `code
-> of two lines`.

    F s     activation
    B s     gradient
After the table.

Axes:  tp  tensor        cp  context
* an item that
  has two lines
* `Work`s"""

MARKED = r"""
Say what it does, with ``a * b`` and \*args\_ of x\_, and ``code
-> of two lines``.


::

        F s     activation
        B s     gradient


After the table.


::

    Axes:  tp  tensor        cp  context


* an item that
  has two lines
* ``Work``\ s"""


@pytest.mark.plan
def test_a_plain_docstring_keeps_its_layout_in_restructured_text(monkeypatch):
    monkeypatch.syspath_prepend(str(SETTINGS))
    plain_docstrings = importlib.import_module("plain_docstrings")
    made = plain_docstrings.restructured(PLAIN.splitlines())
    assert [line.rstrip() for line in made if line.strip()] == [
        line for line in MARKED.splitlines() if line.strip()
    ]
