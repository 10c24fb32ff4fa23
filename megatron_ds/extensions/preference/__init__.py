"""Training on pairs of answers, of which people prefer one (DPO)."""
