"""Folders of Hugging Face → checkpoints of this package → folders of Hugging Face: outputs and files stay."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ds.compat.conversion import convert_checkpoint
from megatron_ds.compat.conversion.family import model_of
from megatron_ds.compat.conversion.formats import Wishes, detected
from megatron_ds.compat.conversion.huggingface.families import FAMILIES
from megatron_ds.compat.conversion.huggingface.format import (
    FORMAT as HUGGING_FACE,
)
from megatron_ds.compat.conversion.logits_proof import (
    largest_difference,
    our_outputs,
    random_tokens,
    their_outputs,
)
from megatron_ds.compat.conversion.own_format import FORMAT as OURS
from megatron_ds.errors import CheckpointError
from megatron_ds.extensions.corpora.vocabulary_training import train_byte_level_bpe
from megatron_ds.models.specs import specs_of
from tests.harness.huggingface_models import MODELS, WINDOW, saved
from tests.harness.layout_comparison import DOCUMENT_ENDS, random_samples
from tests.harness.next_step import difference, next_step
from tests.harness.pretraining import run_file, run_pretrain, train

pytestmark = pytest.mark.processes

pytest.importorskip("transformers", reason="transformers is not installed")
BLOOM_176B = dict(
    model_type="bloom",
    n_embed=14336,
    n_layer=70,
    num_attention_heads=112,
    vocab_size=250880,
)
# The first two rows of OPT and of BioGPT.
UNUSED_ROWS = "model.decoder.embed_positions.weight", "biogpt.embed_positions.weight"
OTHER_HALVES = "deepseek_v3, one group, queries without a latent, other halves"
# Kimi-K2: settings of another model_type, whose architecture is that of DeepSeek-V3.
KIMI_K2 = dict(
    vocab_size=163840,
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    num_attention_heads=64,
    num_key_value_heads=64,
    n_shared_experts=1,
    n_routed_experts=384,
    routed_scaling_factor=2.827,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=8,
    first_k_dense_replace=1,
    max_position_embeddings=131072,
    rope_theta=50000.0,
)
# Families whose usual settings are those of a published model → settings that transformers needs beside them.
FULL_SIZES: dict[str, dict] = {
    "glm": {},
    "glm4": {},
    "ernie4_5": {},
    "seed_oss": {},
    "helium": {},
    "arcee": {},
    "nemotron": {"num_key_value_heads": 8},
    "ministral": {"head_dim": 128},
    "glm4_moe": {},
    "dots1": {
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {},
    "glm4_moe_lite": {},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "granite": {},
    "smollm3": {},
    "cohere": {},
    "cohere2": {},
    "stablelm": {},
    "starcoder2": {},
    "gpt_bigcode": {},
    "biogpt": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "qwen3_next": {},
    "bamba": {},
    "granitemoehybrid": {},
    "falcon_h1": {},
    "nemotron_h": {},
    "olmo_hybrid": {},
    "olmo2": {},
    "mamba2": {},
}


def files_in(folder):
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def there_and_back(theirs, folder):
    """(our checkpoint, the folder of Hugging Face that is made of it)."""
    OURS.write(HUGGING_FACE.read(theirs, Wishes()), folder / "ours", Wishes())
    ours = OURS.read(folder / "ours", Wishes())
    HUGGING_FACE.write(ours, folder / "back", Wishes())
    return ours, folder / "back"


def run_tool(*argv):
    return convert_checkpoint.run_tool([str(word) for word in argv])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same_there_here_and_back_and_its_files_are_equal(
    name, tmp_path
):
    theirs = saved(name, tmp_path / "theirs")
    ours, back = there_and_back(theirs, tmp_path)
    tokens = random_tokens(model_of(ours.model, "the test"))
    expected = their_outputs(theirs, tokens)
    difference, largest = largest_difference(our_outputs(ours, tokens), expected)
    assert largest > 0.1 and difference <= 1e-6 * max(largest, 1)
    assert all(map(torch.equal, their_outputs(back, tokens), expected))
    before, after = files_in(theirs), files_in(back)
    # No position has these rows, and ours has no place for them.
    for table in before.keys() & {*UNUSED_ROWS}:
        assert not after[table][:2].any()
        before[table][:2] = 0
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    "name, layout",
    [
        ("llama", "tp=2,dp=2,zero=3"),
        ("gpt2", "pp=2"),
        ("gpt_neox", "dp=2,zero=1"),
        ("bloom", "tp=2"),
        ("gptj", "pp=2"),
        ("falcon 7b", "pp=2"),
        ("falcon 40b", "tp=2"),
        ("phi", "tp=2"),
        ("phi3, window", "pp=2"),
        ("mpt", "tp=2"),
        ("gemma", "tp=2"),
        ("gemma 2", "tp=2,pp=2"),
        ("gemma 3", "tp=2,pp=2"),
        ("gpt_oss", "tp=2"),
    ],
)
def test_the_first_step_from_a_folder_is_that_of_torch_with_transformers(
    name, layout, tmp_path
):
    error_of_losses, error_of_weights = apart_after_training(name, layout, tmp_path)
    assert error_of_losses < 1e-5 and error_of_weights < 1e-5


@pytest.mark.parametrize(
    "name, layout",
    [
        ("glm", "tp=2"),
        ("glm4", "pp=2"),
        ("ernie4_5", "tp=2,sp=1"),
        ("seed_oss", "dp=2,zero=3"),
        ("helium", "pp=2"),
        ("arcee", "tp=2"),
        ("nemotron", "tp=2,pp=2"),
        ("ministral, a layer with a window", "pp=2"),
        ("glm4_moe", "dp=2,ep=2"),
        ("dots1", "pp=2"),
        ("deepseek_v3", "tp=2,sp=1"),
        (OTHER_HALVES, "pp=2"),
        ("kimi_k2", "tp=2,ep=2,dp=2"),
        ("deepseek_v2", "dp=2,ep=2"),
        ("deepseek_v2, queries without a latent", "tp=2"),
        ("glm4_moe_lite", "dp=2,zero=3"),
        ("granite", "tp=2,sp=1"),
        ("smollm3", "dp=2,zero=3"),
        ("smollm3, listed layers", "pp=2"),
        ("cohere", "pp=2"),
        ("cohere2", "tp=2"),
        ("stablelm", "dp=2,zero=1"),
        ("stablelm, parallel", "tp=2,sp=1"),
        ("starcoder2", "tp=2"),
        ("gpt_bigcode", "pp=2"),
        ("gpt_bigcode, a key for each query", "tp=2"),
        ("biogpt", "tp=2"),
        ("qwen3_next", "tp=2,sp=1"),
        ("qwen3_5", "tp=2"),
        ("qwen3_5_moe", "dp=2,ep=2"),
        ("bamba", "tp=2,pp=3"),
        ("granite 4", "dp=2,zero=3"),
        ("granite 4, dense, rotary", "tp=2,sp=1"),
        ("falcon_h1", "tp=2,sp=1"),
        ("olmo_hybrid", "tp=2,sp=1"),
        ("olmo2", "tp=2"),
        ("mamba2", "tp=2,dp=2,zero=1"),
        ("nemotron_h", "pp=2"),
        ("nemotron 3", "dp=2,ep=2"),
    ],
)
def test_ten_steps_from_a_folder_are_those_of_torch_with_transformers(
    name, layout, tmp_path
):
    error_of_losses, error_of_weights = apart_after_training(
        name, layout, tmp_path, steps=10
    )
    assert error_of_losses < 1e-5 and error_of_weights < 1e-5


def apart_after_training(name, layout, tmp_path, steps=1) -> tuple[float, float]:
    """The largest differences of losses and of weights between steps of AdamW here and with transformers."""
    found = HUGGING_FACE.read(saved(name, tmp_path / "theirs"), Wishes())
    tokens = random_samples(4 * steps, 16, found.model["vocab_size"] - 1, seed=3)
    tokens += (tokens % DOCUMENT_ENDS == 0).long()
    trace, weights = next_step(
        found,
        tokens,
        layout,
        steps=steps,
        seq_length=16,
        hidden_dropout=0.0,
        lr=0.01,
        attention_dropout=0.0,
        adam_eps=0.001,
        weight_decay=0.0,
        clip_grad=0.0,
    )
    losses = transformers_trains(tmp_path / "theirs", tokens, tmp_path / "after")
    after = HUGGING_FACE.read(tmp_path / "after", Wishes()).tensors["weight"]
    expected = {name: tensor.read() for name, tensor in after.items()}
    assert len(losses) == len(trace.losses) == steps
    apart = max(abs(a - b) for a, b in zip(trace.losses, losses, strict=True))
    return apart, difference(weights, expected)


def transformers_trains(folder, tokens, after) -> list[float]:
    """The losses of steps of 4 samples; the trained model is written to `after`."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    embedding = model.get_input_embeddings()
    embedding.padding_idx = None  # the row of a padding token is trained here
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.01, betas=(0.9, 0.999), eps=0.001, weight_decay=0.0
    )
    losses = []
    for batch in tokens.split(4):
        loss = torch.nn.functional.cross_entropy(
            model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.save_pretrained(after)
    return losses


@pytest.mark.parametrize("name", FULL_SIZES)
def test_the_usual_settings_of_a_family_describe_as_many_parameters_as_transformers(
    name,
):
    """The settings that a class of transformers has by itself are of a published model."""
    import transformers

    config = transformers.AutoConfig.for_model(name, **FULL_SIZES[name])
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    model = model_of(FAMILIES[name].options(config.to_dict()), "the test")
    unused = 2 * config.hidden_size if name == "biogpt" else 0
    count = sum(
        spec.numel
        for spec in specs_of(model)
        if not spec.name.endswith(".expert_bias")  # no parameter of transformers
    )
    assert count == theirs.num_parameters() - unused > 10**8


def test_the_settings_of_kimi_k2_describe_as_many_parameters_as_transformers():
    import transformers

    config = transformers.DeepseekV3Config(**KIMI_K2, num_mtp_layers=0)
    with torch.device("meta"):
        theirs = transformers.DeepseekV3ForCausalLM(config)
    options = FAMILIES["kimi_k2"].options({**KIMI_K2, "model_type": "kimi_k2"})
    specs = specs_of(model_of(options, "the test"))
    biases = 60 * 384  # no parameters of transformers
    count = sum(spec.numel for spec in specs)
    assert count == theirs.num_parameters() + biases > 10**12


def test_a_folder_of_kimi_k2_is_read_and_written_under_its_name(tmp_path):
    theirs = saved("kimi_k2", tmp_path / "theirs")
    expected = HUGGING_FACE.read(theirs, Wishes())
    tokens = random_tokens(model_of(expected.model, "the test"))
    logits = their_outputs(theirs, tokens)
    settings = json.loads((theirs / "config.json").read_text())
    settings |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    (theirs / "config.json").write_text(json.dumps(settings))
    ours, back = there_and_back(theirs, tmp_path)
    assert HUGGING_FACE.read(theirs, Wishes()).model == expected.model
    difference, largest = largest_difference(our_outputs(ours, tokens), logits)
    assert largest > 0.1 and difference <= 1e-5
    before, after = files_in(theirs), files_in(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    written = json.loads((back / "config.json").read_text())
    assert written["model_type"] == "kimi_k2"


def test_the_settings_of_bloom_176b_describe_as_many_parameters_as_it_has():
    model = model_of(FAMILIES["bloom"].options(BLOOM_176B), "the test")
    assert sum(spec.numel for spec in specs_of(model)) == 176_247_271_424


def test_taps_in_three_equal_tensors_and_other_names_of_norms_are_read(tmp_path):
    """transformers writes so what it reads as one tensor for each of q, k and v."""
    theirs = saved("olmo_hybrid", tmp_path / "theirs")
    stored = HUGGING_FACE.read(theirs, Wishes()).tensors["weight"]
    expected = {n: t.read() for n, t in stored.items()}
    before = files_in(theirs)
    taps = [n for n in before if n.endswith("0.linear_attn.q_conv1d.weight")]
    [name] = taps
    names = [name.replace("q_conv", f"{part}_conv") for part in "qkv"]
    joined = torch.cat([before[n] for n in names])
    sizes = (10, 30, len(joined) - 40)
    before |= dict(zip(names, (t.clone() for t in joined.split(sizes)), strict=True))
    norm = "model.layers.1.feedforward_layer_norm.weight"
    before["model.layers.1.post_attention_layernorm.weight"] = before.pop(norm)
    save_file(before, theirs / "model.safetensors", {"format": "pt"})
    found = HUGGING_FACE.read(theirs, Wishes()).tensors["weight"]
    assert all(torch.equal(found[n].read(), t) for n, t in expected.items())
    before[names[0]] = before[names[0]][1:].clone()
    save_file(before, theirs / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="3 tensors do not have the shape"):
        HUGGING_FACE.read(theirs, Wishes())


def test_windows_are_those_of_the_settings_and_tokens_outside_of_them_matter(tmp_path):
    ours = HUGGING_FACE.read(
        saved("qwen2, a layer with a window", tmp_path / "theirs"), Wishes()
    )
    assert (
        ours.model["window_size"] == (WINDOW - 1, 0)
        and ours.model["window_attn_skip_freq"] == "[0, 1]"
    )
    without = replace(
        ours,
        model={
            name: value for name, value in ours.model.items() if "window" not in name
        },
    )
    tokens = random_tokens(model_of(ours.model, "the test"))
    differ = (
        (our_outputs(ours, tokens)[0] - our_outputs(without, tokens)[0]).abs() > 1e-5
    ).any(2)
    assert not differ[:, :WINDOW].any() and differ[:, WINDOW:].all()


def test_sharded_bfloat16_with_spellings_of_transformers_4_and_without_prefix(tmp_path):
    theirs = saved("gpt2", tmp_path / "theirs", torch.bfloat16, max_shard_size="20KB")
    assert len(list(theirs.glob("model-*.safetensors"))) > 2
    config = json.loads((theirs / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    del config["tie_word_embeddings"]
    (theirs / "config.json").write_text(json.dumps(config))
    _, back = there_and_back(theirs, tmp_path)
    before, after = files_in(theirs), files_in(back)
    assert before.keys() == after.keys() and {t.dtype for t in after.values()} == {
        torch.bfloat16
    }
    assert all(torch.equal(before[key], after[key]) for key in before)
    bare = {
        name.removeprefix("transformer."): tensor for name, tensor in before.items()
    }
    for path in theirs.glob("model*"):
        path.unlink()
    save_file(
        bare | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, theirs / "model.safetensors"
    )
    ours = HUGGING_FACE.read(theirs, Wishes()).tensors["weight"]
    assert torch.equal(
        ours["embedding.word_embeddings.weight"].read(),
        before["transformer.wte.weight"],
    )


def test_biases_of_experts_stay_in_fp32_beside_weights_in_bfloat16(tmp_path):
    """transformers writes them so (`_keep_in_fp32_modules_strict`)."""
    theirs = saved("glm4_moe", tmp_path / "theirs", torch.bfloat16)
    before = files_in(theirs)
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    before |= {name: torch.randn(4) for name in biases}
    save_file(before, theirs / "model.safetensors", {"format": "pt"})
    _, back = there_and_back(theirs, tmp_path)
    after = files_in(back)
    assert before.keys() == after.keys()
    assert {t.dtype for t in after.values()} == {torch.bfloat16, torch.float32}
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_rope_settings_of_transformers_4_are_those_of_5(tmp_path):
    theirs = saved("llama 3, tied, wide heads", tmp_path / "theirs")
    new = HUGGING_FACE.read(theirs, Wishes()).model
    config = json.loads((theirs / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (theirs / "config.json").write_text(json.dumps(config))
    assert HUGGING_FACE.read(theirs, Wishes()).model == new
    assert new["use_rope_scaling"] and new["rotary_base"] == 500000.0


@pytest.mark.quick
def test_the_tool_converts_verifies_and_keeps_the_tokenizer(tmp_path, capsys):
    import transformers

    theirs = saved("llama", tmp_path / "theirs")
    train_byte_level_bpe(["the theory of the thing " * 9], 270, tmp_path / "tok")
    transformers.GPT2Tokenizer(
        str(tmp_path / "tok/vocab.json"), str(tmp_path / "tok/merges.txt")
    ).save_pretrained(theirs)
    assert run_tool("--load", theirs, "--save", tmp_path / "ours", "--verify") == 0
    assert (
        run_tool(
            "--load",
            tmp_path / "ours",
            "--save",
            tmp_path / "back",
            "--dtype",
            "bfloat16",
            "--max-shard-size",
            "20KB",
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (
        "verified: largest difference of outputs" in said
        and "HuggingFaceTokenizer" in said
    )
    assert (
        json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "bfloat16"
    )
    assert (tmp_path / "back/model.safetensors.index.json").is_file()
    text = "the theory"
    ids = [
        transformers.AutoTokenizer.from_pretrained(folder)(text).input_ids
        for folder in (theirs, tmp_path / "back")
    ]
    assert ids[0] == ids[1]
    with pytest.raises(
        CheckpointError, match="above 1e-09.*was written.*delete it"
    ):  # bfloat16 rounds
        run_tool(
            "--load",
            tmp_path / "ours",
            "--save",
            tmp_path / "other",
            "--dtype",
            "bfloat16",
            "--verify",
            "--tolerance",
            "1e-9",
        )
    with pytest.raises(CheckpointError, match="not empty"):
        run_tool("--load", tmp_path / "ours", "--save", tmp_path / "back")


@pytest.mark.quick
def test_a_run_at_tp_2_and_pp_2_starts_from_a_folder_and_its_checkpoint_goes_back_bit_for_bit(
    tmp_path,
):
    theirs = saved("qwen3, tied", tmp_path / "theirs")
    data = [
        "--mock-data",
        "--seq-length",
        16,
        "--micro-batch-size",
        1,
        "--global-batch-size",
        2,
        "--train-iters",
        1,
        "--lr",
        1e-30,
        "--weight-decay",
        0,
        "--eval-iters",
        0,
    ]
    ended = train(
        4,
        [
            "--load",
            theirs,
            "--save",
            tmp_path / "run",
            *data,
            "--tensor-model-parallel-size",
            2,
            "--pipeline-model-parallel-size",
            2,
        ],
    )
    assert "weights only" in ended[0].out
    assert run_file(tmp_path / "run", 1)["identity"]["model"]["qk_layernorm"] is True
    HUGGING_FACE.write(
        OURS.read(tmp_path / "run", Wishes()), tmp_path / "back", Wishes()
    )
    before, after = files_in(theirs), files_in(tmp_path / "back")
    assert before.keys() == after.keys() and all(
        torch.equal(before[key], after[key]) for key in before
    )


def test_every_option_that_differs_from_the_files_is_named(tmp_path):
    theirs = saved("llama", tmp_path / "theirs")
    ended = train_one(["--load", theirs, "--norm-epsilon", "1e-3", "--rotary-base", 5])
    assert (
        "norm_epsilon: checkpoint 1e-06, this run 0.001" in ended
        and "rotary_base" in ended
    )


def train_one(argv):
    (ended,) = run_pretrain(
        1,
        [
            *argv,
            "--mock-data",
            "--seq-length",
            16,
            "--micro-batch-size",
            1,
            "--global-batch-size",
            1,
            "--train-iters",
            1,
            "--lr",
            1e-30,
            "--eval-iters",
            0,
        ],
    )
    assert ended.code == 2
    return ended.err


def test_formats_are_told_apart(tmp_path):
    theirs = saved("llama", tmp_path / "theirs")
    OURS.write(HUGGING_FACE.read(theirs, Wishes()), tmp_path / "ours", Wishes())
    assert detected(theirs) is HUGGING_FACE and detected(tmp_path / "ours") is OURS
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is empty"):
        detected(tmp_path / "empty")


def test_a_token_that_a_tokenizer_lacks_is_none_in_place_of_gpt2s(tmp_path):
    from types import SimpleNamespace

    from transformers import AutoConfig

    from megatron_ds.compat.conversion.huggingface.format import token_ids
    from tests.harness.byte_tokenizer import END, save_tokenizer

    save_tokenizer(tmp_path)
    about = tmp_path / "tokenizer_config.json"
    named = json.loads(about.read_text())
    named.pop("bos_token")
    about.write_text(json.dumps(named))
    files = {"tokenizer.json": tmp_path / "tokenizer.json"}
    found = token_ids(SimpleNamespace(tokenizer=files))
    assert found["eos_token_id"] == END
    settings = {"model_type": "gpt2", "vocab_size": 259, **found}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.bos_token_id, config.eos_token_id) == (None, END)
    assert token_ids(SimpleNamespace(tokenizer={})) == {}
