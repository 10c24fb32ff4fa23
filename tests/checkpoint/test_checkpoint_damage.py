"""A checkpoint is one save: a change in it ends in an error, in an older checkpoint, or in the same bits."""

import builtins
import io
import itertools
import json
import logging
import os
import random
import shutil
import struct
import zipfile
import zlib

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from megatron_ds.checkpoint.cover import covers_once
from megatron_ds.checkpoint.index import read_index
from megatron_ds.checkpoint.index_pickle import check_opcodes
from megatron_ds.checkpoint.load import latest, load, read_run
from megatron_ds.checkpoint.save import save
from megatron_ds.errors import CheckpointError
from megatron_ds.mpu.group import solo
from tests.harness import checkpoints
from tests.harness.checkpoints import (
    NEW,
    OLD,
    RUN,
    change_index,
    reseal,
    reseal_chunks,
    save_small,
)
from tests.harness.states import Layout, pieces_of, tp_coordinates, world_group
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.plan

TRACKER = "latest_checkpointed_iteration.txt"


def save_of_two_ranks(folder, step):
    layout = Layout(tp=2)
    run_ranks(
        2,
        lambda rank, world: save(
            folder,
            step,
            pieces_of(layout, rank, step),
            world=world_group(layout, rank, world),
            coordinates=tp_coordinates(layout, rank),
            run={},
        ),
    )
    return folder / f"iter_{step:07d}"


def load_all(folder, step=NEW, pieces=None, **options):
    pieces = pieces or pieces_of(Layout(), 0, None)
    load(folder, step, pieces, coordinates={}, world=solo(), **options)
    return pieces


def same_bits(pieces, others):
    return all(
        torch.equal(piece.tensor, other.tensor)
        for piece, other in zip(pieces, others, strict=True)
    )


# ---- Anything at all.


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saves")
    for step in (OLD, NEW):
        save_small(folder, step)
    return folder


def flip(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def loads_the_same_or_is_refused(folder, caplog) -> str:
    """Load what `latest` finds; "error", "older" or "same"."""
    caplog.clear()
    runs = {
        step: RUN | {"progress": RUN["progress"] | {"step": step}}
        for step in (OLD, NEW)
    }
    try:
        step = latest(folder)
        run = read_run(folder, step)
        pieces = load_all(folder, step, checkpoints.some_pieces(None))
    except CheckpointError:
        return "error"
    assert {name: run[name] for name in RUN} == runs[step] and run["step"] == step
    assert same_bits(pieces, checkpoints.some_pieces(step))
    assert step == NEW or TRACKER in caplog.text
    return "same" if step == NEW else "older"


@pytest.mark.parametrize(
    "file, format_1", [(".metadata", False), ("run.json", False), (".metadata", True)]
)
def test_one_flipped_bit_never_loads_anything_else(
    file, format_1, two_saves, tmp_path, caplog
):
    folder = tmp_path / "saves"
    shutil.copytree(two_saves, folder)
    path = folder / "iter_0000004"
    if format_1:
        checkpoints.make_format_1(path)
    content, draw, outcomes = (path / file).read_bytes(), random.Random(file), []
    for bit in draw.sample(range(8 * len(content)), 100):
        (path / file).write_bytes(flip(content, bit))
        outcomes.append(loads_the_same_or_is_refused(folder, caplog))
    assert outcomes.count("older") > 30
    (path / file).write_bytes(content)
    assert loads_the_same_or_is_refused(folder, caplog) == "same"


def test_every_file_of_another_save_or_rank_is_refused(tmp_path):
    older, path = save_of_two_ranks(tmp_path, OLD), save_of_two_ranks(tmp_path, NEW)
    files = sorted(file.name for file in path.iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "run.json"]
    swaps = [(older / name, path / name) for name in files] + [
        (path / "__0_0.distcp", path / "__1_0.distcp")
    ]
    for source, target in swaps:
        kept = target.read_bytes()
        target.write_bytes(source.read_bytes())
        for kinds in (None, ("exp_avg",)):  # also where only a part of the file is read
            with pytest.raises(CheckpointError, match=f"iteration 4 .*{target.name}"):
                load_all(tmp_path, kinds=kinds)
        target.write_bytes(kept)
    assert same_bits(load_all(tmp_path), pieces_of(Layout(), 0, NEW))


def test_a_tensor_file_of_another_save_is_refused_in_whatever_part_of_it_is_read(
    tmp_path,
):
    older, path = save_of_two_ranks(tmp_path, OLD), save_of_two_ranks(tmp_path, NEW)
    shutil.copy(older / "__1_0.distcp", path / "__1_0.distcp")
    refused = 0
    for piece in pieces_of(Layout(), 0, None):
        try:
            load_all(tmp_path, pieces=[piece])
        except CheckpointError as error:
            assert "__1_0.distcp" in str(
                error
            ) and "another save or another rank" in str(error)
            refused += 1
        else:
            assert any(
                torch.equal(piece.tensor, right.tensor)
                for right in pieces_of(Layout(), 0, NEW)
            )
    assert refused > 20


def test_a_checkpoint_of_another_step_under_this_name_is_refused(tmp_path):
    for step in (OLD, NEW):
        save_small(tmp_path, step)
    shutil.rmtree(tmp_path / "iter_0000004")
    shutil.copytree(tmp_path / "iter_0000002", tmp_path / "iter_0000004")
    with pytest.raises(CheckpointError, match="of step 2, and its directory of step 4"):
        read_run(tmp_path, NEW)


def test_checksums_are_those_of_the_files_and_each_save_has_its_id(tmp_path):
    ids = set()
    for step in (OLD, NEW):
        path = save_of_two_ranks(tmp_path, step)
        run = json.loads((path / "run.json").read_text())
        ids.add(run["save_id"])
        assert sorted(run["files"]) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
        for name, entry in run["files"].items():
            content = (path / name).read_bytes()
            assert entry == {
                "bytes": len(content),
                "crc32": f"{zlib.crc32(content):08x}",
            }
    assert len(ids) == 2


def test_a_checkpoint_of_format_1_loads_with_one_line_about_its_checksums(
    tmp_path, caplog
):
    checkpoints.make_format_1(save_small(tmp_path))
    with caplog.at_level(logging.INFO):
        assert latest(tmp_path) == NEW
        assert same_bits(
            load_all(tmp_path, NEW, checkpoints.some_pieces(None)),
            checkpoints.some_pieces(NEW),
        )
    assert len(caplog.records) == 1 and "without checksums" in caplog.text


def test_a_checkpoint_does_not_pass_for_one_of_format_1(tmp_path):
    path = save_small(tmp_path)
    run = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({"format_version": 1, "step": NEW} | RUN))
    with pytest.raises(
        CheckpointError,
        match=f"is of the save {run['save_id']}, and run.json of the save None",
    ):
        load_all(tmp_path, NEW, checkpoints.some_pieces(None))


# ---- The index.


def test_boxes_cover_once_as_counting_elements_finds():
    def box(low, high):
        return ChunkStorageMetadata(
            torch.Size(low), torch.Size([b - a for a, b in zip(low, high)])
        )

    draw, seen = random.Random(3), set()
    for _ in range(600):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
        cuts = [sorted({0, n, draw.randint(0, n)}) for n in shape]
        boxes = [
            box(*zip(*corners))
            for corners in itertools.product(*(list(zip(c, c[1:])) for c in cuts))
        ]
        for _ in range(
            draw.randint(0, 2)
        ):  # replace one by a box of the same size elsewhere, or by any box
            old = boxes.pop(draw.randrange(len(boxes)))
            sizes = (
                old.sizes
                if draw.random() < 0.7
                else torch.Size([draw.randint(0, n) for n in shape])
            )
            low = [draw.randint(0, n - size) for n, size in zip(shape, sizes)]
            boxes.append(box(low, [a + size for a, size in zip(low, sizes)]))
        count = torch.zeros(shape)
        for chunk in boxes:
            count[
                tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes))
            ] += 1
        right = bool((count == 1).all())
        assert covers_once(torch.Size(shape), boxes) == right
        seen.add(right)
    assert (
        seen == {True, False}
        and covers_once(torch.Size([]), [box([], [])])
        and not covers_once(torch.Size([2]), [])
    )


def moved_chunk(index):
    """Two chunks then overlap, and a hole keeps what was in the tensor; the number of elements is right."""
    old = next(key for key in index.storage_data if any(key.offset))
    new = MetadataIndex(old.fqn, [max(n - 1, 0) for n in old.offset])
    index.storage_data[new] = index.storage_data.pop(old)
    next(
        c for c in index.state_dict_metadata[old.fqn].chunks if c.offsets == old.offset
    ).offsets = new.offset


def huge_tensor(index):
    tensor = next(t for t in index.state_dict_metadata.values() if len(t.chunks) == 1)
    tensor.size = tensor.chunks[0].sizes = torch.Size([2**40] * len(tensor.size))


def shared_bytes(index):
    first, second = [
        place
        for place in index.storage_data.values()
        if place.relative_path == "__0_0.distcp"
    ][:2]
    first.offset, first.length = second.offset, second.length


def named(name):
    def change(index):
        for place in index.storage_data.values():
            place.relative_path = name

    return change


@pytest.mark.parametrize("format_1", [False, True])
@pytest.mark.parametrize(
    "change, message",
    [
        (moved_chunk, "chunks of .* overlap or leave holes"),
        (huge_tensor, "bytes, for which __._0.distcp has"),
        (shared_bytes, "two chunks share byte|bytes, for which"),
        (named("."), "'.', which is not a file name in its directory"),
        (named(".."), "'..', which is not a file name"),
        (named(""), "'', which is not a file name"),
        (named("../iter_0000002/__0_0.distcp"), "which is not a file name"),
        (named("folder"), "folder is not a regular file"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_index_that_contradicts_itself_or_the_files_is_refused(
    change, message, format_1, tmp_path
):
    path = save_of_two_ranks(tmp_path, NEW)
    change_index(path, change)
    reseal(path)
    (path / "folder").mkdir()
    if format_1:
        checkpoints.make_format_1(path)
    with pytest.raises(CheckpointError, match=message):
        read_index(path)


@pytest.mark.parametrize(
    "opcodes, message",
    [
        (b"\x80\x04r\xff\xff\xff\x7f.", "LONG_BINPUT"),  # a memo of 16 GB
        (b"\x80\x04\x96" + struct.pack("<Q", 2**40) + b"abc.", "BYTEARRAY8"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"abc.", "BINBYTES8"),
        (b"\x80\x04X" + struct.pack("<I", 2**31) + b"abc.", "would end at byte"),
        (b"\x80\x04cos\nsystem\n.", "GLOBAL"),
        (b"\x80\x04N", "it ends without STOP"),
        (b"\x80\x04N.N.", "more bytes follow"),
        (b"\x80\x04J\x01", "ends within BININT"),
        (b"\x80\x04X\x01", "ends within a length"),
        (b"\xff", "not an opcode"),
    ],
)
def test_opcodes_that_no_index_needs_are_refused_before_anything_is_unpickled(
    opcodes, message
):
    with pytest.raises(ValueError, match=message):
        check_opcodes(opcodes)


def test_a_flip_of_reduce_to_long_binput_is_refused_at_every_place(tmp_path):
    path = save_small(tmp_path)
    checkpoints.make_format_1(path)
    content = (path / ".metadata").read_bytes()
    check_opcodes(content)
    places = [at for at, byte in enumerate(content) if byte == ord("R")]
    refused = 0
    for at in places:
        try:
            check_opcodes(flip(content, 8 * at + 5))
        except ValueError as error:
            refused += "LONG_BINPUT" in str(error)
    assert refused >= 10


# ---- Chunks.


class Reduced:
    """Pickled, it is the call of a function."""

    def __init__(self, function, *arguments):
        self._call = function, arguments

    def __reduce__(self):
        return self._call


def replace_chunk(path, write):
    """Let `write` make the file of a checkpoint that has one chunk, and all checksums fit."""

    def with_its_length(index):
        [place] = index.storage_data.values()
        write(path / place.relative_path)
        place.length = (path / place.relative_path).stat().st_size

    change_index(path, with_its_length)
    reseal_chunks(path)


def test_compressed_records_are_refused_before_they_are_inflated(tmp_path, monkeypatch):
    def zip_bomb(file):
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", bytes(2**22))

    path = save(
        tmp_path,
        NEW,
        checkpoints.some_pieces(NEW)[:1],
        coordinates={},
        world=solo(),
        run={},
    )
    replace_chunk(path, zip_bomb)
    monkeypatch.setattr(
        torch, "load", lambda *args, **options: pytest.fail("a record was inflated")
    )
    monkeypatch.setattr(
        zipfile.ZipFile,
        "open",
        lambda *args, **options: pytest.fail("a record was inflated"),
    )
    with pytest.raises(
        CheckpointError, match="__0_0.distcp is damaged: .*data.pkl is compressed"
    ):
        load_all(tmp_path, NEW, checkpoints.some_pieces(None)[:1])


@pytest.mark.parametrize(
    "values, message",
    [
        (lambda right: right.double(), "torch.float64, and the index records"),
        (lambda right: right.reshape(-1)[:-1].clone(), "a tensor of shape"),
        (lambda right: {"a": right}, "no plain tensor, but a dict"),
        (
            lambda right: Reduced(bytearray, 2**40),
            "names __builtin__ bytearray",
        ),  # weights_only admits it
    ],
)
def test_a_chunk_that_holds_something_else_than_the_index_says_is_refused(
    values, message, tmp_path
):
    path = save(
        tmp_path,
        NEW,
        checkpoints.some_pieces(NEW)[:1],
        coordinates={},
        world=solo(),
        run={},
    )

    replace_chunk(
        path,
        lambda file: torch.save(
            values(checkpoints.some_pieces(NEW)[0].tensor.view(36, 6)), file
        ),
    )
    with pytest.raises(CheckpointError, match=f"__0_0.distcp is damaged: .*{message}"):
        load_all(tmp_path, NEW, checkpoints.some_pieces(None)[:1])


# ---- What the messages say.


def test_the_warning_and_the_error_say_what_is_wrong_with_which_file(
    two_saves, tmp_path, caplog
):
    folder = tmp_path / "saves"
    shutil.copytree(two_saves, folder)
    for step in (NEW, OLD):
        data = folder / f"iter_{step:07d}" / "__0_0.distcp"
        size = data.stat().st_size
        data.write_bytes(data.read_bytes()[:-100])
        reason = (
            f"iter_{step:07d} is not a complete checkpoint: __0_0.distcp has {size - 100} bytes, and "
            f"{size} were saved"
        )
        if step == NEW:
            with caplog.at_level(logging.WARNING):
                assert latest(folder) == OLD
            assert len(caplog.records) == 1 and reason in caplog.text
    with pytest.raises(
        CheckpointError, match=f"no complete checkpoint in .*names '4'.*{reason}"
    ):
        latest(folder)


def test_a_damaged_tensor_comes_with_the_way_back(two_saves, tmp_path):
    folder = tmp_path / "saves"
    shutil.copytree(two_saves, folder)
    data = folder / "iter_0000004" / "__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes(
        flip(
            content,
            8 * content.find(checkpoints.some_pieces(NEW)[1].tensor.numpy().tobytes()),
        )
    )
    with pytest.raises(
        CheckpointError,
        match=f"__0_0.distcp is damaged.*go back to iteration 2, .*write 2 into .*{TRACKER}",
    ):
        load_all(folder, NEW, checkpoints.some_pieces(None))
    shutil.rmtree(folder / "iter_0000002")
    with pytest.raises(CheckpointError, match="has no earlier complete checkpoint"):
        load_all(folder, NEW, checkpoints.some_pieces(None))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "run.json"])
def test_a_file_that_may_not_be_read_is_not_called_damaged(
    name, two_saves, tmp_path, monkeypatch
):
    folder = tmp_path / "saves"
    shutil.copytree(two_saves, folder)

    def guarded(real):
        def open_file(file, *args, **options):
            if str(file).endswith(f"iter_0000004/{name}"):
                raise PermissionError(13, "Permission denied")
            return real(file, *args, **options)

        return open_file

    for module in (builtins, io, os):
        monkeypatch.setattr(module, "open", guarded(module.open))
    with pytest.raises(
        CheckpointError, match=f"{name} cannot be read: Permission denied"
    ) as caught:
        load_all(folder, NEW, checkpoints.some_pieces(None))
    assert "damaged" not in str(caught.value)


# ---- The tool that reads everything.


def test_the_tool_names_every_file_that_is_not_the_saved_one(
    two_saves, tmp_path, capsys
):
    from megatron_ds.commands.verify_checkpoint import main, parse_arguments

    folder = tmp_path / "saves"
    shutil.copytree(two_saves, folder)
    path = folder / "iter_0000004"
    assert main(parse_arguments(["--load", str(folder)])) == 0
    assert "all files are as they were saved" in capsys.readouterr().out
    content = (path / "__0_0.distcp").read_bytes()
    for bit in (0, 4 * len(content), 8 * len(content) - 1):  # any byte, padding too
        (path / "__0_0.distcp").write_bytes(flip(content, bit))
        with pytest.raises(
            CheckpointError, match="__0_0.distcp has the CRC-32 .* was saved"
        ):
            main(parse_arguments(["--load", str(folder)]))
    (path / "__0_0.distcp").unlink()
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:-1])
    with pytest.raises(
        CheckpointError,
        match="__0_0.distcp cannot be read: No such file.*; .*.metadata has .* bytes, and",
    ):
        main(parse_arguments(["--load", str(folder)]))
    checkpoints.make_format_1(folder / "iter_0000002")
    with pytest.raises(CheckpointError, match="format 1, without checksums"):
        main(parse_arguments(["--load", str(folder), "--iteration", "2"]))
