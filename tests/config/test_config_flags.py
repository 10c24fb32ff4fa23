"""The command line: spellings, types, and which word wins."""

import pytest

from megatron_ds.compat.config.unsupported import FLAGS, KEYS
from megatron_ds.config import ModelConfig, OptimizerConfig, parse
from megatron_ds.config.run import all_options
from megatron_ds.config.sources.flags import read_flags, spellings
from megatron_ds.errors import ConfigError

pytestmark = pytest.mark.plan

NEEDED = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 "
    "--micro-batch-size 2 --lr 6e-4 --train-iters 100 --mock-data"
).split()


def value(path: str, *words: str):
    """The value that an option has after the words."""
    line = read_flags(words)
    assert not line.problems, line.problems
    return {setting.path: setting.value for setting in line.settings}[path]


@pytest.mark.parametrize(
    "one, other, path",
    [
        ("--layernorm-epsilon 1e-6", "--norm-epsilon 1e-6", "model.norm_epsilon"),
        ("--num-key-value-heads 4", "--num-query-groups 4", "model.num_query_groups"),
        (
            "--rotary-position-embeddings-theta 5e5",
            "--rotary-base 500000",
            "model.rotary_base",
        ),
        (
            "--rotary-scaling-factor 4",
            "--yarn-rotary-scaling-factor 4",
            "model.yarn_rotary_scaling_factor",
        ),
        (
            "--yarn-original-max-position-embeddings 9",
            "--original-max-position-embeddings 9",
            "model.original_max_position_embeddings",
        ),
        (
            "--use-rotary-position-embeddings",
            "--position-embedding-type rope",
            "model.position_embedding_type",
        ),
        ("--normalization rmsnorm", "--normalization RMSNorm", "model.normalization"),
        (
            "--tokenizer-type HFTokenizer",
            "--tokenizer-type HuggingFaceTokenizer",
            "data.tokenizer_type",
        ),
        (
            "--moe-expert-parallel-size 1",
            "--expert-model-parallel-size 1",
            "parallel.expert_model_parallel_size",
        ),
        ("--swiglu", "--activation swiglu", "model.activation"),
        ("--squared-relu", "--activation squared_relu", "model.activation"),
        ("--disable-bias-linear", "--no-add-bias-linear", "model.add_bias_linear"),
        ("--use-distributed-optimizer", "--zero-stage 1", "zero.stage"),
        (
            "--use-tp-pp-dp-mapping",
            "--rank-order tp-cp-ep-pp-dp",
            "parallel.rank_order",
        ),
        (
            "--checkpoint-activations",
            "--recompute-granularity full",
            "train.recompute_granularity",
        ),
        (
            "--recompute-activations",
            "--recompute-granularity selective",
            "train.recompute_granularity",
        ),
        (
            "--no-check-for-nan-in-loss-and-grad",
            "--check-for-nan continue",
            "train.check_for_nan",
        ),
        ("--overlap-grad-reduce", "--overlap-comm", "zero.overlap_comm"),
        ("--hidden_size=64", "--hidden-size 64", "model.hidden_size"),
        ("--metrics-jsonl m", "--metrics-path m", "logging.metrics_path"),
    ],
)
def test_both_spellings_of_megatron_mean_the_same(one, other, path):
    assert value(path, *one.split()) == value(path, *other.split())


@pytest.mark.parametrize(
    "words, path, expected",
    [
        ("--train-samples 1e6", "train.train_samples", 1_000_000),
        ("--reduce-bucket-size 5e8", "zero.reduce_bucket_size", 500_000_000),
        ("--seed 1_000", "train.seed", 1000),
        ("--lr 6e-4", "optimizer.lr", 6e-4),
        (
            "--rampup-batch-size 16 8 300000",
            "train.rampup_batch_size",
            (16, 8, 300_000),
        ),
        ("--data-path 0.3 a 0.7 b", "data.data_path", ("0.3", "a", "0.7", "b")),
        ("--no-overlap-comm", "zero.overlap_comm", False),
        ("--no-save-optim", "checkpoint.no_save_optim", True),
        ("--save-optim", "checkpoint.no_save_optim", False),
    ],
)
def test_words_become_values_of_the_fields_type(words, path, expected):
    got = value(path, *words.split())
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    "words, says",
    [
        ("--num-layers 2.5", "not a whole number"),
        ("--num-layers true", "not a whole number"),
        ("--lr nan", "not a number"),
        ("--lr inf", "not a number"),
        ("--lr -1e-3", "above 0"),
        ("--clip-grad -1", "at least 0"),
        ("--hidden-dropout 1", "below 1"),
        ("--lr 1 2", "takes one value"),
        ("12 --lr 1", "not preceded by a flag"),
        ("--rampup-batch-size 1 2", "3 whole numbers"),
        ("--save", "needs a text"),
        ("--save=", "an empty value is not a text"),
        ("--no-lr 1", "unknown flag --no-lr"),
        ("--lr --bf16", "--lr needs a number"),
    ],
)
def test_a_wrong_word_is_told(words, says):
    problems = read_flags(words.split()).problems
    assert len(problems) == 1 and says in problems[0], problems


def test_the_later_of_two_equal_flags_wins():
    config = parse(
        [*NEEDED, *"--seed 1 --seed 2 --bf16 --no-bf16 --sequence-parallel".split()]
    )
    assert (
        config.train.seed,
        config.optimizer.bf16,
        config.parallel.sequence_parallel,
    ) == (2, False, True)


def test_two_different_switches_of_one_field_contradict():
    assert "contradict" in read_flags(["--swiglu", "--squared-relu"]).problems[0]
    assert (
        "contradict"
        in read_flags(["--use-distributed-optimizer", "--zero-stage", "0"]).problems[0]
    )
    assert not read_flags(["--use-distributed-optimizer", "--zero-stage", "1"]).problems


def test_every_value_remembers_who_gave_it():
    config = parse(
        [*NEEDED, "--num_key_value_heads", "4", "--swiglu"],
        2,
        defaults={"seq_length": 7, "log_interval": 3},
    )
    assert config.source("model.num_query_groups") == "--num-key-value-heads"
    assert config.source("model.activation") == "--swiglu"
    assert config.source("logging.log_interval") == "the script"
    assert (
        config.source("train.global_batch_size")
        == "micro-batch 2 × 2 data-parallel ranks"
    )
    assert config.source("optimizer.min_lr") == "default"
    assert (config.model.seq_length, config.logging.log_interval) == (1024, 3)


def test_help_names_every_option_and_exits_with_zero(capsys):
    with pytest.raises(SystemExit) as exit:
        parse(["--help", "--nonsense"])
    text = capsys.readouterr().out
    assert exit.value.code == 0
    off = {
        option.negative for option in all_options().values()
    }  # shown only if the default is on
    assert [flag for flag in spellings() if flag not in text and flag not in off] == []
    assert max(map(len, text.splitlines())) <= 127


def test_help_is_printed_by_one_rank(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"], env={"RANK": "1"})
    assert capsys.readouterr().out == ""


def test_every_field_has_help_and_a_flag_of_its_own():
    for path, option in all_options().items():
        assert option.help.endswith("."), path
        assert not option.avoid or option.avoid.endswith("."), path
    assert len({option.flag for option in all_options().values()}) == len(all_options())


def test_what_is_refused_is_not_also_accepted_and_says_what_to_do():
    accepted = {option.json for option in all_options().values()}
    assert not set(FLAGS) & set(spellings()) and not set(KEYS) & accepted
    for answer in (*FLAGS.values(), *KEYS.values()):
        assert answer.note or answer.refusal
        refusal = answer.refusal.lower()
        assert not refusal or any(word in refusal for word in ("remove", "write")), (
            refusal
        )


def test_a_name_that_no_registry_has_is_reported_with_everything_else():
    with pytest.raises(ConfigError) as error:
        parse(
            [*NEEDED, "--pipeline-schedule", "2f2b", "--num-query-groups", "5"],
            known={
                "parallel.pipeline_schedule": {"1f1b": None, "gpipe": None},
                "model.model": {"gpt": None},
            },
        )
    assert "2 problems" in str(error.value) and "may be 1f1b or gpipe" in str(
        error.value
    )


def test_rules_of_the_layers_above_are_asked_when_all_else_is_right():
    def rule(config):
        yield f"{config.model.num_layers} layers are too many."

    def raising(config):
        raise ConfigError("Seven is not enough.")

    with pytest.raises(
        ConfigError, match="1. 12 layers are too many.\n  2. Seven is not enough."
    ):
        parse(NEEDED, rules=[rule, raising])
    with pytest.raises(ConfigError) as error:
        parse([*NEEDED, "--fp16", "--bf16"], rules=[rule, raising])
    assert "layers" not in str(error.value)


def test_derived_sizes_follow_megatrons_formulas():
    model = ModelConfig(
        num_layers=2,
        hidden_size=4096,
        num_attention_heads=32,
        seq_length=128,
        vocab_size=50257,
    )
    assert (model.head_dim, model.query_groups, model.ffn_size, model.positions) == (
        128,
        32,
        16384,
        128,
    )
    assert [model.padded_vocab_size(tp) for tp in (1, 2, 8)] == [50304, 50432, 51200]
    gated = ModelConfig(
        num_layers=2,
        hidden_size=4096,
        num_attention_heads=32,
        activation="swiglu",
        kv_channels=64,
    )
    assert (gated.ffn_size, gated.head_dim) == (10880, 64)
    assert [
        OptimizerConfig(**{name: True}).params_dtype for name in ("fp16", "bf16")
    ] == ["float16", "bfloat16"]
