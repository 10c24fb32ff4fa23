"""What a run records: the log line in Megatron's words and order, metrics.jsonl, and TensorBoard's points
read back."""

import json
import math
import re
import shutil
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_ds.config import CheckpointConfig, LoggingConfig, RunConfig, parse
from megatron_ds.errors import ConfigError, DataError
from megatron_ds.extensions.profiler.phase_times import times_text
from megatron_ds.extensions.services.wandb_log import WandbLog
from megatron_ds.progress.ramps import Progress
from megatron_ds.training.observe.log import Log, open_log
from megatron_ds.training.observe.metrics_file import read_metrics
from megatron_ds.training.observe.records import EvalRecord, TrainRecord, over_layers

pytestmark = pytest.mark.plan

RECORD = TrainRecord(
    step=1200,
    steps=5000,
    samples=614400,
    tokens=629145600,
    step_seconds=1.23456,
    learning_rate=2.94e-4,
    weight_decay=0.1,
    global_batch_size=512,
    loss=2.831712,
    loss_scale=65536.0,
    grad_norm=0.4118,
    skipped_steps=3,
    nan_steps=1,
    seq_length=1024,
    tokens_per_second=424672.3,
    tflops_per_rank=187.62,
    mfu=0.381,
    eta_seconds=4691.3,
    memory_gib=11.271,
    data_seconds=0.002,
)
EVALUATION = EvalRecord(
    step=1200, samples=614400, split="validation", loss=2.5, eval_seconds=3.0
)
BATCH = 12  # samples of a step, in the tests of resumed runs

# Megatron-LM's fields, up to its last one that we have; the order is what scripts that read logs rely on.
MEGATRON = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration {5}1200/ {4}5000 \| consumed samples: {7}614400 \|"
    r" elapsed time per iteration \(ms\): 1234\.6 \| throughput per GPU \(TFLOP/s/GPU\): 187\.6 \|"
    r" learning rate: 2\.940000E-04 \| global batch size:   512 \| lm loss: 2\.831712E\+00 \| loss scale: "
    r"65536\.0 \| grad norm: 0\.412 \| number of skipped iterations:   3 \| number of nan iterations:   1 \|"
)


def logging_to(tmp_path, **where):
    """The parts of a config that the log reads."""
    logging = {
        "metrics_path": None,
        "tensorboard_dir": None,
        "progress_bar": True,
        "log_timers_to_tensorboard": False,
        "csv_monitor_dir": None,
    } | where
    return RunConfig(
        logging=LoggingConfig(**logging),
        checkpoint=CheckpointConfig(save=str(tmp_path / "save")),
    )


def changed(**values) -> TrainRecord:
    return TrainRecord(**vars(RECORD) | values)


def process(
    config, first: int, steps, *, run: str = "a", loss: float = 1.0, then=lambda: None
) -> Log:
    """The log of a process that starts at step `first` and logs `steps`; `then()` is called before the last
    of them."""
    log = open_log(config, Progress(step=first, samples=first * BATCH), run)
    for step in steps:
        if step == steps[-1]:
            then()
        log.write(changed(step=step, samples=step * BATCH, loss=loss))
    log.close()
    return log


# ------------------------------------------------------------------ lines
def test_the_line_has_megatrons_fields_in_its_order_and_then_ours():
    line = RECORD.line()
    found = MEGATRON.match(line)
    assert found, line
    assert line[found.end() :] == (
        " seq length:  1024 | tokens per second: 424672.3 | MFU: 38.1% |"
        " waiting for data (ms): 2.0 | memory (GiB): 11.27 | ETA: 1:18:11 |"
    )


def test_without_a_known_peak_no_mfu_is_printed():
    record = changed(mfu=None)
    assert (
        "MFU" not in record.line() + record.short()
        and "| tokens per second: 424672.3 | waiting" in record.line()
    )


def test_where_blocks_drop_tokens_the_line_says_how_many_stay():
    line = changed(
        kept_tokens=256,
        kept_title="random ltd reserved length",
        layer_tokens=5 * 10**9,
        actual_seq_length=448,
    ).line()
    assert (
        "| random ltd reserved length:   256 | actual seqlen:   448 | "
        "consumed layer tokens:   5000000000 |"
    ) in line
    assert "reserved" not in RECORD.line()


def test_a_loss_that_is_not_a_number_stays_in_the_line():
    line = changed(loss=math.nan, grad_norm=math.inf).line()
    assert "| lm loss: NAN |" in line and "| grad norm: inf |" in line


def test_the_evaluation_stands_between_dashes_with_a_bounded_perplexity_and_its_time():
    dashes, text, again = EVALUATION.line().split("\n")
    assert text == (
        " validation loss at iteration 1200 | lm loss value: 2.500000E+00 | lm loss PPL: "
        "1.218249E+01 | evaluation time (s): 3.00 | "
    )
    assert dashes == again == "-" * len(text)
    assert EvalRecord(1, 1, "test", 800.0, 0.0).perplexity == math.exp(20)
    of_pairs = EvalRecord(1, 1, "test", 0.7, 0.0, {}, False)
    texts = of_pairs.line() + of_pairs.short() + str(of_pairs.fields())
    assert "loss value: 7.000000E-01" in texts and "tokens" not in texts
    assert "ppl" not in texts.lower() and "perplexity" not in texts


def test_short_lines_have_about_100_columns():
    assert RECORD.short() == (
        "step 1200/5000 | loss 2.8317 | grad norm 0.412 | lr 2.94e-04 | 425k tok/s | "
        "38.1% MFU | 3 skipped | 1 NaN | ETA 1:18:11"
    )
    assert len(changed(skipped_steps=0, nan_steps=0, step=5000).short()) <= 100
    assert (
        EVALUATION.short()
        == "validation at step 1200 | loss 2.5000 | perplexity 12.18 | 3.00 s"
    )


def test_further_terms_of_the_objective_stand_behind_the_loss_and_in_fields_of_their_own(
    tmp_path,
):
    terms = {"sop loss": 0.6931}
    record, evaluation = (
        changed(metrics=terms),
        EvalRecord(**{**vars(EVALUATION), "metrics": terms}),
    )
    assert (
        "| lm loss: 2.831712E+00 | sop loss: 6.931000E-01 | loss scale: 65536.0 |"
        in record.line()
    )
    assert "| sop loss value: 6.931000E-01 |" in evaluation.line()
    log = open_log(logging_to(tmp_path), Progress())
    log.write(record)
    log.write(evaluation)
    log.close()
    records = map(
        json.loads, (tmp_path / "save" / "metrics.jsonl").read_text().splitlines()
    )
    assert [record["sop_loss"] for record in records] == [0.6931] * 2


def test_the_line_has_the_extremes_over_layers_and_the_files_have_every_layer(tmp_path):
    layers = {
        f"decoder.layers.{i} {name}": value + i / 100
        for i in range(60)
        for name, value in (
            ("max load", 1.5),
            ("router entropy", 0.9),
            ("dropped", 0.0),
        )
    }
    metrics = {"load balancing loss": 1.01, **layers, "router z-loss": 5.0}
    record, evaluation = (
        changed(metrics=metrics),
        EvalRecord(**{**vars(EVALUATION), "metrics": metrics}),
    )
    assert (
        "| load balancing loss: 1.010000E+00 | largest max load: 2.090000E+00 | smallest router entropy: "
        "9.000000E-01 | largest dropped: 5.900000E-01 | router z-loss: 5.000000E+00 | loss scale"
    ) in record.line()
    for text in (record.line(), record.short(), evaluation.line(), evaluation.short()):
        assert "layers" not in text and "largest max load" in text
    log = open_log(
        logging_to(tmp_path, tensorboard_dir=str(tmp_path / "board")), Progress()
    )
    log.write(record)
    log.close()
    (line,) = (tmp_path / "save" / "metrics.jsonl").read_text().splitlines()
    fields = json.loads(line)
    assert all(
        fields[name.replace(" ", "_")] == value for name, value in layers.items()
    )
    assert not any("largest" in name for name in fields)
    assert scalars(tmp_path / "board").keys() >= metrics.keys()


def test_a_layer_without_a_number_is_the_extreme():
    for name in ("max load", "router entropy"):
        values = {
            f"decoder.layers.{i} {name}": value
            for i, value in enumerate((1.0, math.nan, 2.0))
        }
        (extreme,) = over_layers(values).values()
        assert math.isnan(extreme)
    assert over_layers({"a l.5 b": 1.0, "1.5 b": 2.0}) == {"a l.5 b": 1.0, "1.5 b": 2.0}


def test_nothing_is_written_where_nothing_is_asked_for(tmp_path):
    config = logging_to(tmp_path)
    config = replace(config, checkpoint=CheckpointConfig())
    log = open_log(config, Progress())
    log.write(RECORD)
    log.close()
    assert isinstance(log, Log) and list(tmp_path.iterdir()) == []


def test_times_of_all_ranks_are_those_of_the_ranks_that_had_the_phase():
    text = times_text(
        {"forward-recv": {1: 0.002}, "optimizer": {0: 0.001, 1: 0.003}}, "all"
    )
    assert text.splitlines()[1:] == [
        "  forward-recv:",
        "     rank  1: 2.00",
        "  optimizer:",
        "     rank  0: 1.00",
        "     rank  1: 3.00",
    ]


# ------------------------------------------------------------------ Weights & Biases
class StandInRun:
    """W&B's rule: what is logged at a step before the current one is lost, and a commit ends a step."""

    def __init__(self, **options):
        self.options, self.kept, self.step = options, {}, 0

    def log(self, values, step, commit=False):
        if step >= self.step:
            self.kept.setdefault(step, {}).update(values)
            self.step = step + commit


def wandb_log(monkeypatch, init):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    flags = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 "
    flags += "--train-iters 1 --lr 1 --mock-data --vocab-size 8 --wandb-project p"
    return WandbLog(parse(flags.split(), env={}), "5f0c")


def test_wandb_keeps_the_validation_losses_of_a_step_that_was_logged_before(
    monkeypatch,
):
    log = wandb_log(monkeypatch, StandInRun)
    log.write(RECORD)
    log.write(EVALUATION)
    run = log._points._run
    kept = run.kept[RECORD.step]
    assert EVALUATION.step == RECORD.step and run.options["id"] == "5f0c"
    assert {"lm loss", "lm loss validation"} <= kept.keys()


def test_errors_of_wandb_are_told_at_the_start_and_cost_records_later(monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("no API key")  # W&B's own errors are no OSError either

    with pytest.raises(ConfigError, match="no API key. Run wandb login"):
        wandb_log(monkeypatch, failing)
    log = wandb_log(monkeypatch, StandInRun)
    log._points._run.log = failing
    with pytest.raises(OSError, match="no API key"):
        log.write(RECORD)


# ------------------------------------------------------------------ metrics.jsonl
def test_metrics_lie_in_the_save_folder_one_json_object_a_record_with_run_start_and_time(
    tmp_path,
):
    before = time.time()
    log = open_log(logging_to(tmp_path), Progress(), "5f0c")
    log.write(changed(loss=math.nan))
    log.write(EVALUATION)
    log.close()
    train, validation = map(
        json.loads, (tmp_path / "save" / "metrics.jsonl").read_text().splitlines()
    )
    start, now = train.pop("start"), train.pop("time")
    assert (
        before - 0.01 <= start <= now <= time.time() + 0.01
        and validation["start"] == start
    )
    not_asked_for = (
        "num_zeros",
        "params_norm",
        "decoupled_learning_rate",
        "grad_noise_scale",
        "kept_title",
        "times",
        "tags",
        "kept_title",
    )
    fields = {
        name: value
        for name, value in vars(RECORD).items()
        if name not in ("metrics", *not_asked_for)
    }
    assert train == {"kind": "train", "run": "5f0c", **fields, "loss": None}
    assert validation["kind"] == "validation" and validation[
        "perplexity"
    ] == pytest.approx(math.exp(2.5))


def test_a_resumed_run_deletes_no_record_and_the_newest_of_a_step_counts(tmp_path):
    config, path = (
        logging_to(tmp_path, metrics_path=str(tmp_path / "m.jsonl")),
        tmp_path / "m.jsonl",
    )
    process(config, 0, [1, 2, 3, 4])
    with path.open("a") as file:
        file.write('{"kind": "train", "st')  # cut off by a crash
    process(config, 2, [3], loss=9.0)
    lines = path.read_text().splitlines()
    assert len(lines) == 6 and lines[4] == '{"kind": "train", "st', (
        "all of it stays, and the cut line is ended"
    )
    assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [
        (1, 1.0),
        (2, 1.0),
        (3, 9.0),
        (4, 1.0),
    ]
    assert json.loads(lines[2])["start"] < json.loads(lines[5])["start"], (
        "the two records of step 3 can be told apart"
    )


def test_of_several_runs_in_a_file_readers_get_the_newest(tmp_path):
    config, path = (
        logging_to(tmp_path, metrics_path=str(tmp_path / "m.jsonl")),
        tmp_path / "m.jsonl",
    )
    process(config, 0, [1, 2, 3], run="a")
    process(config, 0, [1, 2], run="b", loss=5.0)
    assert [(r["run"], r["step"], r["loss"]) for r in read_metrics(path)] == [
        ("b", 1, 5.0),
        ("b", 2, 5.0),
    ]
    assert len(path.read_text().splitlines()) == 5


def test_records_of_an_earlier_version_have_no_run_and_count_as_the_resumed_one(
    tmp_path,
):
    path = tmp_path / "m.jsonl"
    path.write_text('{"kind": "train", "step": 1, "loss": 7.0}\n')
    process(logging_to(tmp_path, metrics_path=str(path)), 1, [2])
    assert [r["step"] for r in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize(
    "line", ["hello", "[1]", '{"step": 3}', '{"kind": "train", "step": "3"}']
)
def test_a_line_that_is_no_record_is_reported_with_its_number(tmp_path, line):
    path = tmp_path / "m.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"ki\n\0\0\0\n' + line + "\n")
    if line.startswith('{"kind": '):
        assert len(read_metrics(path)) == 1, "cut lines begin like this"
    else:
        with pytest.raises(DataError, match="line 4: not a record"):
            read_metrics(path)


def test_a_metrics_file_that_was_cut_in_its_first_line_is_taken_up_again(tmp_path):
    from megatron_ds.training.observe.log import check_log

    path = tmp_path / "m.jsonl"
    path.write_text('{"kind": "trai')
    config = logging_to(tmp_path, metrics_path=str(path))
    check_log(config)
    process(config, 0, [1])
    assert [r["step"] for r in read_metrics(path)] == [1]


# ------------------------------------------------------------------ TensorBoard
def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    """{tag: [(x, value)]} by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def as_the_dashboard_reads(folder) -> dict[str, list[int]]:
    """{tag: [x]} by the reader behind TensorBoard's pages, which treats the first start of a folder in its
    own way."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import (
        EventAccumulator,
    )

    events = EventAccumulator(
        str(folder), size_guidance={"tensors": 0}, tensor_size_guidance={"scalars": 0}
    )
    events.Reload()
    return {
        tag: [e.step for e in events.Tensors(tag)] for tag in events.Tags()["tensors"]
    }


def test_tensorboard_has_megatrons_tags_against_steps_and_losses_against_samples(
    tmp_path,
):
    log = open_log(
        logging_to(tmp_path, tensorboard_dir=str(tmp_path / "tb")), Progress()
    )
    log.write(RECORD)
    log.write(EVALUATION)
    log.write(EvalRecord(1200, 614400, "test", 2.25, 1.0))
    log.close()
    losses = {
        "lm loss": 2.831712,
        "lm loss validation": 2.5,
        "lm loss validation ppl": math.exp(2.5),
        "lm loss test": 2.25,
        "lm loss test ppl": math.exp(2.25),
    }
    others = {
        "learning-rate": 2.94e-4,
        "batch-size": 512,
        "loss-scale": 65536.0,
        "grad-norm": 0.4118,
        "iteration-time": 1.23456,
        "throughput": 187.62,
        "batch-generator-time": 0.002,
        "tokens-per-second": 424672.3,
        "mfu": 0.381,
    }
    by_step, by_sample = scalars(tmp_path / "tb"), scalars(tmp_path / "tb" / "samples")
    assert by_step == {
        tag: [(1200, pytest.approx(value))] for tag, value in (losses | others).items()
    }
    assert by_sample == {
        f"{tag} vs samples": [(614400, pytest.approx(value))]
        for tag, value in losses.items()
    }


def test_without_a_known_peak_tensorboard_has_no_mfu(tmp_path):
    log = open_log(
        logging_to(tmp_path, tensorboard_dir=str(tmp_path / "tb")), Progress()
    )
    log.write(changed(mfu=None))
    assert "mfu" not in scalars(tmp_path / "tb") and "throughput" in scalars(
        tmp_path / "tb"
    )


def test_a_run_that_stops_and_resumes_keeps_every_point_against_steps_and_against_samples(
    tmp_path,
):
    config = logging_to(tmp_path, tensorboard_dir=str(tmp_path / "tb"))
    process(config, 0, [5, 10])
    process(config, 10, [15, 20])
    for read in (scalars, as_the_dashboard_reads):
        by_step, by_sample = (
            read(tmp_path / "tb")["lm loss"],
            read(tmp_path / "tb" / "samples")["lm loss vs samples"],
        )
        if read is scalars:
            by_step, by_sample = [x for x, _ in by_step], [x for x, _ in by_sample]
        assert by_step == [5, 10, 15, 20]
        assert by_sample == [60, 120, 180, 240]


def test_steps_that_are_repeated_after_a_crash_appear_once_with_their_new_values(
    tmp_path,
):
    config = logging_to(tmp_path, tensorboard_dir=str(tmp_path / "tb"))
    process(config, 0, [*range(1, 16)])
    process(config, 10, [*range(11, 21)], loss=9.0)  # the checkpoint of step 10
    expected = [(step, 1.0 if step <= 10 else 9.0) for step in range(1, 21)]
    assert scalars(tmp_path / "tb")["lm loss"] == expected
    assert scalars(tmp_path / "tb" / "samples")["lm loss vs samples"] == [
        (step * BATCH, loss) for step, loss in expected
    ]
    assert as_the_dashboard_reads(tmp_path / "tb")["lm loss"] == [*range(1, 21)]
    assert as_the_dashboard_reads(tmp_path / "tb" / "samples")[
        "lm loss vs samples"
    ] == [*range(BATCH, 21 * BATCH, BATCH)]


# ------------------------------------------------------------------ failing disks
@pytest.fixture
def full_disk(monkeypatch):
    """A function that gives this process a limit of so many bytes a file: writes beyond it fail, as on a full
    disk."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Else a module that is imported now would be compiled to a file that is cut off.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield lambda size: resource.setrlimit(
        resource.RLIMIT_FSIZE, (limits[0] if size is None else size, limits[1])
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    "sink, file", [("metrics_path", "metrics.jsonl"), ("tensorboard_dir", "tb")]
)
def test_a_full_disk_is_reported_once_and_ends_nothing(
    tmp_path, caplog, full_disk, sink, file
):
    config = logging_to(tmp_path, **{sink: str(tmp_path / file)})
    config = replace(config, checkpoint=CheckpointConfig())
    log = open_log(config, Progress(), "a")
    record = lambda step: changed(step=step, samples=step * BATCH)
    log.write(record(1))
    size = max(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    full_disk(size + 20)  # half a record more
    for step in (2, 3, 4):
        log.write(record(step))
    full_disk(None)
    log.write(record(5))
    log.close()
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 2
    assert f"cannot write to {tmp_path / file}: File too large." in warnings[0]
    assert (
        "3 record(s) of this run are missing" in warnings[1]
        and str(tmp_path / file) in warnings[1]
    )
    steps = (
        [r["step"] for r in read_metrics(tmp_path / file)]
        if sink == "metrics_path"
        else [x for x, _ in scalars(tmp_path / file)["lm loss"]]
    )
    assert steps == [1, 5], "no half record is left, and the sink works again"


def test_a_folder_that_is_removed_during_the_run_is_made_again_with_a_warning(
    tmp_path, caplog
):
    config = logging_to(tmp_path, tensorboard_dir=str(tmp_path / "save" / "tb"))
    log = process(config, 0, [1, 2, 3], then=lambda: shutil.rmtree(tmp_path / "save"))
    assert [r["step"] for r in read_metrics(tmp_path / "save" / "metrics.jsonl")] == [3]
    assert [x for x, _ in scalars(tmp_path / "save" / "tb")["lm loss"]] == [3]
    assert (
        "metrics.jsonl was removed or emptied during the run" in caplog.text
        and not any(s.lost for s in log.sinks)
    )
