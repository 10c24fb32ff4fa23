"""Ranks that use different parameters: experts in a ModuleList, of which each rank's tokens choose others."""

import pytest
import torch
from torch import nn

import megatron_ds.compat.deepspeed.utils as utils
from megatron_ds.errors import CommunicationError, ConfigError
from tests.harness.engine_runs import EPS, make, on_ranks, weights
from tests.harness.plain_training import train_plainly

pytestmark = pytest.mark.threads

WIDTH, EXPERTS, RANKS, STEPS = 6, 4, 2, 3
LEAF = {"leaf_module": {"classes": ["Experts"]}}


class Experts(nn.Module):
    """The sum of the chosen experts; of none, zeros without a graph."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x, chosen):
        return sum((self.experts[i](x) for i in chosen), torch.zeros(len(x), WIDTH))


class Mixture(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.mixtures = nn.ModuleList(Experts() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, chosen):
        for mixture in self.mixtures:
            x = x + mixture(x, chosen)
        return self.head(x)


def chosen_by(rank, step):
    """Other experts on each rank, in another order; rank 1 chooses none in the second step."""
    return [[0, 1], [3, 1]][rank] if step != 1 else [[2, 0], []][rank]


def inputs(rank, step):
    return torch.randn(
        3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)
    )


def config_of(stage, **zero):
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.01, "weight_decay": 0.1, "eps": EPS},
        },
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            **zero,
        }
        if stage == 3
        else {"stage": stage, **zero},
    }


def train(engine, rank):
    norms = []
    for step in range(STEPS):
        engine.backward(
            engine(inputs(rank, step), chosen_by(rank, step)).square().mean()
        )
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms, weights(engine)


def trained_by_torch(**options):
    """One process that computes the losses of both ranks; gradients that none uses are zeros."""
    plain = make(Mixture, **options)
    loss = lambda module, of: (
        module(inputs(*of), chosen_by(*of)).square().mean()
        + 0 * sum(p.sum() for p in module.parameters())
    )
    norms = train_plainly(
        plain,
        loss,
        [[(rank, step) for rank in range(RANKS)] for step in range(STEPS)],
        lr=0.01,
        eps=EPS,
        clip=0.5,
        weight_decay=0.1,
    )
    return norms, dict(plain.named_parameters())


def check_equal(found):
    norms, expected = trained_by_torch()
    for theirs, after in found:
        assert theirs == pytest.approx(norms, rel=1e-5)
        for name, p in expected.items():
            torch.testing.assert_close(after[name], p.detach(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "stage, zero",
    [
        (0, {}),
        (1, {}),
        (2, {}),
        (3, {"stage3_param_persistence_threshold": 10**6}),
        (3, LEAF),
        (3, {"leaf_module": {"names": ["mixtures.0", "mixtures.1"]}}),
        (3, {"leaf_module": {"classes": [], "name_suffixes": ["s.0", "1"]}}),
    ],
    ids=["0", "1", "2", "3, small", "3, classes", "3, names", "3, suffixes"],
)
def test_experts_that_a_rank_has_not_chosen_have_gradients_of_zeros(
    stage, zero, caplog
):
    check_equal(on_ranks(RANKS, train, lambda: make(Mixture), config_of(stage, **zero)))
    told = [record.getMessage() for record in caplog.records]
    if "leaf_module" in zero:
        assert not told
    else:
        assert len(told) == 1
        assert (
            "mixtures.0.experts.0.weight received a gradient on rank(s) 0 but not on 1"
            in told[0]
        )


def test_leaf_modules_are_gathered_as_a_whole_and_freed():
    def build():
        model = make(Mixture, layers=3)
        assert utils.set_z3_leaf_modules(model, [Experts]) == list(model.mixtures)
        assert utils.get_z3_leaf_modules(model) == list(model.mixtures)
        return model

    def main(engine, rank):
        units, seen = list(dict.fromkeys(engine.gathering._unit_of.values())), []
        look = lambda *_: seen.append(sum(not unit.is_free for unit in units))
        for module in engine.module.modules():
            module.register_forward_pre_hook(look)
        for p in engine.module.parameters():
            p.register_post_accumulate_grad_hook(look)
        result = train(engine, rank)
        return result, len(units), max(seen), sum(not unit.is_free for unit in units)

    norms, expected = trained_by_torch(layers=3)
    for (theirs, after), units, most, left in on_ranks(
        RANKS, main, build, config_of(3)
    ):
        assert theirs == pytest.approx(norms, rel=1e-5)
        head = expected["head.weight"].detach()
        torch.testing.assert_close(after["head.weight"], head, rtol=1e-5, atol=2e-6)
        assert (units, most, left) == (4, 2, 0)


@pytest.mark.parametrize("stage", range(4))
def test_unused_parameters_are_an_error_that_names_them_where_they_are_not_ignored(
    stage,
):
    config = config_of(
        stage, ignore_unused_parameters=False, **(LEAF if stage == 3 else {})
    )
    with pytest.raises(AssertionError) as raised:
        on_ranks(RANKS, train, lambda: make(Mixture), config)
    text = str(raised.value)
    assert "12 of 18 parameters received no gradient in this update" in text
    assert "mixtures.0.experts.0.weight on rank(s) 1" in text
    assert "mixtures.0.experts.2.bias on rank(s) 0, 1" in text and "and 4 more" in text


@pytest.mark.parametrize("ignore", [True, False])
def test_layers_in_another_order_are_an_error_also_where_all_parameters_are_used(
    ignore,
):
    """Layers of equal size have got each other's weights."""

    def main(engine, rank):
        engine.backward(engine(inputs(rank, 0), range(EXPERTS)).square().mean())
        engine.gathering._note(
            f"layer {rank}"
        )  # real ones reach the update by chance only
        before = weights(engine)
        with pytest.raises(
            CommunicationError,
            match="rank 0 used layer 0 where rank 1 used layer 1.*nothing was updated",
        ):
            engine.step()
        engine.discard_gradients()
        assert all(
            torch.equal(before[name], value) for name, value in weights(engine).items()
        )

    on_ranks(
        RANKS,
        main,
        lambda: make(Mixture),
        config_of(3, ignore_unused_parameters=ignore),
    )


def test_ignoring_nothing_allows_a_model_that_uses_all():
    model = lambda: nn.Linear(WIDTH, 1)

    def use(engine, rank):
        engine.backward(engine(inputs(rank, 0)).mean())
        engine.step()
        return engine.global_steps

    assert (
        on_ranks(RANKS, use, model, config_of(2, ignore_unused_parameters=False))
        == [1] * RANKS
    )


def test_the_module_of_the_same_name_does_not_replace_the_function():
    from megatron_ds.utils.z3_leaf_module import set_z3_leaf_modules

    model = make(Mixture)
    set_z3_leaf_modules(model, [Experts])
    assert utils.z3_leaf_module(model.mixtures[0]) and not utils.z3_leaf_module(
        model.head
    )


def test_marks_are_set_and_removed_by_class_name_and_ending():
    model = make(Mixture)
    first, second = model.mixtures
    name = f"{__name__}.Experts"
    assert utils.set_z3_leaf_modules(model, ["Experts"]) == utils.set_z3_leaf_modules(
        model, [name]
    )
    assert utils.unset_z3_leaf_modules(model, [Experts]) == [first, second]
    assert utils.get_z3_leaf_modules(model) == []
    assert utils.set_z3_leaf_modules_by_name(
        model, ["mixtures.1", "no"], raise_if_not_found=False
    ) == ([second], ["no"])
    assert utils.set_z3_leaf_modules_by_suffix(model, ["es.0"]) == ([first], [])
    assert utils.z3_leaf_module(first) and not utils.z3_leaf_module(model.head)
    for call in (
        lambda: utils.set_z3_leaf_modules(model, [nn.Conv2d]),
        lambda: utils.set_z3_leaf_modules_by_name(model, ["no"]),
        lambda: utils.set_z3_leaf_modules_by_suffix(model, ["no"]),
        lambda: utils.set_z3_leaf_modules(model, [3]),
    ):
        with pytest.raises(ValueError):  # as in DeepSpeed
            call()


@pytest.mark.parametrize(
    "given, named",
    [
        (["Experts"], "not a block"),
        ({"class": ["Experts"]}, "leaf_module.class"),
        ({"names": 3}, "not a list"),
        ({"classes": ["Unknown"]}, "no module of the class Unknown"),
    ],
)
def test_wrong_leaf_modules_of_the_json_are_refused(given, named):
    with pytest.raises(ConfigError, match=named):
        on_ranks(1, train, lambda: make(Mixture), config_of(3, leaf_module=given))


def test_leaf_modules_are_fixed_by_initialize():
    def main(engine, rank):
        with pytest.raises(ConfigError, match="before initialize"):
            utils.set_z3_leaf_modules(engine.module, [Experts])

    on_ranks(1, main, lambda: make(Mixture), config_of(3))


def test_a_training_script_accepts_the_keys_without_an_effect():
    from megatron_ds.compat.config.deepspeed_json import reading_of

    zero = {"stage": 3, "ignore_unused_parameters": False, **LEAF}
    reading = reading_of("ds.json", {"zero_optimization": zero})
    assert [setting.path for setting in reading.settings_or_error()] == ["zero.stage"]
    assert list(reading.without_effect) == ["ds.json zero_optimization.leaf_module"]
