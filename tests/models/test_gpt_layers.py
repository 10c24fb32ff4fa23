"""The list of layers: names, parameter specs, what is built when, what is refused."""

from dataclasses import replace

import pytest
import torch

from megatron_ds.errors import ConfigError
from megatron_ds.models import MODELS, build_stage
from megatron_ds.models.attention import Rotary
from megatron_ds.mpu.group import Group
from tests.harness.gpt_runs import make_batch
from tests.harness.model_runs import context_of
from tests.harness.plain_gpt import LLAMA, STYLES, TinyConfig, logical_shapes

pytestmark = pytest.mark.plan

VARIANTS = STYLES | {
    "biases of q, k, v": TinyConfig(**LLAMA, add_qkv_bias=True),
    "normalized heads": TinyConfig(qk_layernorm=True),
}


def tp_of(size, rank=0):
    return Group(
        "tp", tuple(range(size)), rank, transport=None
    )  # building communicates nothing


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("style", VARIANTS)
def test_each_parameter_has_its_name_its_logical_shape_and_its_share(style, tp_size):
    config = VARIANTS[style]
    model = build_stage(MODELS["gpt"](config, context_of(tp_of(tp_size))))
    specs = {p.spec.name: p.spec for p in model.parameters()}
    assert {name: spec.shape for name, spec in specs.items()} == logical_shapes(config)
    assert len(specs) == len(list(model.parameters()))
    for p in model.parameters():
        assert tuple(p.shape) == p.spec.local_shape({"tp": tp_size}), p.spec.name


def test_names_do_not_depend_on_the_cut():
    layers = MODELS["gpt"](STYLES["llama"], context_of())
    assert [layer.name for layer in layers] == [
        "embedding",
        *(f"decoder.layers.{i}" for i in range(3)),
        "decoder.final_layernorm",
        "output_layer",
    ]
    assert [layer.kind for layer in layers] == [
        "embedding",
        "block",
        "block",
        "block",
        "norm",
        "head",
    ]
    names = [
        p.spec.name
        for stage in (layers[:2], layers[2:3], layers[3:])
        for p in build_stage(stage).parameters()
    ]
    assert names == [p.spec.name for p in build_stage(layers).parameters()]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_partial_exactly_where_a_parameter_sees_some_of_the_tokens_or_heads(
    sequence_parallel,
):
    model = build_stage(
        MODELS["gpt"](
            VARIANTS["normalized heads"],
            context_of(tp_of(2), sequence_parallel=sequence_parallel),
        )
    )
    sees_slice = (
        "layernorm.weight",
        "layernorm.bias",
        "linear_proj.bias",
        "linear_fc2.bias",
        "position_embeddings.weight",
    )
    for p in model.parameters():
        of_some_heads = (
            "self_attention.q_" in p.spec.name or "self_attention.k_" in p.spec.name
        )
        partial = (
            sequence_parallel and p.spec.name.endswith(sees_slice) or of_some_heads
        )
        assert p.spec.partial_over == (("tp",) if partial else ()), p.spec.name


@pytest.mark.parametrize("minus_one", [False, True])
def test_initial_values_and_decay_follow_the_kind_of_parameter(minus_one):
    config = replace(
        STYLES["gpt2"], init_method_std=0.5, num_layers=8, apply_layernorm_1p=minus_one
    )
    for p in build_stage(MODELS["gpt"](config, context_of())).parameters():
        name, init = p.spec.name, p.spec.init
        assert p.spec.decay == (len(p.spec.shape) > 1), name
        if name.endswith("bias"):
            assert init.kind == "zeros", name
        elif "norm" in name:
            assert init.kind == ("zeros" if minus_one else "ones"), name
        else:
            assert init.kind == "normal", name
            assert init.std == (0.125 if "proj" in name or "fc2" in name else 0.5), (
                name
            )  # 0.5 / sqrt(2 * 8)


@pytest.mark.parametrize("decays", [False, True])
def test_norms_of_heads_decay_only_on_request(decays):
    config = replace(VARIANTS["normalized heads"], apply_wd_to_qk_layernorm=decays)
    specs = [
        p.spec for p in build_stage(MODELS["gpt"](config, context_of())).parameters()
    ]
    assert {spec.name for spec in specs if spec.decay and len(spec.shape) == 1} == {
        f"decoder.layers.{i}.self_attention.{part}_layernorm.{leaf}"
        for i in range(3)
        for part in "qk"
        for leaf in ("weight", "bias")
        if decays
    }


def test_only_the_first_blocks_of_a_stage_recompute_when_a_number_is_given():
    def granularities(count, start=0):
        layers = MODELS["gpt"](
            STYLES["gpt2"],
            context_of(recompute_granularity="full", recompute_num_layers=count),
        )
        return [
            m.granularity
            for m in build_stage(layers[start:])
            if hasattr(m, "granularity")
        ]

    assert granularities(None) == ["full"] * 3
    assert granularities(1) == ["full", None, None]
    assert granularities(1, start=2) == ["full", None]
    assert granularities(0) == [None] * 3


@pytest.mark.parametrize(
    "change, words",
    [
        (
            dict(num_attention_heads=3, query_groups=3),
            "num_attention_heads=3 .*=2.*whole heads",
        ),
        (dict(query_groups=1), r"num_query_groups=1 .*size in \(1\)"),
        (dict(ffn_size=21), r"ffn_hidden_size=21 .*size in \(1, 3, 7, 21\)"),
        (dict(normalization="LayrNorm"), "did you mean 'LayerNorm'"),
        (dict(activation="gelo"), "did you mean 'gelu'"),
    ],
    ids=str,
)
def test_what_cannot_be_built_says_what_could(change, words):
    # the list itself builds nothing
    layers = MODELS["gpt"](replace(STYLES["gpt2"], **change), context_of(tp_of(2)))
    with pytest.raises(ConfigError, match=words):
        layers[1].make()


def test_an_unknown_granularity_is_refused():
    with pytest.raises(ConfigError, match="'fully'"):
        MODELS["gpt"](STYLES["gpt2"], context_of(recompute_granularity="fully"))


def test_a_sequence_longer_than_the_learned_positions_is_refused():
    config = STYLES["gpt2"]
    embedding = MODELS["gpt"](config, context_of())[0].make()
    with pytest.raises(
        ConfigError, match="18 tokens does not fit 17 learned positions"
    ):
        embedding(None, make_batch(config, s=18))


def test_rotary_tables_are_made_once_for_all_layers_and_anew_for_other_positions():
    rotary = Rotary(head_dim=8, percent=1.0, base=100.0)
    first, second = torch.arange(5).expand(3, 5), torch.tensor([[0, 1, 2], [0, 0, 1]])
    assert rotary.tables(first)[0] is rotary.tables(first)[0]
    assert rotary.tables(first)[0].shape == (5, 1, 1, 4)
    assert rotary.tables(second)[0].shape == (3, 2, 1, 4)
    assert torch.equal(rotary.tables(second)[0][2, 1], rotary.tables(first)[0][1, 0])
