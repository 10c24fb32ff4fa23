"""Merging and assigning tensors of DeepSpeed's files, on small files that DeepSpeed did not write."""

from argparse import Namespace

import pytest
import torch

from megatron_ds.compat.conversion.deepspeed import format as deepspeed_format
from megatron_ds.compat.conversion.deepspeed.checkpoint import (
    read_engine_folder,
)
from megatron_ds.compat.conversion.deepspeed.folder import (
    buffer_names,
    files_of,
    tag_folder,
)
from megatron_ds.compat.conversion.deepspeed.foreign_names import (
    save_with_names,
    scaler_object,
)
from megatron_ds.compat.conversion.deepspeed.optimizer_files import (
    scaler_numbers,
)
from megatron_ds.compat.conversion.deepspeed.stage0 import stage0_state
from megatron_ds.compat.conversion.deepspeed.universal_folder import (
    _tensor,
    write_universal,
)
from megatron_ds.compat.conversion.deepspeed.zero_shards import (
    Shard,
    joined,
    merged_parts,
    merged_slices,
    replayed_slices,
)
from megatron_ds.compat.conversion.family import entries_of, model_of, to_theirs
from megatron_ds.compat.conversion.files.stored_tensor import (
    LogicalCheckpoint,
    RawCheckpoint,
    StoredProgress,
    StoredTensor,
)
from megatron_ds.compat.conversion.files.torch_file import read_torch_file
from megatron_ds.compat.conversion.formats import Wishes
from megatron_ds.compat.conversion.megatron import mds_family
from megatron_ds.compat.engine.deepspeed_loading import deepspeed_folder
from megatron_ds.errors import CheckpointError

pytestmark = pytest.mark.plan

ARGUMENTS = dict(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=4,
    max_position_embeddings=6,
    swiglu=True,
    ffn_hidden_size=6,
    add_bias_linear=False,
    normalization="rmsnorm",
    seq_length=6,
    vocab_size=11,
    use_rotary_position_embeddings=True,
    untie_embeddings_and_output_weights=True,
)


def stored(tensor, place="file"):
    return StoredTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor, place)


def whole_model():
    """(model, tensors of Megatron-DeepSpeed, ours)."""
    model = model_of(mds_family.model_options(ARGUMENTS) | {"vocab_size": 11}, "test")
    family, draw = mds_family.family("thirds"), torch.Generator().manual_seed(1)
    entries = entries_of(family, model)
    ours = {
        entry.ours: torch.randn(entry.spec.shape, generator=draw) for entry in entries
    }
    theirs = to_theirs(
        entries, {name: stored(tensor) for name, tensor in ours.items()}, model
    )
    return model, {name: tensor.read() for name, tensor in theirs.items()}, ours


def on_rank(name, tensor, rank, ranks):
    """What a tensor-parallel rank of Megatron-DeepSpeed holds."""
    dim = 1 if name.endswith((".dense.weight", "4h_to_h.weight")) else 0
    packed = {"query_key_value": 3, "h_to_4h": 2}
    parts = next((n for words, n in packed.items() if words in name), 1)
    if "norm" in name:
        return tensor
    if "word_embeddings" in name or "output_layer" in name:
        tensor = torch.cat([tensor, torch.full((1, 8), 99.0)])  # padding to 12 rows
    return torch.cat(
        [part.chunk(ranks, dim)[rank] for part in tensor.chunk(parts, dim)], dim
    ).clone()


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensor_parallel_ranks_of_megatron_deepspeed_are_merged(tmp_path, ranks):
    _, theirs, ours = whole_model()
    folder = tmp_path / "global_step5"
    folder.mkdir()
    for rank in range(ranks):
        module = {
            name: on_rank(name, tensor, rank, ranks) for name, tensor in theirs.items()
        }
        torch.save(
            {
                "module": module,
                "args": Namespace(**ARGUMENTS),
                "global_steps": 5,
                "param_shapes": None,
                "dp_world_size": 1,
            },
            folder / f"mp_rank_{rank:02d}_model_states.pt",
        )
    (tmp_path / "latest").write_text("global_step5")
    found = deepspeed_format.read(
        tmp_path, Wishes(qkv_packing="thirds", weights_only=True)
    )
    assert (
        found.tensors["weight"].keys() == ours.keys() and found.progress.iteration == 5
    )
    for name, tensor in ours.items():
        assert torch.equal(found.tensors["weight"][name].read(), tensor), name
    with pytest.raises(
        CheckpointError, match="--qkv-packing thirds.*--qkv-packing heads"
    ):
        deepspeed_format.read(tmp_path, Wishes(weights_only=True))
    if ranks == 2:
        (folder / "mp_rank_00_model_states.pt").unlink()
        with pytest.raises(
            CheckpointError,
            match="1 of 2 model_states files are missing, first that of",
        ):
            files_of(folder)


def test_a_pointer_that_leaves_the_folder_is_refused(tmp_path):
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="not the name of a folder"):
        tag_folder(tmp_path)


MODEL_FILE = "mp_rank_00_model_states.pt"


@pytest.mark.parametrize(
    "pointers, ours, found",
    [
        ({"latest": "global_step200"}, "", "global_step200"),
        ({"latest": "tag"}, "tag/iter_0000300", None),  # saved here with a tag
        ({"latest": ""}, "iter_0000300", None),  # and without one
        ({"latest": ""}, "", None),
        (
            {"latest": "global_step200"},
            "iter_0000100",
            "global_step200",
        ),  # DeepSpeed continued ours
        (
            {"latest": "global_step200"},
            "global_step200/iter_0000200",
            None,
        ),  # saved into one of them
        ({"latest_universal": "global_step200"}, "", "global_step200"),
        ({"latest_universal": "global_step200"}, "iter_0000300", None),
    ],
)
def test_an_engine_continues_from_its_own_checkpoint_beside_those_of_deepspeed(
    pointers, ours, found, tmp_path
):
    (tmp_path / "global_step200").mkdir()
    (tmp_path / "global_step200" / MODEL_FILE).touch()
    (tmp_path / ours).mkdir(parents=True, exist_ok=True)
    for name, text in pointers.items():
        (tmp_path / name).write_text(text)
    assert deepspeed_folder(tmp_path, None) == (found and tmp_path / found)
    tag = "global_step200"
    assert deepspeed_folder(tmp_path, tag) == (None if tag in ours else tmp_path / tag)


def test_only_the_flat_tensor_of_stage_3_gets_the_shape_in_the_model_file(tmp_path):
    torch.save({"cat_dim": 0, "param": torch.arange(8.0)}, tmp_path / "merged.pt")
    torch.save(torch.arange(8.0), tmp_path / "flat.pt")
    assert torch.equal(_tensor(tmp_path / "merged.pt", (4,)).read(), torch.arange(8.0))
    assert torch.equal(
        _tensor(tmp_path / "flat.pt", (2, 3)).read(), torch.arange(6.0).view(2, 3)
    )


def test_masters_of_a_fused_optimizer_are_the_weights(tmp_path):
    weights = {"w": torch.randn(2, 3), "b": torch.randn(3)}
    flat = torch.cat([tensor.flatten() for tensor in weights.values()])
    state = {"step": 2, "exp_avg": flat + 1, "exp_avg_sq": flat + 2}
    optimizer = {
        "fp32_groups_flat": [flat],
        "optimizer_state_dict": {
            "state": {0: state},
            "param_groups": [{"params": [0]}],
        },
    }
    torch.save(
        {
            "module": {name: tensor.half() for name, tensor in weights.items()},
            "param_shapes": None,
            "dp_world_size": 1,
            "optimizer": optimizer,
        },
        tmp_path / MODEL_FILE,
    )
    found = read_engine_folder(tmp_path).tensors
    for name, tensor in weights.items():
        assert torch.equal(found["weight"][name].read(), tensor)
        assert torch.equal(found["exp_avg"][name].read(), tensor + 1)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"global_steps": float("inf")}, "'global_steps' is inf, not a count"),
        ({"module": 3}, "is a int"),
        (
            {"optimizer": {"optimizer_state_dict": 3}},
            "another kind than the program writes",
        ),
        ({"param_shapes": [{"w": (2**40, 2**40)}]}, "no optim_states files"),
    ],
)
def test_a_file_with_values_of_other_kinds_is_refused(changes, words, tmp_path):
    torch.save(
        {"module": {"w": torch.ones(2)}, "dp_world_size": 1} | changes,
        tmp_path / MODEL_FILE,
    )
    with pytest.raises(CheckpointError, match=words):
        read_engine_folder(tmp_path)


def test_a_rank_without_bounds_in_the_name_of_a_file_takes_no_time(tmp_path):
    for name in (
        MODEL_FILE,
        "zero_pp_rank_999999999_mp_rank_999999999_model_states.pt",
    ):
        (tmp_path / name).touch()
    with pytest.raises(
        CheckpointError, match="of 1000000000000000000 model_states files are missing"
    ):
        files_of(tmp_path)


def test_sizes_whose_product_overflows_do_not_become_small():
    shape = (2**32, 2**32)
    with pytest.raises(CheckpointError, match="shards hold 0 elements"):
        joined("w", shape, [], "file")
    assert StoredTensor(shape, torch.float32, lambda: None, "file").nbytes == 2**66


def test_a_universal_folder_of_16_bits_is_refused(tmp_path):
    with pytest.raises(
        CheckpointError,
        match="--dtype bfloat16: universal folders hold weights in float32",
    ):
        deepspeed_format.write(
            LogicalCheckpoint(tmp_path, {}, {}),
            tmp_path / "u",
            Wishes(dtype="bfloat16"),
        )


def shards_of(shapes, ranks, stage3=False):
    """(tensors, shards) of one group, cut as DeepSpeed does."""
    draw = torch.Generator().manual_seed(2)
    tensors = {
        name: torch.randn(shape, generator=draw) for name, shape in shapes.items()
    }
    if stage3:
        padded = [
            torch.cat([t.flatten(), t.new_full((-t.numel() % ranks,), 7.0)])
            for t in tensors.values()
        ]
        vectors = [
            torch.cat([p.chunk(ranks)[rank] for p in padded]) for rank in range(ranks)
        ]
    else:
        flat = torch.cat([t.flatten() for t in tensors.values()])
        vectors = torch.cat([flat, flat.new_full((-len(flat) % ranks,), 7.0)]).chunk(
            ranks
        )
    return tensors, [
        Shard(f"rank {r}", {"master": [stored(vector)]})
        for r, vector in enumerate(vectors)
    ]


SHAPES = {"a": (5, 3), "b": (4,), "c": (), "d": (7, 2)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_shards_of_any_number_of_ranks_are_the_whole_tensors(ranks):
    tensors, shards = shards_of(SHAPES, ranks)
    found = merged_slices(SHAPES, shards, replayed_slices(SHAPES, shards))
    tensors3, shards3 = shards_of(SHAPES, ranks, stage3=True)
    for expected, named in (
        (tensors, found["master"]),
        (tensors3, merged_parts(SHAPES, shards3)["master"]),
    ):
        assert all(
            torch.equal(named[name].read(), tensor) for name, tensor in expected.items()
        )


def test_shards_that_do_not_fit_are_refused():
    _, shards = shards_of(SHAPES, 3)
    slices = replayed_slices(SHAPES, shards)
    for wrong in (slices[::-1], slices[:2] + [{}], [slices[0], slices[0], slices[2]]):
        with pytest.raises(CheckpointError, match="mixed up"):
            merged_slices(SHAPES, shards, wrong)
    with pytest.raises(CheckpointError, match="a rank of 2 holds"):
        merged_parts(SHAPES, shards_of(SHAPES, 3, stage3=True)[1][:2])


def state_of(*shapes):
    return {
        "state": {
            i: {"exp_avg": stored(torch.full(shape, float(i)))}
            for i, shape in enumerate(shapes)
        },
        "param_groups": [{"params": list(range(len(shapes)))}],
    }


def test_state_without_names_is_assigned_only_in_one_way():
    weights = {
        name: stored(torch.zeros(shape))
        for name, shape in {
            "a": (2, 3),
            "frozen": (4, 4),
            "b": (2,),
            "c": (2, 3),
        }.items()
    }
    found = stage0_state(state_of((2, 3), (2,), (2, 3)), None, weights, "file")[
        "exp_avg"
    ]
    assert {name: float(tensor.read().mean()) for name, tensor in found.items()} == {
        "a": 0,
        "b": 1,
        "c": 2,
    }
    for shapes, ways in (((2, 3),), "several ways"), (((3, 2),), "no way"):
        with pytest.raises(CheckpointError, match=ways):
            stage0_state(state_of(*shapes), None, weights, "file")
    many = {f"w{i}": stored(torch.zeros(2)) for i in range(3000)}
    assert (
        len(stage0_state(state_of(*[(2,)] * 3000), None, many, "file")["exp_avg"])
        == 3000
    )


def test_the_loss_scaler_is_written_under_the_name_of_deepspeed_without_it(tmp_path):
    numbers = {
        "loss_scale": 512.0,
        "loss_scale_lives": 1,
        "loss_scale_last_overflow": 3,
        "loss_scale_iteration": 9,
    }
    save_with_names({"loss_scaler": scaler_object(numbers)}, tmp_path / "state.pt")
    file = read_torch_file(tmp_path / "state.pt")
    assert file.ignored == ("deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",)
    assert scaler_numbers(file.content["loss_scaler"]) == numbers


@pytest.mark.parametrize(
    "group, optimizer, corrects, decoupled",
    [
        (
            {"bias_correction": False, "lr": 0.1},
            {"type": "Adam", "params": {"adam_w_mode": False}},
            False,
            False,
        ),
        (
            {"bias_correction": True, "decoupled_weight_decay": True},
            {"params": {"bias_correction": False}},
            True,
            True,
        ),
        (
            {},
            {
                "type": "AdamW",
                "params": {"adam_w_mode": False, "bias_correction": False},
            },
            False,
            True,
        ),
        ({}, None, None, None),
    ],
)
def test_choices_of_adam_are_those_of_the_groups_or_the_json(
    group, optimizer, corrects, decoupled, tmp_path
):
    raw = RawCheckpoint(
        tmp_path, {}, {"param_groups": [group], "ds_config": {"optimizer": optimizer}}
    )
    found = deepspeed_format._training(raw)
    assert found.get("optimizer.adam_bias_correction") is corrects
    assert found.get("optimizer.decoupled_weight_decay") is decoupled


def test_moments_without_a_count_of_updates_are_written_with_that_of_the_training(
    tmp_path,
):
    one = StoredTensor((2,), torch.float32, lambda: torch.ones(2), "w")
    raw = RawCheckpoint(
        tmp_path,
        {kind: {"w": one} for kind in ("weight", "exp_avg", "exp_avg_sq")},
        {},
        StoredProgress(iteration=7),
    )
    path = write_universal(raw, tmp_path / "out")
    state = read_torch_file(path / "zero/optimizer_state.pt").content
    assert read_torch_file(path / "zero/w/step.pt").content.read() == 7
    assert state["optimizer_state_dict"]["state"][0]["step"].read() == 7


def test_names_of_buffers_that_are_no_text_are_an_error():
    assert buffer_names({"buffer_names": ["a", "b"]}, "file") == {"a", "b"}
    for wrong in ([[]], [{}], [3], [None]):
        with pytest.raises(
            CheckpointError, match="file: 'buffer_names' has a .*damaged"
        ):
            buffer_names({"buffer_names": ["a", *wrong]}, "file")
