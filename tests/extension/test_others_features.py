"""A distribution with features (examples/feature) is built, installed beside the package, used by every command,
and named by every command once it is gone."""

import json
import re
import subprocess
import sys
import sysconfig
from urllib.request import urlopen

import pytest

from tests.harness.documents import ROOT
from tests.harness.limits import HUNG

pytestmark = pytest.mark.processes

MODEL = (
    "--model loud-gpt --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --vocab-size 64 "
    "--tokenizer-type NullTokenizer"
).split()
RUN = (
    "--mock-data --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 --eval-iters 0 "
    "--log-interval 1 --loud-scale 3"
).split()


def run(python, words, folder):
    return subprocess.run(
        [str(python), "-m", "megatron_ds", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=HUNG,
    )


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """(an interpreter that sees this one's packages, the folder of its own packages)"""
    folder = tmp_path_factory.mktemp("fresh")
    made = [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")]
    subprocess.run(made, check=True)
    (own,) = (folder / "venv").glob("lib/python*/site-packages")
    others = sysconfig.get_path("purelib")
    (own / "others.pth").write_text(f"import site; site.addsitedir({others!r})\n")
    return folder / "venv/bin/python", own


@pytest.fixture(scope="module")
def installed(fresh, tmp_path_factory):
    """The wheel of the example, installed there."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for file in (ROOT / "examples/feature").glob("*.*"):
        (source / file.name).write_bytes(file.read_bytes())
    pip = [sys.executable, "-m", "pip", "--quiet"]
    alone = ["--no-deps", "--no-index"]
    made = [*pip, "wheel", *alone, "--no-build-isolation", "-w", folder, source]
    subprocess.run(made, check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", *alone, "--target", fresh[1], wheel], check=True)
    return fresh


@pytest.fixture(scope="module")
def trained(installed, tmp_path_factory):
    """(what training printed, the folder of the run)"""
    folder = tmp_path_factory.mktemp("run")
    words = ["train", *MODEL, *RUN, "--loud-file", "loud.jsonl", "--save", "saved"]
    done = run(installed[0], words, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, folder


def commands(folder):
    """Return the arguments of each command, and a part of its output where the feature is installed."""
    text = folder / "text.txt"
    text.write_text("1 2 3 4 5 6 7 8\n")
    load = ["--load", folder / "saved"]
    of_run = ["train", *MODEL, *RUN, *load]
    task = ["--task", "WIKITEXT103", "--valid-data", text, "--micro-batch-size", 1]
    to = ["--save", folder / "out", "--to", "megatron_ds", "--no-optim"]
    return {
        "train": ([*of_run, "--train-iters", 3], "scale of 3.0"),
        "plan": (["plan", *MODEL, *RUN, "--world-size", 2], "parameters"),
        "generate": (
            ["generate", *load, "--prompt", "1 2", "--max-new-tokens", 2],
            "1 2",
        ),
        "evaluate": (["evaluate", *load, *task], "perplexity"),
        "convert": (["convert", *load, *to], "wrote"),
        "loud-count": (["loud-count", folder / "loud.jsonl"], "records"),
    }


COMMANDS = ("train", "plan", "generate", "evaluate", "convert", "loud-count")


@pytest.mark.quick
def test_a_run_has_the_option_the_model_the_objective_the_sink_and_the_observer(
    trained,
):
    printed, folder = trained
    rows = [
        json.loads(line)
        for line in (folder / "loud.jsonl").read_text().split("\n")[:-1]
    ]
    assert [row["step"] for row in rows] == [1, 2]
    assert "loud: finished, with a scale of 3.0" in printed
    recorded = json.loads(next((folder / "saved").glob("iter_*/run.json")).read_text())
    assert recorded["features"][0]["distribution"] == "loud-gpt 1.0"
    assert "model loud-gpt" in recorded["features"][0]["supplies"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_knows_an_installed_feature(installed, trained, name):
    words, printed = commands(trained[1])[name]
    done = run(installed[0], words, trained[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert printed in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_without_it_a_command_names_what_is_missing(trained, name):
    words, _ = commands(trained[1])[name]
    done = run(sys.executable, words, trained[1])
    assert done.returncode == 2, done.stdout + done.stderr
    # What the command line has alone is unknown; a checkpoint names the distribution.
    known = {"plan": "loud-gpt", "loud-count": "loud-count"}
    assert known.get(name, "install loud-gpt 1.0") in done.stderr


def test_a_server_knows_it(installed, trained):
    words = ["serve", "--load", trained[1] / "saved", "--port", "0"]
    server = subprocess.Popen(
        [str(installed[0]), "-m", "megatron_ds", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        address = next(
            found[0]
            for line in server.stdout
            if (found := re.findall(r"http://127\.0\.0\.1:\d+", line))
        )
        with urlopen(f"{address}/v1/models", timeout=HUNG) as reply:
            assert json.load(reply)["data"]
    finally:
        server.terminate()
        server.communicate(timeout=HUNG)


def test_the_flag_stands_for_the_installation(trained):
    words, printed = commands(trained[1])["generate"]
    folder = ROOT / "examples/feature"
    done = run(sys.executable, [*words, "--import", "loud_gpt"], folder)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


def test_a_yaml_file_names_a_module(trained):
    file = trained[1] / "run.yaml"
    file.write_text("import: loud_gpt\nloud_scale: 200\n")
    words = ["plan", *MODEL, *RUN[:-2], "--config", file]
    done = run(sys.executable, words, ROOT / "examples/feature")
    assert done.returncode == 2
    assert "is above 100" in done.stderr
