"""Runs `env --check` with defects: rank 1 is slow, rank 2 has another clock and another folder."""

import os
import sys
import time
from types import SimpleNamespace

from megatron_ds.extensions.launch import cluster_check, env_report

RANK = os.environ["RANK"]
SLOW_SECONDS = 1.0
folder = sys.argv[-1]

if RANK == "1":
    seconds = cluster_check.ClusterMeter.seconds
    cluster_check.ClusterMeter.seconds = lambda *args: seconds(*args) + SLOW_SECONDS
if RANK == "2":
    cluster_check.time = SimpleNamespace(
        time=lambda: time.time() + 60,
        monotonic=time.monotonic,
        perf_counter=time.perf_counter,
    )
    folder += "/other"
    os.makedirs(folder)
sys.exit(env_report.main(["--check", "--json", "--folder", folder]))
