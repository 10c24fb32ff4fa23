"""Folders of Hugging Face that are damaged, mixed up, or of models that are not computed: one clear error,
and nothing is written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ds.checkpoint.folder import TRACKER
from megatron_ds.compat.conversion.convert_checkpoint import run_tool
from megatron_ds.compat.conversion.family import entries_of, model_of
from megatron_ds.compat.conversion.files.stored_tensor import StoredProgress
from megatron_ds.compat.conversion.formats import Wishes, detected, format_of
from megatron_ds.compat.conversion.huggingface.families import FAMILIES
from megatron_ds.compat.conversion.huggingface.format import (
    FORMAT as HUGGING_FACE,
)
from megatron_ds.compat.conversion.own_format import FORMAT as OURS
from megatron_ds.compat.conversion.run_values import updates_in
from megatron_ds.errors import CheckpointError, ConfigError
from megatron_ds.extensions.tokenizers.file_tokenizers import WORD_PIECE_TOKENS

pytestmark = pytest.mark.plan

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "vocab_size": 11,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
QUERY = "model.layers.1.self_attn.q_proj.weight"


def tensors_of(settings):
    family = FAMILIES[settings["model_type"]]
    model = model_of(family.options(settings), "the test")
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator)
        for entry in entries_of(family, model)
        for name, shape in zip(entry.theirs, entry.their_shapes)
    }


def written(folder: Path, tensors=None, **settings) -> Path:
    """A folder of LLAMA with other settings (None removes one)."""
    folder.mkdir(exist_ok=True)
    config = {
        name: value
        for name, value in {**LLAMA, **settings}.items()
        if value is not None
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        tensors_of(LLAMA) if tensors is None else tensors, folder / "model.safetensors"
    )
    return folder


def sharded(folder: Path) -> Path:
    tensors = list(tensors_of(LLAMA).items())
    files = {
        "model-00001-of-00002.safetensors": dict(tensors[:9]),
        "model-00002-of-00002.safetensors": dict(tensors[9:]),
    }
    written(folder)
    (folder / "model.safetensors").unlink()
    for name, held in files.items():
        save_file(held, folder / name)
    places = {key: name for name, held in files.items() for key in held}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": places})
    )
    return folder


def convert(source: Path, target: Path, **wishes):
    return OURS.write(HUGGING_FACE.read(source, Wishes(**wishes)), target, Wishes())


def refused(source: Path, target: Path, match: str, **wishes) -> None:
    with pytest.raises(CheckpointError, match=match):
        convert(source, target, **wishes)
    assert not (target / TRACKER).exists() and not list(target.glob("iter_*"))


def test_an_undamaged_folder_converts(tmp_path):
    convert(written(tmp_path / "one"), tmp_path / "a")
    convert(sharded(tmp_path / "two"), tmp_path / "b")
    for name in "ab":
        HUGGING_FACE.write(
            OURS.read(tmp_path / name, Wishes()), tmp_path / f"{name}-back", Wishes()
        )
        found, expected = (
            load_file(tmp_path / f"{name}-back/model.safetensors"),
            tensors_of(LLAMA),
        )
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)


def cut_at(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_file(tmp_path, size):
    source = written(tmp_path / "in")
    cut_at(source / "model.safetensors", size)
    refused(source, tmp_path / "out", "model.safetensors is damaged")


def with_header(file: Path, change) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


FORGED = {
    "a shape of more elements than bytes": lambda h: h[QUERY].update(
        shape=[2**40, 2**40]
    ),
    "a negative size": lambda h: h[QUERY].update(shape=[-8, -8]),
    "offsets in another tensor": lambda h: h[QUERY].update(data_offsets=[0, 256]),
    "offsets beyond the file": lambda h: h[QUERY].update(
        data_offsets=[10**9, 10**9 + 256]
    ),
    "an unknown dtype": lambda h: h[QUERY].update(dtype="F7"),
    "no table": lambda h: h.update({QUERY: "text"}),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_a_forged_header(tmp_path, change):
    source = written(tmp_path / "in")
    with_header(source / "model.safetensors", change)
    refused(source, tmp_path / "out", "model.safetensors is damaged")


def test_a_header_longer_than_the_file(tmp_path):
    source = written(tmp_path / "in")
    content = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(
        (2**60).to_bytes(8, "little") + content[8:]
    )
    refused(source, tmp_path / "out", "header too large")


def test_shards_that_are_swapped_missing_or_outside(tmp_path):
    source = sharded(tmp_path / "in")
    one, two = sorted(source.glob("model-*"))
    one.rename(source / "x"), two.rename(one), (source / "x").rename(two)
    refused(source, tmp_path / "out", "Files are swapped")
    two.unlink()
    refused(source, tmp_path / "out", "lacks 1 of 2 files")
    (source / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../../etc/passwd"}}'
    )
    refused(source, tmp_path / "out", "not a table of file names")


def other_weights() -> dict:
    return {name: tensor + 1 for name, tensor in tensors_of(LLAMA).items()}


def test_a_folder_with_two_sets_of_weights_is_refused_with_the_names_of_both(tmp_path):
    source = sharded(tmp_path / "in")
    save_file(other_weights(), source / "model.safetensors")
    refused(
        source,
        tmp_path / "out",
        r"model\.safetensors, which transformers reads, and model\.safetensors\.index\.json",
    )
    # An index of the single file itself, and shards without an index, are no second answer.
    places = dict.fromkeys(tensors_of(LLAMA), "model.safetensors")
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    found = HUGGING_FACE.read(source, Wishes()).tensors["weight"]
    index.unlink()
    alone = HUGGING_FACE.read(source, Wishes()).tensors["weight"]
    norm = "model.norm.weight"
    expected = other_weights()[norm]
    for tensors in (found, alone):
        assert torch.equal(tensors["decoder.final_layernorm.weight"].read(), expected)


@pytest.mark.parametrize("change", [0, 1])
def test_a_tensor_in_two_shards_is_that_of_the_index_unless_they_differ(
    tmp_path, change
):
    source = sharded(tmp_path / "in")
    last = source / "model-00002-of-00002.safetensors"
    name, first = next(iter(tensors_of(LLAMA).items()))
    save_file({**load_file(last), name: first + change}, last)
    if change:
        refused(source, tmp_path / "out", f"{name} differs from the tensor of that")
    else:
        convert(source, tmp_path / "out")


def test_tensors_that_are_missing_unused_or_of_other_shapes(tmp_path):
    tensors = tensors_of(LLAMA)
    without = {name: tensor for name, tensor in tensors.items() if name != QUERY}
    source = written(tmp_path / "in", without)
    refused(source, tmp_path / "out", f"1 tensors are missing in the files: {QUERY}")
    lines = convert(source, tmp_path / "allowed", allow_missing=("*.q_proj.weight",))
    assert "wrote" in lines[0]
    source = written(
        tmp_path / "in", tensors | {"model.layers.0.extra.weight": torch.ones(3)}
    )
    refused(
        source,
        tmp_path / "out",
        "have no place in the model: model.layers.0.extra.weight",
    )
    read = HUGGING_FACE.read(source, Wishes(allow_unused=("*.extra.*",)))
    assert read.unused == ("model.layers.0.extra.weight",)
    source = written(tmp_path / "in", tensors | {QUERY: torch.ones(8, 4)})
    refused(
        source,
        tmp_path / "out",
        r"q_proj.weight has shape \[8, 4\] and \[8, 8\] is needed",
    )


def test_parts_of_a_tensor_whose_other_parts_are_missing_are_named(tmp_path):
    tensors = tensors_of(LLAMA)
    del tensors[QUERY]
    read = HUGGING_FACE.read(
        written(tmp_path / "in", tensors), Wishes(allow_missing=("*.q_proj.weight",))
    )
    others = [QUERY.replace("q_proj", f"{part}_proj") for part in "kv"]
    why = "(replaced by new values, as other parts of its tensor are missing)"
    assert read.ignored == (f"{QUERY} (missing)", *(f"{name} {why}" for name in others))


def test_a_tied_head_that_differs_from_the_embedding(tmp_path):
    tensors = tensors_of(LLAMA)
    source = written(tmp_path / "in", tensors, tie_word_embeddings=True)
    refused(
        source,
        tmp_path / "out",
        "lm_head.weight differs from model.embed_tokens.weight",
    )
    same = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    convert(written(tmp_path / "in", same, tie_word_embeddings=True), tmp_path / "tied")
    assert (
        "output_layer.weight"
        not in OURS.read(tmp_path / "tied", Wishes()).tensors["weight"]
    )


WINDOWED = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}
INDEXER = r"sparse.* with an indexer"
OF_V3 = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 2,
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
}
OTHER_MODELS = {
    "post-LN": ({"model_type": "bert"}, "post-LN"),
    "an unknown type": ({"model_type": "lama"}, "did you mean 'llama'"),
    "another type": ({"model_type": "gpt_neo"}, "its attention has one bias"),
    "no type": ({"model_type": None}, "model_type None is not supported"),
    "a sliding window": ({"sliding_window": 8}, "sliding_window is 8.*is a mistral"),
    "sliding layers": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "'sliding_attention'",
    ),
    "a window that is text": (
        {"model_type": "mistral", "sliding_window": "8"},
        "sliding_window is '8'",
    ),
    "layers without a window": (
        {
            "model_type": "mistral",
            "sliding_window": 8,
            "layer_types": ["full_attention"],
        },
        "all layers of this model_type",
    ),
    "sliding layers, no window": (
        {"model_type": "qwen2", "layer_types": ["sliding_attention"]},
        "no window is set",
    ),
    "an unknown kind of layers": (
        {**WINDOWED, "layer_types": ["chunked_attention"]},
        "layer_types is",
    ),
    "layer_types of more layers": (
        {**WINDOWED, "layer_types": ["full_attention"] * 9},
        "for each of 2 lay",
    ),
    "first layer that is text": (
        {**WINDOWED, "max_window_layers": "1"},
        "max_window_layers is '1'",
    ),
    "qwen2_moe without layer_types": (
        {**WINDOWED, "model_type": "qwen2_moe"},
        "layer_types is None",
    ),
    "longrope": (
        {"rope_scaling": {"type": "longrope", "factor": 4.0}},
        "rope_type is 'longrope'",
    ),
    "an attention factor of nothing": (
        {"rope_scaling": {"type": "yarn", "factor": 1.0, "attention_factor": 2.0}},
        "attention_factor is 2",
    ),
    "other llama3 bounds": (
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 2.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
        "low_freq_factor 2.0",
    ),
    "another activation": ({"hidden_act": "gelu_10"}, "hidden_act is 'gelu_10'"),
    "some biases": (
        {"attention_bias": True, "mlp_bias": False},
        "attention_bias and mlp_bias differ",
    ),
    "attention biases alone": (
        {"attention_bias": True},
        "attention_bias and mlp_bias differ",
    ),
    "part of a head rotated": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5",
    ),
    "part of a head rotated, as of 4": (
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor is 0.5",
    ),
    "DeepSeek-V3.2": ({"model_type": "deepseek_v32"}, INDEXER),
    "GLM-5": ({"model_type": "glm_moe_dsa"}, INDEXER),
    "DeepSeek-V4": ({"model_type": "deepseek_v4"}, INDEXER),
    "a DeepSeek-V3 with an indexer": (
        {**OF_V3, "index_topk": 4},
        f"index_topk is 4: {INDEXER}.* is not computed",
    ),
    "a type that is a list": (
        {"model_type": ["llama"]},
        r"model_type \['llama'\] is not supported",
    ),
    "a dtype that is a table": ({"dtype": {"a": 1}}, "dtype is {'a': 1}, not a name"),
    "a huge size": (
        {"hidden_size": 10**12},
        "hidden_size 1000000000000, more than 1000000",
    ),
    "a huge vocabulary": (
        {"vocab_size": 10**18},
        "vocab_size 1000000000000000000, more than",
    ),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantized"),
    "no size": ({"hidden_size": None}, "hidden_size is missing"),
    "a size that is text": ({"hidden_size": "eight"}, "config.json"),
    "a list": ({"num_attention_heads": [2]}, "config.json"),
    "a table that is text": (
        {"model_type": "mpt", "attn_config": "x"},
        "config.json is damaged: AttributeError",
    ),
    "an infinite length": (
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": float("inf"),
            }
        },
        "config.json is damaged: OverflowError",
    ),
    "a negative size": ({"num_hidden_layers": -1}, "num_layers: -1 is out of range"),
    "too many layers": ({"num_hidden_layers": 10**12}, "1000000000000 is out of range"),
    "heads that form no groups": (
        {"num_attention_heads": 3, "num_key_value_heads": 2},
        "do not form",
    ),
}


@pytest.mark.parametrize("settings, match", OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_models_that_are_not_computed(tmp_path, settings, match):
    refused(written(tmp_path / "in", **settings), tmp_path / "out", match)


def test_pickles_are_not_read(tmp_path):
    source = written(tmp_path / "in")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert HUGGING_FACE.detect(source)
    refused(source, tmp_path / "out", "pytorch_model.bin, a pickle")


def test_a_model_that_no_family_computes_is_refused_with_its_options(tmp_path):
    convert(written(tmp_path / "in"), tmp_path / "ours")
    ours = OURS.read(tmp_path / "ours", Wishes())
    ours.model["apply_layernorm_1p"] = True
    with pytest.raises(
        CheckpointError,
        match="nearest, llama, differs from this model in apply_layernorm",
    ):
        HUGGING_FACE.write(ours, tmp_path / "back", Wishes())
    with pytest.raises(CheckpointError, match="--family opt differs"):
        HUGGING_FACE.write(ours, tmp_path / "back", Wishes(family="opt"))
    assert not list(tmp_path.glob("*back*"))


def test_heads_rotated_in_part_have_no_family_of_llama(tmp_path):
    convert(written(tmp_path / "in"), tmp_path / "ours")
    ours = OURS.read(tmp_path / "ours", Wishes())
    ours.model["rotary_percent"] = 0.5
    with pytest.raises(CheckpointError, match="partial_rotary_factor is 0.5"):
        HUGGING_FACE.write(ours, tmp_path / "back", Wishes(family="llama"))


WINDOWS = {  # settings → (LEFT, --window-size; --window-attn-skip-freq) of a model of 4 layers
    "mistral's default": (dict(max_position_embeddings=8192), "mistral", (4095, None)),
    "none": (dict(sliding_window=None), "mistral", None),
    "as long as the sequences": (dict(sliding_window=16), "mistral", None),
    "mixtral's default": (dict(max_position_embeddings=8192), "mixtral", None),
    "switched off": (dict(sliding_window=8), "qwen2", None),
    "qwen2's defaults, too few layers": (
        dict(use_sliding_window=True, max_position_embeddings=8192),
        "qwen2",
        None,
    ),
    "all layers": ({**WINDOWED, "max_window_layers": 0}, "qwen3", (7, None)),
    "the last layers": (
        {**WINDOWED, "max_window_layers": 2},
        "qwen2",
        (7, "[0, 0, 1, 1]"),
    ),
    "every other layer": (
        {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "qwen3",
        (7, "2"),
    ),
}


@pytest.mark.parametrize("settings, kind, expected", WINDOWS.values(), ids=WINDOWS)
def test_windows_are_read_and_written_as_they_are_read(settings, kind, expected):
    config = {
        **LLAMA,
        "max_position_embeddings": 16,
        **settings,
        "num_hidden_layers": 4,
        "model_type": kind,
    }
    family = FAMILIES[kind]
    if kind == "mixtral":
        config |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    found = family.options(config)
    assert (found.get("window_size"), found.get("window_attn_skip_freq")) == (
        ((expected[0], 0), expected[1]) if expected else (None, None)
    )
    written = family.settings(model_of(found, "the test"))
    again = family.options({**written, "model_type": kind})
    assert all(
        again.get(name) == found.get(name)
        for name in ("window_size", "window_attn_skip_freq")
    )
    assert written["sliding_window"] == (expected[0] + 1 if expected else None)


def test_a_model_with_windows_is_written_as_a_family_that_has_them(tmp_path):
    convert(written(tmp_path / "in"), tmp_path / "ours")
    ours = OURS.read(tmp_path / "ours", Wishes())
    HUGGING_FACE.write(ours, tmp_path / "plain", Wishes(family="mistral"))
    assert (
        json.loads((tmp_path / "plain/config.json").read_text())["sliding_window"]
        is None
    )
    ours.model["window_size"] = (3, 0)
    HUGGING_FACE.write(ours, tmp_path / "back", Wishes())
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["model_type"] == "mistral" and config["sliding_window"] == 4
    ours.model["window_attn_skip_freq"] = "2"
    HUGGING_FACE.write(ours, tmp_path / "listed", Wishes())
    config = json.loads((tmp_path / "listed/config.json").read_text())
    assert config["model_type"] == "ministral"
    assert config["layer_types"][:2] == ["sliding_attention", "full_attention"]
    with pytest.raises(
        CheckpointError, match="differs from this model in window_attn_skip_freq"
    ):
        HUGGING_FACE.write(ours, tmp_path / "other", Wishes(family="mistral"))


def test_rounding_is_said_and_values_that_float16_lacks_are_refused(tmp_path):
    tensors = tensors_of(LLAMA)
    tensors[QUERY][0, 0] = 1e5
    convert(written(tmp_path / "in", tensors, dtype="bfloat16"), tmp_path / "ours")
    ours = OURS.read(tmp_path / "ours", Wishes())
    for name in ("huggingface", "torch", "torch_dist"):
        with pytest.raises(
            CheckpointError,
            match="float16 cannot hold: the largest is 100000, .*bfloat16",
        ):
            format_of(name).write(ours, tmp_path / "half", Wishes(dtype="float16"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "ours"]
    said = f"{len(tensors)} float32 tensors were rounded to bfloat16"
    assert any(
        said in line for line in HUGGING_FACE.write(ours, tmp_path / "b", Wishes())
    )
    assert not any(
        "rounded" in line
        for line in HUGGING_FACE.write(ours, tmp_path / "c", Wishes(dtype="float32"))
    )


@pytest.mark.parametrize(
    "lower, kind", [(True, "BertWordPieceLowerCase"), (False, "BertWordPieceCase")]
)
def test_the_case_of_a_bert_vocabulary_is_kept(tmp_path, lower, kind):
    source = written(tmp_path / "in")
    (source / "vocab.txt").write_text("\n".join((*WORD_PIECE_TOKENS, "a", "b")))
    (source / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
    convert(source, tmp_path / "ours")
    ours = OURS.read(tmp_path / "ours", Wishes())
    assert ours.tokenizer_type == kind
    HUGGING_FACE.write(
        replace(ours, tokenizer={"vocab.txt": source / "vocab.txt"}),
        tmp_path / "back",
        Wishes(),
    )
    about = json.loads((tmp_path / "back/tokenizer_config.json").read_text())
    assert about == {"tokenizer_class": "BertTokenizer", "do_lower_case": lower}


def test_done_counts_the_bytes_of_the_source(tmp_path):
    source = written(
        tmp_path / "in",
        {name: value.bfloat16() for name, value in tensors_of(LLAMA).items()},
    )
    read, counts = HUGGING_FACE.read(source, Wishes()), []
    OURS.write(read, tmp_path / "ours", Wishes(done=counts.append))
    assert sum(counts) == sum(
        tensor.nbytes for tensor in read.tensors["weight"].values()
    )


@pytest.mark.parametrize(
    "flags, named",
    [
        (
            ["--to", "ours", "--vocab-size", "9", "--iteration", "3"],
            "--iteration and --vocab-size: neither",
        ),
        (
            ["--to", "ours", "--family", "llama", "--max-shard-size", "1GB"],
            "--family and --max-shard-size",
        ),
        (
            ["--to", "ours", "--target-tensor-parallel-size", "2"],
            "--target-tensor-parallel-size: neither",
        ),
        (
            ["--to", "torch", "--allow-missing", "*", "--family", "opt"],
            "--family: neither",
        ),
    ],
)
def test_flags_of_the_converter_that_neither_format_uses_are_refused(
    tmp_path, flags, named
):
    with pytest.raises(ConfigError, match=named):
        run_tool(
            [
                "--load",
                str(written(tmp_path / "in")),
                "--save",
                str(tmp_path / "out"),
                *flags,
            ]
        )
    assert not (tmp_path / "out").exists()


def test_a_conversion_between_other_formats_is_verified_by_this_package_alone(
    tmp_path, capsys
):
    convert(written(tmp_path / "in"), tmp_path / "ours")
    words = [
        "--load",
        str(tmp_path / "ours"),
        "--save",
        str(tmp_path / "out"),
        "--verify",
        "--no-optim",
    ]
    words.append("--to")
    assert run_tool([*words, "torch", "--vocab-size", "11"]) == 0
    assert "both outputs were computed by this package" in capsys.readouterr().out
    with pytest.raises(
        ConfigError,
        match="--verify: a written universal checkpoint of DeepSpeed does not",
    ):
        run_tool([*words, "deepspeed-universal"])


def test_a_written_step_of_the_optimizer_is_the_iteration_where_it_is_not_counted():
    assert (
        updates_in(StoredProgress(iteration=7)) == 7
        and updates_in(StoredProgress()) == 0
    )
    assert updates_in(StoredProgress(iteration=7, num_updates=0)) == 0


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_is_refused_beside_a_model_and_alone(name, tmp_path):
    source = written(tmp_path / "in")
    (source / name).write_text("{}")
    refused(source, tmp_path / "out", "adapter")
    for path in source.iterdir():
        if path.name != name:
            path.unlink()
    with pytest.raises(CheckpointError, match="adapter"):
        detected(source).read(source, Wishes())


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    convert(written(tmp_path / "in"), tmp_path / "ours")
    ours = OURS.read(tmp_path / "ours", Wishes())
    monkeypatch.setattr(
        "megatron_ds.compat.conversion.huggingface.format._write_tokenizer",
        fail,
    )
    with pytest.raises(CheckpointError, match="No space left"):
        HUGGING_FACE.write(ours, tmp_path / "back", Wishes())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "ours"]


def fail(*_):
    raise OSError(28, "No space left on device")
