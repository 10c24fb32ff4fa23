"""Attention over sequences whose tokens are divided among the ranks of a group."""
