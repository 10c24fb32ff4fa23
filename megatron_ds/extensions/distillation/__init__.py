"""Training a student to predict what a larger, frozen model predicts (distillation)."""
