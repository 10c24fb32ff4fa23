"""The search finds what plans of all layouts find, and reads its records again."""

from dataclasses import asdict, replace

import pytest

from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.extensions.plan_time import search as searching
from megatron_ds.extensions.plan_time.cluster import read_cluster
from megatron_ds.extensions.plan_time.layer_record import RecordCache, key_of
from megatron_ds.extensions.plan_time.layouts import (
    SOURCE,
    is_accepted,
    layouts,
    with_layout,
)
from megatron_ds.extensions.plan_time.recorded_work import WorkRecorder
from megatron_ds.extensions.plan_time.search import Search
from megatron_ds.extensions.plan_time.search_layouts import main
from megatron_ds.extensions.plan_time.step_time import step_time

pytestmark = pytest.mark.plan

MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --global-batch-size 4 "
    "--vocab-size 512 --attention-dropout 0 --bf16 --mock-data --lr 1e-4 --train-iters 10"
)
RANKS = 2


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    config = parse(f"{MODEL} --micro-batch-size 1 --dry-run".split(), world_size=RANKS)
    cache = RecordCache(tmp_path_factory.mktemp("records"))
    return Search(config, RANKS, read_cluster("a100-80g"), cache=cache)


@pytest.fixture(scope="module")
def tried(search):
    return search.tried()


def test_estimates_are_near_the_plans_of_the_same_layouts(search, tried):
    accepted = [one for one in tried if is_accepted(one.config)]
    assert len(accepted) > 20
    for one in accepted[:: len(accepted) // 6]:
        plan = plan_world(one.config, 0, "cuda", WorkRecorder)
        seconds = step_time(plan, search.cluster).seconds
        assert one.estimate.seconds == pytest.approx(seconds, rel=0.25), one.layout


def test_the_first_is_the_fastest_of_the_plans_shown(search, tried):
    found = search.best(tried, 4)
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    assert all(one.fits for one in found)
    plan = plan_world(
        with_layout(search.config, found[0].layout, RANKS), 0, "cuda", WorkRecorder
    )
    assert step_time(plan, search.cluster).seconds == found[0].seconds


def test_experts_are_tried_whole_and_divided_as_dense_layers_are():
    flags = "--num-experts 8 --micro-batch-size 1 --dry-run --sequence-parallel"
    config = parse(f"{MODEL} {flags}".split(), world_size=4)
    found = list(layouts(config, 4, 4))
    assert {(one.tp, one.etp) for one in found} == {
        (1, 1),
        (2, 1),
        (2, 2),
        (4, 1),
        (4, 4),
    }
    whole = next(one for one in found if (one.tp, one.etp, one.ep) == (4, 1, 4))
    assert "--expert-tensor-parallel-size 1" in whole.flags(4)
    assert is_accepted(with_layout(config, whole, 4))
    dense = parse(f"{MODEL} --micro-batch-size 1 --dry-run".split(), world_size=4)
    assert all(one.etp == one.tp for one in layouts(dense, 4, 4))


def test_a_second_search_records_no_layer(search, tried, monkeypatch):
    def refused(*_):
        raise AssertionError("the records are in the cache")

    monkeypatch.setattr(searching, "record_layers", refused)
    again = search.tried()
    assert [(one.layout, one.estimate) for one in again] == [
        (one.layout, one.estimate) for one in tried
    ]


def test_the_command_prints_flags_that_train_here(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    picture = tmp_path / "layouts.png"
    code = main(
        [
            *f"--gpus {RANKS} --cluster h100 --top 2 --picture {picture}".split(),
            *MODEL.split(),
        ]
    )
    text = capsys.readouterr().out
    assert code == 0 and "NVIDIA H100" in text
    flags = text.splitlines()[-1].split()
    assert "--micro-batch-size" in flags
    parse([*MODEL.split(), *flags], world_size=RANKS)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_recipe_is_searched_as_its_flags_are(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = tmp_path / "train.sh"
    recipe.write_text(
        f"torchrun --nproc_per_node 2 pretrain_gpt.py {MODEL} --micro-batch-size 1\n"
    )
    asked = f"--gpus {RANKS} --cluster h100 --top 2".split()
    main([str(recipe), *asked])
    of_recipe = capsys.readouterr().out
    main([*asked, *MODEL.split()])
    assert capsys.readouterr().out == of_recipe


def test_a_recipe_beside_flags_is_refused():
    with pytest.raises(ConfigError, match="give one of them"):
        main(["train.sh", "--gpus", "2", "--cluster", "h100", "--num-layers", "4"])


def test_what_was_found_is_named_by_all_that_changes_it(search):
    """Options of features, too: a record of a model with adapters is none of the model without."""
    config = search.config
    key = key_of(config, "cuda")
    assert key == key_of(
        config.with_values({"logging.log_interval": 7}, SOURCE), "cuda"
    )
    for path, value in {
        "adapters.lora_rank": 4,
        "model.hidden_size": 64,
        "zero.stage": 3,
        "data.pack_documents": True,
    }.items():
        assert key != key_of(config.with_values({path: value}, SOURCE), "cuda"), path
    assert key != key_of(config, "cpu")


def test_a_second_search_plans_nothing_anew(search, tried, monkeypatch):
    first = search.best(tried, 2)

    def refused(*_):
        raise AssertionError("the plans are in the cache")

    monkeypatch.setattr(searching, "plan_world", refused)
    assert search.best(tried, 2) == first
    # Other devices have other seconds.
    with pytest.raises(AssertionError, match="in the cache"):
        replace(search, cluster=read_cluster("h100")).best(tried, 1)


@pytest.mark.parametrize("values", [None, 7, [1.0, 2], [1.0, "x", 0.1], {"a": 1}])
def test_a_file_of_the_cache_that_is_no_plan_is_planned_anew(
    search, tried, values, tmp_path
):
    cache = RecordCache(tmp_path)
    [one] = [one for one in tried if is_accepted(one.config)][:1]
    cache.write(key_of(one.config, "cuda", asdict(search.cluster)), values)
    [found] = replace(search, cache=cache).best([one], 1)
    [known] = search.best([one], 1)
    assert found == known
