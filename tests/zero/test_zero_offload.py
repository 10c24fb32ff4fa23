"""Offloaded state: moved elsewhere, updated a sub-group at a time, with the bits of state that stays."""

import dataclasses

import pytest
import torch

from megatron_ds.zero import optimizer
from megatron_ds.zero.arrays import Array
from megatron_ds.zero.memory_tier import MemoryTier
from megatron_ds.zero.offload_settings import OffloadSettings
from megatron_ds.zero.tiers import Tiers
from tests.harness.engines import BATCH, load_state, save_state, train
from tests.harness.engines import config_of as config_of_job
from tests.harness.engines import on_engines as run
from tests.harness.gradients import contribute
from tests.harness.samples import in_turns
from tests.harness.tiny_jobs import tiny_job

pytestmark = [pytest.mark.threads, pytest.mark.one_in(3)]


def config_of(layout, dtype="fp32", style="gpt2"):
    return config_of_job(tiny_job(style, dtype, False, 0.0, 3, BATCH, 8), layout)


def state_of(engine):
    """{(kind, name): whole shard of this rank, put together from its pieces}."""
    found: dict = {}
    for piece in engine.optimizer.pieces():
        found.setdefault((piece.kind, piece.spec.name), []).append(
            (piece.start, piece.tensor.clone())
        )
    return {
        key: torch.cat([t for _, t in sorted(parts, key=lambda part: part[0])])
        for key, parts in found.items()
    }


def trained(layout, dtype, steps=3):
    return run(
        config_of(layout, dtype),
        lambda engine: (train(engine, range(steps)), state_of(engine)),
    )


def assert_same(left, right):
    for (losses, state), (expected_losses, expected) in zip(left, right, strict=True):
        assert losses == expected_losses
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], expected[key]) for key in state)


class Elsewhere(Array):
    """In this memory, but as far away as that of another device."""

    def is_at(self, device, dtype):
        return False

    def part(self, start, stop):
        return Elsewhere(self.tensor[start:stop])


class FarTier(MemoryTier):
    def arrays(self, sizes, dtype):
        return [Elsewhere(array.tensor) for array in super().arrays(sizes, dtype)]


@pytest.fixture
def far(monkeypatch):
    """Offloads everything to a FarTier, in sub-groups so small that parameters are cut."""

    def open_far(settings, device):
        tier = FarTier(torch.device("cpu"))
        return Tiers(
            *(
                tier if place != "device" else None
                for place in (settings.optimizer, settings.parameters)
            )
        )

    monkeypatch.setattr(optimizer, "open_tiers", open_far)
    from_config = OffloadSettings.from_config
    monkeypatch.setattr(
        OffloadSettings,
        "from_config",
        lambda zero: dataclasses.replace(from_config(zero), sub_group_elements=2048),
    )


LAYOUTS = [
    "dp=1,zero=1",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=3,zero=2,accumulate=full",
    "dp=2,zero=3",
    "dp=4,zero=3,hpz=2",
]


@pytest.mark.parametrize("layout, dtype", in_turns(LAYOUTS, ["fp32", "bf16", "fp16"]))
def test_offloaded_state_has_the_bits_of_state_that_stays(layout, dtype, far):
    layout = layout.replace("dp=3", "dp=2,tp=2")
    assert_same(trained(layout + ",offload=cpu", dtype), trained(layout, dtype))


@pytest.mark.parametrize(
    "what, dtype",
    in_turns(
        [
            "offload_param=cpu",
            "offload=cpu,offload_param=cpu",
            "offload=cpu,offload_param=cpu,pin=1",
            "offload=cpu,offload_param=cpu,prefetch=0",
        ],
        ["fp32", "bf16"],
    ),
)
def test_offloaded_weights_have_the_bits_of_weights_that_stay(what, dtype, far):
    assert_same(
        trained(f"dp=2,pp=2,zero=3,{what}", dtype), trained("dp=2,pp=2,zero=3", dtype)
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_offloaded_weights_of_an_inner_group_come_up_to_date(dtype, far):
    layout = "dp=4,zero=3,hpz=2"
    assert_same(
        trained(f"{layout},offload=cpu,offload_param=cpu", dtype),
        trained(layout, dtype),
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_single_rank_offloads_its_weights_too(dtype, far):
    [(losses, state)] = trained("dp=1,zero=3,offload=cpu,offload_param=cpu", dtype)
    [(expected_losses, expected)] = trained("dp=1,zero=0", dtype)
    # other buckets, hence another order in the norm
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    for kind, name in expected.keys():
        if not name.endswith(
            "linear_qkv.bias"
        ):  # a key's bias has no gradient but rounding
            torch.testing.assert_close(
                state[kind, name], expected[kind, name], rtol=1e-4, atol=1e-6
            )

    def look(engine):
        units = [
            unit
            for s in engine.optimizer.sets
            if s.plan.units
            for unit in s.store.units
        ]
        return units and all(unit.is_free for unit in units)

    assert run(config_of("dp=1,zero=3,offload_param=cpu", dtype), look) == [True]


@pytest.mark.parametrize(
    "layout, dtype",
    in_turns(
        [
            "dp=2,zero=1,offload=nvme",
            "dp=2,zero=3,offload=nvme,offload_param=nvme",
            "dp=2,zero=3,offload=cpu,offload_param=nvme",
            "dp=2,zero=2,offload=nvme,ratio=0.4",
        ],
        ["bf16", "fp32"],
    ),
)
def test_a_disk_gives_the_bits_of_memory(layout, dtype, tmp_path):
    stays = ",".join(
        item for item in layout.split(",") if not item.startswith(("offload", "ratio"))
    )
    assert_same(
        trained(f"{layout},sub_group=2048,nvme={tmp_path}", dtype),
        trained(stays, dtype),
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_a_part_of_the_state_can_stay(ratio, far):
    layout = f"dp=2,zero=1,offload=cpu,ratio={ratio}"
    assert_same(trained(layout, "bf16"), trained("dp=2,zero=1", "bf16"))

    def shares(engine):
        s = engine.optimizer.sets[0]
        away = sum(
            leaf.tensor.numel() for group in s.sub_groups for leaf in group.leaves
        )
        return away / (away + sum(leaf.tensor.numel() for leaf in s.resident))

    for share in run(config_of(layout, "bf16"), shares):
        assert ratio <= share <= ratio + 0.15  # whole pages


# before, after
CONTINUED = [
    ("dp=2,zero=1,offload=nvme", "dp=1,tp=2,zero=0"),
    ("dp=1,tp=2,zero=0", "dp=2,zero=3,offload=nvme,offload_param=nvme"),
    (
        "dp=2,pp=2,zero=3,offload=cpu,offload_param=cpu",
        "dp=4,zero=2,offload=nvme,ratio=0.5",
    ),
]


@pytest.mark.parametrize("layouts, dtype", in_turns(CONTINUED, ["fp32", "bf16"]))
def test_a_run_goes_on_from_offloaded_state_and_to_it(layouts, dtype, tmp_path):
    before, after = layouts
    disk = tmp_path / "disk"
    disk.mkdir()
    full = lambda layout: f"{layout},nvme={disk}" if "nvme" in layout else layout
    [expected, *_] = run(
        config_of(full(before), dtype), lambda engine: train(engine, range(6))
    )

    def first(engine):
        train(engine, range(3))
        return save_state(engine, tmp_path / "run", 3)

    def second(engine):
        load_state(engine, tmp_path / "run", 3, numbers)
        return train(engine, range(3, 6))

    numbers = run(config_of(full(before), dtype), first)[0]
    for losses in run(config_of(full(after), dtype), second):
        assert losses == pytest.approx(
            expected[3:], rel=1e-6 if dtype == "fp32" else 2e-3
        )


def test_state_is_where_it_was_sent(tmp_path):
    layout = f"dp=2,zero=3,persist=0,offload=nvme,offload_param=cpu,nvme={tmp_path}"
    for places, memory in run(
        config_of(layout, "bf16"),
        lambda engine: (engine.optimizer.memory_by_place(), engine.optimizer.memory()),
    ):
        assert places["cpu"] == memory.parameters
        assert places["nvme"] == memory.masters + memory.optimizer
        assert places["device"] == memory.gradients


def test_a_skipped_step_leaves_offloaded_state_alone(far):
    def main(engine):
        train(engine, range(1))
        before = state_of(engine)
        engine.optimizer.begin_step()
        engine.optimizer.arm()
        p = next(
            p
            for p in engine.parameters
            if p.spec.name.endswith("final_layernorm.weight")
        )
        contribute(p, float("inf"))
        result = engine.optimizer.step(1.0, 0.0)
        after = state_of(engine)
        return result.skipped and all(
            torch.equal(before[key], after[key]) for key in before
        )

    assert all(run(config_of("dp=2,zero=1,offload=cpu", "bf16"), main))
