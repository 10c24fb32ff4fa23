"""Metrics at services, each read back by the reader of its own library. A library that is missing skips its tests."""

import glob
import json
import sys
import zipfile

import pytest

from megatron_ds.config import parse
from megatron_ds.config.saved_values import from_dict, to_dict
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.curves.tensorboard import scalars_of
from megatron_ds.extensions.services.options import ServiceOptions
from megatron_ds.extensions.services.otel_log import OtelLog
from megatron_ds.progress.ramps import Progress
from megatron_ds.training.observe.log import check_log, open_log

from .test_train_log import EVALUATION, RECORD, changed

pytestmark = pytest.mark.plan
MODEL = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --vocab-size 8 --mock-data "
TRAINING = "--micro-batch-size 1 --train-iters 1 --lr 0.25 "
EARLIER = changed(step=1190, samples=600000, loss=3.5)


def config_of(words):
    return parse((MODEL + TRAINING + words).split(), env={})


def expected(record):
    """TensorBoard's values, whose tags and numbers have tests of their own."""
    losses, others = scalars_of(record, timers=False)
    return losses | others


def logged(words, *records, run="5f0c"):
    log = open_log(config_of(words), Progress(), run)
    for record in records:
        log.write(record)
    log.close()
    assert [sink.lost for sink in log.sinks] == [0]


# ------------------------------------------------------------------ MLflow
@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return mlflow.MlflowClient(f"file://{tmp_path}/store")


def only_run(client, name):
    place = client.get_experiment_by_name(name).experiment_id
    (run,) = client.search_runs([place])
    return run


def test_mlflow_has_the_values_of_all_records_and_the_settings(mlflow, tmp_path):
    words = f"--mlflow-tracking-uri file://{tmp_path}/store --mlflow-experiment e --mlflow-run-name n"
    logged(words, EARLIER, RECORD, EVALUATION)
    run = only_run(mlflow, "e")
    assert (run.info.run_name, run.info.status) == ("n", "FINISHED")
    found = {
        (name, point.step): point.value
        for name in run.data.metrics
        for point in mlflow.get_metric_history(run.info.run_id, name)
    }
    values = {
        (name, record.step): value
        for record in (EARLIER, RECORD, EVALUATION)
        for name, value in (expected(record) | {"samples": record.samples}).items()
    }
    assert found.keys() == values.keys() and found == pytest.approx(values)
    assert run.data.params["optimizer.lr"] == "0.25"


def test_a_run_that_resumes_continues_its_run_at_mlflow(mlflow, tmp_path):
    words = f"--mlflow-tracking-uri file://{tmp_path}/store"
    logged(words, EARLIER)
    logged(words, RECORD)
    run = only_run(mlflow, "megatron_ds")
    history = mlflow.get_metric_history(run.info.run_id, "lm loss")
    assert [point.step for point in history] == [1190, 1200]


def test_what_mlflow_refuses_is_an_error_at_the_start():
    pytest.importorskip("mlflow")
    with pytest.raises(ConfigError, match="--mlflow-tracking-uri nosuch://x: MLflow"):
        open_log(config_of("--mlflow-tracking-uri nosuch://x"), Progress(), "a")


# ------------------------------------------------------------------ Comet
def test_an_archive_of_comet_has_the_values_under_the_key_of_the_run(tmp_path):
    pytest.importorskip("comet_ml")
    from comet_ml.offline import extract_experiment_key_from_offline_file
    from comet_ml.offline import get_metric_msg_validator as validator

    words = f"--comet-project p --comet-workspace w --comet-offline-dir {tmp_path}"
    logged(words, RECORD, EVALUATION)
    logged(words, EARLIER)
    archives = glob.glob(f"{tmp_path}/*.zip")
    keys = {extract_experiment_key_from_offline_file(path) for path in archives}
    found = {}
    for path in archives:
        found |= metrics_in(path, validator())
    values = {
        (name, record.step): value
        for record in (EARLIER, RECORD, EVALUATION)
        for name, value in expected(record).items()
    }
    assert len(archives) == 2 and len(keys) == 1
    assert values.items() <= found.items()


def metrics_in(path, validator):
    """(name, step) → value, of the messages that Comet's own check of an archive accepts as metrics."""
    found = {}
    with zipfile.ZipFile(path) as archive, archive.open("messages.json") as lines:
        for line in lines:
            message = json.loads(line)
            if message["type"] == "metric_msg":
                validator.validate(message["payload"])
                metric = message["payload"]["metric"]
                found[metric["metricName"], metric["step"]] = metric["metricValue"]
    return found


# ------------------------------------------------------------------ OpenTelemetry
def test_spans_and_gauges_of_opentelemetry_have_the_values():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
        InMemorySpanExporter,
    )

    # Two intervals and an evaluation.
    spans = InMemorySpanExporter()
    reader = InMemoryMetricReader()
    config = config_of("--otel-enabled --otel-service-name s")
    sink = OtelLog(config, "5f0c", spans, reader)
    for record in (EARLIER, RECORD, EVALUATION):
        sink.write(record)
    (resource,) = reader.get_metrics_data().resource_metrics
    sink.close()
    # Each record is a span of its length under the job.
    *found, job = spans.get_finished_spans()
    assert [span.name for span in found] == ["train", "train", "validation"]
    assert job.name == "job" and {span.parent.span_id for span in found} == {
        job.context.span_id
    }
    for span, record in zip(found, (EARLIER, RECORD, EVALUATION)):
        values = expected(record) | {"step": record.step, "samples": record.samples}
        assert dict(span.attributes) == named(values)
    lengths = [(span.end_time - span.start_time) / 1e9 for span in found]
    assert lengths == pytest.approx(
        [EARLIER.step_seconds, 10 * RECORD.step_seconds, EVALUATION.eval_seconds]
    )
    # Gauges have the last values.
    gauges = {
        metric.name: metric.data.data_points[0].value
        for metric in resource.scope_metrics[0].metrics
    }
    assert gauges == named(expected(RECORD) | expected(EVALUATION))
    assert resource.resource.attributes["service.name"] == "s"


def named(values):
    return {
        f"megatron_ds.{name.replace(' ', '_')}": value for name, value in values.items()
    }


# ------------------------------------------------------------------ all
@pytest.mark.parametrize(
    "flag, value, module, extra",
    [
        ("--wandb-project", "x", "wandb", "wandb"),
        ("--comet-project", "x", "comet_ml", "comet"),
        ("--mlflow-tracking-uri", "x", "mlflow", "mlflow"),
        ("--otel-enabled", "", "opentelemetry.exporter.otlp.proto.http", "otel"),
    ],
)
def test_a_missing_package_is_an_error_that_names_its_extra(
    flag, value, module, extra, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ConfigError, match=rf"{flag} needs the package {module}.*megatron_ds\[{extra}\]"
    ):
        check_log(config_of(f"{flag} {value}"))


def test_files_with_the_options_in_their_former_section_are_read(tmp_path):
    """Configurations and checkpoints of before have them in the section of the log."""
    file = tmp_path / "run.yaml"
    file.write_text("logging:\n  wandb_project: a\n")
    assert config_of(f"--config {file}").of(ServiceOptions).wandb_project == "a"
    now = to_dict(config_of("--wandb-project a --comet-project b"))
    former = dict(now)
    former["logging"] = now["logging"] | former.pop("services")
    former["sources"] = {
        path.replace("services.", "logging."): source
        for path, source in now["sources"].items()
    }
    assert to_dict(from_dict(former)) == now
