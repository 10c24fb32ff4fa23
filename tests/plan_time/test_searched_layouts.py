"""What a search finds and leaves out is what plans of the same command lines find: with experts and long sequences."""

import json
from dataclasses import replace

import pytest

from megatron_ds.config import parse
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.extensions.plan_time.cluster import read_cluster
from megatron_ds.extensions.plan_time.layer_record import RecordCache
from megatron_ds.extensions.plan_time.layouts import is_accepted
from megatron_ds.extensions.plan_time.recorded_work import WorkRecorder
from megatron_ds.extensions.plan_time.search import Search
from megatron_ds.extensions.plan_time.search_layouts import main
from megatron_ds.extensions.plan_time.step_time import step_time

pytestmark = [pytest.mark.plan, pytest.mark.rest]

RANKS = 2
# Long enough for two context-parallel ranks.
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8192 --global-batch-size 2 "
    "--vocab-size 512 --attention-dropout 0 --hidden-dropout 0 --bf16 --mock-data --lr 1e-4 --train-iters 10 "
    "--num-experts 2 --moe-router-topk 2"
)
CLUSTER = read_cluster("a100-80g")


def with_memory(nbytes: float):
    """Return the cluster, whose devices have other memory."""
    return replace(CLUSTER, device=replace(CLUSTER.device, memory=nbytes))


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    config = parse(f"{MODEL} --micro-batch-size 1 --dry-run".split(), world_size=RANKS)
    cache = RecordCache(tmp_path_factory.mktemp("records"))
    return Search(config, RANKS, CLUSTER, cache=cache)


@pytest.fixture(scope="module")
def tried(search):
    return search.tried()


def planned(words: str):
    """Return the plan of a command line."""
    config = parse(f"{MODEL} {words} --dry-run".split(), world_size=RANKS)
    return plan_world(config, 0, "cuda", WorkRecorder)


def test_experts_and_long_sequences_are_divided(tried):
    accepted = [one.layout for one in tried if is_accepted(one.config)]
    assert {one.cp for one in accepted} == {1, 2}
    assert {one.ep for one in accepted} == {1, 2}
    assert any(one.etp < one.tp for one in accepted)


def test_layouts_shown_have_memory_and_seconds_of_the_plans_of_their_flags(
    search, tried
):
    # A few of each kind, beside the fastest.
    kinds = ("cp", "ep", "etp", "pp")
    some = {getattr(one.layout, kind): one for kind in kinds for one in tried}
    chosen = [one for one in dict.fromkeys(some.values()) if is_accepted(one.config)]
    found = search.best([*tried[:2], *chosen], top=6)
    assert len(found) > 3
    for one in found:
        plan = planned(one.layout.flags(search.config.model.num_layers))
        assert one.peak == plan.worst.peak, one.layout
        assert one.seconds == step_time(plan, CLUSTER).seconds, one.layout


def test_layouts_left_out_for_their_memory_do_not_fit(search, tried):
    accepted = [one for one in tried if is_accepted(one.config)]
    peaks = sorted(one.estimate.peak for one in accepted)
    small = replace(search, cluster=with_memory(peaks[len(peaks) // 2]))
    left_out = [one for one in accepted if not small.may_fit(one)]
    assert len(left_out) > 10
    # Those nearest to the memory are the first that a wrong estimate would leave out.
    nearest = sorted(left_out, key=lambda one: one.estimate.peak)
    for one in [*nearest[:4], *nearest[:: len(nearest) // 4]]:
        plan = planned(one.layout.flags(search.config.model.num_layers))
        assert plan.worst.peak > small.cluster.device.memory, one.layout


def test_layouts_are_planned_until_enough_fit(search, tried):
    """Gathered layers of ZeRO stage 3 are in no estimate, so some of the fastest need more than estimated."""
    accepted = [one for one in tried if is_accepted(one.config)]
    [least] = sorted(accepted, key=lambda one: one.estimate.peak)[:1]
    narrow = replace(search, cluster=with_memory(least.estimate.peak * 1.06))
    assert least.layout.zero == 3 and narrow.may_fit(least)
    others = [one for one in accepted if one is not least and narrow.may_fit(one)]
    [found, *_] = narrow.best([least, *others], top=1)
    assert found.layout != least.layout and found.fits


def test_the_command_line_shown_has_the_seconds_shown(tmp_path, monkeypatch, capfd):
    from megatron_ds.training.pretrain import pretrain

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = f"--gpus 2 --cluster a100-80g --top 1 {MODEL}"
    assert main(asked.split()) == 0
    *_, row, _, flags = capfd.readouterr().out.splitlines()
    file = tmp_path / "plan.json"
    plan = f"{MODEL} {flags} --dry-run --world-size 2 --plan-time --cluster a100-80g --plan-json {file}"
    assert pretrain(plan.split()) == 0
    values = json.loads(file.read_text())
    *_, seconds, _, peak = row.split()
    assert seconds == f"{values['seconds']:.3f}"
    assert peak == f"{values['peak_bytes'] / 1e9:.1f}"
