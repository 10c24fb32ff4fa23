"""Models of transformers that an engine divides over tensor-parallel ranks, made of shards (`zero.Init`) or with
adapters of peft, compared with plain torch in one process."""

import pytest
import torch

import megatron_ds
from megatron_ds.errors import ConfigError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.managed_parameter import spec_of
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.zero import Init
from tests.harness import divided_models
from tests.harness.divided_models import (
    config_of,
    divided,
    make,
    plain,
    trained,
)
from tests.harness.threads import run_ranks

pytest.importorskip(
    "transformers", reason="trains models of transformers, not installed"
)
LLAMA = "LlamaForCausalLM"
QWEN3 = "Qwen3ForCausalLM"
GPT2 = "GPT2LMHeadModel"
FEW = 0.05  # clipping of the few parameters of adapters


def check_equal(found, expected):
    """What four ranks have trained, two by two, is what one process has."""
    losses, norms, weights = expected
    for rank in range(2):  # of a tensor-parallel group
        means = [sum(of) / 2 for of in zip(found[rank][0][0], found[2 + rank][0][0])]
        assert means == pytest.approx(losses, abs=1e-5)
    for (_, seen), *_ in found:
        assert seen == pytest.approx(norms, rel=1e-5)
    for key, value in found[0][1].items():
        torch.testing.assert_close(value, weights[key], rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------ shards
@pytest.mark.threads
@pytest.mark.parametrize(
    "name, stage, of_groups",
    [
        (GPT2, 3, False),
        pytest.param(LLAMA, 3, True, marks=pytest.mark.rest),
        pytest.param("T5ForConditionalGeneration", 1, False, marks=pytest.mark.rest),
    ],
)
def test_a_model_of_shards_is_divided_and_trains_as_one_process(name, stage, of_groups):
    """of_groups: each data-parallel group shards a model, not all ranks together."""
    expected = plain(name)

    def main(rank, world):
        mpu = Mesh(Grid.fit(4, tp=2), rank, world.connect)
        all_ranks = Mesh(Grid.fit(4), rank, world.connect)
        # Shards have the values of the first rank, of whatever seed the others are.
        model = make(name, seed=3 if of_groups or rank == 0 else rank)
        Init(module=model, mpu=mpu if of_groups else all_ranks)
        assert all(p.is_meta for p in model.parameters())
        engine, *_ = megatron_ds.initialize(
            model=model, config=config_of(stage), mpu=mpu
        )
        cut = [p for p in model.parameters() if spec_of(p).is_split_over("tp")]
        assert cut and not any(hasattr(p, "partition") for p in model.parameters())
        return trained(engine)

    check_equal(run_ranks(4, main), expected)


# ------------------------------------------------------------------------------------ adapters
def adapted(name, **options):
    """A model with adapters of LoRA, whose second factors are not zero."""
    peft = pytest.importorskip("peft")
    model = make(name)
    torch.manual_seed(7)
    config = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**config | options)).train()


@pytest.fixture
def with_adapters(monkeypatch):
    """with_adapters(options of LoRA): from then on all models of this module have adapters."""

    def begin(**options):
        monkeypatch.setattr(
            divided_models, "make", lambda name: adapted(name, **options)
        )
        plain.cache_clear()

    yield begin
    plain.cache_clear()


@pytest.mark.threads
@pytest.mark.parametrize(
    "name, stage, options",
    [
        (LLAMA, 3, {"modules_to_save": ["lm_head"]}),
        pytest.param(GPT2, 1, {}, marks=pytest.mark.rest),
        pytest.param(
            QWEN3,
            0,
            {"target_modules": ["q_proj", "down_proj"]},
            marks=pytest.mark.rest,
        ),
        pytest.param(
            "Phi3ForCausalLM", 2, {"use_rslora": True}, marks=pytest.mark.rest
        ),
        pytest.param("OPTForCausalLM", 0, {"lora_bias": True}, marks=pytest.mark.rest),
        pytest.param("T5ForConditionalGeneration", 3, {}, marks=pytest.mark.rest),
    ],
)
def test_adapters_of_divided_layers_train_as_in_one_process(
    name, stage, options, with_adapters
):
    with_adapters(**options)
    expected = plain(name, clip=FEW)
    assert max(expected[1]) > FEW, "clipping is active"

    def then(engine):
        cut = {
            n: spec_of(p).is_split_over("tp")
            for n, p in engine.module.named_parameters()
        }
        return *trained(engine), cut

    found = divided(name, stage, then, clip=FEW)
    check_equal(found, expected)
    # Of each adapted layer that is divided one factor is cut, and trained parameters have moved.
    cut = found[0][2]
    layers = {
        n.partition(".lora_")[0]
        for n, is_cut in cut.items()
        if is_cut and ".lora_" in n
    }
    assert len(layers) >= 4
    for layer in layers:
        factors = [cut[f"{layer}.lora_{part}.default.weight"] for part in "AB"]
        assert sorted(factors) == [False, True] and cut[f"{layer}.base_layer.weight"]


@pytest.mark.threads
@pytest.mark.parametrize(
    "options, keys, message",
    [
        ({"use_dora": True}, {}, "a variant of LoRA .* such as DoRA"),
        ({}, {"partition_config": {"layer_specs": []}}, "has others by its adapters"),
    ],
)
def test_adapters_that_cannot_be_divided_are_refused(
    options, keys, message, with_adapters
):
    with_adapters(**options)
    block = {"autotp_size": 2, **keys}
    with pytest.raises(ConfigError, match=message):
        divided(LLAMA, 0, lambda engine: None, data=1, tensor_parallel=block)


@pytest.mark.threads
def test_adapters_other_than_lora_are_refused(monkeypatch):
    peft = pytest.importorskip("peft")
    config = peft.IA3Config(task_type="CAUSAL_LM")
    monkeypatch.setattr(
        divided_models, "make", lambda name: peft.get_peft_model(make(name), config)
    )
    with pytest.raises(ConfigError, match="of peft's kind .*IA3"):
        divided(LLAMA, 0, lambda engine: None, data=1)
