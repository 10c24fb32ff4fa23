"""Sinks of metrics: files of curves (TensorBoard, CSV), services (Weights & Biases, Comet, MLflow, OpenTelemetry)."""
