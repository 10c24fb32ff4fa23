"""Whole tensors out of pieces of any layout, into safetensors files, against tensors known beforehand."""

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file

from megatron_ds.checkpoint.safetensors_folder import (
    TensorEntry,
    cut_into_files,
    from_safetensors,
    write_folder,
)
from megatron_ds.checkpoint.save import save
from megatron_ds.checkpoint.whole_tensors import TensorStream
from megatron_ds.commands.checkpoint_to_safetensors import main, parse_arguments
from megatron_ds.errors import CheckpointError
from megatron_ds.mpu.group import solo
from tests.harness.checkpoints import change_index, reseal
from tests.harness.states import (
    Layout,
    logical_tensor,
    model_specs,
    pieces_of,
    tp_coordinates,
    world_group,
)
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

LAYOUTS = [
    Layout(),
    Layout(tp=2, dp=2, stage=1),
    Layout(tp=2, cuts=(5,), dp=2, stage=0),
    Layout(dp=3, stage=1, cuts=(3, 9)),
]
ids = dict(ids=str)


def expected():
    return {
        spec.name: logical_tensor("weight", spec, 5)
        for spec in model_specs()
        if not spec.tied_copy
    }


def stream_of(layout, rank, world, **options):
    pieces = [piece for piece in pieces_of(layout, rank, 5) if piece.kind == "weight"]
    return TensorStream(
        pieces,
        coordinates=tp_coordinates(layout, rank),
        world=world_group(layout, rank, world),
        **options,
    )


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


# -------------------------------------------------------------------------------------------------- streaming
@pytest.mark.parametrize("layout", LAYOUTS, **ids)
def test_rank_0_sees_each_whole_tensor_of_any_layout_once(layout):
    def main(rank, world):
        stream = stream_of(layout, rank, world)
        return [(entry.name, tensor) for entry, tensor in zip(stream.entries, stream)]

    first, *others = run_ranks(layout.world_size, main)
    assert {name for name, _ in first} == set(expected()) and len(first) == len(
        expected()
    )
    assert all(torch.equal(tensor, expected()[name]) for name, tensor in first)
    assert all(tensor is None for other in others for _, tensor in other)


def test_tensors_are_cast_before_they_travel():
    layout = Layout(dp=2, stage=1)

    def main(rank, world):
        tensors = [
            t
            for t in stream_of(
                layout, rank, world, dtype_of=lambda name: torch.bfloat16
            )
            if t is not None
        ]
        return tensors, world.traffic[rank].bytes

    (tensors, _), (_, sent) = run_ranks(2, main)
    for tensor, value in zip(tensors, expected().values()):
        assert torch.equal(tensor, value.bfloat16())
    second = sum(
        p.stop - p.start
        for p in pieces_of(layout, 1, 5)
        if p.kind == "weight" and not p.spec.tied_copy
    )
    assert (
        sum(n for (operation, _, _), n in sent.items() if operation == "send")
        == 2 * second
    )


def test_a_missing_part_is_told_on_all_ranks():
    def main(rank, world):
        pieces = [
            p for p in pieces_of(Layout(dp=2, stage=1), rank, 5) if p.kind == "weight"
        ][rank:]
        with pytest.raises(
            CheckpointError, match="do not hold each element once of 1 tensors"
        ):
            TensorStream(
                pieces, coordinates={}, world=world.group("world", (0, 1), rank)
            )

    run_ranks(2, main)


# ---------------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize("limit, files", [(10**6, 1), (4000, 2), (1, 14)])
def test_safetensors_reads_what_was_streamed(tmp_path, limit, files):
    layout = LAYOUTS[1]

    def main(rank, world):
        stream = stream_of(layout, rank, world)
        write_folder(
            tmp_path,
            stream.entries,
            lambda order: stream.tensors([e.name for e in order]),
            world_group(layout, rank, world),
            limit,
        )

    (tmp_path / "config.json").write_text("mine")
    for _ in range(2):  # a second time over the first
        run_ranks(layout.world_size, main)
        found = contents(tmp_path)
        assert found.keys() == expected().keys() and all(
            torch.equal(found[n], t) for n, t in expected().items()
        )
        shards = [name for name in files_in(tmp_path) if name.endswith(".safetensors")]
        assert len(shards) == files and (tmp_path / "config.json").read_text() == "mine"
        if files > 1:
            index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
            assert index["metadata"]["total_size"] == sum(
                4 * t.numel() for t in found.values()
            )
            assert all(
                name in load_file(tmp_path / file)
                for name, file in index["weight_map"].items()
            )
            assert set(index["weight_map"]) == set(found)
        assert len(files_in(tmp_path)) == files + 1 + (files > 1), (
            "nothing is left over"
        )


def test_files_of_another_cut_do_not_stay(tmp_path):
    entries = [TensorEntry(name, (3,), torch.float32) for name in "abcd"]
    for limit in (100, 12, 24, 100):
        write_folder(
            tmp_path,
            entries,
            lambda order: [torch.ones(3) * ord(e.name) for e in order],
            solo(),
            limit,
        )
        assert {n: t[0].item() for n, t in contents(tmp_path).items()} == {
            n: ord(n) for n in "abcd"
        }
        assert len(files_in(tmp_path)) == {100: 1, 12: 5, 24: 3}[limit]


def test_odd_kinds_of_tensors_begin_where_their_elements_may(tmp_path):
    tensors = {
        "flag": torch.tensor([True, False, True]),
        "count": torch.tensor(7),
        "half": torch.randn(3).half(),
        "brain": torch.randn(5, 1).bfloat16(),
        "empty": torch.empty(0, 4),
        "wide": torch.randn(2, 3).double(),
    }
    entries = [
        TensorEntry(name, tuple(t.shape), t.dtype) for name, t in tensors.items()
    ]
    write_folder(
        tmp_path, entries, lambda order: [tensors[e.name] for e in order], solo(), 10**6
    )
    found = load_file(tmp_path / "model.safetensors")
    assert all(
        torch.equal(found[name], t) and found[name].dtype == t.dtype
        for name, t in tensors.items()
    )


def test_no_tensor_outlives_its_turn(tmp_path):
    alive, most = weakref.WeakSet(), [0]

    def tensors(order):
        for entry in order:
            tensor = torch.zeros(entry.shape)
            alive.add(tensor)
            most[0] = max(most[0], len(alive))
            yield tensor

    write_folder(
        tmp_path,
        [TensorEntry(str(i), (50,), torch.float32) for i in range(9)],
        tensors,
        solo(),
        500,
    )
    assert (
        most[0] <= 2
    )  # the one being made, and the one before while its name still stands


def test_a_full_disk_is_told_on_all_ranks_and_leaves_the_old_files(
    tmp_path, monkeypatch
):
    entries = [TensorEntry(name, (3,), torch.float32) for name in "abcd"]
    write_folder(
        tmp_path, entries, lambda order: [torch.ones(3) for _ in order], solo(), 24
    )
    before = {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)}
    monkeypatch.setattr("megatron_ds.checkpoint.safetensors_folder.header_of", refuse)

    def main(rank, world):
        taken = []
        with pytest.raises(
            CheckpointError, match="could not write safetensors to .*No space left"
        ):
            write_folder(
                tmp_path,
                entries,
                lambda order: (taken.append(e) or torch.ones(3) for e in order),
                world.group("world", (0, 1), rank),
                12,
            )
        return len(taken)

    assert run_ranks(2, main) == [4, 4], "the others are not left waiting"
    assert {
        name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)
    } == before


def refuse(entries):
    raise OSError(28, "No space left on device")


def test_files_are_cut_in_order_and_a_large_tensor_has_its_own():
    entries = [TensorEntry(str(n), (n,), torch.uint8) for n in (3, 4, 50, 2, 8)]
    assert [[e.shape[0] for e in file] for file in cut_into_files(entries, 10)] == [
        [3, 4],
        [50],
        [2, 8],
    ]


def test_draws_read_intervals_of_stored_tensors(tmp_path):
    tensors = {
        "matrix": torch.randn(7, 3),
        "vector": torch.randn(5),
        "scalar": torch.tensor(2.5),
    }
    entries = [
        TensorEntry(name, tuple(t.shape), t.dtype) for name, t in tensors.items()
    ]
    for limit in (10**6, 30):
        write_folder(
            tmp_path,
            entries,
            lambda order: [tensors[e.name] for e in order],
            solo(),
            limit,
        )
        draw = from_safetensors(tmp_path)
        for name, tensor in tensors.items():
            flat = tensor.reshape(-1)
            for start in range(flat.numel()):
                for stop in range(start + 1, flat.numel() + 1):
                    out = torch.empty(stop - start)
                    draw(name, start, out)
                    assert torch.equal(out, flat[start:stop])
    with pytest.raises(CheckpointError, match="did you mean 'matrix'"):
        draw("matrx", 0, torch.empty(1))
    with pytest.raises(
        CheckpointError,
        match=r"shape \[5\], but the parameter reads its elements 3 to 6",
    ):
        draw("vector", 3, torch.empty(4))
    with pytest.raises(CheckpointError, match="has no readable safetensors"):
        from_safetensors(tmp_path / "nowhere")


# --------------------------------------------------------------------------------------------------- the tool
@pytest.mark.parametrize("layout", LAYOUTS[1:3], **ids)
def test_the_tool_takes_the_weights_out_of_a_checkpoint_of_any_layout(
    layout, tmp_path, capsys
):
    run_ranks(
        layout.world_size,
        lambda rank, world: save(
            tmp_path / "saved",
            12,
            pieces_of(layout, rank, 5),
            coordinates=tp_coordinates(layout, rank),
            world=world_group(layout, rank, world),
            run={},
        ),
    )
    for dtype in ("float32", "bfloat16"):
        words = [
            "--load",
            str(tmp_path / "saved"),
            "--output",
            str(tmp_path / dtype),
            "--dtype",
            dtype,
        ]
        assert main(parse_arguments([*words, "--max-shard-bytes", "3000"])) == 0
        found = contents(tmp_path / dtype)
        assert found.keys() == expected().keys()
        assert all(
            torch.equal(found[n], t.to(found[n].dtype)) for n, t in expected().items()
        )
        assert {str(t.dtype) for t in found.values()} == {f"torch.{dtype}"}
    assert "iteration 12" in capsys.readouterr().out


def exported(tmp_path, **run):
    """Run the tool on a checkpoint that says `run` of itself."""
    save(
        tmp_path / "saved",
        12,
        pieces_of(Layout(), 0, 5),
        coordinates={},
        world=solo(),
        run=run,
    )
    return main(
        parse_arguments(
            ["--load", str(tmp_path / "saved"), "--output", str(tmp_path / "out")]
        )
    )


MODEL = {"num_layers": 2, "hidden_size": 6}
RUN = {
    "identity": {"model": MODEL},
    "config": {"data": {"tokenizer_type": "NullTokenizer", "seed": 3}},
    "version": "0.9",
}


def test_a_config_json_says_what_the_tensors_are(tmp_path, capsys):
    assert exported(tmp_path, **RUN) == 0
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported(tmp_path, **RUN | {"version": "1.0"}) == 0, (
        "a second export replaces it"
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == found | {
        "megatron_ds_version": "1.0"
    }
    assert found == {
        "model_type": "megatron_ds",
        "tensor_names": "megatron_ds",
        "dtype": "float32",
        "iteration": 12,
        "megatron_ds_version": "0.9",
        "model": MODEL,
        "tokenizer": {"tokenizer_type": "NullTokenizer"},
    }
    assert "needs those that megatron-ds convert writes" in capsys.readouterr().out


def test_a_config_json_of_the_user_stays_and_an_engines_export_gets_none(tmp_path):
    (tmp_path / "a" / "out").mkdir(parents=True)
    (tmp_path / "a" / "out" / "config.json").write_text("mine")
    assert (
        exported(tmp_path / "a", **RUN) == 0
        and exported(tmp_path / "b", engine={}) == 0
    )
    assert (tmp_path / "a" / "out" / "config.json").read_text() == "mine"
    assert files_in(tmp_path / "b" / "out") == ["model.safetensors"]


@pytest.mark.parametrize("damage", ["index", "chunk"])
def test_a_damaged_checkpoint_ends_the_tool_with_an_error_and_leaves_nothing_behind(
    damage, tmp_path
):
    exported(tmp_path, **RUN)
    path, before = tmp_path / "saved" / "iter_0000012", files_in(tmp_path / "out")
    if damage == "index":  # asks for 4 TiB

        def huge(index):
            tensor = next(
                t for t in index.state_dict_metadata.values() if len(t.chunks) == 1
            )
            tensor.size = tensor.chunks[0].sizes = torch.Size(
                [2**40] + [1] * (len(tensor.size) - 1)
            )

        change_index(path, huge)
        reseal(path)
    else:
        content = bytearray((path / "__0_0.distcp").read_bytes())
        content[
            content.find(
                expected()["decoder.layers.1.mlp.linear_fc1.weight"].numpy().tobytes()
            )
            + 5
        ] ^= 1
        (path / "__0_0.distcp").write_bytes(content)
    words = [
        "--load",
        str(tmp_path / "saved"),
        "--iteration",
        "12",
        "--output",
        str(tmp_path / "out"),
    ]
    with pytest.raises(CheckpointError, match="has no earlier complete checkpoint"):
        main(parse_arguments([*words, "--max-shard-bytes", "3000"]))
    assert files_in(tmp_path / "out") == before
