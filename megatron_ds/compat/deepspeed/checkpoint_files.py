"""The files of a tag that DeepSpeed wrote: their names, and the parts of the fp32 weights in them.

    mp_rank_00_model_states.pt                         weights of a tensor-parallel rank
    zero_pp_rank_1_mp_rank_00_optim_states.pt          optimizer of data-parallel rank 1
    layer_03-model_00-model_states.pt                  a layer of a pipeline

Nothing in the files is executed (compat/conversion/files). engine.load_checkpoint reads such folders whole.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ..conversion.files.stored_tensor import StoredTensor
from ..conversion.files.torch_file import read_torch_file

OPTIM = "_optim_states.pt"
MODEL = "_model_states.pt"
# The key of the masters, by stage; below stage 3 each group of a rank is one tensor.
MASTERS = {3: "fp32_flat_groups"}
WHOLE_GROUPS = "single_partition_of_fp32_groups"


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Return the path of the weights of a tensor-parallel rank, which is given as text: "00"."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}{MODEL}")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """Return the path of the optimizer of a data-parallel rank."""
    name = f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}{OPTIM}"
    return os.path.join(base_folder, name)


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """Return the path of a layer of a pipeline. layer_id: "layer_03" """
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}{MODEL}")


def get_optim_files(checkpoint_dir: str | os.PathLike) -> list[str]:
    """Return the files of the optimizer, in the order of their numbers. Raises FileNotFoundError without one."""
    return _files(checkpoint_dir, OPTIM)


def get_model_state_files(checkpoint_dir: str | os.PathLike) -> list[str]:
    """Return the files of the weights, in the order of their numbers. Raises FileNotFoundError without one."""
    return _files(checkpoint_dir, MODEL)


def _files(folder: str | os.PathLike, ending: str) -> list[str]:
    found = [str(path) for path in Path(folder).glob(f"*{ending}")]
    if not found:
        raise FileNotFoundError(
            f"{folder} has no file *{ending}: give the folder of a tag that DeepSpeed wrote, for instance "
            "saved/global_step10."
        )
    return sorted(found, key=_numbers)


def _numbers(path: str) -> list[Any]:
    """ "rank_10" behind "rank_9": texts at even places, numbers at odd ones."""
    parts: list[Any] = re.split(r"(\d+)", path)
    parts[1::2] = map(int, parts[1::2])
    return parts


def parse_optim_states(
    files: Sequence[str], ds_checkpoint_dir: str | os.PathLike
) -> tuple[int, int, list]:
    """(stage, data-parallel ranks, fp32 weights of each rank) of the optimizer files of a tag.

    The weights of a rank: below stage 3 a list with one flat tensor for each group, at stage 3 one flat tensor.
    Raises CheckpointError for files without ZeRO's state.
    """
    states = []
    for path in files:
        states.append(_optimizer_of(path))
    if not states:
        raise CheckpointError(
            f"{ds_checkpoint_dir}: no optimizer file was given. Give those of get_optim_files."
        )
    first = states[0]
    stage = first["zero_stage"]
    # A number, or one for each group of parameters.
    ranks = first.get("partition_count", len(files))
    if isinstance(ranks, list | tuple):
        ranks = max(ranks)
    if ranks != len(files):
        raise CheckpointError(
            f"{ds_checkpoint_dir} has {len(files)} optimizer files of {ranks} ranks. Copy all files of the tag."
        )
    key = MASTERS.get(stage, WHOLE_GROUPS)
    groups = [_read(state[key]) for state in states]
    return stage, ranks, list(map(torch.cat, groups)) if stage == 3 else groups


def _optimizer_of(path: str) -> dict[str, Any]:
    content = read_torch_file(path).content
    state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict) or "zero_stage" not in state:
        raise CheckpointError(
            f"{path} is no optimizer file of ZeRO: it has no optimizer_state_dict with zero_stage."
        )
    return state | {"zero_stage": int(state["zero_stage"])}


def _read(groups: Any) -> list[torch.Tensor]:
    return [g.read() if isinstance(g, StoredTensor) else g for g in groups]
