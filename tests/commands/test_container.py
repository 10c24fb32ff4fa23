"""The Dockerfile, as it is read: no test has a Docker daemon.

Its stages fit together, what it copies exists and reaches it, and its requirements are those of pyproject.toml.
"""

import re
import tomllib
from dataclasses import dataclass, field

import pytest

from tests.harness.documents import ROOT

pytestmark = pytest.mark.plan

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLACE = re.compile(r"\$\{(\w+)\}")


@dataclass
class Stage:
    """A stage of the file. base: its image or stage; lines: (instruction, the rest) of each line after FROM"""

    base: str
    name: str
    lines: list[tuple[str, str]] = field(default_factory=list)

    def of(self, instruction: str) -> list[str]:
        return [rest for found, rest in self.lines if found == instruction]


def read_stages() -> tuple[dict[str, str], list[Stage]]:
    """(default of each argument, stages) of the Dockerfile."""
    arguments = {}
    stages: list[Stage] = []
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        assert not line.endswith("\\"), "an instruction is one line here"
        instruction, _, rest = line.partition(" ")
        if instruction == "ARG":
            name, _, default = rest.partition("=")
            arguments[name] = default
        elif instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(base, name))
        else:
            stages[-1].lines.append((instruction, rest))
    return arguments, stages


ARGUMENTS, STAGES = read_stages()
NAMED = {stage.name: stage for stage in STAGES}


def test_the_image_is_of_a_stage_for_each_device():
    assert STAGES[-1].base == "${DEVICE}" and ARGUMENTS["DEVICE"] == "cpu"
    assert {"cpu", "cuda", "wheel"} == set(NAMED) - {""}
    for stage in STAGES[:-1]:
        assert set(PLACE.findall(stage.base)) <= set(ARGUMENTS)
        assert stage.base.startswith("python:${PYTHON}-slim-")


def test_its_python_is_one_of_the_package():
    names = [row.rpartition(" ")[2] for row in PROJECT["classifiers"]]
    assert ARGUMENTS["PYTHON"] in names


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_device_has_the_torch_of_the_package(device):
    (bounds,) = [name for name in PROJECT["dependencies"] if name.startswith("torch")]
    (line,) = [run for run in NAMED[device].of("RUN") if "pip install" in run]
    assert f'"{bounds}"' in line
    assert ("/whl/cpu" in line) == (device == "cpu")


def test_the_wheel_is_built_with_a_compiler_from_all_that_it_needs():
    stage = NAMED["wheel"]
    assert stage.of("COPY") == [". /source"]
    assert (
        "g++" in stage.of("RUN")[0]
        and "--outdir /wheels /source" in stage.of("RUN")[-1]
    )
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {rule[1:] for rule in rules if rule.startswith("!")}
    assert "*" in rules and all((ROOT / name).exists() for name in sent)
    manifest = (ROOT / "MANIFEST.in").read_text()
    needed = {"setup.py", "pyproject.toml", "MANIFEST.in", "megatron_ds"}
    needed |= {PROJECT["readme"], *PROJECT["license-files"], manifest.split()[1]}
    assert needed == sent


def test_the_image_has_the_wheel_with_extras_and_no_compiler_of_its_own():
    final = STAGES[-1]
    (line,) = [run for run in final.of("RUN") if "pip install" in run]
    assert "from=wheel,source=/wheels" in line and not final.of("COPY")
    (extras,) = re.findall(r"/wheels/\*\.whl\)\[([\w,]+)\]", line)
    assert {"report", "serve"} <= set(extras.split(","))
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert "apt-get" not in " ".join(final.of("RUN"))


def test_the_image_runs_the_command_as_a_user_without_rights():
    final = STAGES[-1]
    assert final.of("ENTRYPOINT") == ['["megatron-ds"]']
    assert "megatron-ds" in PROJECT["scripts"]
    (user,) = final.of("USER")
    assert any(
        f"useradd --create-home --uid 1000 {user}" in run for run in final.of("RUN")
    )
