"""`--help` of each benchmark and tool describes it, and runs nothing."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.harness.warm import warm_python

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
# Files of libraries have no main program.
SCRIPTS = [
    path
    for folder in ("benchmarks", "tools")
    for path in sorted((ROOT / folder).glob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]
# In one process, as most of its seconds are those of imports. Other programs need not be installed.
PROGRAM = """
import contextlib, io, json, runpy, sys
found = {}
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    sys.path.insert(0, path.rpartition("/")[0])
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(path, run_name="__main__")
        found[path] = "returned"
    except SystemExit as end:
        found[path] = f"exit {end.code}, usage {'usage: ' in out.getvalue()}"
    except ModuleNotFoundError as error:
        found[path] = f"no {error.name}"
    del sys.path[0]
print(json.dumps(found))
"""
GOOD = {"exit 0, usage True", "no deepspeed", "no megatron"}


@pytest.mark.quick
def test_each_script_prints_its_help_and_does_nothing(tmp_path):
    command = [warm_python(), "-c", PROGRAM, *map(str, SCRIPTS)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert len(found) == len(SCRIPTS) > 40
    assert {path: how for path, how in found.items() if how not in GOOD} == {}
    assert not [*tmp_path.iterdir()]
