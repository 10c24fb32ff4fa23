"""Names of the files of DeepSpeed's checkpoints, and the fp32 weights of the optimizer's files."""

import pytest
import torch
from megatron_ds.checkpoint.utils import (
    get_layer_ckpt_name_for_rank,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
)
from megatron_ds.utils.zero_to_fp32 import (
    get_model_state_files,
    get_optim_files,
    parse_optim_states,
)

from megatron_ds.errors import CheckpointError

pytestmark = pytest.mark.plan

RANKS = 12


def optimizer_state(stage, rank, **others):
    """Return the state of two groups of a rank, as DeepSpeed writes it."""
    groups = [torch.full((3,), float(rank)), torch.full((2,), rank + 0.5)]
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    return {"zero_stage": stage, "partition_count": RANKS, key: groups, **others}


def write(folder, stage, ranks=RANKS, **others):
    """Write the files of a tag, the last rank first."""
    for rank in reversed(range(ranks)):
        state = {"optimizer_state_dict": optimizer_state(stage, rank, **others)}
        torch.save(state, get_zero_ckpt_name_for_rank(folder, rank, 0))
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"module": {}}, get_model_ckpt_name_for_rank(folder, f"{rank:02d}"))
        assert (folder / f"{name}_optim_states.pt").is_file()


def test_the_names_are_those_that_deepspeed_writes():
    theirs = pytest.importorskip("deepspeed.checkpoint.utils")
    for function, arguments in [
        (get_model_ckpt_name_for_rank, ("saved/tag", "03")),
        (get_zero_ckpt_name_for_rank, ("saved/tag", 11, 2)),
        (get_layer_ckpt_name_for_rank, ("saved/tag", "layer_03", 1)),
    ]:
        expected = getattr(theirs, function.__name__)(*arguments)
        assert function(*arguments) == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_weights_of_each_rank_in_the_order_of_the_ranks(tmp_path, stage):
    write(tmp_path, stage)
    found, ranks, weights = parse_optim_states(get_optim_files(tmp_path), tmp_path)
    assert (found, ranks, len(weights)) == (stage, RANKS, RANKS)
    for rank, held in enumerate(weights):
        expected = [torch.full((3,), float(rank)), torch.full((2,), rank + 0.5)]
        held, expected = (
            (held, expected) if stage < 3 else ([held], [torch.cat(expected)])
        )
        assert all(map(torch.equal, held, expected))


def test_files_are_ordered_by_their_numbers(tmp_path):
    write(tmp_path, 2)
    for files in (get_optim_files(tmp_path), get_model_state_files(tmp_path)):
        assert len(files) == RANKS
    assert "rank_9_" in get_optim_files(tmp_path)[9]
    assert "rank_10_" in get_optim_files(tmp_path)[10]


def test_a_count_for_each_group_counts_by_the_greatest(tmp_path):
    write(tmp_path, 2, partition_count=[RANKS, RANKS // 2])
    _, ranks, _ = parse_optim_states(get_optim_files(tmp_path), tmp_path)
    assert ranks == RANKS


def test_a_folder_without_files_is_named(tmp_path):
    for get in (get_optim_files, get_model_state_files):
        with pytest.raises(FileNotFoundError, match=f"{tmp_path} has no file"):
            get(tmp_path)
    with pytest.raises(CheckpointError, match="no optimizer file was given"):
        parse_optim_states([], tmp_path)


def test_a_missing_rank_is_counted(tmp_path):
    write(tmp_path, 2, ranks=5)
    with pytest.raises(CheckpointError, match="has 5 optimizer files of 12 ranks"):
        parse_optim_states(get_optim_files(tmp_path), tmp_path)


@pytest.mark.parametrize("content", [{}, {"optimizer_state_dict": {"state": {}}}, [1]])
def test_a_file_without_the_state_of_zero_is_named(tmp_path, content):
    path = get_zero_ckpt_name_for_rank(tmp_path, 0, 0)
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=f"{path} is no optimizer file of ZeRO"):
        parse_optim_states([path], tmp_path)
