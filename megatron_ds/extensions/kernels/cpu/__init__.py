"""Implementations for CPUs, behind the table of kernels: nothing here runs on a GPU."""
