"""A run loads the modules that it uses: a plain GPT on one rank none of experts, of other programs' files, of several
ranks' schedules and attention, and of features that are off."""

import json
import subprocess
import sys

import pytest

from tests.harness.limits import HUNG
from tests.harness.pretraining import MOCK

pytestmark = pytest.mark.processes

PROGRAM = """import atexit, json, runpy, sys
names = lambda: sorted(name for name in sys.modules if name.startswith("megatron_ds."))
atexit.register(lambda: print(json.dumps(names()), file=sys.stderr))
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")"""
UNUSED = (
    "checkpoint.background_save",
    "compat.conversion.",
    "compat.deepspeed.",
    "compat.engine",
    "context_parallel.",
    "data.samples.packing",
    "extensions.tokenizers.file_tokenizers",
    "extensions.bert.bert",
    "extensions.data_efficiency.sample_order",
    "extensions.distillation.teacher",
    "extensions.kernels.gpu.",
    "extensions.lora.adapted_layers",
    "extensions.onebit.adam",
    "models.context_attention",
    "moe.mixture",
    "extensions.optimizers.muon",
    "extensions.report.picture",
    "pipeline.simulate",
    "extensions.zero_bubble.schedules",
    "extensions.guards.rerun",
)
# What declares a feature is read at every start.
DECLARATIONS = ("feature",)


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
    loaded = json.loads(done.stderr.splitlines()[-1])
    names = [name.removeprefix("megatron_ds.") for name in loaded]
    found = [
        name
        for name in names
        if name.startswith(UNUSED) and not name.endswith(DECLARATIONS)
    ]
    assert found == [] and "training.trainer" in names
    # May only fall.
    assert len(names) <= 390
