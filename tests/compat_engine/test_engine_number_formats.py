"""Number formats in 16-bit engines: buffers keep theirs, and parameters that a model names stay fp32."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megatron_ds
from megatron_ds.errors import ConfigError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.engine_runs import EPS
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

RANKS, WIDTH = 2, 16
BF16, FP16 = (
    {"bf16": {"enabled": True}},
    {"fp16": {"enabled": True, "initial_scale_power": 4}},
)
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt_neox", "gemma")


class Gated(nn.Module):
    """A gate that works in fp32, as those of transformers' mixtures of experts."""

    _keep_in_fp32_modules_strict = ["gate.weight", "score*bias"]
    _keep_in_fp32_modules = ["wide"]

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gate, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("score_correction_bias", torch.linspace(19, 19.1, WIDTH))
        self.register_buffer("table", torch.linspace(0, 1, WIDTH))

    def forward(self, x):
        x = self.inner(x.to(self.inner.weight.dtype))
        gate = (
            F.linear(x.float(), self.gate.weight.float(), self.gate.bias.float())
            + self.table
        )
        return (gate * self.wide(x.to(self.wide.weight.dtype))).float().square().mean()


def gated():
    torch.manual_seed(1)
    return Gated()


def config_of(stage, **more):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}),
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": EPS}},
        **more,
    }


def on_ranks(main, config, model=gated):
    models = [model() for _ in range(RANKS)]
    return run_ranks(
        RANKS,
        lambda rank, world: main(
            megatron_ds.initialize(
                model=models[rank],
                config=config,
                mpu=Mesh(Grid.fit(RANKS), rank, world.connect),
            ).engine,
            rank,
        ),
    )


def inputs(rank, steps=3):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(steps, 4, WIDTH, generator=generator)


def train(engine, rank):
    for x in inputs(rank):
        engine.backward(engine(x))
        engine.step()


def formats(engine):
    return {
        name: value.dtype
        for name, value in [
            *engine.module.named_parameters(),
            *engine.module.named_buffers(),
        ]
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_late_positions_of_a_bf16_engine_have_the_logits_of_transformers(family):
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.15,
    )
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **sizes)
    )
    theirs = copy.deepcopy(model).eval()
    for p in theirs.parameters():
        p.data = p.data.bfloat16()
    engine = megatron_ds.initialize(
        model=model, mpu=Mesh(Grid(), 0), config=config_of(1, **BF16)
    ).engine
    tokens = torch.randint(3, 97, (1, 200), generator=torch.Generator().manual_seed(0))
    places = torch.arange(1800, 2000)[None]
    logits = lambda module: (
        module(input_ids=tokens, position_ids=places, use_cache=False).logits
    )
    with torch.no_grad():
        assert torch.equal(logits(engine.eval()), logits(theirs))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_model_names_stays_fp32_in_training_and_in_checkpoints(stage, tmp_path):
    def first(engine, rank):
        train(engine, rank)
        engine.save_checkpoint(tmp_path)
        return formats(engine), engine.full_state_dict()

    def second(engine, rank):
        assert engine.load_checkpoint(tmp_path)[0] is not None
        return formats(engine), engine.full_state_dict()

    (found, whole), _ = on_ranks(first, config_of(stage, **BF16))
    assert {name for name, dtype in found.items() if dtype == torch.float32} == {
        "gate.weight",
        "score_correction_bias",
        "table",
    }
    assert (
        whole["gate.weight"].dtype == torch.float32
        and whole["wide.weight"].dtype == torch.bfloat16
    )
    (again, loaded), _ = on_ranks(second, config_of(3 - stage, **BF16))
    assert again == found and all(
        torch.equal(loaded[name], value) for name, value in whole.items()
    )
    assert not torch.equal(
        whole["gate.weight"], whole["gate.weight"].bfloat16().float()
    )


def test_an_fp32_parameter_in_a_bf16_model_is_trained_as_with_torch_alone():
    plain = gated()
    first = {
        name: p.detach() if name == "gate.weight" else p.detach().bfloat16().float()
        for name, p in plain.named_parameters()
    }
    masters = {name: value.clone().requires_grad_() for name, value in first.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=0.01, eps=EPS, weight_decay=0.0)
    for xs in zip(*map(inputs, range(RANKS))):
        for name, p in plain.named_parameters():
            p.data = (
                masters[name].detach().clone()
                if name == "gate.weight"
                else masters[name].bfloat16()
            )
            masters[name].grad = torch.zeros_like(masters[name])
        for x in xs:
            grads = torch.autograd.grad(plain(x) / RANKS, list(plain.parameters()))
            for name, grad in zip(masters, grads):
                masters[name].grad += grad.float()
        optimizer.step()
    for stage in (0, 3):
        found = on_ranks(
            lambda engine, rank: (
                train(engine, rank) or engine.full_state_dict(torch.float32)
            ),
            config_of(stage, **BF16),
        )[0]
        torch.testing.assert_close(
            found["gate.weight"], masters["gate.weight"].detach(), rtol=0, atol=1e-6
        )


@pytest.mark.parametrize(
    "keep, precision, expected",
    [
        ("auto", FP16, {"gate.weight", "wide.weight", "wide.bias"}),
        ([], BF16, set()),
        (["ga*w"], BF16, {"gate.weight"}),
        ("auto", {}, set(dict(gated().named_parameters()))),
    ],
)
def test_the_config_says_which_parameters_stay_fp32(keep, precision, expected):
    config = config_of(2, **precision, data_types={"keep_in_fp32_modules": keep})
    engine = megatron_ds.initialize(
        model=gated(), mpu=Mesh(Grid(), 0), config=config
    ).engine
    found = formats(engine)
    assert {
        name for name, p in engine.module.named_parameters() if p.dtype == torch.float32
    } == expected
    assert (
        found["table"] == torch.float32
        and engine.config["data_types"] == config["data_types"]
    )
    train(engine, 0)


def test_buffers_are_cast_only_where_the_config_says_so():
    config = config_of(
        1, **BF16, data_types={"buffer_dtype": "bf16", "grad_accum_dtype": "fp32"}
    )
    found = formats(
        megatron_ds.initialize(model=gated(), mpu=Mesh(Grid(), 0), config=config).engine
    )
    assert (
        found["table"] == torch.bfloat16
        and found["score_correction_bias"] == torch.float32
    )
    for key, value in {"keep_in_fp32_modules": "all", "buffer_dtype": "half"}.items():
        with pytest.raises(ConfigError, match=f'"data_types.{key}" is .*{value}'):
            megatron_ds.initialize(
                model=gated(),
                mpu=Mesh(Grid(), 0),
                config=config_of(1, **BF16, data_types={key: value}),
            )


@pytest.mark.parametrize(
    "keep, expected", [([], torch.bfloat16), (["1."], torch.float32)]
)
def test_running_statistics_have_the_format_of_their_weights(keep, expected):
    """torch's BatchNorm refuses weights and statistics of different formats."""
    config = config_of(2, **BF16, data_types={"keep_in_fp32_modules": keep})
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.BatchNorm1d(WIDTH, affine=False),
    )
    engine = megatron_ds.initialize(
        model=model, mpu=Mesh(Grid(), 0), config=config
    ).engine
    for x in inputs(0):
        engine.backward(engine(x.bfloat16()).float().square().mean())
        engine.step()
    norm = engine.module[1]
    assert {norm.weight.dtype, norm.running_mean.dtype, norm.running_var.dtype} == {
        expected
    }
    assert (
        engine.module[2].running_mean.dtype == torch.float32
        and norm.num_batches_tracked == 3
    )


@pytest.mark.parametrize("pattern", ["ga(te", "gate[", "+"])
def test_patterns_of_names_have_no_other_signs_than_stars(pattern):
    config = config_of(2, **BF16, data_types={"keep_in_fp32_modules": [pattern]})
    engine = megatron_ds.initialize(
        model=gated(), mpu=Mesh(Grid(), 0), config=config
    ).engine
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}


def test_shards_made_before_the_engine_keep_the_values_of_what_stays_fp32():
    def main(rank, world):
        mesh = Mesh(Grid.fit(RANKS), rank, world.connect)
        megatron_ds.zero.Init(module=models[rank], mpu=mesh, dtype=torch.bfloat16)
        engine = megatron_ds.initialize(
            model=models[rank], config=config_of(3, **BF16), mpu=mesh
        ).engine
        return formats(engine), engine.full_state_dict()

    models = [gated() for _ in range(RANKS)]
    (found, whole), _ = run_ranks(RANKS, main)
    assert (
        found["gate.weight"] == torch.float32 and found["gate.bias"] == torch.bfloat16
    )
    assert (
        torch.equal(whole["gate.weight"], gated().gate.weight)
        and found["inner.weight"] == torch.bfloat16
    )
