"""`megatron-ds serve` of a trained checkpoint: it answers, and a signal ends it well."""

import json
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from megatron_ds.errors import ConfigError
from megatron_ds.extensions.serving import serve
from tests.harness.limits import HUNG
from tests.harness.pretraining import MOCK, run_pretrain, train
from tests.harness.warm import warm_python

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "small"
    train(1, [*MOCK, "--save", folder])
    return folder


@pytest.mark.quick
def test_a_checkpoint_is_served_until_a_signal(checkpoint):
    words = ["serve", "--load", checkpoint, "--port", "0"]
    command = [warm_python(), "-m", "megatron_ds", *map(str, words)]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = server.stdout.readline()
        url = re.fullmatch(r"serving small at (http://127\.0\.0\.1:\d+)\n", line)[1]
        body = {"prompt": "1 2 3", "max_tokens": 4, "temperature": 0, "logprobs": 0}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=HUNG) as answer:
            (choice,) = json.load(answer)["choices"]
        # Text after "1 2 3" begins with what separates the ids.
        tokens = choice["logprobs"]["tokens"]
        assert len(tokens) == 4 and choice["text"] == "".join(tokens)
        assert choice["text"].startswith(" ")
    finally:
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=HUNG)
    assert server.returncode == 0, errors
    assert "Traceback" not in errors and "stopped by SIGTERM" in errors


@pytest.mark.parametrize(
    "flags, error",
    [
        ([], "required: --load"),
        (["--load", "absent"], "--load absent holds no checkpoint"),
        (["--load", "x", "--port", "70000"], "a port is 0 to 65535"),
        (["--load", "x", "--batch-size", "0"], "--batch-size 0: use 1 or more"),
        (["--load", "x", "--max-requests", "-1"], "--max-requests -1: use 1"),
    ],
)
def test_what_cannot_be_served_is_named(flags, error):
    (ended,) = run_pretrain(1, flags, command="serve")
    assert ended.code == 2 and error in ended.err


def test_texts_longer_than_the_positions_are_refused(checkpoint):
    flags = ["--load", checkpoint, "--port", 0, "--max-length", 17]
    (ended,) = run_pretrain(1, flags, command="serve")
    assert ended.code == 2 and "--max-length 17: the model has 16 pos" in ended.err


def test_a_template_that_is_none_is_an_error_at_the_start(checkpoint, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    template = tmp_path / "chat.jinja"
    template.write_text("{% for")
    flags = ["--load", checkpoint, "--port", 0, "--chat-template", template]
    (ended,) = run_pretrain(1, flags, command="serve")
    assert ended.code == 2 and "no template of Jinja, line 1" in ended.err


def test_a_template_that_cannot_be_read_is_an_error(checkpoint):
    flags = ["--load", checkpoint, "--port", 0, "--chat-template", "absent.jinja"]
    (ended,) = run_pretrain(1, flags, command="serve")
    assert ended.code == 2 and "absent.jinja cannot be read" in ended.err


@pytest.mark.parametrize("package", ["uvicorn", "starlette", "pydantic"])
def test_a_missing_package_is_named_with_its_extra(package, monkeypatch):
    for name in list(sys.modules):
        if name.startswith(("megatron_ds.extensions.serving.", f"{package}.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError, match=r'python -m pip install "megatron_ds\[serve\]"'
    ) as caught:
        serve.run_tool(["--load", "absent"])
    assert f"needs the package {package}" in str(caught.value)
