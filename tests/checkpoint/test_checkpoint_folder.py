import errno
import logging
import shutil

import pytest
import torch

from megatron_ds.checkpoint import disk_space
from megatron_ds.checkpoint.folder import check_writable, steps_in, to_delete
from megatron_ds.checkpoint.load import latest, load, read_run
from megatron_ds.checkpoint.save import save
from megatron_ds.errors import CheckpointError
from megatron_ds.mpu.group import solo
from tests.harness.states import Layout, pieces_of, save_step

pytestmark = pytest.mark.plan

TRACKER = "latest_checkpointed_iteration.txt"


def assert_loads(folder, step, seed):
    assert latest(folder) == step
    assert read_run(folder, step)["seed"] == seed
    pieces = pieces_of(Layout(), 0, seed=None)
    load(folder, step, pieces, coordinates={}, world=solo())
    assert all(
        torch.equal(p.tensor, right.tensor)
        for p, right in zip(pieces, pieces_of(Layout(), 0, seed))
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_full_disk_is_described_by_the_bytes_that_are_free_now_too(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(disk_space, "free_bytes", lambda folder: 77)
    full = OSError(errno.ENOSPC, "No space left on device")
    error = disk_space.explained(full, tmp_path, needed=5000, free=9000, share=5000)
    assert "5,000 bytes needed, 9,000 free" in str(error) and "77 now" in str(error)


def test_a_folder_without_checkpoints_has_no_latest(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None


def test_names_and_tracker_are_megatrons(tmp_path):
    assert save_step(tmp_path, 123) == tmp_path / "iter_0000123"
    save_step(tmp_path, 12345678)
    assert (tmp_path / TRACKER).read_text() == "12345678"
    assert names(tmp_path) == ["iter_0000123", "iter_12345678", TRACKER]


def test_an_edited_tracker_goes_back(tmp_path):
    save_step(tmp_path, 100)
    save_step(tmp_path, 200)
    (tmp_path / TRACKER).write_text("100\n")
    assert_loads(tmp_path, 100, seed=100)


@pytest.mark.parametrize("trouble", ["incomplete", "deleted", "nonsense", "no tracker"])
def test_the_newest_complete_checkpoint_is_loaded_with_one_warning_when_the_tracker_leads_nowhere(
    trouble, tmp_path, caplog
):
    for step in (100, 200, 300):
        save_step(tmp_path, step)
    if trouble == "incomplete":
        (tmp_path / "iter_0000300" / "__0_0.distcp").unlink()
    elif trouble == "deleted":
        shutil.rmtree(tmp_path / "iter_0000300")
    else:
        shutil.rmtree(tmp_path / "iter_0000300")
        tracker = tmp_path / TRACKER
        tracker.write_text("release\n") if trouble == "nonsense" else tracker.unlink()
    with caplog.at_level(logging.WARNING):
        assert latest(tmp_path) == 200
    assert (
        len(caplog.records) == 1
        and "iteration 200" in caplog.text
        and TRACKER in caplog.text
    )


def test_a_folder_of_another_program_is_refused_and_not_taken_for_a_fresh_start(
    tmp_path,
):
    (tmp_path / "iter_0000100" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / TRACKER).write_text("100")
    with pytest.raises(CheckpointError, match="no complete checkpoint.*names '100'"):
        latest(tmp_path)


def test_a_tracker_without_any_checkpoint_is_an_error(tmp_path):
    for text in ("release", "7", "9" * 5000):
        (tmp_path / TRACKER).write_text(text)
        with pytest.raises(CheckpointError, match="no complete checkpoint.*names"):
            latest(tmp_path)


def test_what_another_program_left_under_our_name_is_kept_aside(tmp_path):
    theirs = tmp_path / "iter_0000100" / "mp_rank_00"
    theirs.mkdir(parents=True)
    (theirs / "model.pt").write_bytes(b"theirs")
    save_step(tmp_path, 100, limit=1)
    assert_loads(tmp_path, 100, seed=100)
    [kept] = tmp_path.glob("iter_0000100.*")
    assert (kept / "mp_rank_00" / "model.pt").read_bytes() == b"theirs"


def test_old_checkpoints_that_were_moved_and_linked_stop_no_save_and_stay(tmp_path):
    folder, archive = tmp_path / "run", tmp_path / "archive"
    for step in (1, 2):
        save_step(folder, step)
    archive.mkdir()
    for step in (1, 2):
        name = f"iter_{step:07d}"
        shutil.move(folder / name, archive / name)
        (folder / name).symlink_to(archive / name)
    for leftover in (".iter_0000009.writing-00", ".iter_0000002.replaced"):
        (folder / leftover).symlink_to(archive / "iter_0000001")
    (folder / "iter_0000005").write_text("a file under the name of a step")
    save_step(folder, 2, seed=22)
    for step in (3, 4, 5):
        save_step(folder, step, limit=2)
        assert_loads(folder, step, step)
    assert (
        names(archive) == ["iter_0000001", "iter_0000002"]
        and (archive / "iter_0000002" / "run.json").is_file()
    )
    assert steps_in(folder) == [4, 5] and not [
        name for name in names(folder) if name.startswith(".iter")
    ]


def test_saving_a_step_again_replaces_it(tmp_path):
    save_step(tmp_path, 100, seed=1)
    save_step(tmp_path, 100, seed=2)
    assert_loads(tmp_path, 100, seed=2)
    assert names(tmp_path) == ["iter_0000100", TRACKER]


def test_a_second_save_cut_off_between_its_renames_leaves_the_first_loadable_and_is_undone_by_the_next(
    tmp_path,
):
    save_step(tmp_path, 100, seed=1)
    (tmp_path / "iter_0000100").rename(tmp_path / ".iter_0000100.replaced")
    assert_loads(tmp_path, 100, seed=1)
    save_step(tmp_path, 200)
    assert names(tmp_path) == ["iter_0000100", "iter_0000200", TRACKER]


def test_leftovers_of_a_crash_are_invisible_and_removed_by_the_next_save(tmp_path):
    save_step(tmp_path, 100)
    for name in (".iter_0000200.writing", ".iter_0000050.deleting"):
        shutil.copytree(tmp_path / "iter_0000100", tmp_path / name)
    assert_loads(tmp_path, 100, seed=100)
    save_step(tmp_path, 300)
    assert names(tmp_path) == ["iter_0000100", "iter_0000300", TRACKER]


def test_only_the_last_k_are_kept(tmp_path):
    for step in (10, 20, 30, 40):
        save_step(tmp_path, step, limit=2)
    assert steps_in(tmp_path) == [30, 40]
    save_step(tmp_path, 50)
    assert steps_in(tmp_path) == [30, 40, 50]


@pytest.mark.parametrize(
    "steps, saved, limit, expected",
    [
        ([10, 20, 30], 30, None, []),
        ([10, 20, 30], 30, 5, []),
        ([10, 20, 30], 30, 1, [10, 20]),
        (
            [10, 20, 30, 40],
            20,
            1,
            [10],
        ),  # 30 and 40 were gone back from: not counted, not touched
        ([10, 15, 30, 40], 15, 2, []),
        ([7], 7, 1, []),
    ],
)
def test_retention_by_hand(steps, saved, limit, expected):
    assert to_delete(steps, saved, limit) == expected


def test_values_that_json_cannot_keep_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        save(
            tmp_path / "new",
            1,
            pieces_of(Layout(), 0, 0),
            coordinates={},
            world=solo(),
            run={"config": object()},
        )
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_found_at_once(tmp_path):
    check_writable(tmp_path / "a" / "b")
    assert names(tmp_path / "a" / "b") == []
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="--save .*file/checkpoints"):
        check_writable(tmp_path / "file" / "checkpoints")


def test_loading_a_step_that_is_not_there_says_which_are(tmp_path):
    save_step(tmp_path, 10)
    with pytest.raises(
        CheckpointError, match="no checkpoint of iteration 11.*iterations 10"
    ):
        read_run(tmp_path, 11)
