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


LATENT = QWEN | dict(
    add_qkv_bias=False,
    num_layers=4,
    multi_latent_attention=True,
    qk_layernorm=True,
    q_lora_rank=8,
    kv_lora_rank=6,
    qk_head_dim=4,
    qk_pos_emb_head_dim=2,
    v_head_dim=3,
    kv_channels=6,
    rotary_interleaved=True,
    position_embedding_type="yarn",
    yarn_rotary_scaling_factor=2.0,
    original_max_position_embeddings=4,
    yarn_mscale_all_dim=0.5,
    untie_embeddings_and_output_weights=True,
    mtp_num_layers=2,
)
OF_EXPERTS = dict(
    num_experts=(2,),
    moe_layer_freq="[0,1,1,1]",
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)


def random_weights(folder, options) -> LogicalCheckpoint:
    stored = {}
    for spec in specs_of(model_of(options, "")):
        values = torch.randn(spec.shape)
        stored[spec.name] = StoredTensor(
            tuple(spec.shape), torch.float32, lambda v=values: v, spec.name
        )
    return LogicalCheckpoint(folder, options, {WEIGHT: stored})


def check_same(found, expected) -> None:
    ours = found.tensors[WEIGHT]
    stored = expected.tensors[WEIGHT]
    assert ours.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(ours[name].read(), tensor.read()), name


def as_transformer_engine(content, path) -> None:
    """The file of a rank as layers of TransformerEngine save it: whole projections to latents, and joined norms."""
    model = content["model"]
    for name in [*model]:
        for norm, layer in (
            (".q_layernorm.", ".linear_q_up_proj.layer_norm_"),
            (".kv_layernorm.", ".linear_kv_up_proj.layer_norm_"),
            (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
        ):
            if norm in name:
                model[name.replace(norm, layer)] = model.pop(name)
    content["args"].transformer_impl = "transformer_engine"
    torch.save(content, path)


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 2)])
def test_a_release_with_latents_and_depths_is_what_was_read(tp, pp, tmp_path):
    ours = random_weights(tmp_path, LATENT)
    torch_format.write(
        ours, tmp_path / "b", Wishes(tensor_parallel=tp, pipeline_parallel=pp)
    )
    again = torch_format.read(tmp_path / "b", Wishes())
    check_same(again, ours)
    assert model_of(again.model, "") == model_of(ours.model, "")
    # megatron-core's own layers divide the rows of each of these.
    place = "mp_rank_00" if pp == 1 else f"mp_rank_00_{pp - 1:03d}"
    file = tmp_path / "b/release" / place / "model_optim_rng.pt"
    last = torch.load(file, weights_only=False)["model"]
    rows = lambda name: len(last[name])
    block = "mtp.layers.1.transformer_layer.self_attention"
    assert rows(f"{block}.linear_kv_down_proj.weight") == 8 // tp
    assert rows("mtp.layers.1.eh_proj.weight") == 16 // tp
    assert ("embedding.word_embeddings.weight" in last) == (pp > 1 or tp == 1)


def test_latents_of_transformer_engine_are_whole_and_their_norms_joined(tmp_path):
    ours = random_weights(tmp_path, LATENT)
    torch_format.write(ours, tmp_path / "b", Wishes(tensor_parallel=2))
    for rank in range(2):
        path = tmp_path / f"b/release/mp_rank_{rank:02d}/model_optim_rng.pt"
        content = torch.load(path, weights_only=False)
        for name in content["model"]:
            if "_down_proj." in name:
                content["model"][name] = ours.tensors[WEIGHT][name].read()
        as_transformer_engine(content, path)
    check_same(torch_format.read(tmp_path / "b", Wishes()), ours)


@pytest.mark.parametrize("experts", [{}, OF_EXPERTS], ids=["dense", "experts"])
def test_a_written_norm_has_the_keys_of_both_kinds_of_layers(experts, tmp_path):
    ours = random_weights(tmp_path, LATENT | experts)
    torch_dist_format.write(ours, tmp_path / "b", Wishes())
    index = pickle.loads((tmp_path / "b/iter_0000000/.metadata").read_bytes())
    keys = index.state_dict_metadata.keys()
    check_same(torch_dist_format.read(tmp_path / "b", Wishes()), ours)
    block = "mtp.layers.0.transformer_layer."
    wanted = {
        "input_layernorm.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.kv_layernorm.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "pre_mlp_layernorm.weight",
        "self_attention.linear_kv_down_proj._extra_state/shard_0_1",
    }
    if not experts:
        wanted.add("mlp.linear_fc1.layer_norm_weight")
    assert wanted <= {key.removeprefix(block) for key in keys}
    assert f"{block}self_attention.linear_qkv.layer_norm_weight" not in keys
    assert "mtp.layers.0.eh_proj._extra_state/shard_0_1" in keys


def test_the_norm_before_experts_has_both_keys_too(tmp_path):
    experts = OF_EXPERTS | {"moe_layer_freq": "[0,1]"}
    ours = random_weights(tmp_path, QWEN | experts)
    torch_dist_format.write(ours, tmp_path / "b", Wishes())
    index = pickle.loads((tmp_path / "b/iter_0000000/.metadata").read_bytes())
    keys = index.state_dict_metadata.keys()
    alone, joined = "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"
    found = [
        {name for name in (alone, joined) if f"decoder.layers.{layer}.{name}" in keys}
        for layer in range(2)
    ]
    assert found == [{joined}, {alone, joined}]
    check_same(torch_dist_format.read(tmp_path / "b", Wishes()), ours)


def test_biases_of_routers_stay_in_fp32(tmp_path):
    ours = random_weights(tmp_path, LATENT | OF_EXPERTS)
    wishes = Wishes(dtype="bfloat16")
    torch_dist_format.write(ours, tmp_path / "b", wishes)
    found = torch_dist_format.read(tmp_path / "b", Wishes()).tensors[WEIGHT]
    biases = [name for name in found if name.endswith("expert_bias")]
    assert len(biases) == 3 + 2
    for name, tensor in ours.tensors[WEIGHT].items():
        value = tensor.read()
        expected = value if name in biases else value.bfloat16()
        assert torch.equal(found[name].read(), expected), name


@pytest.mark.parametrize(
    "mixers", [{"mixer_pattern": "M-*-"}, {"linear_attention_freq": "2"}]
)
def test_hybrid_models_are_not_written(mixers, tmp_path):
    with pytest.raises(CheckpointError, match="its tensors are not converted"):
        arguments_of(model_of(QWEN | mixers, ""), 1)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"rope_type": "mrope"}, "--rope-type 'mrope'"),
        ({"rotary_percent": 0.5}, "rotary_percent 0.5"),
        ({"rotary_interleaved": True}, "rotary_interleaved True"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type"),
        ({"rotary_scaling_factor": None}, "lack rotary_scaling_factor"),
        ({"kv_lora_rank": None}, "lack kv_lora_rank"),
        ({"mtp_use_repeated_layer": True}, "one block for all predicted tokens"),
    ],
)
def test_latents_and_depths_that_are_not_computed_are_named(changes, words):
    args = arguments_of(model_of(LATENT, ""), 1)
    options = model_options(args, {}, False, 24)
    assert model_of(options, "") == model_of(LATENT, "")
    with pytest.raises(CheckpointError, match=words):
        model_options(args | changes, {}, False, 24)


@pytest.mark.parametrize(
    "option, flag",
    [
        ({"latent_norm_epsilon": 1e-3}, "--latent-norm-epsilon"),
        ({"rotary_interleaved": False}, "--no-rotary-interleaved"),
        (
            {"yarn_correction_range_round_to_int": False},
            "--no-yarn-correction-range-round-to-int",
        ),
    ],
)
def test_latents_that_megatron_computes_otherwise_are_not_written(option, flag):
    with pytest.raises(CheckpointError, match=flag):
        arguments_of(model_of(LATENT | option, ""), 1)
