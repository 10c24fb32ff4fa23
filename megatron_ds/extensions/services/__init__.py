"""Sinks of metrics that are services: Weights & Biases, Comet, MLflow, OpenTelemetry."""
