import itertools
import json
import pickle
import random
from collections import Counter
from enum import Enum

import pytest
import torch

from megatron_ds.checkpoint.index import read_index
from megatron_ds.checkpoint.load import (
    check_same_model,
    latest,
    load,
    read_run,
)
from megatron_ds.checkpoint.pieces import key, written_here
from megatron_ds.checkpoint.save import save
from megatron_ds.errors import CheckpointError
from megatron_ds.mpu.group import solo
from tests.harness.checkpoints import make_format_1, reseal, reseal_chunks
from tests.harness.pretraining import same_bits, saved_state
from tests.harness.resumed_runs import BATCH, HALF, STEPS, resaved, run
from tests.harness.states import (
    KINDS,
    Layout,
    logical_tensor,
    model_specs,
    pieces_of,
    shard,
    tp_coordinates,
    world_group,
)
from tests.harness.stored_weights import load_weights
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import TOLERANCE, tiny_job

pytestmark = [pytest.mark.threads, pytest.mark.one_in(3)]

LAYOUTS = [
    Layout(),
    Layout(dp=3),
    Layout(dp=3, stage=1),
    Layout(tp=2, dp=2, stage=1, padded=14),
    Layout(tp=3, cuts=(7,), stage=1),
    Layout(tp=4, cuts=(1,)),
    Layout(cuts=(1, 9, 13), dp=2, stage=1, padded=16),
    Layout(tp=2, cuts=(5, 6), dp=1),
]


def save_state(directory, layout, seed, step=5, **options):
    def rank_saves(rank, world):
        save(
            directory,
            step,
            pieces_of(layout, rank, seed),
            coordinates=tp_coordinates(layout, rank),
            world=world_group(layout, rank, world),
            run={"seed": seed},
            **options,
        )

    run_ranks(layout.world_size, rank_saves)


def load_state(directory, layout, step=5, **options):
    def rank_loads(rank, world):
        pieces = pieces_of(layout, rank, seed=None)
        load(
            directory,
            step,
            pieces,
            coordinates=tp_coordinates(layout, rank),
            world=world_group(layout, rank, world),
            **options,
        )
        return pieces

    return run_ranks(layout.world_size, rank_loads)


@pytest.mark.parametrize("there", LAYOUTS, ids=str)
def test_what_one_layout_saves_every_other_loads_bit_for_bit(there, tmp_path):
    save_state(tmp_path, there, seed=3)
    for here in LAYOUTS:
        for rank, pieces in enumerate(load_state(tmp_path, here)):
            for piece, right in zip(pieces, pieces_of(here, rank, seed=3), strict=True):
                assert torch.equal(piece.tensor, right.tensor), (
                    f"{key(piece)} on rank {rank} of {here}"
                )


@pytest.mark.parametrize(
    "there, here",
    [
        ("zero=1", "cp=4,zero=1"),
        ("cp=4,comm_type=a2a,zero=1", "zero=0"),
        ("cp=2,zero=2", "cp=2,zero=2"),
        ("cp=2,dp=2,zero=3", "cp=2,zero=3"),
    ],
)
def test_ranks_that_share_sequences_load_each_others_state_and_go_on_as_if_nothing_had_stopped(
    there, here, tmp_path
):
    """Sequences of another number of ranks; the loss of the last step depends on loaded moments."""
    job = tiny_job("llama", "fp32", True, 0.1, 2, BATCH, STEPS)
    folders = whole, half, again = [
        tmp_path / name for name in ("whole", "half", "again")
    ]
    for folder in folders:
        folder.mkdir()
    losses, _ = run(job, there, whole, STEPS)
    run(job, there, half, HALF)
    assert same_bits(resaved(half, again, job, here), saved_state(half, HALF))
    rest, _ = run(job, here, half, STEPS, begin=HALF)
    if there == here:
        assert rest == losses[HALF:] and same_bits(
            saved_state(half, STEPS), saved_state(whole, STEPS)
        )
    # sums over the tokens of a sequence have another order
    assert rest == pytest.approx(losses[HALF:], rel=TOLERANCE["fp32"].loss)


@pytest.mark.parametrize("format_1", [False, True])
def test_ranks_that_see_different_saves_under_one_name_load_neither(format_1, tmp_path):
    layout, places = Layout(dp=2, stage=1), [tmp_path / "here", tmp_path / "there"]
    for seed, place in enumerate(places):
        save_state(place, layout, seed=seed)
        if format_1:
            make_format_1(place / "iter_0000005")

    def rank_loads(rank, world):
        pieces = pieces_of(layout, rank, seed=7)
        with pytest.raises(
            CheckpointError,
            match=r"rank\(s\) 1 of 2 see another save under this name than rank 0",
        ):
            load(
                places[rank],
                5,
                pieces,
                coordinates=tp_coordinates(layout, rank),
                world=world_group(layout, rank, world),
            )
        assert all(
            torch.equal(p.tensor, q.tensor)
            for p, q in zip(pieces, pieces_of(layout, rank, seed=7), strict=True)
        )

    run_ranks(2, rank_loads)


@pytest.mark.parametrize("seed", range(6))
def test_random_layouts_load_each_other(seed, tmp_path):
    draw = random.Random(seed)

    def any_layout():
        cuts = tuple(sorted(draw.sample(range(1, 15), draw.randint(0, 2))))
        return Layout(
            draw.choice([1, 2, 3]),
            cuts,
            draw.randint(1, 3),
            draw.randint(0, 1),
            draw.choice([18, 24, 30]),
        )

    there, here = any_layout(), any_layout()
    save_state(tmp_path, there, seed)
    for rank, pieces in enumerate(load_state(tmp_path, here)):
        for piece, right in zip(pieces, pieces_of(here, rank, seed), strict=True):
            assert torch.equal(piece.tensor, right.tensor), (
                f"{key(piece)}: {there} to rank {rank} of {here}"
            )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_element_is_written_once_however_many_ranks_hold_it(layout):
    counts = Counter()
    for rank in range(layout.world_size):
        for piece in written_here(
            pieces_of(layout, rank, seed=0), tp_coordinates(layout, rank)
        ):
            assert not piece.spec.tied_copy
            own = shard(
                torch.ones(piece.spec.shape), piece.spec, rank % layout.tp, layout.tp
            ).reshape(-1)
            counts[key(piece)] += int(own[piece.start : piece.stop].sum())
    expected = {
        f"{kind}/{spec.name}": spec.numel
        for spec in model_specs(layout.padded)
        if not spec.tied_copy
        for kind in KINDS
    }
    assert counts == expected


def test_the_writing_of_replicated_tensors_is_spread_over_the_ranks_that_hold_them():
    layout = Layout(tp=2, dp=2)
    shares = [
        sum(
            p.tensor.numel()
            for p in written_here(
                pieces_of(layout, rank, 0), tp_coordinates(layout, rank)
            )
        )
        for rank in range(4)
    ]
    assert max(shares) < 0.5 * sum(shares) and min(shares) > 0


def test_the_files_are_what_torchs_own_tool_reads(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    save_state(tmp_path, Layout(tp=2, cuts=(7,), dp=2, stage=1), seed=1)
    dcp_to_torch_save(tmp_path / "iter_0000005", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    for spec, kind in itertools.product(model_specs()[:-1], KINDS):
        assert torch.equal(
            whole[f"{kind}/{spec.name}"], logical_tensor(kind, spec, seed=1)
        )


def test_kinds_limits_what_is_filled_and_what_must_be_there(tmp_path):
    weights = [p for p in pieces_of(Layout(), 0, seed=2) if p.kind == "weight"]
    save(tmp_path, 5, weights, coordinates={}, world=solo(), run={})
    [pieces] = load_state(tmp_path, Layout(), kinds=("weight",))
    for piece, right in zip(pieces, pieces_of(Layout(), 0, seed=2)):
        assert (
            torch.equal(piece.tensor, right.tensor)
            if piece.kind == "weight"
            else piece.tensor.isnan().all()
        )
    with pytest.raises(CheckpointError, match="exp_avg/.* is missing.*--no-load-optim"):
        load_state(tmp_path, Layout())


@pytest.mark.parametrize("tp", [1, 3])
def test_weights_alone_load_into_a_bf16_model_with_zero_padding(tp, tmp_path):
    save_state(tmp_path, Layout(dp=2, stage=1, padded=14), seed=4)

    def rank_loads(rank, world):
        specs, parameters = model_specs(padded=24), []
        for spec in specs:
            parameters.append(
                torch.nn.Parameter(
                    torch.full(spec.local_shape({"tp": tp}), 9.0, dtype=torch.bfloat16)
                )
            )
            parameters[-1].spec = spec
        load_weights(tmp_path, 5, parameters, world.group("tp", range(tp), rank))
        for spec, parameter in zip(specs, parameters):
            right = shard(logical_tensor("weight", spec, seed=4), spec, rank, tp)
            assert torch.equal(parameter.detach(), right.to(torch.bfloat16)), spec.name

    run_ranks(tp, rank_loads)


def test_every_tensor_that_does_not_fit_is_listed_on_every_rank_and_nothing_is_filled(
    tmp_path,
):
    save_state(tmp_path, Layout(), seed=0)
    layout = Layout(tp=2, cuts=(10,))

    def rank_loads(rank, world):
        pieces = pieces_of(layout, rank, seed=None, num_layers=4, hidden=8)
        with pytest.raises(CheckpointError) as caught:
            load(
                tmp_path,
                5,
                pieces,
                coordinates=tp_coordinates(layout, rank),
                world=world_group(layout, rank, world),
            )
        assert all(piece.tensor.isnan().all() for piece in pieces)
        return str(caught.value)

    messages = run_ranks(4, rank_loads)
    assert len(set(messages)) == 1
    assert "weight/decoder.layers.2.mlp.linear_fc1.weight is missing" in messages[0]
    assert (
        "weight/embedding.word_embeddings.weight has shape [13, 6] there and [13, 8] here"
        in messages[0]
    )


def test_another_dtype_is_refused_where_bits_must_not_change(tmp_path):
    save_state(tmp_path, Layout(), seed=0)
    [piece, *_] = pieces_of(Layout(), 0, seed=None)
    piece.tensor = piece.tensor.to(torch.bfloat16)
    with pytest.raises(
        CheckpointError, match="torch.float32 there and torch.bfloat16 here"
    ):
        load(tmp_path, 5, [piece], coordinates={}, world=solo())


def test_a_hole_in_the_state_is_found_before_the_checkpoint_is_published(tmp_path):
    pieces = pieces_of(Layout(), 0, seed=0)
    pieces[3].stop -= 1
    pieces[3].tensor = pieces[3].tensor[:-1]
    with pytest.raises(CheckpointError, match=r"linear_proj.weight has 71 of 72"):
        save(tmp_path, 5, pieces, coordinates={}, world=solo(), run={})
    assert list(tmp_path.iterdir()) == []


def test_one_rank_that_cannot_write_fails_the_save_everywhere_and_the_previous_checkpoint_stays(
    tmp_path, monkeypatch
):
    from megatron_ds.checkpoint import storage

    layout = Layout(tp=2, dp=2)
    save_state(tmp_path, layout, seed=1, step=5)
    write = storage.write_pieces

    def full_disk(path, pieces, tp, rank, pace):
        if rank == 2:
            raise OSError(28, "No space left on device")
        return write(path, pieces, tp, rank, pace)

    monkeypatch.setattr(storage, "write_pieces", full_disk)

    def rank_saves(rank, world):
        with pytest.raises(
            CheckpointError, match="iteration 6 .* rank 2: .*No space left"
        ):
            save(
                tmp_path,
                6,
                pieces_of(layout, rank, 2),
                coordinates=tp_coordinates(layout, rank),
                world=world_group(layout, rank, world),
                run={},
            )

    run_ranks(4, rank_saves)
    assert latest(tmp_path) == 5 and read_run(tmp_path, 5)["seed"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "iter_0000005",
        "latest_checkpointed_iteration.txt",
    ]


def test_run_json_keeps_what_it_was_given_and_says_what_wrote_it(tmp_path):
    run = {
        "progress": {"step": 5, "samples": 40},
        "loss_scale": 65536.0,
        "lr": 0.1 + 0.2,
        "config": {"data_path": ["a", "b"]},
    }
    save(tmp_path, 5, pieces_of(Layout(), 0, 0), coordinates={}, world=solo(), run=run)
    kept = read_run(tmp_path, 5)
    assert {name: kept[name] for name in run} == run
    assert kept["step"] == 5 and kept["versions"]["torch"] == torch.__version__
    assert json.loads((tmp_path / "iter_0000005" / "run.json").read_text()) == kept


def test_a_checkpoint_of_a_later_format_is_refused(tmp_path):
    save_state(tmp_path, Layout(), seed=0)
    (tmp_path / "iter_0000005" / "run.json").write_text('{"format_version": 99}')
    with pytest.raises(CheckpointError, match="format 99"):
        read_run(tmp_path, 5)


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('the checkpoint was executed')",)


@pytest.mark.parametrize("place", ["index", "data"])
def test_a_checkpoint_that_carries_code_is_refused_and_not_executed(place, tmp_path):
    save_state(tmp_path, Layout(), seed=0)
    path = tmp_path / "iter_0000005"
    if place == "index":
        (path / ".metadata").write_bytes(pickle.dumps(Bomb()))
        reseal(path)
    else:
        with open(path / "__0_0.distcp", "r+b") as file:
            size = (path / "__0_0.distcp").stat().st_size
            torch.save(Bomb(), file)
            file.truncate(size)
        reseal_chunks(path)
    with pytest.raises(CheckpointError, match="exec|damaged"):
        load_state(tmp_path, Layout())


class OldPickler(pickle.Pickler):
    """Members of enumerations as Python up to 3.11.3 pickles them: getattr(class, name)."""

    def reducer_override(self, thing):
        return (
            (getattr, (type(thing), thing.name))
            if isinstance(thing, Enum)
            else NotImplemented
        )


def test_an_index_pickled_by_an_older_python_is_read_and_getattr_gives_nothing_else(
    tmp_path,
):
    save_state(tmp_path, Layout(), seed=0)
    path = tmp_path / "iter_0000005"
    index = read_index(path)
    with open(path / ".metadata", "wb") as file:
        OldPickler(file).dump(index)
    reseal(path)
    assert b"getattr" in (path / ".metadata").read_bytes() and read_index(path) == index
    for thing in (torch.Size, torch.serialization._get_layout):

        class Reach:
            def __reduce__(self, thing=thing):
                return getattr, (thing, "__doc__")

        (path / ".metadata").write_bytes(pickle.dumps(Reach()))
        reseal(path)
        with pytest.raises(CheckpointError, match="reads an attribute"):
            read_index(path)


@pytest.mark.parametrize(
    "damage", ["missing file", "short file", "missing index", "garbled index"]
)
def test_damage_is_found_before_anything_is_filled(damage, tmp_path):
    save_state(tmp_path, Layout(tp=2), seed=0)
    path = tmp_path / "iter_0000005"
    data, index = path / "__1_0.distcp", path / ".metadata"
    if damage == "missing file":
        data.unlink()
    elif damage == "short file":
        data.write_bytes(data.read_bytes()[:-100])
    elif damage == "missing index":
        index.unlink()
    else:
        index.write_bytes(index.read_bytes()[::-1])
    pieces = pieces_of(Layout(), 0, seed=None)
    with pytest.raises(CheckpointError, match="__1_0.distcp|.metadata"):
        load(tmp_path, 5, pieces, coordinates={}, world=solo())
    assert all(piece.tensor.isnan().all() for piece in pieces)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        latest(tmp_path)


def test_a_flipped_byte_in_a_tensor_is_found(tmp_path):
    save(
        tmp_path,
        5,
        pieces_of(Layout(), 0, seed=0),
        coordinates={},
        world=solo(),
        run={},
    )
    data = tmp_path / "iter_0000005" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    at = content.find(pieces_of(Layout(), 0, seed=0)[2].tensor.numpy().tobytes())
    content[at + 17] ^= 0x10
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="__0_0.distcp is damaged"):
        load_state(tmp_path, Layout())


def test_fields_of_another_model_are_named_with_both_values():
    saved = {
        "model": {"num_layers": 12, "activation": "gelu", "shape": [1, 2]},
        "tokenizer": {"fingerprint": "a1"},
    }
    check_same_model(
        saved,
        {
            "model": {"num_layers": 12, "activation": "gelu", "shape": (1, 2)},
            "tokenizer": {"fingerprint": "a1"},
        },
    )
    with pytest.raises(CheckpointError) as caught:
        check_same_model(
            saved,
            {
                "model": {"num_layers": 24, "activation": "gelu", "shape": [1, 2]},
                "tokenizer": {},
            },
        )
    assert "model.num_layers: checkpoint 12, this run 24" in str(caught.value)
    assert "tokenizer.fingerprint: checkpoint 'a1', this run (absent)" in str(
        caught.value
    )
    assert "activation" not in str(caught.value)
