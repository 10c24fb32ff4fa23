"""Upcycling: a checkpoint with experts from a dense one."""
