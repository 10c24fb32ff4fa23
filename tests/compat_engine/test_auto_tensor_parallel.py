"""Models of transformers that an engine divides over tensor-parallel ranks ("tensor_parallel.autotp_size"), compared
with plain torch in one process: losses, norms, weights, checkpoints; and what is refused.
"""

import os
import subprocess

import pytest
import torch
from torch import nn

import megatron_ds
from megatron_ds.compat.deepspeed.utils import safe_get_local_optimizer_state
from megatron_ds.compat.division import gradient_proof, split_layers
from megatron_ds.compat.engine import same_batches
from megatron_ds.errors import ArgumentError, CallError, ConfigError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.managed_parameter import spec_of
from megatron_ds.mpu.mesh import Mesh
from tests.harness import divided_models
from tests.harness.divided_models import (
    CLIP,
    MODELS,
    STEPS,
    batch_of,
    config_of,
    divided,
    make,
    plain,
    train,
    trained,
)
from tests.harness.documents import blocks_of
from tests.harness.limits import HUNG
from tests.harness.processes import run_processes
from tests.harness.threads import run_ranks
from tests.harness.warm import warm_environment

pytest.importorskip(
    "transformers", reason="trains models of transformers, not installed"
)
LLAMA = "LlamaForCausalLM"
QWEN3 = "Qwen3ForCausalLM"
GPT2 = "GPT2LMHeadModel"
QUICK = {(QWEN3, 2)}
CASES = [
    pytest.param(name, stage, marks=() if (name, stage) in QUICK else pytest.mark.rest)
    for name in MODELS
    for stage in range(4)
]
PROJECTIONS = [".*[.][qkv]_proj[.]weight$", ".*(gate|up)_proj[.]weight$"]
RULES = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": PROJECTIONS, "partition_type": "column"},
        {"patterns": [".*[.](o|down)_proj[.]weight$"], "partition_type": "row"},
    ],
}


# ------------------------------------------------------------------------------------ numbers
@pytest.mark.threads
@pytest.mark.parametrize("name, stage", CASES)
def test_two_by_two_ranks_train_as_one_process(name, stage):
    losses, norms, weights = plain(name)
    assert max(norms) > CLIP, "clipping is active"
    found = divided(name, stage, trained)
    for rank in range(2):  # of a tensor-parallel group
        means = [sum(of) / 2 for of in zip(found[rank][0][0], found[2 + rank][0][0])]
        assert means == pytest.approx(losses, abs=1e-5)
    for (_, seen), _ in found:
        assert seen == pytest.approx(norms, rel=1e-5)
    state = found[0][1]
    assert state.keys() == weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=1e-5)


@pytest.mark.threads
def test_the_norm_counts_cut_parameters_in_parts_and_whole_ones_once():
    model = make(QWEN3)
    ids = batch_of(0)
    model(input_ids=ids, labels=ids).loss.backward()
    squares = {n: float(p.grad.square().sum()) for n, p in model.named_parameters()}
    whole = sum(squares.values()) ** 0.5

    def then(engine):
        (_, norms) = train(engine, range(1))
        is_cut = {
            name: spec_of(p).is_split_over("tp")
            for name, p in engine.module.named_parameters()
        }
        return norms[0], is_cut

    for norm, is_cut in divided(QWEN3, 1, then, data=1):
        assert norm == pytest.approx(whole, rel=1e-6)
        cut = sum(s for name, s in squares.items() if is_cut[name])
        replicated = sum(s for name, s in squares.items() if not is_cut[name])
        # Wrong counts would be seen: whole parameters twice, and the part of one rank alone.
        for wrong in ((cut + 2 * replicated) ** 0.5, (cut / 2 + replicated) ** 0.5):
            assert abs(wrong / whole - 1) > 1e-2


@pytest.mark.threads
def test_gradients_that_are_partial_sums_are_found_by_measurement(monkeypatch):
    monkeypatch.setattr(split_layers, "_mark_partial", lambda model, name: None)
    _, norms, _ = plain(QWEN3)

    def then(engine):
        partial = [
            name
            for name, p in engine.module.named_parameters()
            if spec_of(p).partial_over
        ]
        return train(engine)[1], partial

    for found, partial in divided(QWEN3, 0, then, data=1):
        assert found == pytest.approx(norms, rel=1e-5)
        assert len(partial) == 4
        assert all("q_norm" in name or "k_norm" in name for name in partial)
    # Without the measurement the norm would be another one.
    monkeypatch.setattr(gradient_proof, "_decide", lambda *of: None)
    for found, _ in divided(QWEN3, 0, then, data=1):
        assert found != pytest.approx(norms, rel=1e-5)


@pytest.mark.threads
def test_layers_of_one_input_share_the_sum_of_its_gradient():
    """In each of two layers: two sums of results, and two of gradients; without sharing five of gradients."""

    def then(engine):
        ids = batch_of(0)
        calls = []
        for _ in range(2):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            calls.append(engine.world.traffic.calls["all_reduce", "tp", 2])
        return calls[1] - calls[0]

    # The divided output layer has a sum of gradients, too.
    assert divided(LLAMA, 0, then, data=1) == [2 * (2 + 2) + 1] * 2


# ------------------------------------------------------------------------------------ options
@pytest.mark.threads
@pytest.mark.rest
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_programs_own_optimizer_trains_the_parts(stage):
    losses, _, weights = plain(GPT2, clip=0)

    def main(rank, world):
        model = make(GPT2)
        config = config_of(stage, clip=0.0, data=1)
        own = config.pop("optimizer")["params"]
        engine, *_ = megatron_ds.initialize(
            model=megatron_ds.tp_model_init(model, 2, torch.float32),
            optimizer=torch.optim.AdamW(model.parameters(), **own),
            config=config,
            mpu=Mesh(Grid.fit(2, tp=2), rank, world.connect),
        )
        return train(engine)[0], engine.full_state_dict()

    found = run_ranks(2, main)
    assert found[0][0] == found[1][0] == pytest.approx(losses, abs=1e-5)
    for key, value in found[0][1].items():
        torch.testing.assert_close(value, weights[key], rtol=0, atol=1e-5)


@pytest.mark.threads
@pytest.mark.rest
@pytest.mark.parametrize("stage", [0, 3])
def test_layers_that_are_recomputed_train_as_well(stage):
    losses, norms, _ = plain(LLAMA)

    def then(engine):
        engine.module.gradient_checkpointing_enable()
        return train(engine)

    for seen in divided(LLAMA, stage, then, data=1):
        assert seen == (pytest.approx(losses, abs=1e-5), pytest.approx(norms, rel=1e-5))


@pytest.mark.threads
@pytest.mark.rest
def test_rules_of_the_json_name_the_layers():
    losses, norms, _ = plain(LLAMA)
    keys = {"autotp_size": 2, "partition_config": RULES}

    def then(engine):
        head = engine.module.lm_head.weight.shape
        cut = engine.module.model.layers[0].mlp.up_proj.weight.shape
        return head, cut, train(engine)

    for head, cut, seen in divided(LLAMA, 1, then, data=1, tensor_parallel=keys):
        assert head == (48, 32) and cut == (32, 32), "the head is in no rule"
        assert seen == (pytest.approx(losses, abs=1e-5), pytest.approx(norms, rel=1e-5))


@pytest.mark.threads
@pytest.mark.rest
@pytest.mark.parametrize("block", [{"bf16": {"enabled": True}}])
def test_a_divided_model_learns_in_bf16_as_the_whole_one_does(block):
    losses, _, _ = plain(LLAMA)
    for seen, _ in divided(LLAMA, 3, train, data=1, **block):
        assert seen == pytest.approx(losses, rel=5e-3)


# ------------------------------------------------------------------------------------ checkpoints
def moments(engine):
    """name → (this rank's first moments, where they lie in the whole parameter)"""
    found = {}
    for name, p in engine.module.named_parameters():
        boxes = spec_of(p).boxes(engine.world.coordinates)
        found[name] = safe_get_local_optimizer_state(p, "exp_avg").view(p.shape), boxes
    return found


def whole_moments(of_ranks):
    """name → the first moments of the whole parameter, from those of all ranks"""
    whole = {}
    for found in of_ranks:
        for name, (part, boxes) in found.items():
            for box in boxes:
                sizes = [at + n for at, n in zip(box.logical, box.sizes)]
                whole.setdefault(name, []).append((part, box, sizes))
    return {name: assembled(parts) for name, parts in whole.items()}


def assembled(parts):
    shape = [max(sizes[d] for *_, sizes in parts) for d in range(len(parts[0][2]))]
    whole = torch.full(shape, float("nan"))
    slices = lambda corner, sizes: tuple(
        slice(at, at + n) for at, n in zip(corner, sizes)
    )
    for part, box, _ in parts:
        whole[slices(box.logical, box.sizes)] = part[slices(box.local, box.sizes)]
    return whole


@pytest.mark.threads
@pytest.mark.parametrize(
    "before, after, stage",
    [
        (2, 1, 1),
        pytest.param(1, 2, 1, marks=pytest.mark.rest),
        pytest.param(2, 1, 3, marks=pytest.mark.rest),
        pytest.param(1, 2, 3, marks=pytest.mark.rest),
        pytest.param(2, 4, 2, marks=pytest.mark.rest),
    ],
)
@pytest.mark.parametrize("name", [GPT2, pytest.param(QWEN3, marks=pytest.mark.rest)])
def test_a_checkpoint_loads_over_another_number_of_ranks(
    name, before, after, stage, tmp_path, monkeypatch
):
    monkeypatch.setitem(MODELS[QWEN3], "num_key_value_heads", 4)
    plain.cache_clear()
    _, norms, weights = plain(name)
    plain.cache_clear()

    def save(engine):
        train(engine, range(3))
        engine.save_checkpoint(tmp_path)
        return engine.full_state_dict(), moments(engine)

    def load(engine):
        path, _ = engine.load_checkpoint(tmp_path)
        assert path is not None
        loaded = engine.full_state_dict(), moments(engine)
        return loaded, train(engine, range(3, STEPS))[1], engine.full_state_dict()

    saved = divided(name, stage, save, data=1, size=before)
    found = divided(name, stage, load, data=1, size=after)
    # Weights and moments are the same, bit by bit.
    loaded = [of_rank for of_rank, *_ in found]
    assert saved[0][0].keys() == loaded[0][0].keys() == weights.keys()
    pairs = (
        (saved[0][0], loaded[0][0]),
        (
            whole_moments(of for _, of in saved),
            whole_moments(of for _, of in loaded),
        ),
    )
    for one, other in pairs:
        assert all(torch.equal(value, other[key]) for key, value in one.items())
    # Training continues as in one process.
    for _, seen, _ in found:
        assert seen == pytest.approx(norms[3:], rel=1e-5)
    for key, value in found[0][2].items():
        torch.testing.assert_close(value, weights[key], rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------ ranks of a group
@pytest.mark.threads
def test_ranks_of_a_group_with_different_samples_are_named():
    def then(engine):
        ids = batch_of(engine.world.rank)
        return engine(input_ids=ids, labels=ids)

    with pytest.raises(CallError, match=r"ranks \[0, 1\] compute one micro-batch"):
        divided(GPT2, 0, then, data=1)


@pytest.mark.threads
def test_ranks_of_a_group_with_different_random_states_are_named(monkeypatch):
    numbers = iter(range(2))
    monkeypatch.setattr(
        same_batches, "_random_states", lambda: [torch.tensor([next(numbers)])]
    )
    monkeypatch.setitem(MODELS, GPT2, {**MODELS[GPT2], "resid_pdrop": 0.1})

    def then(engine):
        ids = batch_of(0)
        return engine(input_ids=ids, labels=ids)

    with pytest.raises(CallError, match="different random states"):
        divided(GPT2, 0, then, data=1)


@pytest.mark.threads
def test_the_loader_gives_ranks_of_a_group_the_same_samples():
    data = [torch.tensor([i]) for i in range(16)]

    def then(engine):
        return [batch.flatten().tolist() for batch in engine.deepspeed_io(data)]

    first, same, other, too = divided(GPT2, 0, then, data=2)
    assert first == same and other == too and first != other


@pytest.mark.threads
def test_weights_that_differ_between_ranks_are_those_of_the_first(caplog):
    def main(rank, world):
        mpu = Mesh(Grid.fit(2, tp=2), rank, world.connect)
        model = make(GPT2, seed=rank)
        engine, *_ = megatron_ds.initialize(
            model=model, config=config_of(0, data=1), mpu=mpu
        )
        return engine.full_state_dict()

    found = run_ranks(2, main)[0]
    expected = make(GPT2, seed=0).state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert "differed between tensor-parallel ranks" in caplog.text


# ------------------------------------------------------------------------------------ what is refused
@pytest.mark.threads
@pytest.mark.parametrize(
    "hook, message",
    [
        ("_enter", "the gradient of .* differs from that of the whole model"),
        ("_gather", "results of shape .* 24. after its layers were divided"),
    ],
)
def test_a_division_with_other_gradients_is_refused(monkeypatch, hook, message):
    monkeypatch.setattr(split_layers, hook, lambda *of: None)
    with pytest.raises(ConfigError, match=message):
        divided(LLAMA, 0, lambda engine: None, data=1)


@pytest.mark.threads
@pytest.mark.parametrize(
    "keys, message",
    [
        ({"autotp_sise": 2}, "unknown key .*did you mean 'autotp_size'"),
        ({"injection_policy_tuple": ["o_proj"]}, 'write "partition_config"'),
        ({"vocab_parallel_lm_head": True}, "computed from all logits"),
        ({"dtype": "bf16"}, 'blocks "bf16" and "fp16"'),
        ({"tp": {"tp_size": 4}}, '"tensor_parallel.tp.tp_size" is 4 beside'),
        ({"partition_config": {"layer_specs": 3}}, 'a block with "layer_specs"'),
        ({"partition_config": {"use_default_specs": False}}, "leaves all layers"),
        (
            {"partition_config": {"layer_specs": [{"patterns": ["nothing"]}]}},
            "has a name like",
        ),
        (
            {
                "partition_config": {
                    "layer_specs": [{"patterns": ["a"], "shape": [[4, 2], -1]}]
                }
            },
            "only columns of equal layers",
        ),
    ],
)
def test_keys_that_an_engine_cannot_follow_are_refused_by_name(keys, message):
    block = {"autotp_size": 2, **keys}
    with pytest.raises(ConfigError, match=message):
        divided(LLAMA, 0, lambda engine: None, data=1, tensor_parallel=block)


@pytest.mark.threads
def test_models_and_sizes_that_do_not_fit_are_refused(monkeypatch):
    nothing = lambda engine: None
    with pytest.raises(ConfigError, match="the mpu has 2 model-parallel ranks"):
        divided(LLAMA, 0, nothing, data=1, size=2, tensor_parallel={"autotp_size": 4})
    monkeypatch.setitem(MODELS, LLAMA, {**MODELS[LLAMA], "num_key_value_heads": 1})
    with pytest.raises(ConfigError, match="num_key_value_heads=1, which 2 tensor"):
        divided(LLAMA, 0, nothing, data=1)
    monkeypatch.setattr(divided_models, "make", lambda name: make(name).to("meta"))
    with pytest.raises(ConfigError, match="has no values: "):
        divided(LLAMA, 0, nothing, data=1)
    with pytest.raises(ArgumentError, match="the number of ranks"):
        megatron_ds.tp_model_init(nn.Linear(2, 2), 0)
    with pytest.raises(ConfigError, match="tp_group is not available"):
        megatron_ds.tp_model_init(nn.Linear(2, 2), 2, tp_group=object())
    other = {"tensor_parallel": {"autotp_size": 4}}
    with pytest.raises(ConfigError, match="tp_size is 2, and .* of the config 4"):
        megatron_ds.tp_model_init(nn.Linear(2, 2), 2, config=other)


# ------------------------------------------------------------------------------------ processes
def train_rank(rank, world, folder):
    model = megatron_ds.tp_model_init(make(GPT2), tp_size=2, dtype=torch.float32)
    config = config_of(2, data=1)
    # As transformers and DeepSpeed count: every rank.
    config |= {"train_batch_size": 8, "gradient_accumulation_steps": 1}
    del config["tensor_parallel"]
    engine, *_ = megatron_ds.initialize(model=model, config=config)
    found = train(engine)
    engine.save_16bit_model(folder)
    return found, engine.train_batch_size(), engine.world.data.ranks


@pytest.mark.processes
@pytest.mark.quick
def test_real_ranks_train_as_one_process_and_save_whole_weights(tmp_path):
    losses, norms, weights = plain(GPT2)
    found = run_processes(2, train_rank, str(tmp_path))
    for rank, ((means, seen), size, ranks) in enumerate(found):
        assert means == pytest.approx(losses, abs=1e-5)
        assert seen == pytest.approx(norms, rel=1e-5)
        assert size == 4 and ranks == (rank,)
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    model = make(GPT2, seed=9)
    model.load_state_dict(saved)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, weights[key], rtol=0, atol=1e-5)


@pytest.mark.processes
def test_the_program_of_the_page_trains_and_continues_on_one_rank(tmp_path):
    blocks = list(blocks_of("docs/use/engine.md"))
    at = next(i for i, b in enumerate(blocks) if b.mark == "file: divided.py")
    program, commands, printed = blocks[at : at + 3]
    (tmp_path / "divided.py").write_text(program.text)
    environment = warm_environment({**os.environ, "OMP_NUM_THREADS": "1"})
    lines = []
    for command in commands.text.strip().splitlines():
        done = subprocess.run(
            command.split(),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            timeout=HUNG,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines += [line for line in done.stdout.splitlines() if line.startswith("step")]
    assert lines == printed.text.strip().splitlines()
