"""Options of optimizers: which optimizer has which, what DeepSpeed's JSON gives, what is refused."""

import json
from pathlib import Path

import pytest
import torch

from megatron_ds.config import OptimizerConfig, parse
from megatron_ds.config.optimizer_facts import COMMON, FACTS, MATRIX, NORMS
from megatron_ds.errors import ConfigError
from megatron_ds.optim import OPTIMIZERS, RegisteredOptimizer
from megatron_ds.planning.rank_plan import _tried

pytestmark = pytest.mark.plan

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 100 "
    "--train-iters 10 --mock-data --micro-batch-size 1 --lr 1e-3"
).split()


@pytest.fixture
def read(tmp_path):
    def configured(kind, *words, **params):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"optimizer": {"type": kind, "params": params}}))
        return parse([*MODEL, "--deepspeed_config", str(path), *words], 1).optimizer

    return configured


@pytest.mark.parametrize("name", FACTS)
def test_the_facts_are_those_of_the_optimizer(name):
    """State, hyper-parameters of a group, and whether it asks for norms or matrices."""
    settings, p = OptimizerConfig(), torch.nn.Parameter(torch.ones(8, 8))
    p.grad = torch.ones(8, 8)
    optimizer = OPTIMIZERS[name]([{"params": [p]}], settings)
    optimizer.step()
    assert {key for key, value in optimizer.state[p].items() if key != "step"} == set(
        FACTS[name].state
    )
    numbers = FACTS[name].numbers(settings) | {"lr": 0.0, "weight_decay": 0.0}
    group = optimizer.param_groups[0] | {"weight_decay": 0.0}
    numbers = {
        key: number for key, number in numbers.items() if name != "muon" or key in group
    }
    assert {key: group[key] for key in numbers} == numbers
    assert _tried(RegisteredOptimizer(name, settings))[0] == len(
        FACTS[name].state
    )  # of plans
    traits = OPTIMIZERS.declared(name).traits
    assert traits.needs_norms == (FACTS[name].depends == NORMS)
    assert traits.needs_matrices == (FACTS[name].depends == MATRIX)
    assert set(FACTS) == set(OPTIMIZERS.names())


def test_names_of_deepspeed_choose_the_optimizer(read):
    for facts in FACTS.values():
        short = {"freeze_step": 5} if "freeze_step" in facts.params else {}
        # AdEMAMix is none of DeepSpeed's.
        for kind in (*facts.types, *map(str.upper, facts.types[:1])):
            assert read(kind, **short).optimizer == facts.name
    for kind, name in (("MuAdam", "AdamW"), ("MuSGD", "SGD")):
        with pytest.raises(
            ConfigError,
            match=f"'{kind}', which is not available: write {name}, and the l",
        ):
            read(kind)
    with pytest.raises(
        ConfigError, match="'Sophia', which is not available. Available: Adam"
    ):
        read("Sophia")


def test_keys_reach_the_options_of_their_optimizer(read):
    lion = read("Lion", betas=[0.8, 0.7], weight_decay=0.3)
    assert (lion.lion_beta1, lion.lion_beta2, lion.adam_beta1) == (0.8, 0.7, 0.9)
    assert (read("Lion").lion_beta1, read("Lion").lion_beta2) == (
        0.9,
        0.999,
    )  # DeepSpeed's
    assert read("Lion", "--lion-beta2", "0.5").lion_beta2 == 0.5
    assert (read("Adagrad", eps=1e-3).adagrad_eps, read("Adagrad").adagrad_eps) == (
        1e-3,
        1e-10,
    )
    assert read("Adam", eps=1e-3).adam_eps == 1e-3
    lamb = read(
        "Lamb",
        max_coeff=0.3,
        min_coeff=0.1,
        eps=1e-6,
        eps_inside_sqrt=True,
        betas=[0.8, 0.9],
    )
    assert (
        lamb.lamb_max_coeff,
        lamb.lamb_min_coeff,
        lamb.adam_eps,
        lamb.lamb_eps_inside_sqrt,
        lamb.adam_beta1,
        lamb.adam_beta2,
    ) == (0.3, 0.1, 1e-6, True, 0.8, 0.9)
    assert (
        read("SGD").sgd_momentum == 0.0
        and read("SGD", momentum=0.3).sgd_momentum == 0.3
    )
    assert read("Adam", amsgrad=True).adam_amsgrad


def test_each_source_of_muon_has_its_own_defaults(read):
    """Megatron's of flags, DeepSpeed's of a JSON."""
    flags = parse([*MODEL, "--optimizer", "muon"], 1).optimizer
    assert (
        flags.muon_momentum,
        flags.muon_use_nesterov,
        flags.muon_coefficient_type,
        flags.muon_scale_mode,
        flags.adam_beta2,
        flags.adam_eps,
    ) == (0.9, False, "quintic", "spectral", 0.999, 1e-8)
    muon = read("Muon", ns_method="gram")
    assert (
        muon.muon_momentum,
        muon.muon_use_nesterov,
        muon.muon_coefficient_type,
        muon.muon_scale_mode,
        muon.adam_beta2,
        muon.adam_eps,
    ) == (0.95, True, "simple", "shape_scaling", 0.95, 1e-10)
    muon = read(
        "Muon",
        momentum=0.8,
        betas=[0.7, 0.6],
        eps=1e-6,
        muon_lr=0.02,
        adam_lr=3e-4,
        per_head_muon=True,
    )
    assert (
        muon.muon_momentum,
        muon.adam_beta1,
        muon.adam_beta2,
        muon.adam_eps,
        muon.muon_lr,
        muon.muon_scalar_lr,
        muon.muon_per_head,
    ) == (0.8, 0.7, 0.6, 1e-6, 0.02, 3e-4, True)
    words = "dist_muon --muon-no-split-qkv --muon-fp32-matmul-prec medium --muon-tp-mode distributed".split()
    assert parse([*MODEL, "--optimizer", *words], 1).optimizer.muon_ns_dtype == "bf16"


@pytest.mark.parametrize(
    "words, says",
    [
        (
            "--muon-coefficient-type cubic5 --muon-num-ns-steps 6",
            "coefficients of 5 iterations, but --muon-num-",
        ),
        (
            "--lion-beta1 0.9",
            "--lion-beta1 0.9 is not an option of --muon-scalar-optimizer adam",
        ),
        (
            "--muon-scalar-optimizer lion --adam-beta2 0.9",
            "--adam-beta2 0.9 is not an option of --muon-scalar-",
        ),
        (
            "--muon-per-head --muon-no-split-qkv",
            "--muon-per-head divides what --muon-no-split-qkv leaves in",
        ),
        (
            "--muon-tp-mode blockwise",
            "that of each part by itself would depend on the layout",
        ),
        (
            "--muon-scale-mode rms",
            "is not one of spectral, unit_rms_norm, shape_scaling, match_rms_adamw",
        ),
    ],
)
def test_options_of_muon_that_do_not_fit_are_refused(words, says):
    with pytest.raises(ConfigError) as error:
        parse([*MODEL, "--optimizer", "muon", *words.split()], 1)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "kind, params, says",
    [
        (
            "Adam",
            {"max_coeff": 1},
            '"optimizer.params.max_coeff" does not apply to the optimizer Adam, which has '
            "adam_w_mode, amsgrad, betas",
        ),
        (
            "Lamb",
            {"adam_w_mode": True},
            "does not apply to the optimizer Lamb, which has betas, bias_c",
        ),
        (
            "Lion",
            {"eps": 1e-8},
            "does not apply to the optimizer Lion, which has betas, lr, max_grad_norm",
        ),
        (
            "Lamb",
            {"freeze_step": 100},
            '"optimizer.params.freeze_step" does not apply to the optimizer Lamb',
        ),
        (
            "OneBitAdam",
            {},
            "--freeze-step 100000 (default) is not below --train-iters 10: the run would end "
            "before it compresses anything. Use --freeze-step 1 to 2, 15 to 25 % of the steps.",
        ),
        (
            "OneBitLamb",
            {"freeze_step": 2, "var_freeze_step": 3},
            'var_freeze_step" does not apply',
        ),
        (
            "OneBitLamb",
            {"freeze_step": 2, "factor_min": 5},
            "no factor is between them",
        ),
        ("ZeroOneAdam", {"local_step_clipper": 0}, "must be at least 1"),
        (
            "Lamb",
            {"max_coeff": 0.1, "min_coeff": 0.2},
            "no trust ratio is between them",
        ),
        ("Adagrad", {"eps": 0}, "must be above 0"),
        (
            "Adam",
            {"amsgrad": True, "bias_correction": False},
            "which corrects its moments",
        ),
    ],
)
def test_keys_of_another_optimizer_are_refused_with_the_legal_ones(
    read, kind, params, says
):
    with pytest.raises(ConfigError) as error:
        read(kind, **params)
    assert says in str(error.value)


def test_flags_of_another_optimizer_are_refused_with_the_legal_ones():
    with pytest.raises(ConfigError) as error:
        parse([*MODEL, "--optimizer", "lion", "--adam-beta2", "0.95"], 1)
    assert str(error.value) == (
        "--adam-beta2 0.95 is not an option of --optimizer lion, which has "
        "--lion-beta1, --lion-beta2. Remove it."
    )
    parse([*MODEL, "--optimizer", "lamb", "--adam-beta2", "0.95"], 1)
    parse([*MODEL, "--optimizer", "adamw", "--adam-beta2", "0.95", "--amsgrad"], 1)
    assert all(
        hasattr(OptimizerConfig, name)
        for facts in FACTS.values()
        for name in facts.own_fields
    )
    assert all(name in COMMON for name in ("lr", "weight_decay"))


def test_the_page_has_a_row_for_each_optimizer():
    page = Path(__file__).parents[2].joinpath("docs/scale/optimizers.md").read_text()
    rows = {
        line.split("|")[1].strip(): line
        for line in page.splitlines()
        if line.startswith("| `")
    }
    for facts in FACTS.values():
        assert f"| {4 * len(facts.state)} |" in rows[f"`{facts.name}`"]
        assert all(f"`{kind}`" in rows[f"`{facts.name}`"] for kind in facts.types)
