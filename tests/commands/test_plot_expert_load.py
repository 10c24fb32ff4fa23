"""The picture of the experts' load: what it reads of metrics.jsonl, and that it is drawn."""

import json

import pytest

from megatron_ds.errors import DataError
from megatron_ds.extensions.report import plot_expert_load
from megatron_ds.extensions.report.plot_expert_load import curves_of, smoothed

pytestmark = pytest.mark.plan


def record(step, **metrics):
    return {"kind": "train", "run": "a", "step": step, "loss": 1.0, **metrics}


def test_each_layer_has_a_curve_of_its_training_steps():
    load = {
        "decoder.layers.1_max_load": 2.0,
        "decoder.layers.12_max_load": 3.0,
        "decoder.layers.1_dropped": 0.25,
    }
    records = [
        record(1, **load),
        record(2, **load),
        {**record(2, **load), "kind": "validation"},
    ]
    assert curves_of(records) == {
        "max_load": {1: [(1, 2.0), (2, 2.0)], 12: [(1, 3.0), (2, 3.0)]},
        "dropped": {1: [(1, 0.25), (2, 0.25)]},
    }


def test_a_run_without_experts_is_an_error():
    with pytest.raises(DataError, match="--num-experts"):
        curves_of([record(1)])


def test_curves_are_means_of_the_last_points():
    assert smoothed([(1, 1.0), (2, 3.0), (3, 8.0)], 2) == [(1, 1.0), (2, 2.0), (3, 5.5)]


def test_a_picture_is_drawn(tmp_path, monkeypatch, capsys):
    metrics, picture = tmp_path / "metrics.jsonl", tmp_path / "load.svg"
    names = ("max_load", "router_entropy", "dropped")
    metrics.write_text(
        "".join(
            json.dumps(
                record(step, **{f"decoder.layers.0_{name}": 1.5 for name in names})
            )
            + "\n"
            for step in (1, 2)
        )
    )
    monkeypatch.setattr(
        "sys.argv", ["plot", "--metrics", str(metrics), "--output", str(picture)]
    )
    assert (
        plot_expert_load.main() == 0 and f"wrote {picture}" in capsys.readouterr().out
    )
    assert picture.read_text().count("<svg") == 1
