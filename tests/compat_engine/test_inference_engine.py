"""`init_inference` over ranks and with stored weights, compared with the model itself; what it refuses."""

import json

import pytest
import torch
from torch import nn

import megatron_ds
from megatron_ds.compat.division import split_layers
from megatron_ds.errors import CallError, CheckpointError, ConfigError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.engine_runs import on_ranks
from tests.harness.processes import run_processes
from tests.harness.threads import run_ranks

transformers = pytest.importorskip(
    "transformers", reason="computes with models of transformers, not installed"
)

SMALL = {
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **SMALL}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **SMALL}
LLAMA = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 64}
NEO = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
# model → sizes: with a plan of its own (llama, experts), by known names, with biases for each head
MODELS = {
    "GPT2LMHeadModel": GPT2,
    "GPTNeoForCausalLM": {"hidden_size": 32, **NEO, **SMALL},
    "LlamaForCausalLM": LLAMA,
    "MixtralForCausalLM": {**LLAMA, "num_local_experts": 4},
    "Phi3ForCausalLM": {**LLAMA, "pad_token_id": 0},
    "OPTForCausalLM": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "BloomForCausalLM": {"hidden_size": 32, "n_layer": 2, "n_head": 4, **SMALL},
    "FalconForCausalLM": {**SIZES, "multi_query": False, "alibi": True},
    "T5ForConditionalGeneration": {**T5, **SMALL, "decoder_start_token_id": 0},
    "BertForMaskedLM": {**SIZES, "intermediate_size": 64},
}
IDS = torch.randint(8, 48, (2, 9), generator=torch.Generator().manual_seed(1))
GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def make(name, **more):
    torch.manual_seed(3)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**{**MODELS[name], **more})).eval()


def inputs_of(model):
    more = {"decoder_input_ids": IDS[:, :5]} if model.config.is_encoder_decoder else {}
    return {"input_ids": IDS, **more}


def over_two_ranks(name, then, **options):
    """then(engine) on two threads that share the model; the results."""

    def main(rank, world):
        mpu = Mesh(Grid.fit(2, tp=2), rank, world.connect)
        options.setdefault("dtype", torch.float32)
        return then(megatron_ds.init_inference(make(name), mpu=mpu, **options))

    return run_ranks(2, main)


def block_of_t5():
    from transformers.models.t5.modeling_t5 import T5Block

    return {T5Block: ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")}


# ------------------------------------------------------------------------------------ over ranks
@pytest.mark.threads
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_compute_what_the_model_computes(name):
    plain = make(name)
    inputs = inputs_of(plain)
    with torch.no_grad():
        expected = plain(**inputs)[0]
    tokens = plain.generate(IDS, **GREEDY) if plain.can_generate() else None

    def then(engine):
        found = engine(**inputs)[0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        if tokens is not None:
            assert torch.equal(engine.generate(IDS, **GREEDY), tokens)
        assert engine.config is engine.module.config and not engine.training
        return sum(p.numel() for p in engine.parameters())

    sizes = over_two_ranks(name, then)
    assert max(sizes) < 0.8 * sum(p.numel() for p in plain.parameters())


@pytest.mark.threads
@pytest.mark.parametrize(
    "name",
    ["GPT2LMHeadModel", pytest.param("LlamaForCausalLM", marks=pytest.mark.rest)],
)
def test_adapters_are_divided_with_their_layers(name, monkeypatch):
    peft = pytest.importorskip("peft")
    options = {"target_modules": "all-linear", "init_lora_weights": False}
    whole = make

    def adapted(name):
        model = whole(name)
        torch.manual_seed(5)
        return peft.get_peft_model(model, peft.LoraConfig(**options)).eval()

    plain = adapted(name)
    with torch.no_grad():
        expected = plain(input_ids=IDS)[0]
        assert (expected - make(name)(input_ids=IDS)[0]).abs().max() > 0.1
    monkeypatch.setitem(globals(), "make", adapted)

    def then(engine):
        found = engine(input_ids=IDS)[0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        return sum(p.numel() for p in engine.parameters())

    sizes = over_two_ranks(name, then)
    assert max(sizes) < 0.8 * sum(p.numel() for p in plain.parameters())
    policy = {type(plain): ("o_proj",)}
    with pytest.raises(ConfigError, match="injection_policy has names of layers"):
        over_two_ranks(name, then, injection_policy=policy)


@pytest.mark.threads
def test_a_policy_names_the_layers_that_are_summed():
    name = "T5ForConditionalGeneration"
    expected = make(name).generate(IDS, **GREEDY)
    found = over_two_ranks(
        name,
        lambda engine: engine.generate(IDS, **GREEDY),
        injection_policy=block_of_t5(),
    )
    assert all(torch.equal(tokens, expected) for tokens in found)


@pytest.mark.threads
def test_a_module_of_the_users_own_is_divided_by_a_policy():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 8)
            self.second = nn.Linear(8, 6)

        def forward(self, x):
            return x + self.second(self.first(x).relu())

    torch.manual_seed(0)
    module = nn.Sequential(Block(), Block())
    state = module.state_dict()
    x = torch.randn(3, 6)
    expected = module(x)

    def main(rank, world):
        own = nn.Sequential(Block(), Block())
        own.load_state_dict(state)
        engine = megatron_ds.init_inference(
            own,
            dtype="fp32",
            injection_policy={Block: "second"},
            mpu=Mesh(Grid.fit(2, tp=2), rank, world.connect),
        )
        assert own[0].first.weight.shape == (4, 6)
        return engine(x)

    for found in run_ranks(2, main):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.threads
def test_a_division_that_computes_something_else_is_refused(monkeypatch):
    """Queries, keys and values of GPT-2 are one layer; cut as one, ranks get parts of other heads."""
    monkeypatch.setattr(split_layers, "FUSED", {})
    with pytest.raises(ConfigError, match="computes something else .* differ by"):
        over_two_ranks("GPT2LMHeadModel", lambda engine: None)


@pytest.mark.threads
def test_heads_that_ranks_do_not_divide_are_refused(monkeypatch):
    monkeypatch.setitem(MODELS, "LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 1})
    with pytest.raises(ConfigError, match="num_key_value_heads=1, which 2 tensor"):
        over_two_ranks("LlamaForCausalLM", lambda engine: None)


@pytest.mark.threads
def test_ranks_with_different_inputs_are_told():
    ranks = iter(range(2))
    with pytest.raises(CallError, match="given different ones"):
        over_two_ranks("GPT2LMHeadModel", lambda engine: engine(IDS + next(ranks)))


def generate_in_processes(rank, world):
    expected = make("LlamaForCausalLM").generate(IDS, **GREEDY)
    torch.manual_seed(rank)
    engine = megatron_ds.init_inference(
        make("LlamaForCausalLM"), tensor_parallel={"tp_size": 2}, dtype=torch.float
    )
    drawn = engine.generate(IDS, max_new_tokens=20, do_sample=True)
    return torch.equal(engine.generate(IDS, **GREEDY), expected), drawn


@pytest.mark.processes
def test_processes_generate_the_same_tokens_and_the_same_samples():
    (same, drawn), (also, of_other) = run_processes(2, generate_in_processes)
    assert same and also and torch.equal(drawn, of_other)


# ------------------------------------------------------------------------------------ stored weights
@pytest.mark.plan
@pytest.mark.parametrize("bits, groups", [(8, None), (8, 16), (4, None)])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_stored_weights_are_within_half_a_step_of_their_group(name, bits, groups):
    quant = {"weight": {"num_bits": bits, "q_groups": groups}}
    engine = megatron_ds.init_inference(make(name), dtype=torch.int8, quant=quant)
    plain = dict(make(name).named_modules())
    stored = [(at, m) for at, m in engine.module.named_modules() if hasattr(m, "codes")]
    assert len(stored) in (8, 14), "all layers but embeddings and the output layer"
    for at, module in stored:
        whole = plain[at].weight.detach().flatten()
        size = whole.numel() // groups if groups else 128
        error = (module.weight.flatten() - whole).view(-1, size).abs()
        bound = whole.view(-1, size).abs().amax(1, keepdim=True) / (2**bits - 2)
        assert (error <= bound * (1 + 1e-5)).all() and error.max() > 0
        assert module.codes.nbytes == whole.numel() * bits // 8
    with torch.no_grad():
        whole = make(name)(IDS)[0]
    assert (engine(IDS)[0] - whole).abs().max() < whole.abs().max() * 0.3


# ------------------------------------------------------------------------------------ checkpoints
@pytest.mark.plan
@pytest.mark.parametrize("name", ["BloomForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("kind", ["json", "keys", "folder"])
def test_a_model_without_memory_gets_its_weights_from_files(name, kind, tmp_path):
    plain = make(name)
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    keys = {"type": "BLOOM", "checkpoints": files, "version": 1.0}
    (tmp_path / "ds.json").write_text(json.dumps(keys))
    options = {
        "json": {"checkpoint": str(tmp_path / "ds.json")},
        "keys": {"checkpoint": keys, "base_dir": str(tmp_path)},
        "folder": {"checkpoint": str(tmp_path)},
    }[kind]
    with megatron_ds.OnDevice(dtype=torch.float32, device="meta"):
        model = type(plain)(plain.config)
    engine = megatron_ds.init_inference(model, dtype=torch.float32, **options)
    with torch.no_grad():
        assert torch.equal(engine(IDS)[0], plain(IDS)[0])


@pytest.mark.plan
def test_files_that_are_missing_or_of_another_model_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="nothing.bin does not exist"):
        megatron_ds.init_inference(
            make("GPT2LMHeadModel"), checkpoint=str(tmp_path / "nothing.bin")
        )
    state = make("GPT2LMHeadModel").state_dict()
    del state["transformer.h.1.mlp.c_fc.bias"]
    torch.save(state, tmp_path / "some.bin")
    with pytest.raises(CheckpointError, match="lacks 1 weights .*h.1.mlp.c_fc.bias"):
        megatron_ds.init_inference(
            make("GPT2LMHeadModel"), checkpoint=str(tmp_path / "some.bin")
        )


DAMAGED = {
    "model.safetensors": (b"", b"\xff" * 99),
    "model.safetensors.index.json": (b"{", b"[]", b"{}", b'{"weight_map": {"a": 1}}'),
    "ds.json": (b"{", b"[1]"),
    "list.bin": (b"abc",),
}


@pytest.mark.plan
@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_named(name, tmp_path):
    is_of_folder = name.startswith("model")
    for content in DAMAGED[name]:
        (tmp_path / name).write_bytes(content)
        given = tmp_path if is_of_folder else tmp_path / name
        with pytest.raises(CheckpointError, match=name):
            megatron_ds.init_inference(make("GPT2LMHeadModel"), checkpoint=given)


# ------------------------------------------------------------------------------------ settings
@pytest.mark.plan
@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtpye": 1}, "did you mean 'dtype'"),
        ({"dtype": "int3"}, "it is torch.half, torch.bfloat16"),
        ({"zero": {"stage": 3}}, "without an optimizer"),
        ({"ep_size": 2}, "experts are divided by tensor_parallel"),
        ({"tp": {"tp_size": 0}}, "1 or more"),
        ({"mp_size": 2, "tp": {"tp_size": 4}}, "Give tp_size alone"),
        ({"quant": {"weight": {"q_type": "asymmetric"}}}, "only symmetric"),
        ({"quant": {"activation": {"num_bits": 8}}}, "weights alone"),
        ({"injection_policy": {"T5Block": ("wo",)}}, "write {LayerClass"),
        ({"save_mp_checkpoint_path": "x"}, "no divided copy is needed"),
        (
            {"checkpoint": {"type": "Megatron", "checkpoints": []}},
            "megatron-ds convert",
        ),
        ({"checkpoint": {"checkpoints": [1]}}, "give a list of files"),
        ({"checkpoint": 3}, "checkpoint is 3: give a folder"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        megatron_ds.init_inference(make("GPT2LMHeadModel"), **options)


@pytest.mark.plan
def test_keys_without_effect_are_said_once(caplog, tmp_path):
    path = tmp_path / "inference.json"
    path.write_text('{"kernel_inject": true, "dtype": "fp16", "max_tokens": 10}')
    with caplog.at_level("INFO"):
        engine = megatron_ds.init_inference(
            make("GPT2LMHeadModel"), path, replace_method="auto", return_tuple=False
        )
    told = [line for line in caplog.messages if "has no effect" in line]
    assert len(told) == 2 and "scaled_dot_product_attention" in told[0]
    assert engine.dtype == torch.float16
    with pytest.raises(CallError, match="11 tokens, and max_out_tokens is 10"):
        engine.generate(torch.ones(1, 11, dtype=torch.long), **GREEDY)


@pytest.mark.plan
def test_times_of_forwards_are_measured_when_asked_for():
    engine = megatron_ds.init_inference(make("GPT2LMHeadModel"), dtype=torch.float32)
    with pytest.raises(CallError, match="profile_model_time"):
        engine.model_times()
    engine.profile_model_time()
    engine(IDS)
    assert len(engine.model_times()) == 1 and engine.model_times() == []


@pytest.mark.plan
def test_a_module_without_generate_is_named():
    engine = megatron_ds.init_inference(torch.nn.Linear(2, 2), dtype=torch.float32)
    with pytest.raises(CallError, match="Linear has no method generate"):
        engine.generate(IDS)


# ------------------------------------------------------------------------------------ stage 3 without an optimizer
@pytest.mark.threads
@pytest.mark.parametrize("device", ["cpu", "none"])
def test_weights_that_ranks_share_generate_the_same_texts(device):
    """ZeRO-Inference: each rank keeps a part of the weights, and layers gather theirs while they compute."""
    plain = make("LlamaForCausalLM")
    inputs = inputs_of(plain)
    with torch.no_grad():
        expected = plain(**inputs).logits
    tokens = plain.generate(IDS, **GREEDY)
    zero = {"stage": 3, "offload_param": {"device": device}}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}

    def main(engine, rank):
        engine.eval()
        with torch.no_grad():
            assert torch.equal(engine(**inputs).logits, expected)
        assert torch.equal(engine.module.generate(IDS, **GREEDY), tokens)
        kept = {
            p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
            for p in engine.module.parameters()
        }
        return sum(kept.values())

    whole = sum(p.nbytes for p in plain.parameters())
    for kept in on_ranks(2, main, lambda: make("LlamaForCausalLM"), config):
        assert kept < 0.7 * whole
