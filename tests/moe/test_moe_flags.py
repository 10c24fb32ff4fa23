"""Flags of Megatron and Megatron-DeepSpeed about experts: which are options, accepted or refused; what
startup says about them. Wrong combinations are in test_config_messages.py."""

import re
from types import SimpleNamespace

import pytest

from megatron_ds.checkpoint.load import check_same_model
from megatron_ds.compat.config.unsupported import FLAGS, answer_to_flag
from megatron_ds.config import parse
from megatron_ds.config.messages import divisors, problems_of
from megatron_ds.config.parse import read
from megatron_ds.config.rules.moe import MOE_RULES
from megatron_ds.config.sources.flags import spellings
from megatron_ds.errors import CheckpointError, ConfigError
from megatron_ds.extensions.startup.moe_notes import OF_DEEPSPEED, moe_notes
from megatron_ds.extensions.startup.startup_text import (
    experts_text,
    notes_text,
    ranges_text,
)
from megatron_ds.training.run_checkpoint import describe_run
from tests.config.test_config_messages import GOOD

pytestmark = pytest.mark.plan

EP = "--expert-model-parallel-size"

# Every flag of the two projects that is about experts.
MEGATRON = """
    num-experts expert-model-parallel-size expert-tensor-parallel-size moe-layer-freq moe-ffn-hidden-size
    moe-shared-expert-intermediate-size moe-shared-expert-gate moe-shared-expert-overlap
    use-grouped-gemm-for-shared-expert moe-shared-expert-glu-interleave-size moe-router-load-balancing-type
    moe-router-topk moe-enable-routing-replay moe-router-topk-limited-devices moe-router-padding-for-fp8
    moe-router-padding-for-quantization moe-router-num-groups moe-router-group-topk moe-router-pre-softmax
    moe-router-topk-scaling-factor moe-router-score-function moe-router-dtype moe-router-enable-expert-bias
    moe-router-bias-update-rate moe-router-quantile-balancing-ema moe-router-force-load-balancing
    moe-router-force-biased moe-grouped-gemm moe-use-legacy-grouped-gemm moe-use-grouped-tensor
    moe-single-grouped-weight moe-single-grouped-bias moe-aux-loss-coeff moe-z-loss-coeff moe-input-jitter-eps
    moe-token-dropping moe-token-dispatcher-type moe-enable-deepep moe-flex-dispatcher-backend
    moe-permute-fusion-into-hybridep moe-hybridep-pad-uneven-dispatch-inputs moe-per-layer-logging
    moe-expert-capacity-factor moe-pad-expert-input-to-capacity moe-pad-experts-for-cuda-graph-inference
    moe-token-drop-policy moe-layer-recompute moe-permute-fusion moe-router-fusion moe-apply-probs-on-input
    moe-latent-size moe-flex-dispatcher-num-sms moe-deepep-num-sms moe-hybridep-num-sms
    moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms-preprocessing
    moe-ncclep-zero-copy moe-dispatch-fwd-dtype moe-combine-bwd-dtype moe-mlp-glu-interleave-size
    moe-expert-rank-capacity-factor moe-paged-stash moe-paged-stash-page-size
    moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-buffer-size-factor-cpu moe-extended-tp
    moe-use-upcycling moe-upcycling-granularity moe-routing-trace-path moe-routing-trace-max-inference-steps
    overlap-moe-expert-parallel-comm overlap-dispatch-backward-with-experts-wgrad
    expert-tensor-parallel-num-weight-shards expert-gtp-weight-remat-size""".split()
DEEPSPEED = """
    num-experts num-experts-switch expert-interval topk moe-expert-parallel-size moe-loss-coeff mlp-type
    moe-train-capacity-factor moe-eval-capacity-factor moe-min-capacity disable-moe-token-dropping
    disable-moe-top2-2nd-expert-sampling enable-expert-tensor-parallelism use-tutel
    create-moe-param-group""".split()


def parsed(words: str, ranks: int = 1):
    return parse(f"{GOOD} {words}".split(), ranks, env={})


@pytest.mark.parametrize("name", sorted({*MEGATRON, *DEEPSPEED}))
def test_every_flag_is_an_option_or_has_an_answer(name):
    answer = answer_to_flag("--" + name)
    assert ("--" + name in spellings()) != (answer is not None)
    assert (
        answer is None
        or bool(answer.note)
        and (bool(answer.refusal) == (answer.values is not None))
    )


def test_spellings_of_deepspeed_are_flags():
    assert set(OF_DEEPSPEED) <= set(spellings()) and {f[2:] for f in OF_DEEPSPEED} <= {
        *DEEPSPEED
    }


@pytest.mark.parametrize(
    "words",
    [
        "--moe-token-dispatcher-type allgather",
        "--moe-token-dispatcher-type alltoall",
        "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
        "--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --moe-per-layer-logging",
        "--moe-shared-expert-overlap --overlap-moe-expert-parallel-comm",
        "--create-moe-param-group --use-tutel",
        "--disable-moe-top2-2nd-expert-sampling --enable-expert-tensor-parallelism",
        "--moe-dispatch-fwd-dtype bf16",
    ],
)
def test_a_choice_of_implementation_is_accepted_and_listed(words):
    config = parsed(f"--num-experts 8 {words}")
    assert set(config.without_effect) == set(re.findall("--[a-z0-9-]+", words))


def test_an_unknown_flag_about_experts_is_not_answered_as_a_family():
    with pytest.raises(
        ConfigError,
        match="unknown flag --moe-rooter-topk; did you mean '--moe-router-topk'",
    ):
        parsed("--num-experts 8 --moe-rooter-topk 2")


# ------------------------------------------------------------------ recipes
@pytest.mark.parametrize(
    "ranks, words, experts",
    [
        # the shapes of published recipes of Megatron: Mixtral, DeepSeek-V2-Lite, DeepSeek-V3, Qwen3, Sinkhorn
        (
            8,
            f"--num-experts 8 {EP} 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
            "--moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall",
            (8,) * 12,
        ),
        (
            4,
            f"--num-experts 64 {EP} 4 --moe-router-topk 6 --moe-layer-freq ([0]*1+[1]*11) --moe-ffn-hidden-size "
            "1408 --moe-shared-expert-intermediate-size 2816 --moe-router-pre-softmax --moe-router-num-groups 1 "
            "--moe-router-group-topk 1 --moe-aux-loss-coeff 1e-3 --moe-router-load-balancing-type seq_aux_loss "
            "--moe-z-loss-coeff 0",
            (0,) + (64,) * 11,
        ),
        (
            2,
            f"--num-experts 256 {EP} 2 --moe-layer-freq [0]*3+[1]*9 --moe-ffn-hidden-size 2048 "
            "--moe-router-topk 8 "
            "--moe-shared-expert-intermediate-size 2048 --moe-router-load-balancing-type seq_aux_loss "
            "--moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-topk-scaling-factor 2.5 "
            "--moe-aux-loss-coeff 1e-4 --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 "
            "--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-dtype fp32",
            (0,) * 3 + (256,) * 9,
        ),
        (
            2,
            f"--num-experts 128 {EP} 2 --expert-tensor-parallel-size 1 --moe-router-topk 8 --moe-ffn-hidden-size "
            "768 --moe-aux-loss-coeff 1e-3 --moe-permute-fusion",
            (128,) * 12,
        ),
        (
            2,
            "--num-experts 8 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn "
            f"--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2 {EP} 1",
            (8,) * 12,
        ),
        # of Megatron-DeepSpeed: experts in every second layer; PR-MoE
        (
            4,
            "--num-experts 64 --moe-expert-parallel-size 4 --expert-interval 2 --topk 1 --moe-router-pre-softmax "
            "--moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0 --moe-eval-capacity-factor 1.0 "
            "--moe-min-capacity 4 --create-moe-param-group",
            (0, 64) * 6,
        ),
        (
            2,
            "--num-experts 2 2 2 2 4 4 --moe-expert-parallel-size 2 --expert-interval 2 --mlp-type residual "
            "--moe-loss-coeff 0.01 --disable-moe-token-dropping",
            (0, 2) * 4 + (0, 4) * 2,
        ),
    ],
)
def test_recipes_are_accepted_as_they_are(ranks, words, experts):
    assert parsed(words, ranks).model.experts == experts


def test_the_dense_recipes_of_megatron_deepspeed_have_no_experts():
    config = parsed(
        "--num-experts 1 --expert-interval 2 --topk 1 --moe-expert-parallel-size 1 "
        "--moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0 --moe-min-capacity 4"
    )
    assert (
        config.model.num_experts is None
        and not any(config.model.experts)
        and moe_notes(config) == []
    )
    assert (
        "--moe-loss-coeff 0.01" in config.without_effect
        and "--num-experts 1" in config.without_effect
    )


def test_disabled_dropping_leaves_the_capacity_out():
    words = "--num-experts 4 --moe-train-capacity-factor 2 --moe-eval-capacity-factor 2 --moe-min-capacity 3"
    with_drops = parsed(words).model
    assert (with_drops.moe_expert_capacity_factor, with_drops.moe_min_capacity) == (
        2.0,
        3,
    )
    config = parsed(f"{words} --disable-moe-token-dropping")
    model = config.model
    assert (
        model.moe_expert_capacity_factor is None
        and model.moe_eval_capacity_factor is None
    )
    assert model.moe_min_capacity == 0 and len(config.without_effect) == 3


def test_the_width_of_the_jitter_alone_selects_it():
    assert (
        parsed("--num-experts 4 --moe-input-jitter-eps 0.1").model.moe_router_noise
        == "jitter"
    )
    assert parsed("--num-experts 4").model.moe_router_noise == "none"
    with pytest.raises(
        ConfigError, match="width of the jitter, but --moe-router-noise none"
    ):
        parsed("--num-experts 4 --moe-input-jitter-eps 0.1 --moe-router-noise none")


def test_several_losses_have_a_weight_each():
    model = parsed(
        "--num-experts 4 --moe-router-load-balancing-type seq_aux_loss global_aux_loss "
        "--moe-aux-loss-coeff 1e-2 1e-3"
    ).model
    assert model.moe_router_load_balancing_type == ("seq_aux_loss", "global_aux_loss")
    assert model.moe_aux_loss_coeff == (1e-2, 1e-3)


# ------------------------------------------------------------------ rules
def test_legal_expert_parallel_sizes_are_exactly_those_that_fit_experts_and_ranks():
    for ranks in (1, 2, 6, 8):
        for numbers in ((8,), (12,), (4, 6)):
            legal = [
                n for n in divisors(ranks) if all(number % n == 0 for number in numbers)
            ]
            for ep in range(1, 9):
                each = " ".join(map(str, numbers))
                freq = "--moe-layer-freq [0]*10+[1]*2" * (len(numbers) > 1)
                words = f"{GOOD} --num-experts {each} {freq} {EP} {ep}".split()
                found = list(problems_of(MOE_RULES, read(words, ranks, env={})))
                assert (found == []) == (ep in legal), (ranks, numbers, ep, found)
                if found:
                    listed = re.search(rf"Use {EP} ([0-9, or]+)", found[0])[1]
                    assert [int(n) for n in re.findall(r"\d+", listed)] == legal


@pytest.mark.parametrize(
    "words",
    [
        "--num-experts 4 --moe-layer-freq [0,1]",
        "--num-experts 4 4 4",
        "--num-experts 4 --moe-layer-freq x",
    ],
)
def test_an_unreadable_choice_of_layers_is_one_problem_among_others(words):
    for dry in ("", "--dry-run --world-size 4"):
        with pytest.raises(ConfigError) as error:
            parsed(f"{words} --fp16 --bf16 --moe-router-topk 9 {EP} 3 {dry}")
        assert len(error.value.problems) == 2 and "--fp16" in str(error.value)


def test_rules_ask_for_nothing_that_is_missing():
    for words in (
        "--num-experts 8",
        f"--num-experts 8 {EP} 2 --moe-router-num-groups 4 --swiglu",
    ):
        with pytest.raises(ConfigError) as error:
            parse(
                [*words.split(), "--mock-data", "--lr", "1", "--train-iters", "1"],
                env={},
            )
        assert "missing: --num-layers, --hidden-size" in str(error.value)


def test_expert_choice_is_for_bert():
    words = "--num-experts 4 --moe-router-load-balancing-type expert_choice"
    with pytest.raises(ConfigError, match="--model gpt"):
        parsed(words)
    assert not [
        p
        for p in problems_of(
            MOE_RULES, read(f"{GOOD} {words} --model bert".split(), env={})
        )
    ]


@pytest.mark.parametrize(
    "kind, words",
    [
        ("sinkhorn", "--moe-router-score-function sigmoid"),
        ("sinkhorn", "--moe-router-pre-softmax"),
        ("expert_choice", "--model bert --moe-router-pre-softmax"),
    ],
)
def test_an_option_that_a_balanced_choice_does_not_read_is_refused(kind, words):
    words = f"{GOOD} --num-experts 4 --moe-router-load-balancing-type {kind} {words}"
    [problem] = problems_of(MOE_RULES, read(words.split(), env={}))
    assert "is not read with --moe-router-load-balancing-type" in problem


# ------------------------------------------------------------------ startup
def test_startup_says_which_layers_have_experts():
    text = experts_text(
        parsed(
            f"--num-experts 8 --expert-interval 2 --moe-ffn-hidden-size 128 {EP} 4", 4
        )
    )
    assert text == (
        "experts: 8 in layers 1, 3, … 11; of width 128; 2 for a token; divided among 4 "
        "expert-parallel ranks"
    )
    text = experts_text(
        parsed(
            "--num-experts 2 4 4 --moe-layer-freq [0]*9+[1]*3 --mlp-type residual "
            "--moe-router-topk 1 --moe-router-pre-softmax"
        )
    )
    assert text == (
        "experts: 2 in layer 9; 4 in layers 10 to 11; of width 3072, beside a dense feed-forward "
        "of width 3072; 1 for a token; all on every data-parallel rank"
    )
    assert "beside shared experts of width 64" in experts_text(
        parsed("--num-experts 2 --moe-shared-expert-intermediate-size 64")
    )
    assert experts_text(parsed("")) == ""


@pytest.mark.parametrize(
    "numbers, text",
    [
        ([3], "layer 3"),
        ([1, 2], "layers 1 to 2"),
        ([0, 4, 8, 12], "layers 0, 4, … 12"),
        ([1, 3], "layers 1, 3"),
        ([0, 1, 2, 7, 9, 10], "layers 0 to 2, 7, 9 to 10"),
    ],
)
def test_layers_are_written_as_ranges(numbers, text):
    assert ranges_text(numbers) == text


@pytest.mark.parametrize(
    "words, says, unless",
    [
        ("--topk 2", "--expert-interval 2", "--topk 2 --expert-interval 1"),
        ("--moe-loss-coeff 0.1", "--topk 1", "--moe-loss-coeff 0.1 --topk 2"),
        ("--topk 2", "default is 0.1", "--topk 2 --moe-loss-coeff 0.1"),
        ("--topk 2", "default is 0.1", "--moe-router-topk 2"),
        (
            "--moe-train-capacity-factor 2",
            "--moe-min-capacity 4",
            "--moe-train-capacity-factor 2 --moe-min-capacity 0",
        ),
        (
            "--moe-train-capacity-factor 2",
            "default is 1",
            "--moe-train-capacity-factor 2 --moe-eval-capacity-factor 1",
        ),
        (
            "--topk 2",
            "--moe-train-capacity-factor 1",
            "--topk 2 --disable-moe-token-dropping",
        ),
        ("--topk 2", "chooses it with noise", "--topk 4"),
        ("--topk 2", "chooses it with noise", "--moe-router-topk 2"),
        (
            "--moe-train-capacity-factor 1",
            "sum of the remaining ones",
            "--moe-expert-capacity-factor 1",
        ),
        (
            "--moe-train-capacity-factor 1 --topk 1 --moe-router-pre-softmax",
            "keeps random ones",
            "--moe-train-capacity-factor 1 --topk 2",
        ),
        (
            "--moe-expert-capacity-factor 1.5",
            "in Megatron --moe-expert-capacity-factor applies there too",
            "--moe-expert-capacity-factor 1.5 --moe-eval-capacity-factor 1.5",
        ),
        (
            "--moe-expert-capacity-factor 1",
            "those of a rank do",
            "--moe-expert-capacity-factor 1 --moe-capacity-scope micro-batch",
        ),
        ("--moe-loss-coeff 0.1", "rank's tokens", "--moe-aux-loss-coeff 0.1"),
        (
            "--moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type global_aux_loss",
            "previous step",
            "--moe-aux-loss-coeff 0.1",
        ),
        ("--moe-router-topk 2", "nothing balances", "--moe-aux-loss-coeff 0.1"),
        (
            "--moe-router-topk 2",
            "nothing balances",
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        ),
        (
            "--moe-input-jitter-eps 0.1",
            "in evaluation too",
            "--moe-router-noise gumbel",
        ),
    ],
)
def test_startup_notes_what_differs_and_only_that(words, says, unless):
    said = lambda words: " ".join(
        notes_text(parsed(f"--num-experts 8 {words}")).split()
    )
    assert says in said(words) and says not in said(unless)


def test_a_plain_recipe_needs_no_notes():
    assert notes_text(parsed("--num-experts 8 --moe-aux-loss-coeff 0.01")) == ""
    assert notes_text(parsed("")) == ""


@pytest.mark.parametrize(
    "words",
    [
        "--moe-router-load-balancing-type sinkhorn",
        "--moe-router-topk 3",
        "--expert-interval 2",
        "--moe-router-pre-softmax",
        "--mlp-type residual",
        "--moe-router-topk-scaling-factor 2",
    ],
)
def test_a_checkpoint_of_another_router_or_other_layers_is_another_model(words):
    def identity(words: str) -> dict:
        config = parsed(f"--num-experts 4 {words}")
        return describe_run(config, config, SimpleNamespace(fingerprint=""), "")[
            "identity"
        ]["model"]

    check_same_model(identity(""), identity(f"{EP} 1 --moe-expert-capacity-factor 2"))
    with pytest.raises(CheckpointError, match="belongs to another run"):
        check_same_model(identity(""), identity(words))


def test_refused_flags_are_refused_with_a_value_and_accepted_when_off():
    for name in ("--moe-latent-size", "--moe-layer-recompute", "--moe-use-upcycling"):
        assert (
            not FLAGS[name].accepts("")
            and not FLAGS[name].accepts("3")
            and FLAGS[name].accepts(None)
        )
