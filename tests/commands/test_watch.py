"""`megatron-ds watch --once`: what the terminal shows is what the file holds."""

import json

import pytest

from megatron_ds.extensions.report.recorded_run import Run
from megatron_ds.extensions.report.watch_run import BARS, BESIDE, curve, facts, main

pytestmark = pytest.mark.plan

TRAIN = {
    "kind": "train",
    "run": "a",
    "time": 100.0,
    "step": 7,
    "steps": 1200,
    "eta_seconds": 90.4,
    "loss": 2.5,
    "learning_rate": 0.001,
    "grad_norm": None,
    "tokens_per_second": 41200.0,
    "mfu": 0.381,
    "skipped_steps": 2,
}
RECORDS = [
    {**TRAIN, "step": 6, "loss": 3.0},
    {**TRAIN, "kind": "validation", "step": 6, "loss": 2.75},
    {**TRAIN, "kind": "spike", "step": 4},
    {"kind": "save", "run": "a", "time": 99.0, "step": 5, "save_seconds": 1.0},
    TRAIN,
]


def test_the_facts_are_those_of_the_newest_records():
    assert facts(Run("r", RECORDS), 163.0) == {
        "step": "7 of 1,200, 0:01:30 left",
        "loss": "2.5000",
        "learning rate": "1.000e-03",
        "gradient norm": "–",
        "tokens per second": "41,200",
        "MFU": "38.1%",
        "skipped steps": "2",
        "validation loss": "2.7500 at step 6",
        "checkpoint": "step 5",
        "spikes": "1, the last at step 4",
        "newest record": "0:01:03 ago",
    }


def test_a_curve_fits_the_line_and_goes_from_the_largest_to_the_smallest():
    assert curve([3.0, None, 2.0, 1.0], 9) == "█▅▁"
    assert curve([1.0] * 3, 9) == "▁▁▁" and curve([], 9) == ""
    falling = curve([float(-i) for i in range(1000)], 60)
    assert len(falling) <= 60 and falling[0] == "█" and falling[-1] == "▁"


def test_once_prints_the_view_without_markup_of_a_name(tmp_path, capsys):
    folder = tmp_path / "[red]run"
    folder.mkdir()
    lines = [json.dumps(record) + "\n" for record in RECORDS]
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"kind": "tr')
    assert main([str(folder), "--once"]) == 0
    printed = capsys.readouterr().out
    assert "7 of 1,200" in printed and "█▁" in printed


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_the_view_fits_the_terminal_and_a_curve_uses_its_width(
    tmp_path, capsys, monkeypatch, columns
):
    monkeypatch.setenv("COLUMNS", str(columns))
    folder = tmp_path / ("a-long-name-of-a-run-" * 8)
    folder.mkdir()
    steps = [{**TRAIN, "step": n, "loss": float(-n)} for n in range(700)]
    lines = [json.dumps(record) + "\n" for record in [*RECORDS, *steps]]
    (folder / "metrics.jsonl").write_text("".join(lines))
    assert main([str(folder), "--once"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= columns
    # The curve is in one line: of 700 values each bar has the mean of equally many.
    [drawn] = [line for line in printed if "▁" in line]
    bars = sum(line in BARS for line in drawn)
    assert (columns - BESIDE) / 2 < bars <= columns - BESIDE and "█" in drawn
