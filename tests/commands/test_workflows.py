"""What is in .github runs what a developer runs: each command of a workflow is a target of the Makefile."""

import re
import runpy
import tomllib

import pytest
import yaml

from tests.harness.documents import ROOT

pytestmark = pytest.mark.plan

FOLDER = ROOT / ".github/workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^([A-Z]+) +\?=", MAKEFILE, re.MULTILINE))
COMMAND = re.compile(r"make ([a-z-]+)((?: [A-Z]+=\S+)*)")
# A place for a value of the matrix, which this repository wrote itself.
MATRIX = re.compile(r"\$\{\{ matrix\.(\w+) \}\}")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(path):
    return yaml.safe_load(path.read_text())


def jobs():
    return [
        pytest.param(job, id=f"{path.stem}.{name}")
        for path in WORKFLOWS
        for name, job in read(path)["jobs"].items()
    ]


def commands(job):
    """The lines that a job runs, with each value of its matrix in its place."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for step in job["steps"]:
        for line in step.get("run", "").splitlines():
            lines = [line]
            for name in MATRIX.findall(line):
                place = f"${{{{ matrix.{name} }}}}"
                lines = [
                    each.replace(place, str(value))
                    for each in lines
                    for value in matrix[name]
                ]
            yield from lines


def excluded(matrix, **values):
    """Whether the matrix leaves out a job of these values."""
    return any(
        all(values.get(name) == value for name, value in row.items())
        for row in matrix.get("exclude", ())
    )


@pytest.mark.parametrize("job", jobs())
def test_each_command_of_a_workflow_is_a_target_of_the_makefile(job):
    for line in commands(job):
        found = COMMAND.fullmatch(line)
        assert found, f"{line!r} is no target of the Makefile"
        assert found[1] in TARGETS, line
        for assignment in found[2].split():
            assert assignment.partition("=")[0] in VARIABLES, line


@pytest.mark.parametrize("job", jobs())
def test_a_job_has_a_limit_least_rights_and_actions_of_one_version(job):
    assert job["timeout-minutes"] <= 60
    assert set(job["permissions"]) <= {"contents", "id-token", "pages"}
    assert job["permissions"].get("contents", "read") == "read"
    for step in job["steps"]:
        if "uses" in step:
            assert re.fullmatch(r"[\w./-]+@v\d+\.\d+\.\d+", step["uses"])


def test_the_checks_of_a_change_are_those_of_make_test_and_more():
    found = {
        COMMAND.fullmatch(line)[1]
        for path in WORKFLOWS
        for job in read(path)["jobs"].values()
        for line in commands(job)
    }
    (needed,) = re.findall(r"^test: (.*)$", MAKEFILE, re.MULTILINE)
    assert set(needed.split()) <= found
    assert {"shard", "wheel", "check-wheel", "links", "workflows", "check-tag"} <= found


def test_every_shard_runs_with_every_python_and_every_torch_of_the_package():
    matrix = read(FOLDER / "tests.yml")["jobs"]["test"]["strategy"]["matrix"]
    steps = read(FOLDER / "tests.yml")["jobs"]["test"]["steps"]
    (command,) = [step["run"] for step in steps if "run" in step]
    count = int(re.search(r"SHARD=\S.*/(\d+)", command)[1])
    assert matrix["shard"] == list(range(1, count + 1))
    # The versions of torch are those that pyproject.toml allows.
    (bounds,) = [d for d in PROJECT["dependencies"] if d.startswith("torch")]
    first, end = map(int, re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", bounds).groups())
    assert matrix["torch"] == [f"2.{minor}" for minor in range(first, end)]
    # Each Python meets the newest, and each torch at least one Python.
    for python in matrix["python"]:
        assert not excluded(matrix, python=python, torch=matrix["torch"][-1])
    for torch in matrix["torch"]:
        assert any(
            not excluded(matrix, python=python, torch=torch)
            for python in matrix["python"]
        )


def test_wheels_are_built_for_each_python_that_is_tested():
    tested = read(FOLDER / "tests.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    for name in ("checks.yml", "release.yml"):
        wheels = read(FOLDER / name)["jobs"]["wheel"]["strategy"]["matrix"]["python"]
        assert wheels == tested
    named = {row.rpartition(" ")[2] for row in PROJECT["classifiers"] if ":: 3." in row}
    assert named <= set(tested)


def test_a_release_is_published_by_a_token_of_its_own_job_after_the_checks():
    release = read(FOLDER / "release.yml")
    publish = release["jobs"]["publish"]
    assert publish["needs"] == "wheel" and publish["environment"] == "pypi"
    assert publish["permissions"] == {"id-token": "write"}
    assert "secrets." not in (FOLDER / "release.yml").read_text()
    assert not [step for step in publish["steps"] if "run" in step]
    order = [line.split()[1] for line in commands(release["jobs"]["wheel"])]
    assert order == ["check-tag", "wheel", "check-wheel"]


def test_hooks_before_a_commit_run_targets_of_the_makefile():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local" and len(repo["hooks"]) >= 2
    for hook in repo["hooks"]:
        assert COMMAND.fullmatch(hook["entry"])[1] in TARGETS


def test_the_citation_has_the_version_of_the_package():
    version = runpy.run_path(str(ROOT / "megatron_ds/version.py"))["__version__"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == version
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
