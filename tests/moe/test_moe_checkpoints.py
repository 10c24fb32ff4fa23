"""Checkpoints of models with experts: of any layout for any other, complete, and enough to go on."""

from pathlib import Path

import pytest
import torch

from megatron_ds.checkpoint.index import read_index
from megatron_ds.checkpoint.pieces import key, views, written_here
from megatron_ds.commands import (
    checkpoint_to_safetensors,
    verify_checkpoint,
)
from megatron_ds.compat.deepspeed.zero_to_fp32 import (
    get_fp32_state_dict_from_zero_checkpoint,
)
from megatron_ds.errors import CheckpointError
from megatron_ds.training.run_checkpoint import all_pieces
from tests.compat_engine import test_engine_experts as engine_experts
from tests.harness.pretraining import same_bits, saved_state
from tests.harness.resumed_runs import BATCH, HALF, STEPS, resaved, run
from tests.harness.tiny_jobs import tiny_job

pytestmark = [pytest.mark.threads, pytest.mark.one_in(2)]

# The first layer is dense. Routers remember a bias and the last shares.
REMEMBERING = (
    "--moe-layer-freq [0]*1+[1]*2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type global_aux_loss "
    "--moe-aux-loss-coeff 1e-2 --moe-router-dtype fp64"
).split()
ONE, EP4, MIXED = "dp=1,zero=0", "dp=4,ep=4,zero=1", "tp=2,pp=2,dp=2,ep=2,sp=1,zero=0"
SHARDED = "tp=2,dp=2,ep=2,zero=3"
# Experts whole on each rank, in halves, and over more ranks than dense layers.
WHOLE = "tp=2,sp=1,dp=2,etp=1,ep=4,zero=1"
DIVIDED = "tp=2,sp=1,dp=2,ep=2,zero=0"
BEYOND = "tp=2,sp=1,dp=2,etp=4,zero=3"
KINDS = {"weight", "exp_avg", "exp_avg_sq"}


def job(dtype="fp32", experts=("4",), flags=REMEMBERING):
    return [
        *tiny_job("llama", dtype, True, 0.0, 3, BATCH, STEPS),
        "--num-experts",
        *experts,
        *flags,
    ]


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """Checkpoints after two steps by layout, dtype and experts; each is made once. Tests only read there."""
    made = {}

    def folder(layout, dtype="fp32", experts=("4",), flags=REMEMBERING) -> Path:
        name = (layout, dtype, experts)
        if name not in made:
            made[name] = tmp_path_factory.mktemp("halfway")
            run(job(dtype, experts, flags), layout, made[name], HALF)
        return made[name]

    return folder


@pytest.mark.parametrize(
    "dtype, there, here",
    [
        ("fp32", EP4, ONE),
        ("fp32", EP4, MIXED),
        ("fp32", EP4, SHARDED),
        ("bf16", SHARDED, EP4),
        ("bf16", SHARDED, ONE),
        pytest.param("fp32", WHOLE, DIVIDED, marks=pytest.mark.rest),
        ("fp32", DIVIDED, WHOLE),
        pytest.param("bf16", WHOLE, ONE, marks=pytest.mark.rest),
        pytest.param("bf16", BEYOND, WHOLE, marks=pytest.mark.rest),
    ],
)
def test_what_one_layout_saves_another_loads_bit_for_bit(
    halfway, dtype, there, here, tmp_path
):
    folder = halfway(there, dtype)
    saved = saved_state(folder, HALF)
    assert {name.partition("/")[0] for name in saved} == KINDS
    assert (
        saved["exp_avg/decoder.layers.2.mlp.experts.linear_fc1.weight"]
        .flatten(1)
        .any(1)
        .all()
    )
    for leaf in ("expert_bias", "last_share"):
        assert saved[f"weight/decoder.layers.1.mlp.router.{leaf}"].any(), leaf
    index = read_index(folder / f"iter_{HALF:07d}").state_dict_metadata
    assert {entry.properties.dtype for entry in index.values()} == {torch.float32}
    assert same_bits(resaved(folder, tmp_path, job(dtype), here), saved)


def test_a_pyramid_of_residual_experts_loads_at_other_layouts(halfway, tmp_path):
    flags, experts = (
        ["--moe-layer-freq", "[0]*1+[1]*2", "--mlp-type", "residual"],
        ("2", "4"),
    )
    folder = halfway("tp=2,dp=2,ep=2,zero=1", experts=experts, flags=flags)
    saved = saved_state(folder, HALF)
    assert [
        len(saved[f"weight/decoder.layers.{i}.mlp.experts.linear_fc2.weight"])
        for i in (1, 2)
    ] == [2, 4]
    assert "weight/decoder.layers.1.mlp.coefficient" in saved
    for number, layout in enumerate((ONE, "pp=2,dp=2,ep=2,zero=0")):
        path = tmp_path / str(number)
        path.mkdir()
        assert same_bits(
            resaved(folder, path, job("fp32", experts, flags), layout), saved
        )


def test_each_element_is_written_by_one_rank(tmp_path):
    def written(engine):
        place = engine.mesh.coordinates
        return [
            (key(piece), tuple(piece.spec.shape), view.offset, tuple(view.tensor.shape))
            for piece in written_here(all_pieces(engine), place)
            for view in views(piece, place)
        ]

    _, ranks = run(job(), "tp=2,pp=2,dp=2,ep=2,sp=1,zero=1", tmp_path, 1, visit=written)
    counts: dict[str, torch.Tensor] = {}
    for name, shape, offset, sizes in sum(ranks, []):
        count = counts.setdefault(name, torch.zeros(shape, dtype=torch.int8))
        count[tuple(slice(at, at + n) for at, n in zip(offset, sizes))] += 1
    assert all((count == 1).all() for count in counts.values())
    experts = [
        f"decoder.layers.{i}.mlp.experts.linear_{fc}.weight"
        for i in (1, 2)
        for fc in ("fc1", "fc2")
    ]
    remembered = {
        f"weight/decoder.layers.{i}.mlp.router.{leaf}"
        for i in (1, 2)
        for leaf in ("expert_bias", "last_share")
    }
    assert {
        f"{kind}/{name}" for kind in KINDS for name in experts
    } | remembered <= counts.keys()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """(losses, state) of four steps at EP 4."""
    folder = tmp_path_factory.mktemp("whole")
    return run(job(), EP4, folder, STEPS)[0], saved_state(folder, STEPS)


@pytest.mark.parametrize("layout", [EP4, ONE, MIXED, SHARDED])
def test_a_run_goes_on_as_if_it_had_not_stopped(
    halfway, uninterrupted, layout, tmp_path
):
    losses, state = uninterrupted
    step = f"iter_{HALF:07d}"
    (tmp_path / step).symlink_to(halfway(EP4) / step)
    rest, _ = run(job(), layout, tmp_path, STEPS, begin=HALF)
    now = saved_state(tmp_path, STEPS)
    if layout == EP4:
        assert rest == losses[HALF:] and same_bits(now, state)
        return
    assert rest == pytest.approx(losses[HALF:], rel=1e-6)
    for name, values in now.items():
        # Adam turns rounding noise of a small gradient into a larger fraction of a step of 1e-3.
        torch.testing.assert_close(values, state[name], rtol=1e-3, atol=1e-5)
        if name.endswith("expert_bias"):
            assert torch.equal(values, state[name])


def test_forgotten_bias_and_shares_would_show(
    halfway, uninterrupted, tmp_path, monkeypatch
):
    """The test above compares what it should."""
    from megatron_ds.moe.balance import StepState

    step = f"iter_{HALF:07d}"
    (tmp_path / step).symlink_to(halfway(EP4) / step)
    monkeypatch.setattr(StepState, "pieces", lambda self: [])
    rest, _ = run(job(), ONE, tmp_path, STEPS, begin=HALF)
    assert rest != pytest.approx(uninterrupted[0][HALF:], rel=1e-6)


def test_a_changed_byte_of_one_expert_is_found(halfway, tmp_path):
    """Only that expert's chunk is damaged, and what names it is the load, or the tool that verifies."""
    name, step = (
        "weight/decoder.layers.1.mlp.experts.linear_fc2.weight",
        f"iter_{HALF:07d}",
    )
    source, path = halfway(EP4) / step, tmp_path / step
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    index = read_index(path)
    place = next(
        place
        for at, place in index.storage_data.items()
        if at.fqn == name and at.offset[0] == 2
    )
    content = bytearray((path / place.relative_path).read_bytes())
    content[place.offset + place.length // 2] ^= 1
    (path / place.relative_path).write_bytes(content)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(HALF))
    with pytest.raises(
        CheckpointError, match=f"{place.relative_path} is damaged: {name}"
    ):
        run(job(), ONE, tmp_path, HALF, begin=HALF)
    with pytest.raises(CheckpointError, match=place.relative_path):
        verify_checkpoint.main(
            verify_checkpoint.parse_arguments(["--load", str(tmp_path)])
        )


def test_the_export_has_every_expert_and_what_routers_remember(halfway, tmp_path):
    from safetensors.torch import load_file

    folder = halfway(EP4)
    verify_checkpoint.main(verify_checkpoint.parse_arguments(["--load", str(folder)]))
    arguments = checkpoint_to_safetensors.parse_arguments(
        ["--load", str(folder), "--output", str(tmp_path)]
    )
    assert checkpoint_to_safetensors.main(arguments) == 0
    exported, saved = (
        load_file(tmp_path / "model.safetensors"),
        saved_state(folder, HALF),
    )
    assert exported.keys() == {name.partition("/")[2] for name in saved}
    assert all(
        torch.equal(tensor, saved[f"weight/{name}"])
        for name, tensor in exported.items()
    )
    assert exported["decoder.layers.1.mlp.experts.linear_fc1.weight"].shape[0] == 4
    assert exported["decoder.layers.1.mlp.router.expert_bias"].any()


def test_zero_to_fp32_has_every_expert_of_an_engine(tmp_path):
    def save(engine, rank):
        engine_experts.train(engine, rank, slice(1))
        engine.save_checkpoint(tmp_path)
        return engine.full_state_dict()

    state = engine_experts.on_expert_ranks(save, stage=1)[0]
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert found.keys() == state.keys() and all(
        torch.equal(found[name], state[name]) for name in found
    )
    assert {
        f"experts.{i}.up.weight" for i in range(engine_experts.EXPERTS)
    } <= found.keys()
