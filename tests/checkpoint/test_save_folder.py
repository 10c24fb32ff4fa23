"""Which run a save folder holds, where a run starts, and room on the disk."""

import errno
import os
import re
import resource
from pathlib import Path

import pytest

from megatron_ds.checkpoint import disk_space
from megatron_ds.checkpoint.disk_space import bytes_written_here, check_room, explained
from megatron_ds.checkpoint.folder import read_tracker, write_durably
from megatron_ds.checkpoint.load import latest, read_run
from megatron_ds.checkpoint.save import save
from megatron_ds.checkpoint.save_folder import move_aside
from megatron_ds.config import parse
from megatron_ds.config.options.training import CheckpointConfig
from megatron_ds.errors import CheckpointError, MismatchError
from megatron_ds.mpu.group import solo
from megatron_ds.training.base_weights import started_from_pretrained
from megatron_ds.training.restart import continued
from megatron_ds.training.run_start import find_start
from megatron_ds.training.start_folder import clear_save_folder
from tests.harness.deaths import forked, survived
from tests.harness.pretraining import MOCK
from tests.harness.states import Layout, pieces_of

pytestmark = pytest.mark.plan

TRACKER = "latest_checkpointed_iteration.txt"
BYTES = bytes_written_here(pieces_of(Layout(), 0, 1), {})


def checkpoint(folder, step, run_id="aa11"):
    save(
        folder,
        step,
        pieces_of(Layout(), 0, step),
        coordinates={},
        world=solo(),
        run={"run_id": run_id} if run_id else {},
    )


def start(**options):
    return find_start(
        CheckpointConfig(
            **{
                name: str(v) if isinstance(v, Path) else v
                for name, v in options.items()
            }
        ),
        solo(),
    )


@pytest.fixture
def used(tmp_path):
    """A folder with iterations 10 and 20 of run aa11."""
    for step in (10, 20):
        checkpoint(tmp_path / "used", step)
    return tmp_path / "used"


# ---------------------------------------------------------------------- whose folder it is
def test_a_new_run_is_refused_in_the_folder_of_another_and_told_the_three_ways_out(
    used,
):
    words = (
        rf"--save {used} holds another run: iteration 20 \(run id aa11, written \d{{4}}-.*\).*Add "
        rf"--load {used} to continue that run; add --overwrite-save .*; or give another --save folder"
    )
    with pytest.raises(CheckpointError, match=words):
        start(save=used)
    assert start(save=used, overwrite_save=True).step is None


def test_a_run_that_continues_keeps_its_id_and_others_get_one_each(used, tmp_path):
    assert (
        start(load=used, save=used).run_id
        == start(load=used, save=tmp_path / "new").run_id
        == "aa11"
    )
    assert (
        start(load=used, save=f"{used}/../used/", no_load_optim=True).run_id == "aa11"
    )
    ids = {
        start(save=tmp_path / "new").run_id,
        start(save=tmp_path / "new").run_id,
        start().run_id,
        start(load=used, finetune=True).run_id,
    }
    assert len(ids) == 4 and "aa11" not in ids


def test_going_back_by_the_tracker_is_the_same_run(used):
    (used / TRACKER).write_text("10")
    found = start(load=used, save=used)
    assert (found.step, found.run_id) == (10, "aa11")


def test_a_checkpoint_without_a_run_id_continues_under_a_new_one(tmp_path):
    checkpoint(tmp_path / "old", 10, run_id=None)
    assert start(load=tmp_path / "old", save=tmp_path / "old").run_id.isalnum()
    with pytest.raises(CheckpointError, match="run id unknown"):
        start(save=tmp_path / "old")


@pytest.mark.parametrize(
    "run_id, step, words",
    [
        (
            "bb22",
            5,
            "holds another run: iteration 5 .*Use --load .*/there to continue that run",
        ),
        ("aa11", 30, "holds a later iteration of this run: iteration 30"),
        ("aa11", 20, None),
    ],
)
def test_loading_here_and_saving_there_needs_that_there_is_nothing_to_lose_there(
    used, tmp_path, run_id, step, words
):
    checkpoint(tmp_path / "there", step, run_id)
    if words is None:
        assert start(load=used, save=tmp_path / "there").run_id == "aa11"
        return
    with pytest.raises(CheckpointError, match=words):
        start(load=used, save=tmp_path / "there")


def test_fine_tuning_into_the_folder_of_its_weights_is_another_run(used):
    with pytest.raises(CheckpointError, match="Remove --finetune to continue that run"):
        start(load=used, save=used, finetune=True)


@pytest.mark.parametrize(
    "name, text", [("metrics.jsonl", '{"step": 1}\n'), (TRACKER, "100")]
)
def test_metrics_or_a_tracker_alone_are_another_run_too(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(
        CheckpointError, match="holds another run: files of a run without a checkpoint"
    ):
        start(save=tmp_path)


def test_a_run_without_a_checkpoint_is_named_by_its_metrics_and_can_start_again(
    tmp_path,
):
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "train", "run": "486b7c5d", "step": 3}\n{"kind": "tra'
    )
    with pytest.raises(
        CheckpointError,
        match=r"run id 486b7c5d.*Add --load \S+ to start that run again from scratch",
    ):
        start(save=tmp_path)


@pytest.mark.parametrize("has_load", [False, True])
def test_a_restart_begins_again_among_the_files_of_its_own_run(
    tmp_path, monkeypatch, used, has_load
):
    """The run is named by its launcher, or by the checkpoint that it continues from."""
    monkeypatch.setenv("MEGATRON_DS_RUN", "486b7c5d")
    run_id = "aa11" if has_load else "486b7c5d"
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "metrics.jsonl").write_text(f'{{"run": "{run_id}", "step": 3}}\n')
    found = start(save=begun, **({"load": used} if has_load else {}))
    assert (found.step, found.run_id) == (20 if has_load else None, run_id)


def test_a_restart_leaves_the_first_lines_of_its_run_with_overwrite_save(tmp_path):
    """Only the run that was there before is moved into a subfolder."""
    flags = ["--save", str(tmp_path), "--overwrite-save"]
    given = parse([*MOCK, *flags], world_size=1)
    environ = {"MEGATRON_DS_RESTARTS": "1", "MEGATRON_DS_RUN": "486b7c5d"}
    for run_id, stays in (("486b7c5d", True), ("aa11", False)):
        (tmp_path / "metrics.jsonl").write_text(f'{{"run": "{run_id}", "step": 3}}\n')
        now = continued(given, solo(), environ)
        assert now.checkpoint.overwrite_save == (not stays)
        clear_save_folder(now.checkpoint, solo())
        assert (tmp_path / "metrics.jsonl").exists() == stays


def test_weights_to_start_from_do_not_make_another_run_of_the_same_command(
    used, tmp_path
):
    """The folder is asked for by the --load of the user, in whose place these weights are loaded."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "metrics.jsonl").write_text('{"run": "486b7c5d", "step": 3}\n')
    words = ["--pretrained-checkpoint", str(used), "--save", str(own)]
    given = parse([*MOCK, *words, "--load", str(own)], world_size=1)
    now = started_from_pretrained(given, solo())
    assert find_start(now.checkpoint, solo(), given.checkpoint).step == 20
    # without --load it is a new run
    alone = parse([*MOCK, *words], world_size=1)
    now = started_from_pretrained(alone, solo())
    with pytest.raises(CheckpointError, match="Add --load"):
        find_start(now.checkpoint, solo(), alone.checkpoint)


@pytest.mark.parametrize(
    "words, problem",
    [
        (["--load", "{0}/mispelt", "--save", "{0}/new"], "the folder does not exist"),
        (
            ["--load", "{0}/new", "--save", "{0}/new", "--exit-on-missing-checkpoint"],
            "--exit-on-missing-checkpoint is given",
        ),
    ],
)
def test_weights_to_start_from_do_not_hide_a_load_folder_without_a_checkpoint(
    used, tmp_path, words, problem
):
    flags = [word.format(tmp_path) for word in words]
    given = parse([*MOCK, "--pretrained-checkpoint", str(used), *flags], world_size=1)
    with pytest.raises(MismatchError, match=problem):
        started_from_pretrained(given, solo())


@pytest.mark.parametrize(
    "load, finetune, advice",
    [
        (None, False, "Add --load {there} to start that run again from scratch"),
        ("there", True, "Remove --finetune to start that run again from scratch"),
        ("used", False, "Use --load {there} to start that run again from scratch"),
        (
            "used",
            True,
            "Use --pretrained-checkpoint {used} --load {there} in place of --load {used} --finetune to start",
        ),
    ],
)
def test_what_to_do_about_a_run_without_a_checkpoint(
    used, tmp_path, load, finetune, advice
):
    there = tmp_path / "there"
    there.mkdir()
    (there / "metrics.jsonl").write_text('{"run": "486b7c5d", "step": 3}\n')
    folders = {"there": there, "used": used}
    with pytest.raises(MismatchError) as error:
        start(save=there, load=folders.get(load), finetune=finetune)
    assert advice.format(**folders) in str(error.value)


def test_an_empty_metrics_file_is_nothing(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    assert start(save=tmp_path).step is None


def test_overwrite_save_moves_the_other_run_into_a_folder_that_can_be_loaded(used):
    (used / "metrics.jsonl").write_text('{"step": 1}\n')
    (used / "notes.txt").write_text("mine")
    (used / "tokenizer-0123456789ab" / "vocab_file").mkdir(parents=True)
    (used / "tokenizer-0123456789ab" / "vocab_file" / "vocab.txt").write_text("[PAD]")
    clear_save_folder(CheckpointConfig(save=str(used), overwrite_save=True), solo())
    [aside] = used.glob("replaced-aa11-*")
    assert sorted(p.name for p in used.iterdir()) == [
        "notes.txt",
        aside.name,
        "tokenizer-0123456789ab",
    ]
    assert sorted(p.name for p in aside.iterdir()) == [
        "iter_0000010",
        "iter_0000020",
        TRACKER,
        "metrics.jsonl",
        "tokenizer-0123456789ab",
    ]
    assert (
        aside / "tokenizer-0123456789ab" / "vocab_file" / "vocab.txt"
    ).read_text() == "[PAD]"
    assert start(load=aside, save=aside).step == 20
    assert move_aside(used) is None


def test_overwrite_save_leaves_the_run_that_continues_there(used):
    clear_save_folder(
        CheckpointConfig(save=str(used), load=str(used), overwrite_save=True), solo()
    )
    assert latest(used) == 20


# ---------------------------------------------------------------------- a folder without a checkpoint
def test_one_command_starts_and_resumes(tmp_path, caplog):
    caplog.set_level("INFO")
    assert start(load=tmp_path / "run", save=tmp_path / "run").step is None
    assert f"{tmp_path}/run holds no checkpoint: starting from scratch" in caplog.text


def test_a_misspelt_load_is_an_error_with_the_names_that_are_close(used, tmp_path):
    with pytest.raises(
        CheckpointError,
        match=r"--load .*/uzed: the folder does not exist, .* Did you mean .*/used\?",
    ):
        start(load=tmp_path / "uzed")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        CheckpointError, match="--load .*/empty: the folder holds no checkpoint"
    ):
        start(load=tmp_path / "empty", save=tmp_path / "other")
    with pytest.raises(CheckpointError, match="--exit-on-missing-checkpoint is given"):
        start(
            load=tmp_path / "empty",
            save=tmp_path / "empty",
            exit_on_missing_checkpoint=True,
        )


# ---------------------------------------------------------------------- links and pipes
def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (f".{TRACKER}.new", f".{TRACKER}"):
        (tmp_path / name).symlink_to(victim)
    write_durably(tmp_path / TRACKER, "10")
    assert victim.read_text() == "precious" and read_tracker(tmp_path) == "10"


def test_a_pipe_as_tracker_or_run_file_is_an_error_and_does_not_hang(used):
    os.remove(used / TRACKER)
    os.mkfifo(used / TRACKER)
    with pytest.raises(CheckpointError, match=f"{TRACKER} is not a regular file"):
        latest(used)
    os.remove(used / TRACKER)
    os.remove(used / "iter_0000020" / "run.json")
    os.mkfifo(used / "iter_0000020" / "run.json")
    with pytest.raises(CheckpointError, match="run.json is not a regular file"):
        read_run(used, 20)


# ---------------------------------------------------------------------- room
def room(folder, saves=1, limit=None):
    check_room(
        folder,
        pieces_of(Layout(), 0, 1),
        coordinates={},
        world=solo(),
        saves=saves,
        limit=limit,
    )


def test_a_disk_that_cannot_hold_one_checkpoint_is_an_error_before_the_first_step(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(disk_space, "free_bytes", lambda folder: BYTES - 1)
    with pytest.raises(
        CheckpointError,
        match=rf"--save .*: no space left .* {BYTES:,} bytes needed, {BYTES - 1:,} free",
    ):
        room(tmp_path)
    monkeypatch.setattr(disk_space, "free_bytes", lambda folder: None)
    room(tmp_path)


@pytest.mark.parametrize(
    "saves, limit, warned",
    [(2, None, False), (3, None, True), (9, 1, False), (9, 2, True), (1, 9, False)],
)
def test_a_disk_that_will_be_full_later_is_a_warning(
    tmp_path, monkeypatch, caplog, saves, limit, warned
):
    monkeypatch.setattr(disk_space, "free_bytes", lambda folder: 2 * BYTES)
    room(tmp_path, saves, limit)
    assert ("checkpoints that fit: 2" in caplog.text) == warned


def test_the_bytes_of_a_checkpoint_are_those_of_its_files(tmp_path):
    checkpoint(tmp_path, 1)
    held = sum(
        path.stat().st_size for path in (tmp_path / "iter_0000001").glob("*.distcp")
    )
    assert 0.5 * BYTES < BYTES < held


def saved_under_a_limit(folder, most):
    """The error of a save by a process that may write files of so many bytes."""

    def attempt():
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        try:
            save(
                folder,
                1,
                pieces_of(Layout(), 0, 1, hidden=600),
                coordinates={},
                world=solo(),
                run={},
            )
        except CheckpointError as error:
            (folder.parent / "error").write_text(str(error)[:most])

    assert survived(forked(attempt))
    return (folder.parent / "error").read_text()


@pytest.mark.parametrize("most", [4096, 200_000])
def test_a_limit_of_file_size_is_named_with_the_bytes(tmp_path, most):
    share = bytes_written_here(pieces_of(Layout(), 0, 1, hidden=600), {})
    assert share > most
    message = saved_under_a_limit(tmp_path / "run", most)
    assert re.search(
        rf"File too large: .* {share:,} bytes needed, .* files of {most:,} bytes \(ulimit -f\)",
        message,
    )
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    "error, free, words",
    [
        (
            OSError(errno.ENOSPC, "?"),
            3_000_000,
            "No space left on device: about 5,000,000 bytes needed, 3,000,000 free",
        ),
        (
            OSError(errno.EDQUOT, "?"),
            None,
            "Disk quota exceeded: about 5,000,000 bytes needed, an unknown number free",
        ),
        (
            RuntimeError("unexpected pos 704 vs 598"),
            3_000_000,
            "No space left on device: about 5,000,000 bytes needed, 3,000,000",
        ),
    ],
)
def test_a_write_that_failed_on_a_full_disk_says_so_with_the_bytes(
    tmp_path, error, free, words
):
    assert words in str(explained(error, tmp_path, 5_000_000, free, 5_000_000))


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), RuntimeError("another defect")]
)
def test_another_failure_of_a_write_keeps_its_words(tmp_path, error):
    assert explained(error, tmp_path, 5_000_000, 10**9, 5_000_000) is error
