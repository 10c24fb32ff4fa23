"""Checkpoints as programs for DeepSpeed ask for them: default tags, `latest`, frozen parameters left out,
what fits only, functions that load, and the program's own state."""

import logging
import random
from argparse import Namespace

import numpy as np
import pytest
import torch
from torch import nn

from megatron_ds.compat.deepspeed.zero_to_fp32 import (
    get_fp32_state_dict_from_zero_checkpoint,
)
from megatron_ds.errors import CheckpointError, ConfigError
from tests.harness.engine_runs import Stack, config_of, make, on_ranks, train, weights

pytestmark = pytest.mark.threads


class Adapted(nn.Module):
    """A frozen base with small trained parts, as LoRA makes them."""

    def __init__(self, rank=2, adapters=2):
        super().__init__()
        self.base = Stack(depth=1).requires_grad_(False)
        width = self.base.head.in_features
        self.down = nn.ModuleList(
            nn.Linear(11, rank, bias=False) for _ in range(adapters)
        )
        self.up = nn.ModuleList(
            nn.Linear(rank, 11, bias=False) for _ in range(adapters)
        )
        self.register_buffer("seen", torch.full((2,), float(width)))

    def forward(self, tokens):
        x = self.base(tokens)
        return x + sum(up(down(x)) for down, up in zip(self.down, self.up))


adapted = lambda seed=3, **options: lambda: make(Adapted, seed, **options)


def same(one, other, names=None):
    return all(
        torch.equal(value, other[name])
        for name, value in one.items()
        if names is None or name in names
    )


# ------------------------------------------------------------------------------------------------------- tags
def test_a_save_without_a_tag_has_deepspeeds_name(tmp_path, caplog):
    def main(engine, rank):
        for _ in range(3):
            train(engine, rank, 1)
            engine.save_checkpoint(tmp_path)
        assert (tmp_path / "latest").read_text() == "global_step3"
        at = lambda **tag: (
            engine.load_checkpoint(tmp_path, **tag)[0] and engine.global_steps
        )
        steps = [
            at(tag="global_step1"),
            at(tag="global_step2"),
            at(),
            at(tag="global_step1"),
        ]
        with pytest.raises(
            CheckpointError,
            match="tag 'global_step9' .* there: global_step1, global_step2",
        ):
            engine.load_checkpoint(tmp_path, tag="global_step9")
        engine.save_checkpoint(
            tmp_path, "global_step7"
        )  # a folder of its own comes first
        return [*steps, at(), at(tag="global_step7"), at(tag="global_step3")]

    assert (
        on_ranks(2, main, lambda: make(Stack), config_of(1, 2))
        == [[1, 2, 3, 1, 1, 1, 3]] * 2
    )
    assert (
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "global_step2").keys()
        == get_fp32_state_dict_from_zero_checkpoint(tmp_path).keys()
    )
    assert "names" not in caplog.text


def test_the_tracker_decides_where_latest_names_another_step(tmp_path, caplog):
    def main(engine, rank):
        for _ in range(2):
            train(engine, rank, 1)
            engine.save_checkpoint(tmp_path)
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
        engine.load_checkpoint(tmp_path)
        return engine.global_steps

    assert on_ranks(1, main, lambda: make(Stack), config_of(1, 1)) == [1]
    assert "latest names global_step2, but the last checkpoint" in caplog.text


def test_ranks_with_different_tags_save_nothing(tmp_path):
    def main(engine, rank):
        train(engine, rank, 1)
        with pytest.raises(ConfigError, match="different tags.*step-0 .*step-1 "):
            engine.save_checkpoint(tmp_path, f"step-{rank}")
        return list(tmp_path.iterdir())

    assert on_ranks(2, main, lambda: make(Stack), config_of(1, 2)) == [[], []]


@pytest.mark.parametrize("rule,warnings", [("WARN", 1), ("Ignore", 0)])
def test_ranks_with_different_tags_may_save_under_the_first(
    tmp_path, caplog, rule, warnings
):
    def main(engine, rank):
        train(engine, rank, 1)
        engine.save_checkpoint(tmp_path, f"step-{rank}")
        return engine.load_checkpoint(tmp_path)[0]

    config = config_of(1, 2, checkpoint={"tag_validation": rule})
    places = on_ranks(2, main, lambda: make(Stack), config)
    assert ["step-0" in str(place) for place in places] == [True, True]
    assert caplog.text.count("all save under the first") == warnings


def test_save_latest_false_leaves_the_last_checkpoint_the_last(tmp_path):
    def main(engine, rank):
        train(engine, rank, 1)
        engine.save_checkpoint(tmp_path / "new", save_latest=False)
        nothing = engine.load_checkpoint(tmp_path / "new")
        engine.save_checkpoint(tmp_path, "a")
        train(engine, rank, 1)
        engine.save_checkpoint(tmp_path, "b", save_latest=False)
        engine.save_checkpoint(tmp_path, save_latest=False)
        at = lambda **tag: (
            engine.load_checkpoint(tmp_path, **tag)[0] and engine.global_steps
        )
        return nothing, at(), at(tag="b"), at(), at(tag="global_step2")

    assert (
        on_ranks(2, main, lambda: make(Stack), config_of(2, 2))
        == [((None, None), 1, 2, 1, 2)] * 2
    )


# ------------------------------------------------------------------------------------ the program's own state
def test_the_programs_state_comes_back_with_its_types(tmp_path):
    state = {
        "rng": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "args": Namespace(lr=0.1, layers=(1, 2)),
        3: (1, 2),
        "best": np.float64(0.5),
        "epoch": 1,
    }

    def main(engine, rank):
        train(engine, rank, 1)
        engine.save_checkpoint(tmp_path, client_state=state)
        return engine.load_checkpoint(tmp_path)[1]

    for found in on_ranks(2, main, lambda: make(Stack), config_of(3, 2)):
        torch.set_rng_state(found["rng"])
        random.setstate(found["python"])
        np.random.set_state(found["numpy"])
        assert (
            found["args"] == state["args"]
            and found[3] == (1, 2)
            and found["epoch"] == 1
        )
        assert type(found["best"]) is np.float64 and found.keys() == state.keys()


def test_a_state_that_cannot_be_stored_is_refused_before_anything_is_written(tmp_path):
    def main(engine, rank):
        with pytest.raises(
            ConfigError, match=r"client_state\['hooks'\]\[0\] is of type .*function"
        ):
            engine.save_checkpoint(
                tmp_path / "saved", client_state={"epoch": 1, "hooks": [make]}
            )
        return (tmp_path / "saved").exists()

    assert on_ranks(2, main, lambda: make(Stack), config_of(0, 2)) == [False, False]


# ------------------------------------------------------------------------------------------ parts of a module
@pytest.mark.parametrize("stages", [(0, 3), (2, 1), (3, 2)])
def test_frozen_parameters_may_be_left_out(stages, tmp_path):
    def first(engine, rank):
        train(engine, rank)
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        return weights(engine)

    def second(engine, rank):
        with pytest.raises(
            CheckpointError,
            match="lacks 10 parameters, first base.*module_strict=False",
        ):
            engine.load_checkpoint(tmp_path)
        before = weights(engine)
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        after = weights(engine)
        return before, after, train(engine, rank), engine.global_steps

    saved = on_ranks(2, first, adapted(), config_of(stages[0], 2))[0]
    frozen = {name for name in saved if name.startswith("base")}
    for before, after, _, steps in on_ranks(
        2, second, adapted(seed=5), config_of(stages[1], 2)
    ):
        assert (
            same(after, before, frozen)
            and same(after, saved, saved.keys() - frozen)
            and steps == 6
        )
        assert not same(before, saved, saved.keys() - frozen)
    assert not any(
        name in get_fp32_state_dict_from_zero_checkpoint(tmp_path) for name in frozen
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_what_fits_is_loaded_where_the_modules_differ(stage, tmp_path, caplog):
    def first(engine, rank):
        train(engine, rank)
        engine.save_checkpoint(tmp_path)
        return weights(engine)

    def second(engine, rank):
        with pytest.raises(
            CheckpointError, match="another module.*load_module_strict=False"
        ):
            engine.load_checkpoint(tmp_path)
        before = weights(engine)
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        return before, weights(engine), train(engine, rank)

    saved = on_ranks(2, first, adapted(adapters=2), config_of(stage, 2))[0]
    caplog.set_level(logging.WARNING)
    for adapters in (1, 3):
        for before, after, _ in on_ranks(
            2, second, adapted(5, adapters=adapters), config_of(stage, 2)
        ):
            new = after.keys() - saved.keys()
            assert same(after, saved, saved.keys()) and same(after, before, new)
    assert "lacks 2 parameters of this engine, first down.2.weight" in caplog.text


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_function_of_the_program_loads_the_module(stage, tmp_path):
    def load_halved(src, dst):
        assert src.keys() == dst.state_dict().keys()
        dst.load_state_dict({name: value / 2 for name, value in src.items()})

    def first(engine, rank):
        train(engine, rank)
        engine.save_checkpoint(tmp_path)
        return engine.full_state_dict()

    def second(engine, rank):
        engine.load_checkpoint(tmp_path, custom_load_fn=load_halved)
        steps, found = engine.global_steps, engine.full_state_dict()
        train(engine, rank)
        return steps, found

    saved = on_ranks(2, first, adapted(), config_of(stage, 2))[0]
    steps, found = on_ranks(2, second, adapted(seed=5), config_of(3 - stage, 2))[0]
    assert steps == 3 and all(
        torch.equal(found[name], value / 2) for name, value in saved.items()
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_an_error_of_that_function_on_one_rank_is_one_of_all_ranks(stage, tmp_path):
    def main(engine, rank):
        def load_on_rank_0(src, dst):
            if rank:
                raise CheckpointError("no weights for this rank")
            dst.load_state_dict(src)

        engine.save_checkpoint(tmp_path)
        before = engine.full_state_dict()
        with pytest.raises(
            CheckpointError, match="custom_load_fn: .*no weights for this rank"
        ):
            engine.load_checkpoint(tmp_path, custom_load_fn=load_on_rank_0)
        assert same(before, engine.full_state_dict())
        train(engine, rank)

    on_ranks(2, main, adapted(), config_of(stage, 2))


# ------------------------------------------------------------------------------------------ compiled modules
@pytest.mark.parametrize("stages", [(0, 2), (1, 3)])
@pytest.mark.parametrize("compiled_first", [True, False])
def test_names_do_not_depend_on_torch_compile(stages, compiled_first, tmp_path):
    compiled = lambda: torch.compile(
        adapted()(), backend=lambda graph, _: graph.forward
    )
    models = [compiled, adapted(seed=5)] if compiled_first else [adapted(), compiled]

    def first(engine, rank):
        engine.save_checkpoint(
            tmp_path, client_state={"names": sorted(weights(engine))}
        )
        engine.save_safetensors(tmp_path / "exported")
        return engine.full_state_dict()

    def second(engine, rank):
        path, client = engine.load_checkpoint(tmp_path)
        assert any("_orig_mod" in name for name in client["names"]) == compiled_first
        found = engine.full_state_dict()
        engine.load_state_dict(
            {name: torch.zeros_like(p) for name, p in adapted()().state_dict().items()}
        )
        engine.load_checkpoint(
            tmp_path,
            load_module_only=True,
            custom_load_fn=lambda src, dst: dst.load_state_dict(src),
        )
        return found, engine.full_state_dict()

    saved = on_ranks(2, first, models[0], config_of(stages[0], 2))[0]
    assert saved.keys() == adapted()().state_dict().keys()
    found, again = on_ranks(2, second, models[1], config_of(stages[1], 2))[0]
    assert same(saved, found) and same(saved, again)


def test_a_compiled_module_is_trained_by_names_of_the_plain_one():
    config = config_of(2, 1) | {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.01},
            "param_groups": ["down.*:lr_factor=2,decay=off"],
        }
    }
    compiled = lambda: torch.compile(adapted()(), backend="eager")
    main = lambda engine, rank: (train(engine, rank), engine.full_state_dict())[1]
    (found,) = on_ranks(1, main, compiled, config)
    (plain,) = on_ranks(1, main, adapted(), config)
    assert same(found, plain)
