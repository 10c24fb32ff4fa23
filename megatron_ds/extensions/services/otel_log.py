"""The sink for OpenTelemetry: spans of the run and of its log intervals, and gauges of the latest values.

    job            the process, from its start to its end
      train        an interval between log lines, with step, samples and the values as attributes
      validation   an evaluation, likewise

Names are those of TensorBoard with underscores, under `megatron_ds.`. The exporter sends OTLP over HTTP to where
the variables OTEL_EXPORTER_OTLP_… of OpenTelemetry point, from threads of its own.
"""

import time
from importlib import import_module
from typing import Any

from ...config import RunConfig
from ...training.observe.records import EvalRecord, Record, TrainRecord
from ..curves.tensorboard import scalars_of
from .options import ServiceOptions

NAME = "megatron_ds"
SECOND = 10**9  # in ns, the unit of spans


class OtelLog:
    """Records spans and gauges with providers of its own, so that a program's stay as they are."""

    place = "OpenTelemetry"

    def __init__(self, config: RunConfig, run_id: str, span_exporter=None, reader=None):
        """span_exporter, reader: of OpenTelemetry's SDK; None: OTLP over HTTP."""
        self._timers = config.logging.log_timers_to_tensorboard
        resources = import_module("opentelemetry.sdk.resources")
        # All that the process sends has these attributes.
        resource = resources.Resource.create(
            {
                "service.name": config.of(ServiceOptions).otel_service_name,
                f"{NAME}.run": run_id,
                f"{NAME}.world_size": config.world_size,
            }
        )
        # Spans are sent in batches, gauges once a minute.
        tracing = import_module("opentelemetry.sdk.trace")
        export = import_module("opentelemetry.sdk.trace.export")
        metrics = import_module("opentelemetry.sdk.metrics")
        exporter = span_exporter or _otlp("trace", "OTLPSpanExporter")
        self._spans = tracing.TracerProvider(resource=resource)
        self._spans.add_span_processor(export.BatchSpanProcessor(exporter))
        self._metrics = metrics.MeterProvider([reader or _otlp_reader()], resource)
        self._meter = self._metrics.get_meter(NAME)
        self._gauges: dict[str, Any] = {}
        # The span of the job contains all others.
        trace = import_module("opentelemetry.trace")
        self._tracer = self._spans.get_tracer(NAME)
        self._job = self._tracer.start_span("job")
        self._context = trace.set_span_in_context(self._job)
        self._step: int | None = None

    def write(self, record: Record) -> None:
        """Record a span that ends now, and the values."""
        losses, others = scalars_of(record, self._timers)
        values = {
            f"{NAME}.{tag.replace(' ', '_')}": value
            for tag, value in (losses | others).items()
        }
        now = time.time_ns()
        places = {f"{NAME}.step": record.step, f"{NAME}.samples": record.samples}
        span = self._tracer.start_span(
            record.kind,
            context=self._context,
            start_time=now - round(self._seconds(record) * SECOND),
            attributes=values | places,
        )
        span.end(now)
        for name, value in values.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(name)
            self._gauges[name].set(value)

    def close(self) -> None:
        """Send what is waiting."""
        self._job.end()
        self._spans.shutdown()
        self._metrics.shutdown()

    def _seconds(self, record: Record) -> float:
        """Return how many seconds the interval or the evaluation took; 0 for other records."""
        if isinstance(record, EvalRecord):
            return record.eval_seconds
        if not isinstance(record, TrainRecord):
            return 0.0
        # The first record of a process counts as one step: earlier steps were those of another process.
        steps = 1 if self._step is None else record.step - self._step
        self._step = record.step
        return record.step_seconds * steps


def _otlp(signal: str, name: str):
    module = import_module(f"opentelemetry.exporter.otlp.proto.http.{signal}_exporter")
    return getattr(module, name)()


def _otlp_reader():
    export = import_module("opentelemetry.sdk.metrics.export")
    return export.PeriodicExportingMetricReader(_otlp("metric", "OTLPMetricExporter"))
