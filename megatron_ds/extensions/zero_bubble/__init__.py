"""Schedules without bubbles: backward in two halves (Qi et al. 2023, arXiv:2401.10241)."""
