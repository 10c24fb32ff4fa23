"""Faults at random moments under random layouts: nothing is lost or repeated, each fault has a name, and the training
ends with the bits of the undisturbed one.

MEGATRON_DS_CHAOS is the number of moments. The time of the disturbed runs beside that of the undisturbed ones is
printed at the end (`pytest -s`).
"""

import json
import os
import random
import re
import time
from pathlib import Path

import pytest

from tests.harness.clusters import free_port, wait_until
from tests.harness.limits import HUNG
from tests.harness.pretraining import losses, same_bits, saved_state
from tests.launch.starts import Launcher, all_end

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(3600),
    pytest.mark.all,
]

MOMENTS = int(os.environ.get("MEGATRON_DS_CHAOS", "12"))
STEPS = 20
EVERY = 3  # steps between checkpoints
PATIENCE = 2 * HUNG
SPOILED = str(Path(__file__).with_name("spoiled_training.py"))
WORDS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-3 --mock-data --vocab-size 61 --eval-iters 0 --log-interval 1 "
    f"--train-iters {STEPS} --save-interval {EVERY} --save save --load save"
)
LAYOUTS = (
    "--zero-stage 1",
    "--zero-stage 2 --async-save",
    "--zero-stage 3",
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--pipeline-model-parallel-size 2 --async-save",
)
# Fault → what the launcher or the run prints about it.
FAULTS = {
    "kill": r"rank {} on localhost .* failed first|rank {} on localhost is behind",
    "stop": r"rank {} on localhost is behind",
    "loop": r"rank {} on localhost is behind",
    "end": r"SIGTERM|signal",
    "cut": r"rank {} on localhost .* failed first",
    "full": r"File too large|No space left",
    "slow": r"rank {} on localhost .* failed first",
}


def run(folder, layout, spoil):
    """(exit code, output) of one command, with its restarts."""
    words = f"--num_gpus 2 --max-restarts 2 --hang-seconds 3 --end-seconds 0 --master_port {free_port()}"
    started = Launcher(
        [*words.split(), SPOILED, *WORDS.split(), *layout.split()],
        folder,
        SPOIL=json.dumps(spoil),
        OMP_NUM_THREADS="1",
    )
    try:
        wait_until(lambda: started.process.poll() is not None, "the end", PATIENCE)
    except AssertionError as late:
        started.process.terminate()
        raise AssertionError(f"{late}\n{started.text}") from None
    code = started.end()
    assert all_end(folder)
    return code, started.text


def train(folder, layout, spoil):
    """(seconds, outputs of all commands): the same command until the training is complete."""
    begin = time.monotonic()
    code, text = run(folder, layout, spoil)
    texts = [text]
    while code or max(losses(folder / "save")) < STEPS:
        assert len(texts) < 3, texts
        code, text = run(folder, layout, {})
        texts.append(text)
    return time.monotonic() - begin, texts


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Layout → (folder, seconds) of its training without faults."""
    found = {}

    def of(layout):
        if layout not in found:
            folder = tmp_path_factory.mktemp("undisturbed")
            found[layout] = folder, train(folder, layout, {})[0]
        return found[layout]

    return of


@pytest.fixture(scope="module")
def seconds():
    """Yield the seconds of all undisturbed and of all disturbed runs, which are printed at the end."""
    found = [0.0, 0.0]
    yield found
    if found[1]:
        print(
            f"\n{found[0]:.0f} s without faults, {found[1]:.0f} s with: {found[0] / found[1]:.0%}"
        )


@pytest.mark.parametrize("seed", range(MOMENTS))
def test_a_training_survives(tmp_path, undisturbed, seconds, seed):
    draw = random.Random(seed)
    layout = draw.choice(LAYOUTS)
    fault = list(FAULTS)[seed % len(FAULTS)]
    rank = draw.randrange(2)
    # A cut checkpoint has another one before it.
    step = draw.randrange(2 * EVERY + 1, STEPS - EVERY)
    later = draw.uniform(0, 0.3) if fault in ("kill", "stop", "end", "cut") else 0.0
    folder, alone = undisturbed(layout)
    taken, texts = train(tmp_path, layout, {"0": [rank, step, fault, later]})
    seconds[0] += alone
    seconds[1] += taken
    # named
    text = "".join(texts)
    assert re.search(FAULTS[fault].replace("{}", str(rank)), text), text
    # each step once in the end, with the bits of the undisturbed run
    assert losses(tmp_path / "save") == losses(folder / "save")
    mine = saved_state(tmp_path / "save", STEPS)
    assert same_bits(mine, saved_state(folder / "save", STEPS))
