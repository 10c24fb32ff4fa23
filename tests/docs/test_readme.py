"""The table of what composes is what the layout grid runs, and the pages use plain terms."""

import re

import pytest

from tests.grid.test_layout_grid import OPTIONS
from tests.harness.documents import ROOT, pages
from tests.harness.tiny_jobs import TOLERANCE

pytestmark = pytest.mark.plan

README = (ROOT / "README.md").read_text(encoding="utf-8")
PARALLELISM = (ROOT / "docs" / "scale" / "parallelism.md").read_text(encoding="utf-8")


def test_the_table_of_what_composes_has_the_axes_of_the_grid_and_their_values():
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| ([^|]+) \|$", PARALLELISM, re.MULTILINE)
    assert {key: values for key, values in rows} == {
        key: ", ".join(map(str, values)) for key, values in OPTIONS.items()
    }


def test_the_tolerances_beside_the_table_are_those_in_force():
    limit = TOLERANCE["fp32"]
    given = re.findall(r"below\s+([\d.e-]+)\s+of", PARALLELISM)
    assert [float(number) for number in given] == [
        limit.loss,
        limit.weights,
    ] and limit.grad_norm == limit.loss


# Words with a plain replacement, see the glossary of CONTRIBUTING.md. docs/reference/flags.md is generated
# from the help of the options.
UNCLEAR = (
    r"nobody|somebody|everybody|whoever|passport|foretold|made-up|go(?:es)? on|so many|by itself|"
    r"says? (?:so|which|what|it|why|how|that)|tells? (?:what|how|which|where|why|that)|"
    r"speaks?|talks?|knows? (?:of|nothing|no)|no word|the words of|will do|legal alternatives"
)


@pytest.mark.parametrize(
    "page", [page for page in pages() if page != "docs/reference/flags.md"]
)
def test_a_page_uses_plain_terms(page):
    prose = re.sub(
        r"^```.*?^```",
        "",
        (ROOT / page).read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    assert re.findall(rf"\b(?:{UNCLEAR})\b", prose) == []


def test_readme_gives_the_exit_code_of_torchrun_beside_that_of_the_ranks():
    (stopping,) = re.findall(
        r"On SIGTERM, SIGUSR1 or Ctrl-C.*?continue\.", README, re.DOTALL
    )
    assert "exit code 0" in stopping and re.search(
        r"torchrun itself exits with code 1", stopping
    )


def test_parallelism_names_what_differs_between_layouts_and_the_network_it_needs():
    for fact in (
        "Single weights",
        "3e-5",
        "label_smoothing",
        "V − 1",
        "Trusted networks",
        "pickles",
        "GLOO_SOCKET_IFNAME",
    ):
        assert fact in PARALLELISM
