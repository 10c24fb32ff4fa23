"""mp_rank files of all versions are merged into the tensors that they were cut from; broken files are
refused."""

import os
import pickle
import shutil
from dataclasses import replace

import pytest
import torch

from megatron_ds.config.model_options import ModelConfig
from megatron_ds.conversion import megatron_torch_dist_format, megatron_torch_format
from megatron_ds.conversion.family import model_of
from megatron_ds.conversion.flat_buffers import LocalParameter, places_of
from megatron_ds.conversion.formats import Wishes, detected
from megatron_ds.conversion.megatron_args import arguments_of
from megatron_ds.conversion.megatron_names import Part, part_of
from megatron_ds.conversion.stored_tensor import WEIGHT, StoredTensor
from megatron_ds.conversion.tensor_views import StoredBox
from megatron_ds.conversion.torch_dist_folder import Sharded
from megatron_ds.conversion.torch_file import read_torch_file
from megatron_ds.errors import CheckpointError
from tests.harness.legacy_megatron import ROWS, logical_gpt, write_legacy

KEEP = Wishes(vocab_size=ROWS)


def check_equal(found, tensors, rows=ROWS):
    assert found.tensors.keys() == {WEIGHT}
    assert found.tensors[WEIGHT].keys() == tensors.keys()
    for name, tensor in tensors.items():
        wanted = tensor[:rows] if name == "embedding.word_embeddings.weight" else tensor
        assert torch.equal(found.tensors[WEIGHT][name].read(), wanted), name


@pytest.mark.parametrize("version", [None, 0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("spelling", ["encoder", "transformer"])
def test_every_packing_of_qkv_is_read(version, spelling, tmp_path):
    tensors = logical_gpt()
    write_legacy(tmp_path, tensors, tp=2, pp=1, version=version, spelling=spelling)
    assert detected(tmp_path).name == "megatron_torch"
    check_equal(megatron_torch_format.read(tmp_path, KEEP), tensors)


@pytest.mark.parametrize("tp, pp, chunks", [(1, 1, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (4, 1, 1)])
def test_every_layout_is_merged(tp, pp, chunks, tmp_path):
    tensors = logical_gpt()
    write_legacy(tmp_path, tensors, tp=tp, pp=pp, chunks=chunks)
    found = megatron_torch_format.read(tmp_path, Wishes(vocab_size=19))
    check_equal(found, tensors, rows=19)
    assert found.model["vocab_size"] == 19
    assert (found.progress.iteration, found.progress.samples) == (5, 40)
    assert found.optimizer is None


def test_a_release_has_weights_and_no_progress(tmp_path):
    tensors = logical_gpt()
    write_legacy(tmp_path, tensors, tp=1, pp=2, release=True)
    found = megatron_torch_format.read(tmp_path, KEEP)
    check_equal(found, tensors)
    assert found.progress.iteration is None


def test_the_size_of_the_vocabulary_is_asked_for_where_nothing_records_it(tmp_path):
    write_legacy(tmp_path, logical_gpt(), tp=1, pp=1)
    with pytest.raises(CheckpointError, match="24 rows with padding.*--vocab-size N"):
        megatron_torch_format.read(tmp_path, Wishes())
    with pytest.raises(CheckpointError, match="fewer than the 25"):
        megatron_torch_format.read(tmp_path, Wishes(vocab_size=25))


@pytest.mark.parametrize("option, words", [
    ({"multi_latent_attention": True}, "multi-latent attention"), ({"num_layers": 5}, "are missing: decoder"),
    ({"hidden_size": 32}, "do not have the shape"),
    ({"untie_embeddings_and_output_weights": True}, "output_layer.weight"), ({"geglu": True}, "--geglu"),
    ({"softmax_type": "learnable"}, "weights of its softmax"), ({"num_layers": None}, "lack num_layers")],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_a_model_that_is_not_computed_or_not_in_the_files_is_refused(option, words, tmp_path):
    write_legacy(tmp_path, logical_gpt(), tp=1, pp=1, **option)
    with pytest.raises(CheckpointError, match=words):
        megatron_torch_format.read(tmp_path, KEEP)


@pytest.mark.parametrize("freq, ours", [(None, None), (2, "2"), ([1, 0, 1, 1], "[1, 0, 1, 1]")])
def test_windows_are_read_and_written(freq, ours, tmp_path):
    window = {"window_size": (4, 0), "window_attn_skip_freq": freq, "softmax_type": "off-by-one"}
    write_legacy(tmp_path, logical_gpt(), tp=1, pp=1, **window)
    found = megatron_torch_format.read(tmp_path, KEEP).model
    assert (found["window_size"], found.get("window_attn_skip_freq")) == ((4, 0), ours)
    model = ModelConfig(**found)
    written = arguments_of(model, 1)
    assert (written["window_size"], written["softmax_type"]) == ((4, 0), "off-by-one")
    again = replace(model, window_attn_skip_freq=str(written["window_attn_skip_freq"]))
    assert again.windowed == model.windowed


# ---- Files that are broken or mixed up.

def folder_of(path, t, p=0):
    return path / f"mp_rank_{t:02d}_{p:03d}"


def swap(one, other):
    kept = one.with_name("kept")
    one.rename(kept)
    other.rename(one)
    kept.rename(other)


def read_all(folder):
    found = megatron_torch_format.read(folder, KEEP)
    return [tensor.read() for tensors in found.tensors.values() for tensor in tensors.values()]


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
    with pytest.raises(CheckpointError, match="differs between .*mp_rank_00.* and .*mp_rank_01"):
        read_all(tmp_path / "one")


def test_a_head_that_is_not_the_tied_embedding_is_refused(tmp_path):
    path = write_legacy(tmp_path, logical_gpt(), tp=1, pp=2)
    change(folder_of(path, 0, 1),
           lambda content: content["model"]["word_embeddings_for_head"]["weight"].add_(1))
    with pytest.raises(CheckpointError, match="tied embeddings"):
        read_all(tmp_path)


def change(folder, function):
    file = folder / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    function(content)
    torch.save(content, file)


@pytest.mark.parametrize("function, words", [
    (lambda content: content["model"]["language_model"]["encoder"].update(adapter=torch.ones(2)),
     "have no place in the model: .*adapter"),
    (lambda content: content["model"]["language_model"]["encoder"].pop("layers.0.mlp.dense_h_to_4h.bias"),
     "tensors are missing"),
    (lambda content: content["model"]["language_model"]["encoder"].update(
        {"layers.0.mlp.dense_h_to_4h.bias": torch.ones(3)}), "do not have the shape"),
    (lambda content: content.pop("model"), "holds no model"),
    (lambda content: content.pop("args"), "records no arguments"),
    (lambda content: content.update(iteration=6), "not of one save"),
    (lambda content: content.update(code=Code()), "posix.system|nt.system"),
], ids=["extra", "missing", "shape", "no model", "no args", "iteration", "code"])
def test_a_changed_file_is_refused(function, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_legacy(tmp_path, logical_gpt(), tp=1, pp=2)
    change(folder_of(path, 0, 0), function)
    with pytest.raises(CheckpointError, match=words):
        read_all(tmp_path)
    assert not (tmp_path / "executed").exists()


class Code:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_missing_ranks_and_truncated_files_are_refused(tmp_path):
    path = write_legacy(tmp_path, logical_gpt(), tp=2, pp=2)
    file = folder_of(path, 1, 1) / "model_optim_rng.pt"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="is refused or damaged"):
        read_all(tmp_path)
    shutil.rmtree(file.parent)
    with pytest.raises(CheckpointError, match=r"files of 3 ranks.*2 × 2 × 1 ranks; the first missing is "
                                              r"\(1, 1, 0\)"):
        read_all(tmp_path)


# ---- Parts.

def test_the_buffer_of_the_distributed_optimizer_is_laid_out_backwards_at_multiples_of_64():
    sizes = (100, 7, 64, 33)
    parameters = [LocalParameter(Part(str(n)), (n,), torch.float32) for n in sizes]
    assert places_of(parameters, None) == ([(0, 192), (0, 128), (0, 64), (0, 0)], [292])
    assert places_of(parameters, 90) == ([(1, 64), (1, 0), (0, 64), (0, 0)], [128, 164])
    shared = [replace(parameters[0], own_bucket=True), *parameters[1:]]
    assert places_of(shared, None) == ([(1, 0), (0, 128), (0, 64), (0, 0)], [192, 100])


@pytest.mark.parametrize("theirs, ours", [
    ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
     Part("decoder.layers.3.input_layernorm.weight")),
    ("decoder.layers.3.mlp.linear_fc1.layer_norm_bias", Part("decoder.layers.3.pre_mlp_layernorm.bias")),
    ("decoder.layers.3.mlp.linear_fc1.weight_v", Part("decoder.layers.3.mlp.linear_fc1.weight", half=1)),
    ("decoder.layers.3.mlp.experts.local_experts.5.linear_fc2.weight",
     Part("decoder.layers.3.mlp.experts.linear_fc2.weight", expert=5)),
    ("decoder.layers.3.mlp.experts.linear_fc1.weight11",
     Part("decoder.layers.3.mlp.experts.linear_fc1.weight", expert=11)),
    ("decoder.layers.3.mlp.experts.experts.2.linear_fc1.weight_w",
     Part("decoder.layers.3.mlp.experts.linear_fc1.weight", expert=2, half=0)),
    ("decoder.layers.3.mlp.experts.experts.linear_fc1.weight",
     Part("decoder.layers.3.mlp.experts.linear_fc1.weight")),
    ("language_model.transformer.layers.3.attention.query_key_value.bias",
     Part("decoder.layers.3.self_attention.linear_qkv.bias")),
    ("language_model.encoder.layers.3.post_attention_norm.weight",
     Part("decoder.layers.3.pre_mlp_layernorm.weight"))])
def test_names_of_all_spellings_become_ours(theirs, ours):
    assert part_of(theirs, is_bert=False) == ours


def test_shards_that_are_stored_flat_become_the_weight():
    whole = torch.arange(2 * 4 * 6.).view(2, 4, 6)                      # [layers, rows, columns]
    flat = whole.view(2, 2, 2, 1, 6).permute(0, 1, 3, 2, 4).reshape(2, 2, 1, 12)

    box = StoredTensor((2, 2, 1, 12), torch.float32, lambda: flat, "a file")
    tensor = Sharded("key", (2, 2, 1, 12), torch.float32, (StoredBox((0, 0, 0, 0), box),))
    found = megatron_torch_dist_format.unflattened(tensor, (2, 4, 6))
    assert torch.equal(found.whole().read(), whole)
    assert [torch.equal(row.read(), whole[i]) for i, row in enumerate(found.rows())] == [True, True]


def test_a_state_that_this_package_wrote_for_megatron_is_refused_when_it_is_damaged(tmp_path):
    source = write_legacy(tmp_path / "a", logical_gpt(), tp=1, pp=1).parent
    found = megatron_torch_format.read(source, KEEP)
    megatron_torch_dist_format.write(found, tmp_path / "b", Wishes())
    step = tmp_path / "b" / "iter_0000005"
    check_equal(megatron_torch_dist_format.read(tmp_path / "b", Wishes()), logical_gpt())
    file = step / "__0_0.distcp"
    whole = file.read_bytes()
    for damaged, words in ((whole[:-50], "truncated"), (b"", "truncated")):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=words):
            megatron_torch_dist_format.read(tmp_path / "b", Wishes())
    file.write_bytes(whole[1:] + b"\0")
    damaged = megatron_torch_dist_format.read(tmp_path / "b", Wishes())
    with pytest.raises(CheckpointError, match="refused or damaged|no archive"):
        damaged.tensors[WEIGHT]["decoder.final_layernorm.bias"].read()
    file.unlink()
    with pytest.raises(CheckpointError, match="All ranks' files belong into one folder"):
        megatron_torch_dist_format.read(tmp_path / "b", Wishes())


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 4), (4, 1)])
def test_a_release_that_is_written_is_what_was_read(tp, pp, tmp_path):
    tensors = logical_gpt()
    source = write_legacy(tmp_path / "a", tensors, tp=2, pp=1).parent
    found = megatron_torch_format.read(source, Wishes(vocab_size=21))
    wishes = Wishes(tensor_parallel=tp, pipeline_parallel=pp)
    megatron_torch_format.write(found, tmp_path / "b", wishes)
    assert len(list((tmp_path / "b/release").iterdir())) == tp * pp
    again = megatron_torch_format.read(tmp_path / "b", Wishes())
    check_equal(again, tensors, rows=21)
    assert model_of(again.model, "").ffn_size == model_of(found.model, "").ffn_size
    assert again.model.items() >= found.model.items()
    with pytest.raises(CheckpointError, match="do not divide over 3 ranks"):
        megatron_torch_format.write(found, tmp_path / "c", Wishes(tensor_parallel=3))
    assert not (tmp_path / "c").exists()


def test_an_index_whose_parts_share_bytes_is_refused(tmp_path):
    source = write_legacy(tmp_path / "a", logical_gpt(), tp=1, pp=1).parent
    megatron_torch_dist_format.write(megatron_torch_format.read(source, KEEP), tmp_path / "b", Wishes())
    path = tmp_path / "b/iter_0000005/.metadata"
    index = pickle.loads(path.read_bytes())
    one, other, *_ = (info for key, info in index.storage_data.items() if key.fqn.endswith("linear_fc1.bias"))
    other.offset = one.offset
    path.write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=f"two parts share byte {one.offset}"):
        megatron_torch_dist_format.read(tmp_path / "b", Wishes())


def test_common_values_with_code_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write_legacy(tmp_path / "a", logical_gpt(), tp=1, pp=1).parent
    megatron_torch_dist_format.write(megatron_torch_format.read(source, KEEP), tmp_path / "b", Wishes())
    common = tmp_path / "b/iter_0000005/common.pt"
    torch.save({"args": Code()}, common)
    with pytest.raises(CheckpointError, match="would run code"):
        read_torch_file(common)
    with pytest.raises(CheckpointError, match="would run code"):
        megatron_torch_dist_format.read(tmp_path / "b", Wishes())
    assert not (tmp_path / "executed").exists()
