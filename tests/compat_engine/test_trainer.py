"""The Trainer of transformers, by accelerate, on the engine under the name `deepspeed`, with two ranks.

The references are losses of the same program under DeepSpeed (tests/golden/trainer_losses.json, which
tests/harness/huggingface_runs.py makes), and, for adapters, those of one process. In bf16 DeepSpeed's own
stages 2 and 3 are 6e-5 apart, and 8e-5 was found here.
"""

import importlib.util
import json
import os
import subprocess

import pytest
import torch

from tests.harness.documents import blocks_of
from tests.harness.huggingface_runs import CASES, GOLDEN, looped, run, trained
from tests.harness.limits import HUNG
from tests.harness.warm import warm_environment

MISSING = [
    name for name in ("accelerate", "peft") if importlib.util.find_spec(name) is None
]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}"),
]
ADAPTER = "model/adapter_model.safetensors"
OWN = {"json_options": {"own_optimizer": True}}
DIVIDED = {"json_options": {"divided": 2}}
# Beside the cases that DeepSpeed ran: other stages and options of this package.
MORE = {
    "0 plain": trained(stage=0),
    "1 plain": trained(stage=1),
    "3 saved": trained(stage=3, save=True),
    "3 offloaded": trained(stage=3, json_options={"offload": True}),
    "3 recomputed": trained(stage=3, recompute=True),
    "0 frozen": trained(stage=0, freeze=True),
    "3 frozen": trained(stage=3, freeze=True),
    "0 own": trained(stage=0, **OWN),
    "3 own": trained(stage=3, **OWN),
    "2 resumed": trained(stage=2, resume="3 saved/checkpoint-3"),
    "3 lora published": trained(stage=3, lora=True, published=True),
    "2 lora recomputed": trained(stage=2, lora=True, recompute=True),
    "3 lora recomputed": trained(stage=3, lora=True, recompute=True),
    "2 lora resumed": trained(stage=2, lora=True, resume="3 lora/checkpoint-3"),
    "3 lora resumed": trained(stage=3, lora=True, resume="2 lora/checkpoint-3"),
    "2 divided": trained(stage=2, save=True, **DIVIDED),
    "3 divided": trained(stage=3, resume="2 divided/checkpoint-3", **DIVIDED),
    "3 divided shards": trained(stage=3, shards=True, **DIVIDED),
    "2 divided lora": trained(stage=2, lora=True, **DIVIDED),
    "3 divided lora shards": trained(stage=3, lora=True, shards=True, **DIVIDED),
}
DEEPSPEED = json.loads(GOLDEN.read_text())["losses"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def losses(folder) -> dict[str, list[float]]:
    return run("megatron_ds", CASES | MORE, folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Losses of one process with neither package, and the folder of what it saves."""
    place = tmp_path_factory.mktemp("alone")
    return run(
        "none",
        {"lora": trained(lora=True), "loop": looped(accumulation=2, lora=True)},
        place,
    ), place


@pytest.mark.parametrize("name", CASES)
def test_programs_of_the_trainer_and_of_accelerate_have_deepspeeds_losses(losses, name):
    assert losses[name] == pytest.approx(
        DEEPSPEED[name], rel=2e-4 if "bf16" in name else 1e-5
    )
    kinds = {
        tuple(found) for kind, found in DEEPSPEED.items() if kind.startswith(name[0])
    }
    assert len(kinds) == len(CASES) / 2  # none is another one


@pytest.mark.parametrize(
    "name",
    [
        "2 lora",
        "3 lora",
        "2 lora recomputed",
        "3 lora recomputed",
        "2 lora resumed",
        "3 lora resumed",
        "3 lora published",
        "2 divided lora",
        "3 divided lora shards",
    ],
)
def test_adapters_have_the_losses_and_values_of_one_process(
    losses, alone, folder, name
):
    from safetensors.torch import load_file

    expected, place = alone
    assert losses[name] == pytest.approx(expected["lora"], rel=1e-5)
    found, values = (load_file(at / ADAPTER) for at in (folder / name, place / "lora"))
    assert found.keys() == values.keys() and all(
        value.any() for value in values.values()
    )
    for key, value in values.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["2 divided", "3 divided", "3 divided shards"])
def test_a_divided_model_has_the_losses_and_the_saved_values_of_a_whole_one(
    losses, folder, name
):
    from safetensors.torch import load_file

    assert losses[name] == pytest.approx(DEEPSPEED["2 plain"], rel=1e-5)
    found, values = (
        load_file(folder / case / "model/model.safetensors")
        for case in (name, "0 plain")
    )
    assert found.keys() == values.keys()
    for key, value in values.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["2 loop lora", "3 loop lora"])
def test_a_loop_of_accelerate_has_the_losses_of_one_process(losses, alone, name):
    assert losses[name] == pytest.approx(alone[0]["loop"], rel=1e-5)


@pytest.mark.parametrize(
    "name",
    ["0 plain", "1 plain", "3 saved", "3 offloaded", "3 recomputed", "2 resumed"],
)
def test_losses_are_the_same_at_every_stage_and_after_resuming_at_another(losses, name):
    assert losses[name] == pytest.approx(DEEPSPEED["2 plain"], rel=1e-5)


@pytest.mark.parametrize("kind", ["frozen", "own"])
def test_stages_agree_with_frozen_parameters_and_own_optimizers(losses, kind):
    assert losses[f"3 {kind}"] == pytest.approx(losses[f"0 {kind}"], rel=1e-5)
    assert losses[f"3 {kind}"][-1] < losses[f"3 {kind}"][0]
    assert losses[f"3 {kind}"] != pytest.approx(losses["3 plain"], rel=1e-6)


def test_the_program_of_the_page_trains_and_resumes(tmp_path):
    program = next(
        b for b in blocks_of("docs/use/engine.md") if b.mark == "file: trainer.py"
    )
    (tmp_path / "trainer.py").write_text(program.text)
    environment = warm_environment(
        {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    )
    for more in ([], ["out/checkpoint-3"]):
        done = subprocess.run(
            ["torchrun", "--nproc-per-node", "2", "trainer.py", "out", *more],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            timeout=HUNG,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out/checkpoint-6/global_step6").is_dir()
