"""The benchmark of training steps runs, on its smallest workload, with its ranks in this process."""

import contextlib
import io
import json
import re
import runpy
import sys

import pytest
import torch

from tests.harness.documents import ROOT

pytestmark = pytest.mark.threads

SCRIPT = ROOT / "benchmarks" / "train_step.py"
BESIDE = ("contestants", "peak_memory", "workloads")


@pytest.fixture
def script(monkeypatch):
    """Runs it with arguments, as `python benchmarks/train_step.py` does; its globals."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    threads = torch.get_num_threads()
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)

    def run(*arguments, name="__main__"):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        return runpy.run_path(str(SCRIPT), run_name=name)

    yield run
    torch.set_num_threads(threads)
    for name in BESIDE:
        sys.modules.pop(name, None)


class Running:
    """A contestant of one rank, without a process of its own."""

    def __init__(self, script, contestant, args):
        self.arguments = [
            "--workload",
            args.workload,
            "--dtype",
            args.dtype,
            "--steps",
            str(args.steps),
            "--rank-of",
            contestant,
        ]
        self.script = script

    def finish(self):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            self.script(*self.arguments)
        return json.loads(printed.getvalue().splitlines()[-1])


@pytest.mark.parametrize("dtype, tolerance", [("fp32", 1e-4), ("bf16", 0.02)])
def test_the_benchmark_of_training_steps_ends_with_a_table_of_equal_losses(
    script, dtype, tolerance, capsys, monkeypatch, tmp_path
):
    arguments = [
        "--workload",
        "T",
        "--dtype",
        dtype,
        *"--steps 4 --rounds 1 --contestants eager ours ours:zero=1,recompute=full".split(),
        "--output",
        str(tmp_path / "records.jsonl"),
    ]
    parent = script(name="parent")
    monkeypatch.setitem(
        parent["main"].__globals__,
        "Running",
        lambda contestant, args, pythons: Running(script, contestant, args),
    )
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    parent["main"]()
    rows = re.findall(
        r"^\| (\S+) \|.*\| (\d+) \| (\S+) \| (\d+) \| \S+ \|$",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    assert [name for name, *_ in rows] == [
        "eager",
        "ours",
        "ours:zero=1,recompute=full",
    ]
    losses = [float(loss) for _, _, loss, _ in rows]
    assert (
        losses == pytest.approx([losses[0]] * 3, abs=tolerance) and 4 < losses[0] < 6.2
    )
    assert all(int(tokens) > 0 and int(peak) > 0 for _, tokens, _, peak in rows)
    records = [
        json.loads(line)
        for line in (tmp_path / "records.jsonl").read_text().splitlines()
    ]
    assert len(records) == 3 and all(len(record["seconds"]) == 4 for record in records)
