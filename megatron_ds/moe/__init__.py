"""Mixture of experts: router, losses, capacity, dispatch over expert-parallel ranks, experts."""
