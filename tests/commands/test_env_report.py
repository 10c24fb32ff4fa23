"""The report on this machine, with and without torch."""

import json
import os
import platform
import re
import subprocess
import sys
from importlib import metadata

import pytest

from megatron_ds.errors import ConfigError
from megatron_ds.extensions.launch import env_report
from tests.harness.documents import ROOT
from tests.harness.limits import HUNG

pytestmark = pytest.mark.plan


def test_versions_are_those_of_the_installed_packages(capsys):
    assert env_report.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [*report] == [*env_report.SECTIONS]
    for name in env_report.PACKAGES:
        try:
            assert report["versions"][name] == metadata.version(name)
        except metadata.PackageNotFoundError:
            assert report["versions"][name] is None
    assert report["versions"]["python"].startswith(platform.python_version())
    assert report["devices"]["cores"].endswith(f"of {os.cpu_count()}")


def test_the_text_has_every_row(capsys):
    assert env_report.main([]) == 0
    text = capsys.readouterr().out
    for title in env_report.SECTIONS:
        assert re.search(f"^{title}$", text, re.M)
    for name in env_report.versions():
        assert re.search(f"^  {re.escape(name)} ", text, re.M)


def test_each_operation_has_its_implementation_and_reasons(monkeypatch):
    from megatron_ds.ops.kernel_table import OPERATIONS

    found = env_report.kernels()
    assert {"adamw", "attention", "product"} <= {*found} == {*OPERATIONS}
    attention = OPERATIONS["swiglu"]
    absent = type(attention.implementations[0])(
        "fast", print, devices=("cpu", "cuda"), available=lambda: "no such instruction"
    )
    monkeypatch.setattr(
        attention, "implementations", [absent, *attention.implementations]
    )
    assert env_report.kernels()["swiglu"].endswith("not fast: no such instruction")


def test_without_torch_the_report_says_so():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from megatron_ds.extensions.launch.env_report import main; main(['--json'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["devices"]["GPUs"] == "unknown: torch is not installed"
    assert report["kernels"] == {"kernels": "unknown: torch is not installed"}
    assert (
        report["missing"]["torch"]
        == 'everything but this report: python -m pip install "megatron_ds"'
    )


def test_variables_of_libraries_are_shown_and_secrets_are_not():
    environ = {
        "NCCL_DEBUG": "INFO",
        "WANDB_API_KEY": "0123",
        "MLFLOW_TRACKING_URI": "https://me:0123@host/x",
        "HF_ENDPOINT": "https://host/@x",
        "HOME": "/root",
    }
    assert env_report.variables(environ) == {
        "HF_ENDPOINT": "https://host/@x",
        "MLFLOW_TRACKING_URI": "(set)",
        "NCCL_DEBUG": "INFO",
        "WANDB_API_KEY": "(set)",
    }


def test_what_is_missing_is_listed_with_its_use(monkeypatch):
    monkeypatch.setattr(env_report, "find_spec", lambda name: None)
    monkeypatch.setattr(env_report.shutil, "which", lambda name: None)
    found = env_report.missing()
    assert (
        found["pyarrow"]
        == 'Parquet files as corpora: python -m pip install "megatron_ds[data]"'
    )
    assert found["pdsh"] == "launch --launcher pdsh"


def test_a_folder_without_check_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--folder is checked by --check"):
        env_report.main(["--folder", str(tmp_path)])
