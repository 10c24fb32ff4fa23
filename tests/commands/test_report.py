"""`megatron-ds report`: its numbers are plain reductions of the file, its texts are escaped, and it stands alone."""

import contextlib
import json
import statistics
import sys
import time
from html.parser import HTMLParser

import pytest

from megatron_ds.errors import ConfigError, DataError
from megatron_ds.extensions.report.command import main
from megatron_ds.extensions.report.paragraph import duration
from megatron_ds.extensions.report.recorded_run import titles
from tests.harness.pretraining import MOCK, run_pretrain
from tests.harness.pretraining import train as train_ranks

pytestmark = pytest.mark.threads


@pytest.fixture
def undrawn(monkeypatch):
    """Pages without pictures, which take most of the time."""
    monkeypatch.setattr("megatron_ds.extensions.report.page.chart", lambda *_: None)


class Page(HTMLParser):
    """numbers: (run, name) → value; texts: of cells and paragraphs; tags: those that occur."""

    def __init__(self, text: str):
        super().__init__()
        self.numbers = {}
        self.texts = []
        self.tags = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        found = dict(attrs)
        if "data-value" in found:
            key = int(found["data-run"]), found["data-name"]
            self.numbers[key] = float(found["data-value"])

    def handle_data(self, data):
        self.texts.append(data)


def report(tmp_path, *runs) -> tuple[str, Page]:
    output = tmp_path / "out" / "report.html"
    assert main([*map(str, runs), "--output", str(output)]) == 0
    text = output.read_text(encoding="utf-8")
    return text, Page(text)


def train(start, step, time, **values) -> dict:
    numbers = {
        "step_seconds": 0.5,
        "data_seconds": 0.125,
        "loss": 5.0 - step / 10,
        "grad_norm": 1.0 + step,
        "learning_rate": 0.01,
        "tokens_per_second": 100.0 + step,
        "tflops_per_rank": 1.5,
        "mfu": None,
        "memory_gib": 1.0,
        "samples": 4 * step,
        "tokens": 64 * step,
        "steps": 12,
        "skipped_steps": 1,
        "nan_steps": 0,
    }
    return _record("train", start, time, step=step, **numbers | values)


def _record(kind, start, time, **values) -> dict:
    return {"kind": kind, "run": "a", "start": start, "time": time, **values}


ABOUT = {
    "model": "gpt",
    "parameters": 137024,
    "trained": 1024,
    "layers": 2,
    "width": 64,
    "heads": 4,
    "experts": 8,
    "vocabulary": 513,
    "sequence": 64,
    "data": ["wiki", "code"],
    "batch": 8,
    "optimizer": "adam",
    "dtype": "bfloat16",
    "layout": {"tp": 2, "dp": 4},
    "zero": 1,
}
MACHINE = {"ranks": "8", "device": "NVIDIA H200", "host": "node7", "torch": "2.0"}


def process(start, step, began, settings=()) -> dict:
    values = {"settings": dict(settings), "environment": MACHINE}
    return _record("process", start, start, step=step, began=began, **values)


def written(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


MEMORY = {"planned": {"weights": 4}, "measured": {"weights": 4}}
# Two processes. The first logs each 2 steps and saves at step 4; the second goes on from there.
HISTORY = [
    process(102.0, 0, 100.0),
    train(102.0, 2, 103.0),
    train(102.0, 4, 104.0),
    _record("memory", 102.0, 104.5, step=4, measuring_seconds=0.25, **MEMORY),
    _record("save", 102.0, 106.0, step=4, save_seconds=2.0),
    _record("validation", 102.0, 107.0, step=4, loss=4.5, eval_seconds=1.0),
    train(102.0, 7, 109.0, loss=None, grad_norm=50.0),
    _record("spike", 102.0, 109.0, step=6, loss=9.0),
    process(123.0, 4, 120.0),
    train(123.0, 6, 124.0),
    _record("rerun", 123.0, 124.0, step=6, loss=9.0),
    train(123.0, 8, 125.0, mfu=0.5, memory_gib=3.0),
    _record("validation", 123.0, 126.0, step=8, loss=4.75, eval_seconds=1.0),
]


def test_the_wall_time_of_a_run_that_was_restarted_is_split_by_hand(tmp_path, undrawn):
    _, page = report(tmp_path, written(tmp_path / "m.jsonl", HISTORY))
    seconds = {
        name.removeprefix("seconds-"): value
        for (_, name), value in page.numbers.items()
        if name.startswith("seconds-")
    }
    # Steps 1 to 4 of the first process and 5 to 8 of the second are kept: 8 × 0.375 s. Steps 5 to 7 of the first
    # were repeated. All 11 steps waited for data. Nothing was there from 109 to 120.
    assert seconds == pytest.approx(
        {
            "training": 8 * 0.375,
            "repeated": 3 * 0.375,
            "data": 11 * 0.125,
            "evaluation": 2.0,
            "saves": 2.0,
            "measuring": 0.25,
            "starting": 2.0 + 3.0,
            "stopped": 11.0,
            "unexplained": 26 - 25.75,
        }
    )
    assert page.numbers[0, "wall"] == 26
    assert page.numbers[0, "explained"] == pytest.approx(25.75 / 26)
    assert sum(seconds.values()) == pytest.approx(26)


def test_numbers_are_of_the_newest_record_of_each_step(tmp_path, undrawn):
    _, page = report(tmp_path, written(tmp_path / "m.jsonl", HISTORY))
    numbers = {name: value for (_, name), value in page.numbers.items()}
    expected = {
        "step": 8,
        "loss": 5.0 - 0.8,
        "validation-loss": 4.75,
        "best-validation-loss": 4.5,
        "largest-grad-norm": 50.0,
        "tokens-per-second": statistics.median([102, 104, 106, 107, 108]),
        "mfu": 0.5,
        "memory": 3.0,
        "spikes": 1,
        "reruns": 1,
        "saves": 1,
        "processes": 2,
    }
    assert {name: numbers[name] for name in expected} == expected
    assert "test-loss" not in numbers


def test_a_run_is_explained_and_its_numbers_are_those_of_its_file(tmp_path):
    words = "--eval-interval 2 --eval-iters 1 --save-interval 3 --log-interval 1 --record-memory-history"
    words += f" --memory-snapshot-path {tmp_path / 'memory.json'}"
    [ended] = run_pretrain(1, [*MOCK, *words.split(), "--save", tmp_path / "run"])
    assert ended.code == 0, ended.err
    text, page = report(tmp_path, tmp_path / "run")
    # A plain reduction: one process, each step logged once.
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    of = lambda kind, name: [r[name] for r in records if r["kind"] == kind]
    data = sum(of("train", "data_seconds"))
    [began], [ready] = of("process", "began"), of("about", "time")
    expected = {
        "step": of("train", "step")[-1],
        "tokens": of("train", "tokens")[-1],
        "loss": of("train", "loss")[-1],
        "best-validation-loss": min(of("validation", "loss")),
        "tokens-per-second": statistics.median(of("train", "tokens_per_second")),
        "saves": len(of("save", "step")),
        "seconds-data": data,
        "seconds-training": sum(of("train", "step_seconds")) - data,
        "seconds-saves": sum(of("save", "save_seconds")),
        "seconds-measuring": sum(of("memory", "measuring_seconds")),
        "seconds-evaluation": sum(r.get("eval_seconds", 0) for r in records),
        "seconds-starting": ready - began,
        "wall": records[-1]["time"] - began,
    }
    numbers = {name: page.numbers[0, name] for name in expected}
    assert numbers == pytest.approx(expected)
    told = told_in(text)
    assert told.startswith("A gpt model with ") and "on mock tokens by adam" in told
    # What was recorded for the report: settings with their sources, and the environment.
    [settings] = of("process", "settings")
    assert settings["logging.log_interval"] == ["1", "--log-interval"]
    assert {"logging.log_interval", "--log-interval"} <= set(page.texts)
    assert {"torch", "ranks"} <= set(page.texts)
    # It stands alone, and has its pictures.
    assert "://" not in text and "<svg" in text and "@import" not in text


@contextlib.contextmanager
def processor_time(rank):
    """Clocks count the processor's time of this process, so that other programs of the machine cost it none."""
    begin = time.process_time()
    now = time.time()
    spent = lambda: time.process_time() - begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: now + spent())
        patch.setattr(time, "monotonic", lambda: 1000.0 + spent())
        patch.setattr(time, "perf_counter", lambda: 2000.0 + spent())
        yield


def test_of_a_run_that_was_started_twice_99_percent_of_the_time_are_explained(
    tmp_path, undrawn
):
    words = [*MOCK, "--hidden-size", "128", "--seq-length", "64"]
    words += ["--max-position-embeddings", "64", "--train-iters", "12"]
    words += (
        "--eval-interval 6 --eval-iters 1 --save-interval 3 --log-interval 6".split()
    )
    words += ["--save", tmp_path / "run"]
    for more in (["--exit-interval", "6"], ["--load", tmp_path / "run"]):
        train_ranks(1, [*words, *more], spoil=processor_time)
    _, page = report(tmp_path, tmp_path / "run")
    numbers = {name: value for (_, name), value in page.numbers.items()}
    assert numbers["processes"] == 2 and numbers["step"] == 12
    assert numbers["seconds-starting"] > 0 and numbers["seconds-stopped"] > 0
    running = numbers["wall"] - numbers["seconds-stopped"]
    assert abs(numbers["seconds-unexplained"]) < 0.01 * running
    assert numbers["explained"] > 0.99


def test_a_colleague_reads_what_was_trained_how_long_and_how_well(tmp_path, undrawn):
    begin = [
        process(102.0, 0, 100.0),
        _record("about", 102.0, 102.5, step=0, about=ABOUT),
    ]
    folder = tmp_path / "notes"
    text, _ = report(
        tmp_path, written(folder / "metrics.jsonl", [*begin, *HISTORY[1:]])
    )
    assert "<title>notes</title>" in text and "<h1>notes</h1>" in text
    assert told_in(text) == (
        "A gpt model with 137,024 parameters, of which 1,024 are trained: 2 layers of width 64 with 4 heads and up "
        "to 8 experts, a vocabulary of 513 tokens, and sequences of 64 tokens. It was trained on wiki and code by "
        "adam in bfloat16, with 8 samples a step. It ran on 8 ranks as tp 2 × dp 4 with ZeRO stage 1, on NVIDIA H200 "
        "of host node7. It made 8 of 12 steps, 512 tokens, in 26 s, until 1970-01-01 00:02 UTC, in 2 processes one "
        "after another. The steps that count took 12% of this time. The training loss went from 4.8000 to 4.2000, "
        "the validation loss is 4.7500 (at best 4.5000). Steps skipped: 1."
    )
    # A file of an earlier version says less.
    text, _ = report(tmp_path, written(folder / "metrics.jsonl", HISTORY))
    assert told_in(text).startswith("It made 8 of 12 steps")


def told_in(text: str) -> str:
    """The paragraph of the page's one run."""
    return text.split('<p class="about">')[1].split("</p>")[0]


def test_runs_have_the_shortest_names_that_differ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert titles(["runs/a", "runs/b/metrics.jsonl", "c.jsonl"]) == [
        "a",
        "b",
        "c.jsonl",
    ]
    assert titles(["x/a", "y/a"]) == ["x/a", "y/a"] and titles(["."]) == [tmp_path.name]
    assert titles(["x/a", "x/a"]) == ["x/a", "x/a"]


@pytest.mark.parametrize(
    "seconds, text",
    [(0.2, "less than 1 s"), (41.4, "41 s"), (4980, "1 h 23 min"), (90061, "1 d 1 h")],
)
def test_durations_have_two_units(seconds, text):
    assert duration(seconds) == text


HOSTILE = "<script>alert('1')</script>&\"$x$"


def test_texts_of_files_are_escaped(tmp_path):
    setting = {HOSTILE: [HOSTILE, HOSTILE]}
    folder = tmp_path / "<img src=x onerror=alert(1)>$_"
    runs = [
        written(folder / "metrics.jsonl", [process(1.0, 0, 0.5, setting), *HISTORY]),
        written(tmp_path / "b.jsonl", HISTORY),
    ]
    text, page = report(tmp_path, *runs)
    assert "script" not in page.tags and "img" not in page.tags
    assert "<script" not in text and "<img" not in text


def test_settings_that_differ_are_beside_each_other(tmp_path, undrawn):
    both = {"train.seed": ["1", "--seed"]}
    runs = [
        written(
            tmp_path / name,
            [process(1.0, 0, 0.5, both | more), train(1.0, 1, 2.0)],
        )
        for name, more in (
            ("a.jsonl", {"optimizer.lr": ["0.25", "--lr"]}),
            ("b.jsonl", {"optimizer.lr": ["0.5", "run.yaml"]}),
            ("c.jsonl", {}),
        )
    ]
    text, _ = report(tmp_path, *runs)
    section = text.split("Settings that differ")[1].split("</section>")[0]
    row = "<tr><td>optimizer.lr</td><td>0.25</td><td>0.5</td><td>default</td></tr>"
    assert row in section and "train.seed" not in section


def test_a_file_of_an_earlier_version_has_no_settings_and_is_not_explained(
    tmp_path, undrawn
):
    old = [record for record in HISTORY if record["kind"] not in ("process", "save")]
    text, page = report(tmp_path, written(tmp_path / "m.jsonl", old))
    assert "Not recorded by this run." in text
    # The first line of each process has an unknown number of steps.
    assert page.numbers[0, "seconds-training"] == pytest.approx((5 + 2) * 0.375)


def test_what_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"metrics\.jsonl: no such file\. Give a"):
        report(tmp_path, tmp_path)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="holds no records"):
        report(tmp_path, tmp_path / "empty.jsonl")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"megatron_ds\[report\]"):
        report(tmp_path, written(tmp_path / "m.jsonl", HISTORY))


def test_a_page_that_cannot_be_written_is_an_error(tmp_path, undrawn):
    run = written(tmp_path / "m.jsonl", HISTORY)
    with pytest.raises(ConfigError, match=r"cannot write .*Is a directory\. Choose"):
        main([str(run), "--output", str(tmp_path)])
