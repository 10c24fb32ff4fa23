"""Layers whose weights are split over the tensor-parallel group, and the loss on logits split likewise.

Shoeybi et al. 2019 (arXiv:1909.08053); sequence parallelism from Korthikanti et al. 2022 (arXiv:2205.05198).
"""
