"""--param-group: patterns of names → optimizer, learning rate, weight decay, initial weights."""

import json

import pytest

from megatron_ds.config import parse
from megatron_ds.config.options.training import DECOUPLED_RATE
from megatron_ds.config.rules.group import GroupRule, group_rule
from megatron_ds.errors import ConfigError
from megatron_ds.mpu.param_spec import Init, Matrices, ParamSpec
from megatron_ds.optim import OPTIMIZERS, group_of, param_groups_of
from megatron_ds.planning.run_plan import RULES

pytestmark = pytest.mark.plan

JOB = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 100 --lr 1e-3 "
    "--train-iters 10 --mock-data --micro-batch-size 1 --num-experts 2"
).split()
FC1 = "*.linear_fc1.weight"


def parsed(*words, rules=RULES):
    return parse(
        [*JOB, *words], 1, rules=rules, known={"optimizer.optimizer": OPTIMIZERS}
    ).optimizer


def spec(name, **more):
    return ParamSpec(name, (4, 4), Init("normal", 1.0), **more)


def test_a_rule_is_read_from_its_text():
    assert group_rule("a.*:lr_factor=0.5,decay=off") == GroupRule(
        "a.*", None, 0.5, False
    )
    assert group_rule("[ab]?:optimizer=lion,init_factor=0") == GroupRule(
        "[ab]?", "lion", init_factor=0.0
    )
    assert group_rule("*:decay=on").matches("decoder.x") and not group_rule(
        "a*:decay=on"
    ).matches("A")


@pytest.mark.parametrize(
    "text, says",
    [
        ("*.weight", "is not PATTERN:KEY=VALUE,KEY=VALUE"),
        (":lr_factor=2", "is not PATTERN:KEY"),
        ("*:lr_factor=", "is not PATTERN:KEY"),
        ("*:lr_facto=2", "the key 'lr_facto'; did you mean 'lr_factor'?"),
        ("*:decay=on,decay=on", "has decay twice"),
        ("*:lr_factor=0", "must be above 0"),
        ("*:decay=maybe", "'maybe' is not true or false"),
        ("*:lr_factor=x", "'x' is not a number"),
    ],
)
def test_texts_that_are_no_rules_are_refused(text, says):
    with pytest.raises(ConfigError) as error:
        parsed("--param-group", text, rules=())
    assert says in str(error.value) and "--param-group" in str(error.value)


@pytest.mark.parametrize(
    "words, says",
    [
        (
            ["*.linear_fc3.weight:decay=off"],
            "matches none of the .* parameters.*decoder.layers.[*].mlp",
        ),
        (
            [f"{FC1}:decay=off", "*fc1*:lr_factor=2"],
            "matches --param-group '[*].linear_fc1.weight' and '[*]fc1",
        ),
        (
            ["embedding.*:optimizer=muon"],
            "gives embedding.word_embeddings.weight to muon, which is for weights",
        ),
        (["*:optimizer=adamm"], "unknown optimizer 'adamm'; did you mean 'adam'"),
    ],
)
def test_patterns_that_do_not_fit_the_model_are_refused(words, says):
    with pytest.raises(ConfigError, match=says):
        parsed("--param-group", *words)


def test_flags_add_up_and_files_have_lists(tmp_path):
    both = (f"{FC1}:lr_factor=2", "*.linear_proj.weight:decay=off")
    assert (
        parsed("--param-group", both[0], "--param-group", both[1]).param_groups == both
    )
    assert parsed("--param-group", *both).param_groups == both
    path = tmp_path / "run.yaml"
    path.write_text(f'param_groups:\n  - "{both[0]}"\n  - "{both[1]}"\n')
    assert parsed("--config", str(path)).param_groups == both
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps({"optimizer": {"type": "AdamW", "param_groups": both}}))
    assert parsed("--deepspeed_config", str(path)).param_groups == both
    path.write_text(
        json.dumps({"optimizer": {"param_groups": ["*.linear_fc3.weight:decay=off"]}})
    )
    with pytest.raises(ConfigError, match="matches none of the"):
        parsed("--deepspeed_config", str(path))


def test_groups_are_divided_by_rules_and_then_by_rate():
    settings = parsed(
        "--decoupled-lr",
        "0.1",
        "--param-group",
        f"{FC1}:optimizer=lion,lr_factor=0.5",
        "--param-group",
        "*.router.weight:decay=off",
        "--lion-beta1",
        "0.8",
    )
    groups = param_groups_of(settings)
    of = lambda name, **more: group_of(spec(name, **more), groups)
    fc1, router, other = (
        of("x.linear_fc1.weight"),
        of("x.router.weight"),
        of("x.linear_fc2.weight"),
    )
    assert (fc1.optimizer.name, fc1.lr_factor, fc1.decay) == ("lion", 0.5, True)
    assert (router.optimizer.name, router.lr_factor, router.decay) == (
        "adam",
        1.0,
        False,
    )
    assert (other.optimizer.name, other.decay) == ("adam", True)
    assert (
        of("embedding.word_embeddings.weight", is_vocabulary=True).rate
        == DECOUPLED_RATE
    )


def test_a_rule_may_give_matrices_to_muon_or_take_them_from_it():
    some = param_groups_of(
        parsed("--param-group", f"{FC1}:optimizer=muon", "--muon-momentum", "0.8")
    )
    matrix = lambda name: spec(name, matrices=Matrices())
    assert group_of(matrix("x.linear_fc1.weight"), some).optimizer.name == "muon"
    assert group_of(matrix("x.linear_fc2.weight"), some).optimizer.name == "adam"
    rest = param_groups_of(
        parsed(
            "--optimizer",
            "muon",
            "--muon-scalar-lr",
            "1e-4",
            "--param-group",
            f"{FC1}:optimizer=adam,lr_factor=2",
        )
    )
    taken = group_of(matrix("x.linear_fc1.weight"), rest)
    assert (taken.optimizer.name, taken.lr_factor) == (
        "adam",
        pytest.approx(0.2),
    )  # of the other's rate
    assert group_of(matrix("x.linear_fc2.weight"), rest).optimizer.name == "muon"
