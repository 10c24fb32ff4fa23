"""Timelines as files and pictures: what is written is read again, and every box stands where its computation
ran."""

import json
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megatron_ds.errors import DataError
from megatron_ds.extensions.report.picture import (
    LEFT,
    RIGHT,
    Panel,
    layout,
    save_png,
    svg,
)
from megatron_ds.extensions.report.trace_files import (
    as_simulation,
    read_traces,
    steps_of,
    timelines_of,
    typical_cost,
    write_trace,
)
from megatron_ds.pipeline.instruction import COMPUTE, Instruction, Op, StageCosts
from megatron_ds.pipeline.passes import lower
from megatron_ds.pipeline.schedules import SCHEDULES
from megatron_ds.pipeline.simulate import simulate
from tests.harness.limits import HUNG
from tests.harness.warm import warm_python

pytestmark = pytest.mark.plan

ROOT = Path(__file__).parents[2]
LOWERED = simulate(
    lower(SCHEDULES["zb-v"](3, 4), 6, tied=(0, 5)), StageCosts(1, 1.5, 0.5, 0.25).of
)


def test_a_trace_is_what_chrome_reads_one_event_per_instruction_in_microseconds(
    tmp_path,
):
    write_trace(
        tmp_path / "a.json",
        {2: [(Instruction(Op.F, 5, 3), 1.5, 1.75), (Instruction(Op.TIE, 5), 2, 2)]},
    )
    events = [
        e
        for e in json.loads((tmp_path / "a.json").read_text())["traceEvents"]
        if e["ph"] == "X"
    ]
    assert events[0] == {
        "name": "F3@5",
        "cat": "F",
        "ph": "X",
        "ts": 1.5e6,
        "dur": 0.25e6,
        "pid": 2,
        "tid": 0,
        "args": {"op": "F", "stage": 5, "microbatch": 3},
    }
    assert events[1]["args"] == {"op": "TIE", "stage": 5, "microbatch": None}


def test_what_is_written_whole_or_rank_by_rank_is_read_again(tmp_path):
    timelines = timelines_of(LOWERED)
    write_trace(tmp_path / "all.json", timelines)
    for rank, entries in timelines.items():
        write_trace(tmp_path / f"{rank}.json", {rank: entries})
    for found in (
        read_traces([tmp_path / "all.json"]),
        read_traces(tmp_path / f"{rank}.json" for rank in timelines),
    ):
        assert found.keys() == timelines.keys()
        again = as_simulation(found)
        assert (
            again.schedule == LOWERED.schedule and again.peak_live == LOWERED.peak_live
        )
        assert again.span == pytest.approx(
            LOWERED.span
        ) and again.bubble == pytest.approx(LOWERED.bubble)


def test_a_recording_of_several_steps_comes_apart_step_by_step():
    step = timelines_of(LOWERED)
    later = {
        rank: [(i, start + 100, end + 100) for i, start, end in its]
        for rank, its in step.items()
    }
    whole = {rank: step[rank] + later[rank] for rank in step}
    assert [
        [i for i, *_ in part[1] if i.op in COMPUTE] for part in steps_of(whole)
    ] == [[i for i, *_ in step[1] if i.op in COMPUTE]] * 2
    assert as_simulation(steps_of(whole)[1]).span == pytest.approx(LOWERED.span)


def test_the_typical_cost_of_a_recording_is_the_median_over_microbatches():
    f = lambda k, took: (Instruction(Op.F, 0, k), 10 * k, 10 * k + took)
    b = (Instruction(Op.B, 0, 0), 50, 53)
    cost = typical_cost({0: [f(0, 5), f(1, 1), f(2, 2), b]})
    assert [
        cost(Instruction(op, 0, 7)) for op in (Op.F, Op.B, Op.I, Op.W, Op.SEND_ACT)
    ] == [2, 3, 1.5, 1.5, 0]
    again = simulate(LOWERED.schedule, typical_cost(timelines_of(LOWERED)))
    assert again.busy == pytest.approx(LOWERED.busy)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not a timeline.*JSONDecodeError"),
        ('{"traceEvents": [{"ph": "X"}]}', "not a timeline.*'args'"),
        (
            '{"traceEvents": [{"ph": "X", "ts": 0, "dur": 1, "pid": 0, '
            '"args": {"op": "Q", "stage": 0, "microbatch": 0}}]}',
            "'Q' is not a valid Op",
        ),
        (None, "no such file. A run with --trace writes timelines"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(tmp_path, text, message):
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=f"a.json.*{message}"):
        read_traces([tmp_path / "a.json"])


def test_two_files_of_one_rank_are_not_mixed(tmp_path):
    for name in ("a", "b"):
        write_trace(tmp_path / f"{name}.json", {0: [(Instruction(Op.F, 0, 0), 0, 1)]})
    with pytest.raises(
        DataError, match="b.json contains pipeline rank 0, and so does an earlier file"
    ):
        read_traces([tmp_path / "a.json", tmp_path / "b.json"])


def test_every_computation_is_a_box_where_and_as_long_as_it_ran():
    picture = layout(
        [Panel("one", LOWERED), Panel("two", simulate(SCHEDULES["1f1b"](2, 3)))],
        width=1000,
    )
    scale = (1000 - LEFT - RIGHT) / LOWERED.span
    told = {box.tip.split(":")[0]: box for box in picture.boxes if box.tip}
    rows = {}
    for rank, (program, starts, ends) in enumerate(
        zip(LOWERED.schedule, LOWERED.starts, LOWERED.ends)
    ):
        for i, start, end in zip(program, starts, ends):
            if (
                i.op in COMPUTE and i.op is not Op.F
            ):  # the second panel has F and B of the same names
                box = told[str(i)]
                assert box.x == pytest.approx(LEFT + start * scale)
                assert box.width == pytest.approx((end - start) * scale, abs=1)
                rows.setdefault(rank, set()).add(box.y)
    assert (
        all(len(ys) == 1 for ys in rows.values())
        and len(set.union(*rows.values())) == 3
    )
    assert max(box.x + box.width for box in picture.boxes) <= 1000
    assert max(label.y for label in picture.labels) < picture.height


def test_an_svg_is_xml_with_a_box_for_each_computation_and_a_png_is_a_png(tmp_path):
    panels = [Panel("a < b & c", LOWERED)]
    root = ElementTree.fromstring(svg(panels))
    assert sum(element.tag.endswith("title") for element in root.iter()) == 3 * 4 * 6
    assert "a < b & c" in [element.text for element in root.iter()]
    save_png(panels, tmp_path / "a.png", width=600, dots=1)
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def show(*flags, cwd=ROOT):
    command = [warm_python(), ROOT / "tools/show_schedule.py", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=None, timeout=HUNG
    )


def test_the_tool_draws_a_plan_beside_what_was_measured(tmp_path):
    first = show(
        "--schedule",
        "zb-h1",
        "--pipeline-size",
        "2",
        "--microbatches",
        "3",
        "--chrome-trace",
        tmp_path / "run" / "0.json",
    )
    assert first.returncode == 0 and "rank 0 | F0 F1 .. I0 W0 F2" in first.stdout
    both = show(
        "--schedule",
        "1f1b",
        "--measured",
        tmp_path / "run",
        "--output",
        tmp_path / "both.svg",
    )
    assert both.returncode == 0, both.stderr
    assert "1f1b: 2 ranks, 3 micro-batches, bubble 25.0%, span 0.012" in both.stdout
    assert "measured: 2 ranks, bubble 10.0%, span 0.01 s" in both.stdout
    assert (tmp_path / "both.svg").read_text().count("peak alive") == 2


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--schedule", "zb-w"), "unknown pipeline schedule 'zb-w'; did you mean"),
        (
            ("--schedule", "zb-v", "--chunks", "3"),
            "Valid: 2. Schedules for 3 chunks: interleaved",
        ),
        (("--microbatches", "0"), "0 micro-batches"),
        (("--output", "a.gif"), "the file name must end in .svg or .png"),
        (("--measured", "nowhere.json"), "nowhere.json: no such file"),
        (("--costs", "1", "-1", "1"), "input_grad=-1.0 is not a cost"),
    ],
)
def test_the_tool_refuses_with_the_alternatives(flags, message):
    done = show(*flags)
    assert (
        done.returncode == 2
        and message in done.stderr
        and "Traceback" not in done.stderr
    )
