"""docs/design/pipeline.md: its pictures are what the tool draws today, and its worked example keeps the
contract."""

import shlex
import subprocess

import pytest

from megatron_ds.pipeline.schedules import SCHEDULES
from tests.contracts import test_schedules_contract as contract
from tests.harness.documents import ROOT, blocks_of, environment
from tests.harness.limits import HUNG

pytestmark = [pytest.mark.plan, pytest.mark.one_in(2, together=True)]

PAGE = "docs/design/pipeline.md"
BLOCKS = list(blocks_of(PAGE))


def test_the_pictures_of_the_page_are_those_that_its_commands_make(tmp_path):
    commands = next(block.text for block in BLOCKS if block.language == "bash")
    for command in commands.replace("\\\n", " ").splitlines():
        words = shlex.split(command)
        subprocess.run(
            [words[0], ROOT / words[1], *words[2:]],
            cwd=tmp_path,
            env=environment(),
            check=True,
            timeout=HUNG,
            stdout=subprocess.DEVNULL,
        )
    drawn, kept = (
        {path.name: path.read_text() for path in (folder / "pictures").glob("*.svg")}
        for folder in (tmp_path, ROOT / "docs/design")
    )
    stale = [name for name in sorted(drawn | kept) if drawn.get(name) != kept.get(name)]
    assert drawn and not stale, f"{stale}: run the commands of {PAGE} in docs/design"
    assert all(f"](pictures/{name})" in (ROOT / PAGE).read_text() for name in drawn)


@pytest.fixture
def worked_example():
    """The name that the page's file registers, for as long as the test takes."""
    before = set(SCHEDULES)
    exec(next(block.text for block in BLOCKS if block.file == "w_last.py"), {})
    (name,) = set(SCHEDULES) - before
    yield name
    del SCHEDULES._things[name]


def test_the_worked_example_keeps_every_promise_of_the_contract(worked_example):
    promises = [
        test for name, test in vars(contract).items() if name.startswith("test_")
    ]
    assert len(promises) >= 6
    for promise in promises:
        promise(worked_example)
