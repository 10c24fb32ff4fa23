"""The tutorial as a notebook: it is what the page says, it runs, and pictures are made from what it writes.

`test_docs.py` runs the page itself.
"""

import json

import pytest

from tests.harness.documents import ROOT, environment, in_small, link_sources
from tests.harness.limits import HUNG
from tests.harness.warm import warm_environment
from tools.browser import program
from tools.draw_tutorial import PICTURES
from tools.write_notebook import NOTEBOOK, PAGE, notebook

NAME = "docs/start/tutorial.md"


@pytest.mark.plan
def test_the_notebook_is_made_from_the_page_and_has_no_outputs():
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert text == notebook(PAGE.read_text(encoding="utf-8")), (
        "the page has changed: python tools/write_notebook.py"
    )
    cells = json.loads(text)["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(codes) > 15 and all(cell["outputs"] == [] for cell in codes)
    assert not any("<!--" in "".join(cell["source"]) for cell in cells)


@pytest.mark.plan
def test_a_page_becomes_cells_of_text_commands_and_files():
    page = (
        "# Title\n\nFirst.\n\n## A\n\nRun:\n\n```bash\nls\n```\n\n`a.py`:\n\n"
        "<!-- file: a.py -->\n```python\nprint(1)\n```\n\n```python\nprint(2)\n```\n\n"
        "<!-- printed -->\n```text\n2\n```\n\n<!-- runs in: make test -->\n```bash\npip\n```\n"
    )
    cells = json.loads(notebook(page))["cells"]
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    assert found[0] == ("markdown", "# Title\n\nFirst.")
    assert found[1][0] == "code" and "PATH" in found[1][1]
    assert found[2:] == [
        ("markdown", "## A\n\nRun:"),
        ("code", "%%bash\nset -e\nls"),
        ("markdown", "`a.py`:"),
        ("code", "%%writefile a.py\nprint(1)"),
        ("code", "print(2)"),
        ("markdown", "```text\n2\n```\n\n```bash\npip\n```"),
    ]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The folder of the notebook, and the notebook after its execution in small."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    folder = tmp_path_factory.mktemp("notebook")
    link_sources(folder)
    (folder / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    made = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(made)
    for cell in made.cells:
        cell.source = in_small(NAME, cell.source)
    where = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(made, timeout=HUNG, resources=where)
    client.execute(env=warm_environment(environment()))
    return folder, made


@pytest.mark.rest
def test_the_notebook_runs_from_text_to_an_answer_of_the_server(executed):
    folder, made = executed
    said = "".join(
        output.get("text", "")
        for cell in made.cells
        for output in cell.get("outputs", ())
    )
    assert "grid: 2 ranks = tp 1 × pp 1 × dp 2" in said
    assert said.count("finished; 4 steps") == 2
    assert said.count("WIKITEXT103") == 2 and said.count("LAMBADA") == 4
    answer = json.loads(next(line for line in said.splitlines() if '"choices"' in line))
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert (folder / "tutorial/loss.png").stat().st_size > 10_000


@pytest.mark.skipif(program() is None, reason="Chromium is not installed")
@pytest.mark.rest
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_made_from_what_the_tutorial_has_written(executed, name, tmp_path):
    folder, _ = executed
    PICTURES[name](folder / "tutorial", tmp_path / "made.png")
    made = (tmp_path / "made.png").read_bytes()
    assert made[:4] == b"\x89PNG" and len(made) > 5_000
