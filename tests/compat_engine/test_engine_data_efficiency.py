"""The block "data_efficiency" of an engine's JSON: samples of training_data= by a curriculum, and layers that
drop tokens."""

import math
from types import SimpleNamespace

import pytest
import torch
from megatron_ds.runtime.data_pipeline.data_routing.helper import (
    convert_to_random_ltd,
    remove_random_ltd_state_dict,
    save_without_random_ltd,
)
from torch import nn

import megatron_ds
from megatron_ds.compat.engine.curriculum_loader import CurriculumBatches
from megatron_ds.compat.engine.dropped_tokens import RandomLTDSchedule
from megatron_ds.errors import ConfigError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.data_efficiency.test_curriculum_sampler import (
    SEED,
    TOTAL,
    placed,
    sampler_of,
    write,
)

pytestmark = pytest.mark.plan

MICRO = 4
STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("metrics")
    write(path)
    return path


def engine_of(model, data=None, stage=0, **blocks):
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": STEPS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "data_efficiency": {"enabled": True, "seed": SEED, **blocks},
    }
    engine, _, loader, _ = megatron_ds.initialize(
        model=model, config=config, training_data=data, mpu=Mesh(Grid.fit(1), 0)
    )
    return engine, loader


# ---------------------------------------------------------------------------------------------- samples
class Numbers(torch.utils.data.Dataset):
    """Sample i is [i]."""

    def __len__(self):
        return TOTAL

    def __getitem__(self, i):
        return torch.tensor([float(i)])


def sampling(case, folder, **more):
    metrics = placed(case, folder)
    block = {"enabled": True, "curriculum_metrics": metrics, "data_cluster_path": "x"}
    return {"data_sampling": {"enabled": True, "curriculum_learning": block, **more}}


def wanted(case, folder, batches):
    sampler = sampler_of(case, folder)
    return [sampler.draw(MICRO * STEPS) for _ in range(batches)]


def read(engine, loader, updates):
    """Train, and return the samples of each update."""
    found = []
    micro = iter(loader)
    for _ in range(updates):
        found.append([])
        for _ in range(STEPS):
            batch = next(micro)
            found[-1] += batch.flatten().int().tolist()
            engine.backward(engine(batch).square().mean())
            engine.step()
    return found


@pytest.mark.parametrize("workers", (0, 1))
def test_the_loader_reads_the_samples_of_the_curriculum(folder, workers):
    blocks = sampling("value", folder, num_workers=workers, num_epochs=3)
    engine, loader = engine_of(nn.Linear(1, 1), Numbers(), **blocks)
    assert read(engine, loader, 5) == wanted("value", folder, 5)
    assert len(loader) == -(-3 * TOTAL // MICRO)
    state = loader.data_sampler.state_dict()
    assert state["consumed_samples"] == 5 * MICRO * STEPS
    assert state["curriculum_step"] == 5


def test_an_iteration_ends_when_the_epochs_are_consumed(folder):
    blocks = sampling("value", folder, num_epochs=1)
    _, loader = engine_of(nn.Linear(1, 1), Numbers(), **blocks)
    assert sum(1 for _ in loader) == TOTAL // MICRO + 1


def test_a_checkpoint_keeps_the_position(folder, tmp_path):
    blocks = sampling("both", folder)
    engine, loader = engine_of(nn.Linear(1, 1), Numbers(), **blocks)
    read(engine, loader, 4)
    engine.save_checkpoint(tmp_path)
    again, loader = engine_of(nn.Linear(1, 1), Numbers(), **blocks)
    again.load_checkpoint(tmp_path)
    assert read(again, loader, 3) == wanted("both", folder, 7)[4:]


def test_batches_pass_through_the_programs_function_and_schedules(folder):
    engine, loader = engine_of(nn.Linear(1, 1), Numbers(), **sampling("custom", folder))
    with pytest.raises(ConfigError, match="no function is set"):
        next(iter(loader))
    engine.set_custom_curriculum_learning_schedule(
        {"words": lambda step: min(9, 2 + step // 5)}
    )
    seen = []
    engine.set_data_post_process_func(
        lambda batch, state: seen.append(state["current_difficulties"]) or -batch
    )
    found = read(engine, loader, 6)
    assert found == [[-i for i in batch] for batch in wanted("custom", folder, 6)]
    assert [each["words"] for each in seen] == [2] * 8 + [3] * 4


def test_ranks_share_each_micro_batch(folder):
    found = []
    for rank in range(2):
        group = SimpleNamespace(size=2, rank=rank)
        batches = CurriculumBatches(sampler_of("value", folder), 64, (2, 2), group)
        found.append([part for part, _ in zip(batches, range(6))])
    joined = [a + b for a, b in zip(*found)]
    assert [joined[i] + joined[i + 1] for i in (0, 2, 4)] == wanted("value", folder, 3)


def test_what_the_json_lacks_is_named(folder):
    engine, _ = engine_of(nn.Linear(1, 1), Numbers())
    with pytest.raises(ConfigError, match="has no curriculum over samples"):
        engine.set_data_post_process_func(print)
    with pytest.raises(ConfigError, match="sampling.num_epoch"):
        engine_of(nn.Linear(1, 1), **sampling("value", folder, num_epoch=3))
    with pytest.raises(ConfigError, match='seed" is true; it must be of type int'):
        engine_of(nn.Linear(1, 1), seed=True)


# ---------------------------------------------------------------------------------------------- tokens
LENGTH = 16


class Block(nn.Module):
    """Mixes tokens by a mask, and keeps what it was called with."""

    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seen = []

    def forward(self, hidden_states, attention_mask=None):
        self.seen.append((hidden_states.detach(), attention_mask))
        x = self.linear(hidden_states)
        scores = x @ x.transpose(1, 2)
        if attention_mask is not None:
            scores = scores + attention_mask[:, 0]
        return (hidden_states + scores.softmax(-1) @ x, "other")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        mask = torch.full((1, 1, LENGTH, LENGTH), -math.inf).triu(1)
        for layer in self.layers:
            x = layer(x, attention_mask=mask)[0]
        return x


def routing(low, high=LENGTH, steps=4, multiple=4, **changes):
    schedule = {
        "min_value": low,
        "max_value": high,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": steps, "seq_per_step": multiple},
    }
    block = {
        "enabled": True,
        "total_layer_num": 4,
        "random_ltd_layer_num": 2,
        "random_ltd_layer_id": [1, 2],
        "model_mask_name": "attention_mask",
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": schedule,
        "layer_token_lr_schedule": {"enabled": False},
    }
    return {"data_routing": {"enabled": True, "random_ltd": block | changes}}


def inputs(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(MICRO, LENGTH, 8, generator=generator)


def train(engine, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        for part in range(STEPS):
            loss = engine(inputs(STEPS * step + part)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def test_layers_keep_tokens_by_deepspeeds_schedule():
    engine, _ = engine_of(Model(), **routing(4))
    engine = convert_to_random_ltd(engine, Block)
    train(engine, 6)
    lengths = [[x.shape[1] for x, _ in layer.seen] for layer in engine.module.layers]
    # floor(t / 4 · 12 + 4), a multiple of 4, twice in each update
    kept = [4, 4, 4 + 3 - 3, 4 + 3 - 3, 8, 8, 12, 12, 16, 16, 16, 16]
    assert lengths == [[LENGTH] * 12, kept, kept, [LENGTH] * 12]
    # DeepSpeed's count: batch · (kept · 2 + 16 · 2) of each update
    tokens = MICRO * STEPS * sum(2 * k + 2 * LENGTH for k in kept[::2])
    assert engine.random_ltd_scheduler.state_dict() == {
        "consumed_layer_tokens": tokens,
        "current_steps": 5,
        "current_value": 16,
        "min_value": 4,
        "max_value": 16,
    }


@pytest.mark.parametrize(
    "low, high, steps, multiple, kept, tokens",
    [
        (
            50,
            200,
            30,
            16,
            [48, 64, 80, 80, 96, 112, 128, 144, 160, 176, 192, 200],
            188800,
        ),
        (7, 64, 11, 3, [6, 21, 36, 51, *[64] * 8], 69600),
        (16, 16, 5, 4, [16] * 12, 19200),
    ],
)
def test_the_schedule_has_deepspeeds_integers(low, high, steps, multiple, kept, tokens):
    """Every third of 40 updates, and the layer-tokens, of DeepSpeed 0.19.8's RandomLTDScheduler."""
    block = routing(low, high, steps, multiple)["data_routing"]["random_ltd"]
    layers = {
        "total_layer_num": 6,
        "random_ltd_layer_num": 4,
        "random_ltd_layer_id": [1, 2, 3, 4],
    }
    schedule = RandomLTDSchedule(block | layers, 5)
    found = []
    for update in range(40):
        schedule.update_seq(update)
        schedule.update_seq(update)
        found.append(schedule.get_current_seq())
    assert found[: 3 * 12 : 3] == kept and schedule.consumed_layer_tokens == tokens


@pytest.mark.parametrize("stage", (0, 3))
def test_with_all_tokens_kept_training_is_that_without(stage):
    engine, _ = engine_of(Model(), stage=stage, **routing(LENGTH))
    plain, _ = engine_of(Model(), stage=stage)
    assert train(convert_to_random_ltd(engine, Block), 3) == train(plain, 3)


def test_a_layer_sees_some_tokens_in_order_and_the_others_pass():
    engine, _ = engine_of(Model(), **routing(4, steps=100))
    convert_to_random_ltd(engine, Block)
    x = inputs(0).requires_grad_()
    engine(x)
    before, first, second, last = (layer.seen[0] for layer in engine.module.layers)
    whole = engine.module.layers[0](before[0], before[1])[0]
    (part, mask) = first
    # Its tokens are rows of the whole, in their order, with the causal mask of 4.
    places = [
        [row for row in range(LENGTH) if (whole[b, row] == token).all()]
        for b in range(MICRO)
        for token in part[b]
    ]
    assert all(len(found) == 1 for found in places)
    places = torch.tensor(places).view(MICRO, 4)
    assert (places.diff(dim=1) > 0).all() and len(
        {tuple(p.tolist()) for p in places}
    ) > 1
    assert torch.equal(mask[0, 0], torch.full((4, 4), -math.inf).triu(1))
    # The next blocks: some tokens again, then all.
    assert second[0].shape[1] == 4 and last[0].shape[1] == LENGTH


def test_gradients_are_those_of_the_same_computation_without_hooks():
    """The hooks' gather and scatter against one written apart."""
    engine, _ = engine_of(Model(), **routing(8, steps=100))
    convert_to_random_ltd(engine, Block)
    x = inputs(3).requires_grad_()
    (got,) = torch.autograd.grad(engine(x).square().sum(), x)
    layers = engine.module.layers
    seen = [layer.seen[0][0] for layer in layers]
    hidden = inputs(3).requires_grad_()
    mask = torch.full((1, 1, LENGTH, LENGTH), -math.inf).triu(1)
    engine.eval()
    y = hidden
    for number, layer in enumerate(layers):
        if number in (1, 2):
            rows = torch.stack(
                [
                    torch.tensor(
                        [
                            int((y[b] == token).all(-1).nonzero()[0])
                            for token in seen[number][b]
                        ]
                    )
                    for b in range(MICRO)
                ]
            )
            each = []
            for b in range(MICRO):
                part = y[b, rows[b]][None]
                out = layer(part, attention_mask=mask[..., :8, :8])[0]
                each.append(y[b].index_copy(0, rows[b], out[0]))
            y = torch.stack(each)
        else:
            y = layer(y, attention_mask=mask)[0]
    (expected,) = torch.autograd.grad(y.square().sum(), hidden)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_loaded_checkpoint_goes_on_with_the_same_bits(tmp_path):
    whole, _ = engine_of(Model(), **routing(4))
    losses = train(convert_to_random_ltd(whole, Block), 5)
    first, _ = engine_of(Model(), **routing(4))
    train(convert_to_random_ltd(first, Block), 2)
    first.save_checkpoint(tmp_path)
    second, _ = engine_of(Model(), **routing(4))
    convert_to_random_ltd(second, Block).load_checkpoint(tmp_path)
    assert train(second, 3, first=2) == losses[4:]
    assert (
        second.random_ltd_scheduler.state_dict()
        == whole.random_ltd_scheduler.state_dict()
    )


def test_evaluation_sees_all_tokens_and_names_stay():
    engine, _ = engine_of(Model(), **routing(4))
    convert_to_random_ltd(engine, Block)
    engine.eval()
    assert torch.equal(engine(inputs(0)), Model()(inputs(0)))
    names = list(Model().state_dict())
    assert list(save_without_random_ltd(engine)) == names
    theirs = {"layers.1.random_ltd_layer.linear.bias": 1}
    assert remove_random_ltd_state_dict(theirs) == {"layers.1.linear.bias": 1}


def test_wrong_blocks_are_named():
    engine, _ = engine_of(Model())
    with pytest.raises(ConfigError, match="the config has no random-LTD"):
        convert_to_random_ltd(engine, Block)
    with pytest.raises(ConfigError, match="give the engine"):
        convert_to_random_ltd(Model(), Block)
    with pytest.raises(ConfigError, match='layer_num" is 2, but .* has 1 layers'):
        engine_of(Model(), **routing(4, random_ltd_layer_id=[1]))
    with pytest.raises(ConfigError, match='layer_id" has 9, but the module has 4'):
        engine, _ = engine_of(Model(), **routing(4, random_ltd_layer_id=[1, 9]))
        convert_to_random_ltd(engine, Block)
    with pytest.raises(ConfigError, match="hidden_state_order\" is 'bsh'"):
        engine, _ = engine_of(Model(), **routing(4, hidden_state_order="bsh"))
        convert_to_random_ltd(engine, Block)
