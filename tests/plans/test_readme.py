"""The README's table of what composes is what the layout grid runs."""

import re

from tests.harness.documents import ROOT
from tests.threads.test_layout_grid import SAMPLED
from tests.threads.test_sample_layouts import CURRICULA, OWN
from tools.compare_layouts import TOLERANCE

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_what_composes_has_the_axes_of_the_grid_and_their_values():
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| ([^|]+) \|$", README, re.MULTILINE)
    axes = SAMPLED | OWN | {"curriculum": tuple(CURRICULA)}
    assert {key: values for key, values in rows} == {key: ", ".join(map(str, values)) for key, values in axes.items()}


def test_the_tolerances_it_tells_are_those_in_force():
    limit = TOLERANCE["fp32"]
    told = re.findall(r"below\s+([\d.e-]+)\s+of", README)
    assert [float(number) for number in told] == [limit.loss, limit.weights] and limit.grad_norm == limit.loss
