"""A run loads the modules that it uses: a plain GPT on one rank none of experts, of other programs' files, of several
ranks' schedules and attention, of checkpoints, corpora and offloading without them, and of features that are off.

`python -m tests.harness.loaded_modules pretrain_gpt.py …` prints what a run loads, and which import brings it."""

import json
import subprocess
import sys

import pytest

from tests.harness.limits import HUNG
from tests.harness.pretraining import MOCK

pytestmark = pytest.mark.processes

PROGRAM = """import atexit, json, runpy, sys
from tests.harness.loaded_modules import loaded
atexit.register(lambda: print(json.dumps(loaded(sys.modules)), file=sys.stderr))
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")"""
UNUSED = (
    "checkpoint.folder",
    "checkpoint.load",
    "checkpoint.save",
    "compat.conversion.",
    "compat.deepspeed.",
    "compat.engine",
    "context_parallel.",
    "config.rules.moe",
    "config.rules.zero",
    "config.sources.config_files",
    "data.loading.corpora",
    "data.samples.packing",
    "data.text.indexed",
    "extensions.tokenizers.file_tokenizers",
    "extensions.bert.bert",
    "extensions.data_efficiency.sample_order",
    "extensions.distillation.teacher",
    "extensions.kernels.gpu.",
    "extensions.lora.adapted_layers",
    "extensions.onebit.adam",
    "host.async_io",
    "host.shared_pages",
    "models.context_attention",
    "moe.mixture",
    "mpu.channels",
    "mpu.process_groups",
    "mpu.shared_sums",
    "extensions.optimizers.muon",
    "extensions.report.picture",
    "pipeline.simulate",
    "extensions.zero_bubble.schedules",
    "extensions.guards.rerun",
    "zero.gathering",
    "zero.number_blocks",
    "zero.sub_groups",
    "zero.sharded_parameters",
    "zero.whole_matrices",
)
# What declares a feature is read at every start.
DECLARATIONS = ("feature", "options")


def test_a_plain_run_loads_nothing_of_what_it_does_not_use(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            "pretrain_gpt.py",
            *MOCK,
        ],
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0, done.stderr
    nodes = json.loads(done.stderr.splitlines()[-1])
    names = [name.removeprefix("megatron_ds.") for name in nodes]
    found = [
        name
        for name in names
        if name.startswith(UNUSED) and not name.endswith(DECLARATIONS)
    ]
    assert found == [] and "training.trainer" in names
    # Grows by the declaration of a new feature alone.
    assert len(names) <= 340
    assert sum(nodes.values()) <= 139_700
