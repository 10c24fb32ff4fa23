"""Words of other programs about layers: hybrid patterns, gates, dense first layers, shared experts, scaled positions.

The oracle of a word is the same model written with this package's own options: the configurations are equal.
"""

import math

import pytest
import torch

from megatron_ds.compat.config.layer_halves import HALVES, read_halves
from megatron_ds.compat.recipes.file import Training
from megatron_ds.compat.recipes.verdict import Kind, assess
from megatron_ds.config.parse import parse
from megatron_ds.errors import ConfigError
from megatron_ds.models import MODELS
from megatron_ds.models.attention import rotary_scalings
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.training.pretrain import KNOWN_NAMES, RULES

pytestmark = pytest.mark.plan

RUN = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 2 --lr 1e-3 "
    "--mock-data --vocab-size 61"
).split()
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24"
YARN = "--max-position-embeddings 256 --seq-length 128 --rotary-base 100"
STACK = "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"


def parsed(words: str, ranks: int = 1):
    return parse([*RUN, *words.split()], ranks, known=KNOWN_NAMES, rules=RULES, env={})


@pytest.mark.parametrize(
    "theirs, ours, ranks",
    [
        ("--hybrid-layer-pattern *-*-*-", "--num-layers 3", 1),
        # Megatron takes the number of halves from the pattern, whatever --num-layers is.
        ("--num-layers 6 --hybrid-override-pattern *-*-*-", "--num-layers 3", 1),
        (
            f"--hybrid-layer-pattern *-*E*E {EXPERTS}",
            f"--num-layers 3 --moe-layer-freq [0,1,1] {EXPERTS}",
            1,
        ),
        (
            "--hybrid-layer-pattern *-|*-*-*- --pipeline-model-parallel-size 2",
            "--num-layers 4 --pipeline-layout 1,3 --pipeline-model-parallel-size 2",
            2,
        ),
        (f"--hybrid-layer-pattern *-*- --spec {STACK}", "--num-layers 2", 1),
        # Layers that are no whole blocks are halves.
        (
            "--hybrid-layer-pattern M-*G --mamba-num-groups 1",
            "--num-layers 4 --mixer-pattern M-*G --mamba-num-groups 1",
            1,
        ),
        ("--hybrid-layer-pattern **-", "--num-layers 3 --mixer-pattern **-", 1),
        ("--hybrid-layer-pattern *-*", "--num-layers 3 --mixer-pattern *-*", 1),
        (
            "--hybrid-layer-pattern *|-*- --pipeline-model-parallel-size 2",
            "--num-layers 4 --mixer-pattern *-*- --pipeline-layout 1,3 --pipeline-model-parallel-size 2",
            2,
        ),
        (
            "--num-layers 2 --glu-activation swiglu",
            "--num-layers 2 --swiglu --ffn-hidden-size 128",
            1,
        ),
        (
            "--num-layers 2 --glu-activation swiglu --ffn-hidden-size 64",
            "--num-layers 2 --swiglu --ffn-hidden-size 64",
            1,
        ),
        (
            f"--num-layers 5 --first-k-dense-replace 2 {EXPERTS}",
            f"--num-layers 5 --moe-layer-freq [0,0,1,1,1] {EXPERTS}",
            1,
        ),
        (
            f"--num-layers 5 --first-k-dense-replace 1 --moe-layer-freq 2 {EXPERTS}",
            f"--num-layers 5 --moe-layer-freq [0,0,1,0,1] {EXPERTS}",
            1,
        ),
        (
            f"--num-layers 2 --norm-topk-prob --moe-router-pre-softmax --moe-layer-freq -1 {EXPERTS}",
            f"--num-layers 2 {EXPERTS}",
            1,
        ),
        # Megatron-DeepSpeed's default: every second layer.
        (
            "--num-layers 4 --num-experts 2 4",
            "--num-layers 4 --num-experts 2 4 --expert-interval 2",
            1,
        ),
        (
            f"--num-layers 2 --n-shared-experts 2 {EXPERTS}",
            f"--num-layers 2 --moe-shared-expert-intermediate-size 48 {EXPERTS}",
            1,
        ),
        (
            f"--num-layers 2 --position-embedding-type rope --rope-scaling-type yarn --rope-scaling-factor 5 {YARN} "
            "--beta-fast 16 --rope-scaling-mscale 0.7 --rope-scaling-original-max-position-embeddings 64",
            f"--num-layers 2 --position-embedding-type yarn --yarn-rotary-scaling-factor 4 {YARN} "
            "--yarn-beta-fast 16 --yarn-mscale 0.7 --original-max-position-embeddings 64",
            1,
        ),
    ],
)
def test_a_word_is_the_model_of_the_options_here(theirs, ours, ranks):
    mine = parsed(ours, ranks)
    found = parsed(theirs, ranks)
    assert found.model.experts == mine.model.experts
    assert found.parallel == mine.parallel
    if mine.model.is_rotary and mine.model.position_embedding_type == "yarn":
        assert found.model.yarn_factor == mine.model.yarn_factor == 4
        assert found.model.yarn_beta_fast == mine.model.yarn_beta_fast
        assert found.model.yarn_mscale == mine.model.yarn_mscale
    assert found.model.moe_router_pre_softmax == mine.model.moe_router_pre_softmax
    assert found.model.position_embedding_type == mine.model.position_embedding_type
    assert shapes(found) == shapes(mine)


def shapes(config):
    layers = MODELS["gpt"](config.model, ParallelContext(device=torch.device("meta")))
    params = (p.spec for layer in layers for p in layer.make().parameters())
    return {spec.name: tuple(spec.shape) for spec in params}


@pytest.mark.parametrize(
    "pattern, says",
    [
        ("+-", "half 1 is multi-latent attention"),
        ("D-", "half 1 is sparse attention"),
        ("*-/*-", "more than the next token"),
        ("*-X", "'X' stands for no half"),
        ("|", "one for each half"),
    ],
)
def test_a_pattern_of_another_model_is_refused_by_the_name_of_its_half(pattern, says):
    with pytest.raises(ConfigError, match=says):
        parsed(f"--hybrid-layer-pattern {pattern}")


def test_ratios_of_mamba_layers_are_refused():
    with pytest.raises(ConfigError, match="hybrid-layer-pattern"):
        parsed("--num-layers 4 --hybrid-attention-ratio 0.5")


def test_halves_are_read_whether_or_not_a_model_here_has_them():
    halves = read_halves("M*|GE-/*E/*E", "--x")
    assert [half.kind for half in halves.main] == [HALVES[c] for c in "M*GE-"]
    assert [half.segment for half in halves.main] == [0, 0, 1, 1, 1]
    assert halves.segments == 2
    assert halves.further_tokens == ("*E", "*E")


def test_a_script_of_hybrid_models_needs_a_pattern():
    def kinds(script, *more):
        training = Training(script, (*RUN, "--num-layers", "2", *more), 1)
        return {v.kind for v in assess(training, KNOWN_NAMES, RULES).verdicts}

    assert kinds("pretrain_gpt.py") == {Kind.DONE}
    assert Kind.REFUSED in kinds("pretrain_hybrid.py")
    assert Kind.REFUSED in kinds("pretrain_mamba.py")
    pattern = ("--hybrid-layer-pattern", "*-*-")
    assert kinds("pretrain_hybrid.py", *pattern) == {Kind.DONE}


def test_a_split_without_a_corpus_to_divide_is_noted():
    argv = [word for word in RUN if word != "--mock-data"]
    words = "--num-layers 2 --train-data-path p --split 949,50,1 --tokenizer-type NullTokenizer"
    config = parse([*argv, *words.split()], 1, rules=RULES, env={})
    assert config.data.split is None
    assert any("--split" in note for note in config.without_effect)


def test_options_that_megatron_does_not_read_are_noted():
    config = parsed("--num-layers 2 --short-seq-prob 0 --mask-prob 0.2")
    assert len(config.without_effect) == 2


def test_packed_documents_of_a_fork_keep_attention_within_documents():
    assert parsed("--num-layers 2 --use-packed-seq-params").data.reset_attention_mask


def test_a_scaled_weight_is_not_divided_by_its_sum():
    with pytest.raises(ConfigError, match="undoes the factor"):
        parsed(
            f"--num-layers 2 {EXPERTS} --norm-topk-prob --moe-router-topk-scaling-factor 2"
        )


def test_offloading_without_a_stage_splits_the_offloaded_state():
    config = parsed("--num-layers 2 --optimizer-cpu-offload", 2)
    assert (config.zero.stage, config.zero.offload_optimizer) == (1, "cpu")
    assert config.sources["zero.stage"].kind == "derived"
    with pytest.raises(ConfigError, match="zero-stage"):
        parsed("--num-layers 2 --offload-optimizer cpu")


def test_yarn_of_the_fork_has_the_frequencies_of_its_formula():
    """freq = inter (1 - m) + extra m, m from 1 to 0 between the channels that turn beta_fast and beta_slow times."""
    config = parsed(
        f"--num-layers 2 --rope-scaling-type yarn --rope-scaling-original-max-position-embeddings 64 {YARN} "
        "--position-embedding-type rope"
    ).model
    width = config.head_dim
    extra = [100 ** (-i / width) for i in range(0, width, 2)]

    def channel(turns):
        return width * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(100))

    low = max(math.floor(channel(32)), 0)
    high = min(math.ceil(channel(1)), width - 1)
    ramp = [
        min(max((i - low) / (high - low or 0.001), 0), 1) for i in range(width // 2)
    ]
    expected = [f / 4 * r + f * (1 - r) for f, r in zip(extra, ramp)]
    (scaling,) = rotary_scalings(config)
    torch.testing.assert_close(
        scaling(torch.tensor(extra)), torch.tensor(expected), rtol=1e-6, atol=0
    )
