"""Implementations for CPUs, behind the table of kernels: nothing here runs on a GPU."""

UNIT = 16  # queries, or keys, of which the attention kernel has scores at a time
