"""Programs that are not changed, TRL's scripts and one of the Trainer, have the losses that they have with DDP.

Each case starts two programs of two processes that import transformers, so a day runs a part of them.
"""

import importlib.util

import pytest

from tests.harness.unmodified_programs import losses, make_inputs

MISSING = [
    name
    for name in ("accelerate", "datasets", "trl")
    if importlib.util.find_spec(name) is None
]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The programs' inputs, and what they write."""
    place = tmp_path_factory.mktemp("programs")
    make_inputs(place)
    return place


@pytest.fixture(scope="module")
def with_ddp(folder):
    """Program → its losses with DDP, which are computed once."""
    known = {}

    def found(program):
        if program not in known:
            known[program] = losses(folder, program, "ddp")
        return known[program]

    return found


@pytest.mark.parametrize(
    "program, way, stage",
    [
        ("text_model", "launch", 2),
        ("sft", "accelerate", 3),
        pytest.param("dpo", "accelerate", 3, marks=pytest.mark.all),
        ("kto", "command", 3),
        ("grpo", "accelerate", 3),
        pytest.param("text_model", "accelerate", 3, marks=pytest.mark.all),
        pytest.param("sft", "launch", 2, marks=pytest.mark.all),
        ("dpo", "torchrun", 2),
        pytest.param("kto", "accelerate", 2, marks=pytest.mark.all),
        pytest.param("sft", "torchrun", 3, marks=pytest.mark.all),
    ],
)
def test_an_unmodified_program_has_the_losses_of_ddp(
    folder, with_ddp, program, way, stage
):
    expected = with_ddp(program)
    found = losses(folder, program, way, stage)
    assert len(found) == 3 and found == pytest.approx(expected, rel=0, abs=1e-5)
    assert len(set(found)) == 3
    # The checkpoint is one of this package's engine.
    states = folder / f"{program}-{way}-{stage}" / "checkpoint-3" / "global_step3"
    assert (states / "latest_checkpointed_iteration.txt").is_file()
