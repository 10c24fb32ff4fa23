"""The folder of Megatron-LM's checkpoints: which iteration to read.

latest_checkpointed_iteration.txt    "123", or "release": weights without iteration
iter_0000123/  release/              mp_rank_*/model_optim_rng.pt (torch) or .metadata (torch_dist)
"""

import re
from pathlib import Path

from ....checkpoint.folder import TRACKER, name_of, read_regular
from ....errors import CheckpointError

RELEASE = "release"
_ITERATION = re.compile(r"iter_([0-9]{7,})")
_NUMBER = re.compile(r"[0-9]{1,18}")


def iteration_folders(folder: Path) -> list[Path]:
    """Return the folders of iterations below a folder, or the folder itself if it is one."""
    if not folder.is_dir():
        return []
    found = sorted(
        path
        for path in folder.iterdir()
        if path.is_dir() and (_ITERATION.fullmatch(path.name) or path.name == RELEASE)
    )
    return found or [folder]


def find_iteration(folder: Path, wanted: int | None) -> Path:
    """Return the folder of an iteration; of the one in the tracker if `wanted` is None.

    Raises CheckpointError if there is none.
    """
    # The given folder may itself be that of an iteration.
    folders = iteration_folders(folder)
    names = [path.name for path in folders]
    if folders == [folder]:
        own = folder.resolve().name
        if (
            wanted is not None
            and own != name_of(wanted)
            and (_ITERATION.fullmatch(own) or own == RELEASE)
        ):
            raise CheckpointError(
                f"{folder} is the folder of {own}, and --iteration {wanted} is wanted. "
                "Give the folder that contains it."
            )
        return folder
    # Without a wanted iteration the tracker decides, or the only folder there is.
    if wanted is not None:
        name = name_of(wanted)
    else:
        try:
            text = read_regular(folder / TRACKER).decode(errors="replace").strip()
        except OSError:
            if len(folders) > 1:
                raise CheckpointError(
                    f"{folder} has no {TRACKER}, and several iterations: "
                    f"{', '.join(names)}. Choose one with --iteration."
                ) from None
            return folders[0]
        is_number = text != RELEASE and _NUMBER.fullmatch(text)
        name = name_of(int(text)) if is_number else text
    if name not in names:
        raise CheckpointError(f"{folder} has no {name}. It has {', '.join(names)}.")
    return folder / name
