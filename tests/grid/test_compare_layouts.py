"""tools/compare_layouts.py as a user runs it: layouts on real gloo ranks, a table, an exit code."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from megatron_ds.errors import ConfigError
from tests.harness.layout_comparison import parse_layout
from tests.harness.limits import HUNG
from tests.harness.warm import warm_python
from tools import compare_layouts

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^(\S+=\S+) +(\S+) +(\S+) +(\S+) +(ok|TOO LARGE)$", re.MULTILINE)


def run(*words: str) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        [warm_python(), str(ROOT / "tools" / "compare_layouts.py"), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HUNG,
    )


def test_layouts_on_real_ranks_train_like_one_process():
    layouts = [
        "tp=2,pp=2,dp=1,sp=1,schedule=gpipe",
        "tp=1,pp=2,dp=2,zero=1,recompute=full,schedule=1f1b",
        "tp=2,dp=2,zero=1,mbs=2",
    ]
    done = run(
        "--layouts",
        *layouts,
        "--steps",
        "6",
        "--num-layers",
        "2",
        "--style",
        "llama",
        "--dropout",
        "0.1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = ROW.findall(done.stdout)
    assert [row[0] for row in rows] == layouts and {row[4] for row in rows} == {"ok"}
    assert all(0 < float(row[1]) < 1e-6 and 0 < float(row[3]) < 1e-5 for row in rows), (
        "equal to the bit? Did two ranks train?"
    )


def test_a_layout_beyond_the_tolerance_is_marked_and_changes_the_exit_code(capsys):
    close = compare_layouts.Difference(1e-8, 1e-8, 1e-6)
    far = compare_layouts.Difference(1e-8, 1e-2, 1e-6)
    args = compare_layouts.parse_arguments(["--layouts", "dp=2"])
    assert compare_layouts.show([("dp=2", close)], args) == 0
    assert compare_layouts.show([("dp=2", close), ("tp=2", far)], args) == 1
    assert [row[4] for row in ROW.findall(capsys.readouterr().out)] == [
        "ok",
        "ok",
        "TOO LARGE",
    ]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--layouts", "tp=2,zerro=1"], "cannot read 'zerro=1'.*did you mean 'zero'"),
        (
            ["--layouts", "tp=3"],
            r"--num-attention-heads 4 is not a multiple of --tensor-model-parallel-size 3.*1, 2 or 4",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_told_in_a_paragraph(capsys, words, said):
    assert compare_layouts.main([*words, "--steps", "1"]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error, re.DOTALL) and "Traceback" not in error


def test_a_layout_means_its_flags():
    layout = parse_layout("tp=2,pp=4,dp=3,sp=1,zero=1,recompute=none,schedule=gpipe")
    assert layout.world_size == 24
    assert layout.flags == (
        "--tensor-model-parallel-size",
        "2",
        "--pipeline-model-parallel-size",
        "4",
        "--sequence-parallel",
        "--zero-stage",
        "1",
        "--pipeline-schedule",
        "gpipe",
    )
    assert "--sequence-parallel" not in parse_layout("tp=2,sp=0").flags
    with pytest.raises(ConfigError, match="dp=many"):
        parse_layout("dp=many")
