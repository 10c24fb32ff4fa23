"""Folders that a conversion reads and writes: downloads that are incomplete, folders of runs, disks that are full."""

import json
from unittest.mock import Mock

import pytest

from megatron_ds.commands.verify_checkpoint import run_tool as verify
from megatron_ds.compat.conversion.foreign_start import (
    foreign_format as format_of_run,
)
from megatron_ds.compat.conversion.formats import detected
from megatron_ds.compat.conversion.huggingface.format import (
    FORMAT as HUGGING_FACE,
)
from megatron_ds.compat.conversion.own_format import FORMAT as OURS
from megatron_ds.compat.conversion.published import published
from megatron_ds.errors import CheckpointError
from tests.compat_checkpoints.test_huggingface_damage import (
    convert,
    refused,
    sharded,
    written,
)
from tests.contracts.test_special_tokens import library_json

pytestmark = pytest.mark.plan


@pytest.mark.parametrize("left", [(), ("model-00001-of-00002.safetensors",)])
def test_a_download_without_weights_or_their_index_says_what_it_lacks(tmp_path, left):
    source = sharded(tmp_path / "in")
    for path in source.glob("model*"):
        if path.name not in left:
            path.unlink()
    assert detected(source) is HUGGING_FACE
    assert format_of_run(str(source), None) == HUGGING_FACE.name
    refused(source, tmp_path / "out", "has no model.safetensors and no model.saf.*Comp")


def test_a_config_json_of_another_kind_is_no_model(tmp_path):
    for content in ('{"train_batch_size": 4}', "[]", "{"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match="is not known"):
            detected(tmp_path)


def test_a_conversion_into_the_folder_of_a_run_changes_nothing(tmp_path):
    source, target = written(tmp_path / "in"), tmp_path / "out"
    convert(source, target)
    with pytest.raises(CheckpointError, match="out holds iteration 0 .* Give a new fo"):
        convert(source, target)
    assert HUGGING_FACE.name != detected(target).name
    with pytest.raises(
        CheckpointError, match="is a checkpoint itself: give the folder"
    ):
        detected(target / "iter_0000000")
    with pytest.raises(CheckpointError, match="is a checkpoint itself"):
        verify(["--load", str(target / "iter_0000000")])


def test_a_conversion_that_fails_leaves_nothing(tmp_path, monkeypatch):
    source = written(tmp_path / "in")
    (source / "tokenizer.json").write_text(json.dumps(library_json(("</s>",))))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file cannot be written: .*Give another"):
        convert(source, tmp_path / "file")
    full = CheckpointError("the disk is full")
    monkeypatch.setattr(f"{OURS.write.__module__}.save", Mock(side_effect=full))
    for target in (tmp_path / "new", tmp_path / "there"):
        if target.name == "there":
            target.mkdir()
        with pytest.raises(CheckpointError, match="the disk is full"):
            convert(source, target)
        assert not target.exists() or not any(target.iterdir())


def test_a_disk_that_is_full_for_torch_save_is_an_error_of_the_folder(tmp_path):
    full = RuntimeError("unexpected pos 704")
    full.__context__ = OSError(28, "No space left on device")
    alone = RuntimeError("[enforce fail at inline_container.cc:672]")
    for error, why in ((full, "No space left"), (alone, "torch.save failed")):
        with pytest.raises(CheckpointError, match=f"out cannot be written: {why}"):
            with published(tmp_path / "out"):
                raise error
    with pytest.raises(RuntimeError, match="a defect"), published(tmp_path / "out"):
        raise RuntimeError("a defect")
    assert not any(tmp_path.iterdir())


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    source = written(tmp_path / "in")
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (source / "model.safetensors").write_text(text)
    refused(source, tmp_path / "out", "a pointer of Git LFS.*run git lfs pull")
