"""What this package writes for Megatron-LM is what it read; files of it that are damaged are refused."""

import pickle

import pytest
import torch

from megatron_ds.compat.conversion.family import model_of
from megatron_ds.compat.conversion.files.stored_tensor import (
    WEIGHT,
    LogicalCheckpoint,
    StoredTensor,
)
from megatron_ds.compat.conversion.files.torch_file import read_torch_file
from megatron_ds.compat.conversion.formats import Wishes
from megatron_ds.compat.conversion.megatron import (
    torch_dist_format,
    torch_format,
)
from megatron_ds.compat.conversion.megatron.args import arguments_of, model_options
from megatron_ds.errors import CheckpointError
from megatron_ds.models.specs import specs_of
from tests.harness.legacy_megatron import (
    KEEP,
    Code,
    check_equal,
    logical_gpt,
    write_legacy,
)

pytestmark = pytest.mark.plan


def test_a_state_that_this_package_wrote_for_megatron_is_refused_when_it_is_damaged(
    tmp_path,
):
    source = write_legacy(tmp_path / "a", logical_gpt(), tp=1, pp=1).parent
    found = torch_format.read(source, KEEP)
    torch_dist_format.write(found, tmp_path / "b", Wishes())
    step = tmp_path / "b" / "iter_0000005"
    check_equal(torch_dist_format.read(tmp_path / "b", Wishes()), logical_gpt())
    file = step / "__0_0.distcp"
    whole = file.read_bytes()
    for damaged, words in ((whole[:-50], "truncated"), (b"", "truncated")):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=words):
            torch_dist_format.read(tmp_path / "b", Wishes())
    file.write_bytes(whole[1:] + b"\0")
    damaged = torch_dist_format.read(tmp_path / "b", Wishes())
    with pytest.raises(CheckpointError, match="refused or damaged|no archive"):
        damaged.tensors[WEIGHT]["decoder.final_layernorm.bias"].read()
    file.unlink()
    with pytest.raises(
        CheckpointError, match="All ranks' files belong into one folder"
    ):
        torch_dist_format.read(tmp_path / "b", Wishes())


QWEN = dict(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    ffn_hidden_size=32,
    vocab_size=24,
    max_position_embeddings=8,
    add_bias_linear=False,
    add_qkv_bias=True,
    normalization="RMSNorm",
    activation="swiglu",
    position_embedding_type="rope",
    make_vocab_size_divisible_by=8,
)


def test_layers_without_positions_are_read_as_they_are_written():
    model = model_of(QWEN | {"no_rope_freq": "2"}, "")
    args = arguments_of(model, 1)
    assert args["no_rope_freq"] == [0, 1]
    assert model_options(args, {}, False, 24)["no_rope_freq"] == "[0, 1]"


def test_biases_of_qkv_and_the_options_of_adam_are_written(tmp_path):
    tensors = {
        spec.name: torch.randn(spec.shape) for spec in specs_of(model_of(QWEN, ""))
    }
    stored = {
        name: StoredTensor(
            tuple(tensor.shape), tensor.dtype, lambda tensor=tensor: tensor, name
        )
        for name, tensor in tensors.items()
    }
    ours = LogicalCheckpoint(
        tmp_path,
        QWEN,
        {kind: stored for kind in (WEIGHT, "exp_avg", "exp_avg_sq")},
        optimizer="adam",
        training={
            "optimizer.adam_bias_correction": False,
            "optimizer.decoupled_weight_decay": False,
        },
    )
    counted, place = [], tmp_path / "b"
    lines = torch_dist_format.write(
        ours, place, Wishes(done=counted.append, dtype="bfloat16")
    )
    assert any("--override-opt_param-scheduler" in line for line in lines)
    assert sum(counted) == 3 * sum(tensor.nbytes for tensor in stored.values())
    again = torch_dist_format.read(tmp_path / "b", Wishes())
    assert (
        again.model["add_qkv_bias"] and again.tensors[WEIGHT].keys() == tensors.keys()
    )
    assert again.training.items() >= ours.training.items()
    common = read_torch_file(tmp_path / "b/iter_0000000/common.pt").content
    assert [
        group["bias_correction"]
        for group in common["optimizer"]["optimizer"]["param_groups"]
    ] == [False, False]
    lines = torch_dist_format.write(ours, tmp_path / "c", Wishes(weights_only=True))
    assert not any("--override-opt_param-scheduler" in line for line in lines)


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 4), (4, 1)])
def test_a_release_that_is_written_is_what_was_read(tp, pp, tmp_path):
    tensors = logical_gpt()
    source = write_legacy(tmp_path / "a", tensors, tp=2, pp=1).parent
    found = torch_format.read(source, Wishes(vocab_size=21))
    wishes = Wishes(tensor_parallel=tp, pipeline_parallel=pp)
    torch_format.write(found, tmp_path / "b", wishes)
    assert len(list((tmp_path / "b/release").iterdir())) == tp * pp
    again = torch_format.read(tmp_path / "b", Wishes())
    check_equal(again, tensors, rows=21)
    assert model_of(again.model, "").ffn_size == model_of(found.model, "").ffn_size
    assert again.model.items() >= found.model.items()
    with pytest.raises(CheckpointError, match="do not divide over 3 ranks"):
        torch_format.write(found, tmp_path / "c", Wishes(tensor_parallel=3))
    assert not (tmp_path / "c").exists()


def test_an_index_whose_parts_share_bytes_is_refused(tmp_path):
    source = write_legacy(tmp_path / "a", logical_gpt(), tp=1, pp=1).parent
    torch_dist_format.write(torch_format.read(source, KEEP), tmp_path / "b", Wishes())
    path = tmp_path / "b/iter_0000005/.metadata"
    index = pickle.loads(path.read_bytes())
    one, other, *_ = (
        info
        for key, info in index.storage_data.items()
        if key.fqn.endswith("linear_fc1.bias")
    )
    other.offset = one.offset
    path.write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=f"two parts share byte {one.offset}"):
        torch_dist_format.read(tmp_path / "b", Wishes())


def test_common_values_with_code_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write_legacy(tmp_path / "a", logical_gpt(), tp=1, pp=1).parent
    torch_dist_format.write(torch_format.read(source, KEEP), tmp_path / "b", Wishes())
    common = tmp_path / "b/iter_0000005/common.pt"
    torch.save({"args": Code()}, common)
    with pytest.raises(CheckpointError, match="would run code"):
        read_torch_file(common)
    with pytest.raises(CheckpointError, match="would run code"):
        torch_dist_format.read(tmp_path / "b", Wishes())
    assert not (tmp_path / "executed").exists()
