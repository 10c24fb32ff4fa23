"""Kernels: implementations of operations (ops/) in C++ for CPUs and in CUDA for GPUs.

Importing `registered` registers all of them in the table of kernels (ops/kernel_table.py). Without it torch's
operations compute everything.
"""
