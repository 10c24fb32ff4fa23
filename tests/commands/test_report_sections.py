"""Sections of the report that a run records on request: its pipeline in time, memory by owner, load of experts."""

import json
import statistics

import pytest

from megatron_ds.errors import DataError

from .test_report import HISTORY, process, report, train, undrawn, written

pytestmark = pytest.mark.plan
__all__ = ["undrawn"]

# 1F1B of two ranks and two micro-batches, in ms: (rank, op, micro-batch, start, end). As planned a forward takes 1 and
# a backward 2; here rank 1 begins 1 later, and rank 0 waits for its gradients.
STEP = (
    (0, "F", 0, 0, 1),
    (0, "F", 1, 1, 2),
    (0, "B", 0, 6, 8),
    (0, "B", 1, 9, 11),
    (1, "F", 0, 2, 3),
    (1, "B", 0, 3, 5),
    (1, "F", 1, 5, 6),
    (1, "B", 1, 6, 8),
)


def event(rank, op, microbatch, start, end):
    args = {"op": op, "stage": rank, "microbatch": microbatch}
    times = {"ts": 1000.0 * start, "dur": 1000.0 * (end - start)}
    return {"name": "", "cat": op, "ph": "X", "pid": rank, "args": args, **times}


def traced(folder, *steps):
    """A file of each rank."""
    folder.mkdir()
    for rank in (0, 1):
        events = [event(*e) for step in steps for e in step if e[0] == rank]
        text = json.dumps({"traceEvents": events})
        (folder / f"rank{rank}.json").write_text(text)
    return {"logging.trace": [str(folder), "--trace"]}


def numbers_of(tmp_path, records):
    text, page = report(tmp_path, written(tmp_path / "m.jsonl", records))
    return text, {name: value for (_, name), value in page.numbers.items()}


def test_a_step_of_the_pipeline_is_beside_its_plan(tmp_path, undrawn):
    slow = [(rank, op, n, 4 * start, 4 * end) for rank, op, n, start, end in STEP]
    later = [(rank, op, n, 100 + start, 100 + end) for rank, op, n, start, end in STEP]
    settings = traced(tmp_path / "traces", slow, later)
    text, numbers = numbers_of(
        tmp_path, [process(1.0, 0, 0.5, settings), *HISTORY[1:2]]
    )
    # By hand: rank 0 has F 0-1, F 1-2, B 4-6, B 7-9 in the plan. Both ranks compute for 6 ms.
    expected = {
        "span-planned": 9e-3,
        "span-measured": 11e-3,
        "bubble-planned": 1 - 12 / 18,
        "bubble-measured": 1 - 12 / 22,
        **{f"busy-{r}-{w}": 6e-3 for w in ("planned", "measured") for r in (0, 1)},
    }
    assert {name: numbers[name] for name in expected} == pytest.approx(expected)
    assert "measured: bubble 45.5%" in text and "://" not in text


def test_a_folder_without_timelines_is_named(tmp_path, undrawn):
    settings = {"logging.trace": [str(tmp_path / "<gone>"), "--trace"]}
    text, _ = numbers_of(tmp_path, [process(1.0, 0, 0.5, settings), *HISTORY[1:2]])
    assert "No timelines of a step are in" in text and "&lt;gone&gt;" in text


def test_other_files_in_the_folder_are_an_error(tmp_path, undrawn):
    settings = traced(tmp_path / "traces", STEP)
    (tmp_path / "traces" / "other.json").write_text("{}")
    with pytest.raises(DataError, match=r"other\.json"):
        numbers_of(tmp_path, [process(1.0, 0, 0.5, settings), *HISTORY[1:2]])


def test_memory_is_that_of_the_newest_process(tmp_path, undrawn):
    counts = {"weights": 3 * 2**20, "activations": 2**19}
    old = memory(102.0, counts, counts)
    new = memory(123.0, counts, counts | {"activations": 2**20})
    _, numbers = numbers_of(tmp_path, [*HISTORY[:3], old, *HISTORY[3:], new])
    found = {
        name: value for name, value in numbers.items() if name.startswith("bytes-")
    }
    assert found == {
        "bytes-weights-planned": 3.0,
        "bytes-activations-planned": 0.5,
        "bytes-all-planned": 3.5,
        "bytes-weights-measured": 3.0,
        "bytes-activations-measured": 1.0,
        "bytes-all-measured": 4.0,
    }


def memory(start, planned, measured):
    values = {"step": 2, "planned": planned, "measured": measured}
    return {"kind": "memory", "run": "a", "start": start, "time": start + 1} | values


def test_the_load_of_experts_is_reduced_for_each_layer(tmp_path):
    loads = {1: (1.5, 1.25), 2: (1.75, 1.125), 3: (1.0, 3.0)}
    steps = [
        train(2.0, step, 2.0 + step, **layers(0, of_0) | layers(11, of_11))
        for step, (of_0, of_11) in loads.items()
    ]
    # Step 3 was repeated: its first record does not count.
    repeated = train(2.0, 3, 4.5, **layers(0, 9.0) | layers(11, 9.0))
    records = [process(2.0, 0, 1.0), *steps[:2], repeated, steps[2]]
    text, numbers = numbers_of(tmp_path, records)
    for n, layer in enumerate((0, 11)):
        values = [of[n] for of in loads.values()]
        assert numbers[f"load-last-{layer}"] == values[-1]
        assert numbers[f"load-largest-{layer}"] == max(values)
        assert numbers[f"load-mean-{layer}"] == statistics.fmean(values)
        assert numbers[f"entropy-last-{layer}"] == values[-1] / 2
    assert not any(name.startswith("dropped") for name in numbers)
    assert "layer 11" in text and "largest load / mean" in text


def layers(number, load):
    names = {"max_load": load, "router_entropy": load / 2}
    return {f"decoder.layers.{number}_{name}": value for name, value in names.items()}


def test_what_no_run_records_has_no_section(tmp_path, undrawn):
    records = [record for record in HISTORY if record["kind"] != "memory"]
    text, _ = numbers_of(tmp_path, records)
    headings = ("Pipeline", "Memory", "Experts")
    assert not any(f"<h2>{heading}</h2>" in text for heading in headings)
