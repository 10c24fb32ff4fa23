"""What an engine saves, loads and shows whole: any stage and number of ranks into any other, bit for bit."""

import json
import os
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import megatron_ds
from megatron_ds.commands.checkpoint_to_safetensors import (
    main as checkpoint_to_safetensors,
)
from megatron_ds.commands.checkpoint_to_safetensors import parse_arguments
from megatron_ds.compat.engine import from_safetensors
from megatron_ds.errors import CheckpointError, ConfigError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.checkpoints import rewrite_run
from tests.harness.engine_runs import (
    WIDTH,
    Odd,
    config_of,
    loss_of,
    make,
    on_ranks,
    train,
    weights,
)
from tests.harness.threads import run_ranks

pytestmark = [pytest.mark.threads, pytest.mark.one_in(2, together=True)]

BF16 = {"bf16": {"enabled": True}}


class Counting(Odd):
    """A module with a tied parameter under two names, and buffers: one that counts, one that is not saved."""

    def __init__(self):
        super().__init__()
        self.tied = nn.Embedding(11, WIDTH)
        self.tied.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, tokens):
        self.seen += 1
        return super().forward(tokens)


build = partial(make, Counting)


# ------------------------------------------------------------------------------------------------ checkpoints
@pytest.mark.parametrize(
    "missing", ["progress", "optimizer", "client_state", "engine.elements"]
)
def test_what_the_run_json_of_an_engines_checkpoint_lacks_is_named(missing, tmp_path):
    def main(engine, rank):
        path = engine.save_checkpoint(tmp_path)
        run = json.loads((path / "run.json").read_text())
        section, _, name = missing.partition(".")
        rewrite_run(
            path,
            **{
                section: {
                    key: value for key, value in run[section].items() if key != name
                }
                if name
                else None
            },
        )
        with pytest.raises(CheckpointError, match=f"has no '{missing}'"):
            engine.load_checkpoint(tmp_path)

    on_ranks(1, main, build, config_of(0, 1))


def test_an_engine_does_not_save_into_the_folder_of_a_training_script(tmp_path):
    def main(engine, rank):
        rewrite_run(
            engine.save_checkpoint(tmp_path), engine=None
        )  # as run.json of a script has it
        with pytest.raises(
            CheckpointError, match="holds iteration 0 of a training script"
        ):
            engine.save_checkpoint(tmp_path)
        engine.save_checkpoint(tmp_path, "beside")

    on_ranks(1, main, build, config_of(0, 1))


def test_a_pipe_in_place_of_the_last_tag_is_an_error_and_not_a_wait(tmp_path):
    os.mkfifo(tmp_path / "latest")
    with pytest.raises(CheckpointError, match="latest is not a regular file"):
        on_ranks(
            1,
            lambda engine, rank: engine.load_checkpoint(tmp_path),
            build,
            config_of(0, 1),
        )


@pytest.mark.parametrize(
    "before, after",
    [((0, 1), (3, 2)), ((3, 3), (1, 2)), ((2, 2), (0, 1)), ((1, 2), (3, 3))],
)
@pytest.mark.parametrize("more", [{}, BF16], ids=["fp32", "bf16"])
def test_a_run_saved_at_one_stage_goes_on_at_another(before, after, more, tmp_path):
    def first(engine, rank):
        norms = train(engine, rank, 2)
        engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
        return norms

    def second(engine, rank):
        path, client_state = engine.load_checkpoint(tmp_path)
        assert (
            client_state == {"epoch": 3}
            and path.endswith("iter_0000002")
            and engine.global_steps == 2
        )
        return train(engine, rank, 2, first=2), int(engine.module.seen)

    schedule = {
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5},
        }
    } | more
    [expected] = on_ranks(
        1,
        lambda engine, rank: train(engine, rank, 4),
        build,
        config_of(0, 1, **schedule),
    )
    begun = on_ranks(before[1], first, build, config_of(*before, **schedule))
    for norms, seen in on_ranks(after[1], second, build, config_of(*after, **schedule)):
        # In 16 bits each order of summation rounds differently.
        assert (
            begun[0] + norms == pytest.approx(expected, rel=1e-2 if more else 2e-5)
            and seen == 4
        )


@pytest.mark.parametrize("stage", [0, 3])
def test_the_same_layout_goes_on_with_the_same_bits(stage, tmp_path):
    def first(engine, rank):
        train(engine, rank, 1)
        engine.save_checkpoint(tmp_path)
        return train(engine, rank, 2, first=1), weights(engine)

    def second(engine, rank):
        engine.load_checkpoint(tmp_path)
        return train(engine, rank, 2, first=1), weights(engine)

    results = [
        on_ranks(2, main, build, config_of(stage, 2, **BF16))
        for main in (first, second)
    ]
    for (norms, after), (other_norms, other) in zip(*results):
        assert norms == other_norms and all(
            torch.equal(p, other[name]) for name, p in after.items()
        )


def test_tags_are_folders_and_the_last_one_is_loaded(tmp_path):
    def main(engine, rank):
        for step, tag in enumerate(("first", "best", "best")):
            train(engine, rank, 1, first=step)
            engine.save_checkpoint(tmp_path, tag)
        found = [
            engine.load_checkpoint(tmp_path)[0],
            engine.global_steps,
            engine.load_checkpoint(tmp_path, "first")[0],
            engine.global_steps,
        ]
        with pytest.raises(
            CheckpointError, match="no checkpoint with the tag 'bet' .* best, first"
        ):
            engine.load_checkpoint(tmp_path, "bet")
        with pytest.raises(ConfigError, match="not the name of a folder"):
            engine.save_checkpoint(tmp_path, "a/b")
        engine.save_checkpoint(tmp_path)
        return [
            *found,
            engine.load_checkpoint(tmp_path)[0],
            engine.load_checkpoint(tmp_path / "none"),
        ]

    for found in on_ranks(2, main, build, config_of(1, 2)):
        assert found == [
            f"{tmp_path}/best/iter_0000003",
            3,
            f"{tmp_path}/first/iter_0000001",
            1,
            f"{tmp_path}/iter_0000001",
            (None, None),
        ]
    assert not (tmp_path / "best" / "iter_0000002").exists()


def test_weights_alone_start_afresh(tmp_path):
    def main(engine, rank):
        train(engine, rank, 2)
        engine.save_checkpoint(tmp_path)
        return weights(engine)

    def load(engine, rank):
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        return engine.global_steps, weights(engine)

    saved = on_ranks(1, main, build, config_of(0, 1))[0]
    sgd = config_of(3, 2) | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    for steps, found in on_ranks(2, load, build, sgd):
        assert steps == 0 and all(
            torch.equal(p, saved[name]) for name, p in found.items()
        )
    with pytest.raises(
        CheckpointError, match="state of the optimizer adam, .* sgd cannot use"
    ):
        on_ranks(2, lambda engine, rank: engine.load_checkpoint(tmp_path), build, sgd)
    with pytest.raises(CheckpointError, match="another module: 2.* parameters"):
        on_ranks(
            1,
            lambda engine, rank: engine.load_checkpoint(tmp_path),
            lambda: nn.Linear(2, 2),
            config_of(0, 1),
        )


# ---------------------------------------------------------------------------------------- gathered parameters
@pytest.mark.parametrize("stage, ranks", [(0, 2), (1, 2), (2, 3), (3, 2), (3, 3)])
@pytest.mark.parametrize("more", [{}, BF16], ids=["fp32", "bf16"])
def test_changes_of_one_rank_are_kept_by_all_and_by_the_masters(stage, ranks, more):
    check_changes(ranks, config_of(stage, ranks, **more))


def test_changes_of_quantized_weights_leave_the_other_masters_as_they_are():
    config = config_of(3, 2)
    config["zero_optimization"] |= {
        "zero_quantized_weights": True,
        "stage3_param_persistence_threshold": 0,
    }
    check_changes(2, config, rounding=2e-3)


def check_changes(ranks, config, rounding=0.0):
    def main(engine, rank):
        train(engine, rank, 1)
        before = masters(engine)
        module = engine.module
        with engine.gathered_parameters(
            [module.blocks[0].up.weight, module.scale], modifier_rank=1
        ):
            if rank == 1:
                with torch.no_grad():
                    module.blocks[0].up.weight[3:5] = 0.25
                    module.scale.fill_(2)
        return before, masters(engine), weights(engine)

    def masters(engine):
        return {
            (p.spec.name, p.start): p.tensor.clone()
            for p in engine.optimizer.pieces()
            if p.kind == "weight"
        }

    for before, after, found in on_ranks(ranks, main, build, config):
        assert (found["blocks.0.up.weight"][3:5] - 0.25).abs().max() <= rounding
        assert abs(found["scale"] - 2) <= rounding
        for (name, start), master in after.items():
            old = before[name, start]
            rows = torch.arange(start, start + master.numel()) // WIDTH
            changed = (
                (rows >= 3) & (rows < 5)
                if name == "blocks.0.up.weight"
                else torch.full_like(rows, name == "scale") > 0
            )
            assert torch.equal(master[~changed], old[~changed]), (
                "what was not changed keeps the bits of its master"
            )
            assert (master[changed] == (2 if name == "scale" else 0.25)).all()


def test_inside_values_are_whole_and_outside_they_are_not_there():
    def main(engine, rank):
        head = engine.module.head.weight
        with engine.gathered_parameters(head):
            whole = head.detach().clone()
        assert (
            head.shape == whole.shape
            and head.isnan().all()
            and engine.module.state_dict()["embed.weight"].isnan().all()
        )
        with (
            pytest.raises(ConfigError, match="ranks are 0 to 1"),
            engine.gathered_parameters(head, modifier_rank=2),
        ):
            pass
        return whole

    assert all(
        torch.equal(found, build().head.weight)
        for found in on_ranks(2, main, build, config_of(3, 2))
    )


# ----------------------------------------------------------------------------------------------- whole models
@pytest.mark.parametrize("stage, ranks", [(0, 1), (1, 2), (3, 3)])
@pytest.mark.parametrize("more", [{}, BF16], ids=["fp32", "bf16"])
def test_the_full_state_dict_is_that_of_the_module(stage, ranks, more):
    def main(engine, rank):
        train(engine, rank, 1)
        return (
            engine.full_state_dict(),
            weights(engine),
            engine.full_state_dict(torch.float64),
        )

    results = on_ranks(ranks, main, build, config_of(stage, ranks, **more))
    state, after, wide = results[0]
    other = make(Counting, seed=9)
    other.load_state_dict(state, strict=True)
    assert (
        list(state) == list(other.state_dict())
        and state["seen"] == 1
        and "scratch" not in state
    )
    assert all(
        torch.equal(state[name], p) and state[name].dtype == p.dtype
        for name, p in after.items()
    )
    assert (
        state["tied.weight"] is state["embed.weight"]
        and wide["head.weight"].dtype == torch.float64
    )
    assert all(not found for found, _, _ in results[1:])


@pytest.mark.parametrize("limit", [10**6, 3000])
def test_safetensors_hold_each_tensor_once(limit, tmp_path):
    def main(engine, rank):
        train(engine, rank, 1)
        engine.save_safetensors(tmp_path, max_shard_bytes=limit)
        return engine.full_state_dict()

    state = on_ranks(2, main, build, config_of(3, 2))[0]
    found = {
        name: t
        for path in tmp_path.glob("*.safetensors")
        for name, t in load_file(path).items()
    }
    assert found.keys() == state.keys() - {"tied.weight"} and all(
        torch.equal(t, state[name]) for name, t in found.items()
    )
    assert (tmp_path / "model.safetensors.index.json").exists() == (limit < 10**6)


def test_a_checkpoint_of_an_engine_becomes_safetensors(tmp_path):
    def main(engine, rank):
        train(engine, rank, 1)
        engine.save_checkpoint(tmp_path / "saved", "best")
        return engine.full_state_dict()

    state = on_ranks(2, main, build, config_of(2, 2))[0]
    assert not checkpoint_to_safetensors(
        parse_arguments(
            [
                "--load",
                str(tmp_path / "saved" / "best"),
                "--output",
                str(tmp_path / "out"),
            ]
        )
    )
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == state.keys() - {"tied.weight"} and all(
        torch.equal(t, state[name]) for name, t in found.items()
    )


# ----------------------------------------------------------------------------------------- larger than a rank
@pytest.mark.parametrize("stage, more", [(0, {}), (3, {}), (3, BF16)])
def test_a_module_on_meta_is_filled_in_shards(stage, more, tmp_path):
    def save(engine, rank):
        engine.save_safetensors(tmp_path, max_shard_bytes=2000)
        return weights(engine)

    expected = on_ranks(1, save, build, config_of(0, 1))[0]
    stored = from_safetensors(tmp_path)

    def run(rank, world):
        asked = {}

        def draw(name, start, out):
            asked[name] = asked.get(name, 0) + out.numel()
            stored(name, start, out) if name != "scratch" else out.fill_(1)

        with torch.device("meta"):
            module = Counting()
        mesh = Mesh(Grid.fit(2), rank, world.connect)
        engine, *_ = megatron_ds.initialize(
            model=module, config=config_of(stage, 2, **more), mpu=mesh, draw=draw
        )
        return asked, weights(engine), train(engine, rank, 1)

    sizes = {name: p.numel() for name, p in expected.items()}
    asked = [found for found, _, _ in run_ranks(2, run)]
    for found, values, _ in run_ranks(2, run):
        assert all(
            torch.equal(p, expected[name].to(p.dtype)) for name, p in values.items()
        )
        assert sum(found.get(name, 0) for name in sizes) <= sum(sizes.values()) * (
            0.6 if stage == 3 else 1
        )
    assert stage < 3 or all(
        asked[0].get(name, 0) + asked[1].get(name, 0) == n for name, n in sizes.items()
    )


def test_a_tensor_that_is_missing_is_told_on_all_ranks(tmp_path):
    on_ranks(
        1,
        lambda engine, rank: engine.save_safetensors(tmp_path),
        lambda: nn.Linear(2, 2),
        config_of(0, 1),
    )
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(
        CheckpointError, match=r"no tensor '0\.(weight|bias)'; did you mean"
    ):
        megatron_ds.initialize(
            model=module,
            config=config_of(0, 1),
            mpu=Mesh(Grid(), 0),
            draw=from_safetensors(tmp_path),
        )


@pytest.mark.parametrize(
    "block",
    [
        {"offload_optimizer": {"device": "cpu"}},
        {"offload_param": {"device": "cpu"}},
        {"offload_optimizer": {"device": "nvme"}},
    ],
)
def test_offloading_changes_no_bit(block, tmp_path):
    def main(engine, rank):
        norms = train(engine, rank)
        engine.save_checkpoint(tmp_path / "saved")
        engine.load_checkpoint(tmp_path / "saved")
        return norms, weights(engine), engine.full_state_dict()

    if block.get("offload_optimizer", {}).get("device") == "nvme":
        block["offload_optimizer"]["nvme_path"] = str(tmp_path)
    config = config_of(3, 2, **BF16)
    expected = on_ranks(2, main, make, config)
    config["zero_optimization"] |= block
    for (norms, found, state), (other_norms, other, other_state) in zip(
        on_ranks(2, main, make, config), expected
    ):
        assert norms == other_norms and all(
            torch.equal(p, other[name]) for name, p in found.items()
        )
        assert all(torch.equal(t, other_state[name]) for name, t in state.items())


def test_losses_fall():
    """Not only equal: it learns."""

    def main(engine, rank):
        tokens = torch.arange(22).view(2, 11) % 11
        first = loss_of(engine, tokens).item()
        train(engine, rank, 9)
        return first, loss_of(engine, tokens).item()

    for first, last in on_ranks(2, main, build, config_of(3, 2)):
        assert last < first
