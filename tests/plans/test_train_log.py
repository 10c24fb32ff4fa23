"""What a run says: the log line in Megatron's words and order, metrics.jsonl, TensorBoard's tags read back."""

import json
import math
import re
from types import SimpleNamespace

import pytest

from megatron_ds.training.log import EvalRecord, Log, TrainRecord, open_log

RECORD = TrainRecord(
    step=1200, steps=5000, samples=614400, tokens=629145600, step_seconds=1.23456, learning_rate=2.94e-4, weight_decay=0.1,
    global_batch_size=512, loss=2.831712, loss_scale=65536.0, grad_norm=0.4118, skipped_steps=3, nan_steps=1, seq_length=1024,
    tokens_per_second=424672.3, tflops_per_rank=187.62, mfu=0.381, eta_seconds=4691.3, memory_gib=11.271, data_seconds=0.002)
EVALUATION = EvalRecord(step=1200, samples=614400, split="validation", loss=2.5, eval_seconds=3.0)

# Megatron-LM's fields, up to its last one that we have; the order is what scripts that read logs rely on.
MEGATRON = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration {5}1200/ {4}5000 \| consumed samples: {7}614400 \|"
    r" elapsed time per iteration \(ms\): 1234\.6 \| throughput per GPU \(TFLOP/s/GPU\): 187\.6 \|"
    r" learning rate: 2\.940000E-04 \| global batch size:   512 \| lm loss: 2\.831712E\+00 \| loss scale: 65536\.0 \|"
    r" grad norm: 0\.412 \| number of skipped iterations:   3 \| number of nan iterations:   1 \|")


def logging_to(tmp_path, **where):
    """The parts of a config that the log reads."""
    logging = {"metrics_path": None, "tensorboard_dir": None} | where
    return SimpleNamespace(logging=SimpleNamespace(**logging), checkpoint=SimpleNamespace(save=str(tmp_path / "save")))


def test_the_line_has_megatrons_fields_in_its_order_and_then_ours():
    line = RECORD.line()
    found = MEGATRON.match(line)
    assert found, line
    assert line[found.end():] == (" seq length:  1024 | tokens per second: 424672.3 | MFU: 38.1% |"
                                  " waiting for data (ms): 2.0 | memory (GiB): 11.27 | ETA: 1:18:11 |")


def test_where_blocks_drop_tokens_the_line_says_how_many_stay():
    line = TrainRecord(**vars(RECORD) | {"kept_tokens": 256, "layer_tokens": 5 * 10**9, "actual_seq_length": 448}).line()
    assert "| random ltd reserved length:   256 | actual seqlen:   448 | consumed layer tokens:   5000000000 |" in line
    assert "reserved" not in RECORD.line()


def test_a_loss_that_is_not_a_number_stays_in_the_line():
    line = TrainRecord(**{**vars(RECORD), "loss": math.nan, "grad_norm": math.inf}).line()
    assert "| lm loss: NAN |" in line and "| grad norm: inf |" in line


def test_the_evaluation_stands_between_dashes_with_a_bounded_perplexity():
    dashes, text, again = EVALUATION.line().split("\n")
    assert text == (" validation loss at iteration 1200 | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 | ")
    assert dashes == again == "-" * len(text)
    assert EvalRecord(1, 1, "test", 800.0, 0.0).perplexity == math.exp(20)


def test_metrics_lie_in_the_save_folder_one_json_object_a_record(tmp_path):
    log = open_log(logging_to(tmp_path), 0)
    log.train(TrainRecord(**{**vars(RECORD), "loss": math.nan}))
    log.evaluation(EVALUATION)
    log.close()
    train, validation = map(json.loads, (tmp_path / "save" / "metrics.jsonl").read_text().splitlines())
    assert train == {"kind": "train", **vars(RECORD), "loss": None}
    assert validation["kind"] == "validation" and validation["perplexity"] == pytest.approx(math.exp(2.5))


def test_a_resumed_run_replaces_the_records_of_steps_it_repeats(tmp_path):
    config, path = logging_to(tmp_path, metrics_path=str(tmp_path / "m.jsonl")), tmp_path / "m.jsonl"
    at = lambda step, loss: TrainRecord(**{**vars(RECORD), "step": step, "loss": loss})
    log = open_log(config, 0)
    for step in (1, 2, 3, 4):
        log.train(at(step, 1.0))
    log.close()
    with path.open("a") as file:
        file.write('{"kind": "train", "st')                              # cut off by a crash
    log = open_log(config, 2)
    log.train(at(3, 9.0))
    log.close()
    assert [(r["step"], r["loss"]) for r in map(json.loads, path.read_text().splitlines())] == [(1, 1.0), (2, 1.0), (3, 9.0)]


def test_nothing_is_written_where_nothing_is_asked_for(tmp_path):
    config = logging_to(tmp_path)
    config.checkpoint.save = None
    log = open_log(config, 0)
    log.train(RECORD)
    log.close()
    assert isinstance(log, Log) and list(tmp_path.iterdir()) == []


def test_tensorboard_has_megatrons_tags_against_steps_and_against_samples(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = open_log(logging_to(tmp_path, tensorboard_dir=str(tmp_path / "tb")), 0)
    log.train(RECORD)
    log.evaluation(EVALUATION)
    log.evaluation(EvalRecord(1200, 614400, "test", 2.25, 1.0))
    log.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    both = {"learning-rate": 2.94e-4, "batch-size": 512, "lm loss": 2.831712, "loss-scale": 65536.0, "grad-norm": 0.4118,
            "iteration-time": 1.23456, "throughput": 187.62, "batch-generator-time": 0.002, "lm loss validation": 2.5,
            "lm loss validation ppl": math.exp(2.5), "lm loss test": 2.25, "lm loss test ppl": math.exp(2.25)}
    once = {"tokens-per-second": 424672.3, "mfu": 0.381}
    assert set(events.Tags()["scalars"]) == {*both, *(f"{tag} vs samples" for tag in both), *once}
    for tag, value in (both | once).items():
        (event,) = events.Scalars(tag)
        assert (event.step, event.value) == (1200, pytest.approx(value))
    for tag, value in both.items():
        (event,) = events.Scalars(f"{tag} vs samples")
        assert (event.step, event.value) == (614400, pytest.approx(value))
