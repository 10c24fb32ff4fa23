"""mp_rank files of all versions are merged into the tensors that they were cut from; broken files are
refused."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_ds.compat.conversion.family import model_of
from megatron_ds.compat.conversion.files.stored_tensor import StoredTensor
from megatron_ds.compat.conversion.files.tensor_views import StoredBox
from megatron_ds.compat.conversion.files.torch_dist_folder import Sharded
from megatron_ds.compat.conversion.foreign_start import foreign_defaults, read_foreign
from megatron_ds.compat.conversion.formats import Wishes, detected
from megatron_ds.compat.conversion.megatron import (
    torch_dist_format,
    torch_format,
)
from megatron_ds.compat.conversion.megatron.args import (
    OF_CAPACITY,
    arguments_of,
    capacity_of,
    model_options,
)
from megatron_ds.compat.conversion.megatron.flat_buffers import (
    LocalParameter,
    places_of,
)
from megatron_ds.compat.conversion.megatron.names import (
    EMBEDDING,
    TensorPart,
    part_of,
)
from megatron_ds.config import parse
from megatron_ds.data.tokenizers import build_tokenizer
from megatron_ds.errors import CheckpointError
from tests.harness.legacy_megatron import (
    KEEP,
    ROWS,
    Code,
    check_equal,
    logical_gpt,
    write_legacy,
)

pytestmark = pytest.mark.plan


@pytest.mark.parametrize("version", [None, 0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("spelling", ["encoder", "transformer"])
def test_every_packing_of_qkv_is_read(version, spelling, tmp_path):
    tensors = logical_gpt()
    write_legacy(tmp_path, tensors, tp=2, pp=1, version=version, spelling=spelling)
    assert detected(tmp_path).name == "megatron_torch"
    check_equal(torch_format.read(tmp_path, KEEP), tensors)


@pytest.mark.parametrize(
    "tp, pp, chunks", [(1, 1, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (4, 1, 1)]
)
def test_every_layout_is_merged(tp, pp, chunks, tmp_path):
    tensors = logical_gpt()
    write_legacy(tmp_path, tensors, tp=tp, pp=pp, chunks=chunks)
    found = torch_format.read(tmp_path, Wishes(vocab_size=19))
    check_equal(found, tensors, rows=19)
    assert found.model["vocab_size"] == 19
    assert (found.progress.iteration, found.progress.samples) == (5, 40)
    assert found.optimizer is None


def test_a_release_has_weights_and_no_progress(tmp_path):
    tensors = logical_gpt()
    write_legacy(tmp_path, tensors, tp=1, pp=2, release=True)
    found = torch_format.read(tmp_path, KEEP)
    check_equal(found, tensors)
    assert found.progress.iteration is None


def test_the_size_of_the_vocabulary_is_asked_for_where_nothing_records_it(tmp_path):
    write_legacy(tmp_path, logical_gpt(), tp=1, pp=1)
    with pytest.raises(CheckpointError, match="24 rows with padding.*--vocab-size N"):
        torch_format.read(tmp_path, Wishes())
    with pytest.raises(CheckpointError, match="fewer than the 25"):
        torch_format.read(tmp_path, Wishes(vocab_size=25))


@pytest.mark.parametrize(
    "option, words",
    [
        ({"multi_latent_attention": True}, "multi-latent attention"),
        ({"num_layers": 5}, "are missing: decoder"),
        ({"hidden_size": 32}, "do not have the shape"),
        ({"untie_embeddings_and_output_weights": True}, "output_layer.weight"),
        ({"geglu": True}, "--geglu"),
        ({"softmax_type": "learnable"}, "weights of its softmax"),
        ({"num_layers": None}, "lack num_layers"),
        ({"rope_type": "yarn"}, "another rotary"),
        ({"qk_l2_norm": True}, "unit length"),
        ({"softmax_scale": 0.1}, "--softmax-scale"),
        ({"activation_func_clamp_value": 7.0}, "clamped"),
        ({"glu_linear_offset": 1.0}, "offset"),
        ({"moe_apply_probs_on_input": True}, "inputs of experts"),
        ({"num_layers": 10**9}, "must be a count"),
        ({"kv_channels": "4"}, "kv_channels is '4'"),
        ({"num_experts": "x"}, "num_experts is 'x'"),
        (
            {"num_experts": 3, "expert_model_parallel_size": 2},
            "do not divide|files of 1 ranks",
        ),
        ({"tensor_model_parallel_size": 10**14}, "files of 1 ranks"),
        ({"tensor_model_parallel_size": 1.0}, "must be a count"),
        (
            {"moe_layer_freq": "x", "num_experts": 2},
            "options in its files: --moe-layer-freq 'x'",
        ),
        (
            {"moe_router_load_balancing_type": 3, "num_experts": 2},
            "a value in its files is of another kind",
        ),
        (
            {"moe_expert_capacity_factor": float("nan"), "num_experts": 2},
            "capacity_factor is nan",
        ),
        (
            {"moe_expert_capacity_factor": "1", "num_experts": 2},
            "capacity_factor is '1'",
        ),
        ({"norm_epsilon": 10**400}, "a value in its files is of another kind"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_model_that_is_not_computed_or_not_in_the_files_is_refused(
    option, words, tmp_path
):
    write_legacy(tmp_path, logical_gpt(), tp=1, pp=1, **option)
    with pytest.raises(CheckpointError, match=words):
        torch_format.read(tmp_path, KEEP)


def test_the_null_tokenizer_has_one_row_more_than_its_argument(tmp_path):
    write_legacy(
        tmp_path,
        logical_gpt(),
        tp=1,
        pp=1,
        tokenizer_type="NullTokenizer",
        vocab_size=22,
    )
    assert torch_format.read(tmp_path, Wishes()).model["vocab_size"] == 23
    assert torch_format.read(tmp_path, Wishes(vocab_size=22)).model["vocab_size"] == 22


def test_the_example_trains_as_many_rows_as_its_variable_states(tmp_path):
    write_legacy(tmp_path, logical_gpt(), tp=1, pp=1)  # it does not record the size
    text = (Path(__file__).parents[2] / "examples/from_megatron.sh").read_text()
    words = next(
        line for line in text.splitlines() if "VOCAB_SIZE:+" in line
    ).partition(' "${schedule')[0]
    flags = subprocess.run(
        ["bash", "-c", f"echo {words}"],
        env={"VOCAB_SIZE": str(ROWS)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    argv = [
        "--load",
        str(tmp_path),
        *"--mock-data --lr 1 --train-iters 1 --seq-length 8 --micro-batch-size 1".split(),
        *flags,
    ]
    config = parse(argv, env={}, defaults=foreign_defaults(argv))
    rows = build_tokenizer(config.data, config.model).vocab_size
    config = replace(config, model=replace(config.model, vocab_size=rows))
    assert read_foreign(config, "megatron_torch").model["vocab_size"] == ROWS


def test_the_capacity_of_experts_is_that_of_a_micro_batch():
    assert capacity_of({"moe_expert_capacity_factor": -1.0}) == capacity_of({}) == {}
    found = capacity_of(
        {"moe_expert_capacity_factor": 1.5, "moe_token_drop_policy": "position"}
    )
    assert found == {
        "moe_expert_capacity_factor": 1.5,
        "moe_eval_capacity_factor": 1.5,
        "moe_capacity_scope": "micro-batch",
        "moe_token_drop_policy": "position",
        "moe_pad_expert_input_to_capacity": False,
    }


@pytest.mark.parametrize("factor", [None, 1.5])
def test_the_capacity_of_experts_is_written_as_it_is_read(factor):
    options = dict(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=4,
        max_position_embeddings=8,
        vocab_size=24,
        num_experts=(2,),
        moe_expert_capacity_factor=factor,
        moe_eval_capacity_factor=factor,
    )
    options |= (
        {"moe_capacity_scope": "micro-batch", "moe_token_drop_policy": "position"}
        if factor
        else {}
    )
    model = model_of(options, "")
    tensors = {EMBEDDING: StoredTensor((24, 16), torch.float32, lambda: None, "")}
    again = model_of(model_options(arguments_of(model, 1), tensors, False, None), "")
    assert all(
        getattr(again, name) == getattr(model, name)
        for name in (
            "num_experts",
            "moe_eval_capacity_factor",
            "moe_capacity_scope",
            *OF_CAPACITY,
        )
    )


def test_files_into_which_the_converter_wrote_the_same_rank_are_merged(tmp_path):
    tensors = logical_gpt()
    write_legacy(tmp_path, tensors, tp=2, pp=2, release=True, rank=0)
    check_equal(torch_format.read(tmp_path, KEEP), tensors)


def test_another_iteration_than_that_of_the_folder_is_refused(tmp_path):
    path = write_legacy(tmp_path, logical_gpt(), tp=1, pp=1)
    assert torch_format.read(path, replace(KEEP, iteration=5)).progress.iteration == 5
    with pytest.raises(
        CheckpointError, match="is the folder of iter_0000005, and --iteration 6"
    ):
        torch_format.read(path, replace(KEEP, iteration=6))


@pytest.mark.parametrize("text", ["²", "9" * 5000, "-1"])
def test_a_tracker_that_names_no_iteration_is_refused(text, tmp_path):
    write_legacy(tmp_path, logical_gpt(), tp=1, pp=1)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(CheckpointError, match="has no .*It has iter_0000005"):
        torch_format.read(tmp_path, KEEP)


def test_optimizer_state_of_joined_experts_is_refused(tmp_path):
    path = write_legacy(tmp_path, logical_gpt(), tp=1, pp=1, num_experts=2)
    change(
        path / "mp_rank_00",
        lambda content: content.update(
            optimizer={},
            model={"decoder.layers.0.mlp.experts.weight1": torch.ones(16, 8)},
        ),
    )
    with pytest.raises(
        CheckpointError,
        match="experts.weight1, in which all experts are one .*--no-optim",
    ):
        torch_format.read(tmp_path, KEEP)
    with pytest.raises(CheckpointError, match="tensors are missing"):
        torch_format.read(tmp_path, replace(KEEP, weights_only=True))


# ---- Files that are broken or mixed up.


def folder_of(path, t, p=0):
    return path / f"mp_rank_{t:02d}_{p:03d}"


def swap(one, other):
    kept = one.with_name("kept")
    one.rename(kept)
    other.rename(one)
    kept.rename(other)


def read_all(folder):
    found = torch_format.read(folder, KEEP)
    return [
        tensor.read()
        for tensors in found.tensors.values()
        for tensor in tensors.values()
    ]


@pytest.mark.parametrize("pair", [((0, 0), (1, 0)), ((0, 0), (0, 1))])
def test_swapped_shards_are_refused(pair, tmp_path):
    path = write_legacy(tmp_path, logical_gpt(), tp=2, pp=2)
    swap(*(folder_of(path, *at) for at in pair))
    with pytest.raises(CheckpointError, match="the files of two ranks are swapped"):
        read_all(tmp_path)


def test_files_of_two_saves_are_refused(tmp_path):
    path = write_legacy(tmp_path / "one", logical_gpt(), tp=2, pp=1)
    other = write_legacy(tmp_path / "other", logical_gpt(seed=1), tp=2, pp=1)
    shutil.copytree(other / "mp_rank_01", path / "mp_rank_01", dirs_exist_ok=True)
    with pytest.raises(
        CheckpointError, match="differs between .*mp_rank_00.* and .*mp_rank_01"
    ):
        read_all(tmp_path / "one")


def test_a_head_that_is_not_the_tied_embedding_is_refused(tmp_path):
    path = write_legacy(tmp_path, logical_gpt(), tp=1, pp=2)
    change(
        folder_of(path, 0, 1),
        lambda content: content["model"]["word_embeddings_for_head"]["weight"].add_(1),
    )
    with pytest.raises(CheckpointError, match="tied embeddings"):
        read_all(tmp_path)


def change(folder, function):
    file = folder / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    function(content)
    torch.save(content, file)


@pytest.mark.parametrize(
    "function, words",
    [
        (
            lambda content: content["model"]["language_model"]["encoder"].update(
                adapter=torch.ones(2)
            ),
            "have no place in the model: .*adapter",
        ),
        (
            lambda content: content["model"]["language_model"]["encoder"].pop(
                "layers.0.mlp.dense_h_to_4h.bias"
            ),
            "tensors are missing",
        ),
        (
            lambda content: content["model"]["language_model"]["encoder"].update(
                {"layers.0.mlp.dense_h_to_4h.bias": torch.ones(3)}
            ),
            "do not have the shape",
        ),
        (
            lambda content: content["model"]["language_model"]["encoder"].update(
                {"layers.0.mlp.dense_4h_to_h.weight": torch.ones(64)}
            ),
            "not parts along dimension 1",
        ),
        (
            lambda content: content["model"]["language_model"]["encoder"].update(
                {"layers.0.mlp.experts.weight1": torch.ones(64)}
            ),
            "not that of 1 experts",
        ),
        (lambda content: content.update(model={}), "26 tensors are missing"),
        (lambda content: content.pop("model"), "holds no model"),
        (lambda content: content.pop("args"), "records no arguments"),
        (lambda content: content.update(iteration=6), "not of one save"),
        (lambda content: content.update(checkpoint_version="x"), "not of one save"),
        (lambda content: content.update(code=Code()), "posix.system|nt.system"),
    ],
    ids=[
        "extra",
        "missing",
        "shape",
        "dimensions",
        "joined experts",
        "empty",
        "no model",
        "no args",
        "iteration",
        "version",
        "code",
    ],
)
def test_a_changed_file_is_refused(function, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_legacy(tmp_path, logical_gpt(), tp=2, pp=2)
    for rank in range(2):
        change(folder_of(path, rank, 0), function)
    with pytest.raises(CheckpointError, match=words):
        read_all(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_missing_ranks_and_truncated_files_are_refused(tmp_path):
    path = write_legacy(tmp_path, logical_gpt(), tp=2, pp=2)
    file = folder_of(path, 1, 1) / "model_optim_rng.pt"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="is refused or damaged"):
        read_all(tmp_path)
    shutil.rmtree(file.parent)
    with pytest.raises(
        CheckpointError,
        match=r"files of 3 ranks.*2 × 2 × 1 ranks; the first missing is "
        r"\(1, 1, 0\)",
    ):
        read_all(tmp_path)


# ---- Parts.


def test_the_buffer_of_the_distributed_optimizer_is_laid_out_backwards_at_multiples_of_64():
    sizes = (100, 7, 64, 33)
    parameters = [
        LocalParameter(TensorPart(str(n)), (n,), torch.float32) for n in sizes
    ]
    assert places_of(parameters, None) == ([(0, 192), (0, 128), (0, 64), (0, 0)], [292])
    assert places_of(parameters, 90) == ([(1, 64), (1, 0), (0, 64), (0, 0)], [128, 164])
    shared = [replace(parameters[0], own_bucket=True), *parameters[1:]]
    assert places_of(shared, None) == ([(1, 0), (0, 128), (0, 64), (0, 0)], [192, 100])


@pytest.mark.parametrize(
    "theirs, ours",
    [
        (
            "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
            TensorPart("decoder.layers.3.input_layernorm.weight"),
        ),
        (
            "decoder.layers.3.mlp.linear_fc1.layer_norm_bias",
            TensorPart("decoder.layers.3.pre_mlp_layernorm.bias"),
        ),
        (
            "decoder.layers.3.mlp.linear_fc1.weight_v",
            TensorPart("decoder.layers.3.mlp.linear_fc1.weight", half=1),
        ),
        (
            "decoder.layers.3.mlp.experts.local_experts.5.linear_fc2.weight",
            TensorPart("decoder.layers.3.mlp.experts.linear_fc2.weight", expert=5),
        ),
        (
            "decoder.layers.3.mlp.experts.linear_fc1.weight11",
            TensorPart("decoder.layers.3.mlp.experts.linear_fc1.weight", expert=11),
        ),
        (
            "decoder.layers.3.mlp.experts.experts.2.linear_fc1.weight_w",
            TensorPart(
                "decoder.layers.3.mlp.experts.linear_fc1.weight", expert=2, half=0
            ),
        ),
        (
            "decoder.layers.3.mlp.experts.experts.linear_fc1.weight",
            TensorPart("decoder.layers.3.mlp.experts.linear_fc1.weight"),
        ),
        (
            "language_model.transformer.layers.3.attention.query_key_value.bias",
            TensorPart("decoder.layers.3.self_attention.linear_qkv.bias"),
        ),
        (
            "language_model.encoder.layers.3.post_attention_norm.weight",
            TensorPart("decoder.layers.3.pre_mlp_layernorm.weight"),
        ),
    ],
)
def test_names_of_all_spellings_become_ours(theirs, ours):
    assert part_of(theirs, is_bert=False) == ours


def test_shards_that_are_stored_flat_become_the_weight():
    whole = torch.arange(2 * 4 * 6.0).view(2, 4, 6)  # [layers, rows, columns]
    flat = whole.view(2, 2, 2, 1, 6).permute(0, 1, 3, 2, 4).reshape(2, 2, 1, 12)

    box = StoredTensor((2, 2, 1, 12), torch.float32, lambda: flat, "a file")
    tensor = Sharded(
        "key", (2, 2, 1, 12), torch.float32, (StoredBox((0, 0, 0, 0), box),)
    )
    found = torch_dist_format.unflattened(tensor, (2, 4, 6))
    assert torch.equal(found.whole().read(), whole)
    assert [
        torch.equal(row.read(), whole[i]) for i, row in enumerate(found.rows())
    ] == [True, True]
