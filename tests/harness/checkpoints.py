"""Small checkpoints, and such as were changed on purpose: with checksums that fit again, or as format 1 wrote
them."""

import json
import pickle
import zlib
from pathlib import Path

from megatron_ds.checkpoint.run_file import checksum_of, entry_of
from megatron_ds.checkpoint.save import save
from megatron_ds.mpu.group import solo
from tests.harness.states import Layout, pieces_of

OLD, NEW = 2, 4
RUN = {
    "progress": {
        "step": NEW,
        "samples": 16,
        "tokens": 160,
        "scheduled_samples": 16,
        "skipped_steps": 0,
        "nan_steps": 0,
    },
    "optimizer": {"num_updates": 4},
    "config": {"train": {"lr": 0.001}},
}


def some_pieces(seed):
    """Five of the pieces: enough for two files, few enough for hundreds of loads."""
    return pieces_of(Layout(), 0, seed)[2:7]


def save_small(folder, step=NEW):
    run = RUN | {"progress": RUN["progress"] | {"step": step}}
    return save(folder, step, some_pieces(step), coordinates={}, world=solo(), run=run)


def entry(file: Path) -> dict:
    return entry_of(file.stat().st_size, zlib.crc32(file.read_bytes()))


def rewrite_run(path: Path, **changes) -> None:
    """Change values of run.json (None removes one) and its checksum with them."""
    run = json.loads((path / "run.json").read_text())
    run = {
        name: value for name, value in {**run, **changes}.items() if value is not None
    }
    (path / "run.json").write_text(json.dumps({**run, "checksum": checksum_of(run)}))


def reseal(path: Path) -> None:
    """Make run.json agree with the files as they are now, as one who forges a checkpoint would."""
    rewrite_run(
        path,
        files={
            file.name: entry(file) for file in path.iterdir() if file.name != "run.json"
        },
    )


def change_index(path: Path, change) -> None:
    """Let `change` modify the unpickled index, and pickle it again."""
    index = pickle.loads((path / ".metadata").read_bytes())
    change(index)
    (path / ".metadata").write_bytes(pickle.dumps(index))


def reseal_chunks(path: Path) -> None:
    """Make the index agree with the tensor files as they are now, and run.json with both."""

    def with_checksums_that_fit(index):
        for place in index.storage_data.values():
            content = (path / place.relative_path).read_bytes()
            place.crc32 = (
                zlib.crc32(content[: place.offset]),
                zlib.crc32(content[: place.offset + place.length]),
            )

    change_index(path, with_checksums_that_fit)
    reseal(path)


def make_format_1(path: Path) -> None:
    """What the same save would have written before there were checksums."""

    def without_checksums(index):
        index.storage_meta.save_id = None
        for place in index.storage_data.values():
            vars(place).pop("crc32")

    change_index(path, without_checksums)
    run = json.loads((path / "run.json").read_text()) | {"format_version": 1}
    (path / "run.json").write_text(
        json.dumps(
            {k: v for k, v in run.items() if k not in ("save_id", "files", "checksum")}
        )
    )
