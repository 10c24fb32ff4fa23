"""Latent attention and further predictions in checkpoints that megatron-core wrote, and in ours that it reads."""

import pytest
import torch

from megatron_ds.compat.conversion.files.stored_tensor import WEIGHT
from megatron_ds.compat.conversion.formats import Wishes, detected
from megatron_ds.compat.conversion.logits_proof import our_outputs
from megatron_ds.compat.conversion.megatron import torch_dist_format
from tests.compat_checkpoints.test_megatron_checkpoints import (
    OPTIONS,
    keys_of,
    logical_experts,
    same,
)
from tests.harness import megatron_core
from tests.harness.megatron_core import (
    DEEPSEEK,
    DEPTHS,
    LATENT,
    ROWS,
    STEPS,
    MegatronCore,
    logical_weights,
    mean_loss,
    pipeline_weights,
)
from tests.harness.next_step import difference, next_step

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        bool(megatron_core.skip_reason()), reason=megatron_core.skip_reason()
    ),
]
ALL_ROWS = Wishes(vocab_size=ROWS)
FORMATS = ("torch", "torch_dist")


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    server = MegatronCore(tmp_path_factory.mktemp("megatron_latents"))
    yield server
    server.close()


def saved_by(core, name, model, sharding=None, **layout):
    """(checkpoint in each format, what each rank has after one more step)"""
    folder = core.folder / name
    saves = [[kind, str(folder / kind), sharding] for kind in FORMATS]
    ranks = core.run(name, model, saves=saves, **layout)
    found = [detected(folder / kind).read(folder / kind, ALL_ROWS) for kind in FORMATS]
    return found, ranks


def trained_on(core, found, layout):
    trace, weights = next_step(found, core.batches[STEPS], layout, **OPTIONS)
    return trace.losses[0], weights


def near(found, expected) -> bool:
    assert expected.abs().max() > 0.3
    return (found - expected).abs().max() <= 1e-5


@pytest.fixture(scope="module", params=[12, None], ids=["latent queries", "plain"])
def latent(request, core):
    """Two tensor-parallel ranks, whose layers divide the projections to the latents as well."""
    model = {**LATENT, "q_lora_rank": request.param}
    return model, *saved_by(core, f"latent {request.param}", model, tp=2)


def test_weights_and_logits_of_latents_are_those_of_megatron_core(core, latent):
    model, found, ranks = latent
    assert same(*found)
    options = found[0].model
    assert options["multi_latent_attention"] and options["rotary_interleaved"]
    stored = {name: t.read() for name, t in found[0].tensors[WEIGHT].items()}
    theirs = [{"weights": rank["saved"]} for rank in ranks]
    for name, value in logical_weights(theirs, model).items():
        assert torch.equal(stored.pop(name), value), name
    assert not stored
    logits = torch.cat([rank["logits"][0] for rank in ranks], -1)
    [ours] = our_outputs(found[0], core.batches[STEPS][:, :-1])
    assert near(ours, logits)


def test_a_model_with_latents_of_ours_is_read_by_megatron_core(core, latent, tmp_path):
    model, found, ranks = latent
    [_, stored] = found
    torch_dist_format.write(stored, tmp_path / "ours", Wishes())
    again = detected(tmp_path / "ours").read(tmp_path / "ours", Wishes())
    assert same(stored, again) and again.model == stored.model
    theirs = core.folder / f"latent {model['q_lora_rank']}/torch_dist"
    assert keys_of(theirs) <= keys_of(tmp_path / "ours")
    after = core.run(
        f"back {model['q_lora_rank']}",
        model,
        distributed=True,
        steps=0,
        first_batch=STEPS,
        load=[str(tmp_path / "ours"), "fully_reshardable"],
    )
    logits = torch.cat([rank["logits"][0] for rank in ranks], -1)
    assert near(torch.cat([rank["logits"][0] for rank in after]), logits)
    for name, value in after[0]["saved"].items():
        assert torch.equal(stored.tensors[WEIGHT][name].read(), value), name


@pytest.mark.parametrize("sharding", [None, "dp_reshardable", "fully_reshardable"])
def test_the_next_step_with_latents_experts_and_a_depth_is_that_of_megatron_core(
    sharding, core
):
    name = f"deepseek {sharding}"
    found, ranks = saved_by(
        core, name, DEEPSEEK, sharding, distributed=sharding is not None
    )
    assert same(*found)
    layout = {None: "tp=2,sp=1", "dp_reshardable": "pp=2"}.get(sharding, "dp=2,ep=2")
    loss, weights = trained_on(core, found[1], layout)
    theirs = logical_experts(ranks[:1])
    assert "mtp.layers.0.eh_proj.weight" in theirs
    assert abs(loss - mean_loss(ranks)) < 1e-5
    assert difference({n: weights[n] for n in theirs}, theirs) < 1e-5
    before = found[1].tensors[WEIGHT]
    moved = {name: (before[name].read() - w).abs().max() for name, w in theirs.items()}
    assert all(change > 1e-4 for change in moved.values()), "a weight is not trained"


@pytest.fixture(scope="module")
def depths(core):
    """Two pipeline stages, of which the second has a copy of the embedding."""
    return saved_by(core, "depths", DEPTHS, pp=2)


def test_depths_behind_pipeline_stages_are_merged_and_train_on(core, depths):
    found, ranks = depths
    assert same(*found)
    saved = pipeline_weights(ranks, "saved")
    for name, value in saved.items():
        assert torch.equal(found[0].tensors[WEIGHT][name].read(), value), name
    loss, weights = trained_on(core, found[1], "tp=2,sp=1")
    assert abs(loss - mean_loss(ranks)) < 1e-5
    assert difference(weights, pipeline_weights(ranks)) < 1e-5


def test_a_model_with_depths_of_ours_trains_on_in_megatron_core(core, depths, tmp_path):
    found, ranks = depths
    torch_dist_format.write(found[1], tmp_path / "ours", Wishes())
    again = detected(tmp_path / "ours").read(tmp_path / "ours", Wishes())
    assert same(found[1], again) and again.model == found[1].model
    after = core.run(
        "depths back",
        DEPTHS,
        distributed=True,
        steps=0,
        first_batch=STEPS,
        load=[str(tmp_path / "ours"), "fully_reshardable"],
    )
    assert abs(mean_loss(after) - mean_loss(ranks)) < 1e-5
    theirs = logical_weights(after[:1], DEPTHS)
    assert difference(theirs, pipeline_weights(ranks)) < 1e-5
