"""`PipelineModule` of one stage, and its engine: trained as by torch alone, and evaluated."""

import pytest
import torch
from megatron_ds.pipe import (
    LayerSpec,
    PipeDataParallelTopology,
    PipelineModule,
    TiedLayerSpec,
)
from megatron_ds.runtime.pipe.engine import PipelineEngine, PipelineError
from torch import nn
from torch.nn import functional as F

import megatron_ds
from megatron_ds.errors import ConfigError
from tests.harness.engine_runs import (
    EPS,
    STEPS,
    Block,
    assert_trained_as,
    batches,
    config_of,
    make,
    on_ranks,
    weights,
)
from tests.harness.plain_training import train_plainly

pytestmark = pytest.mark.threads

WORDS = 11
WIDTH = 14


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def head(embedding, x):
    return x @ embedding.weight.t()


def pipeline(**options):
    """Layers that are made, given, functions, and tied."""
    layers = [
        TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH),
        LayerSpec(Block, WIDTH),
        lambda x: 0.5 * x,
        Block(WIDTH),
        nn.LayerNorm(WIDTH),
        TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, forward_fn=head),
    ]
    return PipelineModule(layers, num_stages=1, loss_fn=cross_entropy, **options)


class Plain(nn.Module):
    """The same computation without a pipeline, with the names of its parameters."""

    def __init__(self, source):
        super().__init__()
        self.add_module("1", source.get_submodule("1"))
        self.add_module("3", source.get_submodule("3"))
        self.add_module("4", source.get_submodule("4"))
        words = source.tied_modules["words"]
        self.tied_modules = nn.ModuleDict({"words": words})

    def forward(self, tokens):
        embedding = self.tied_modules["words"]
        first, second, norm = (self.get_submodule(name) for name in "134")
        return norm(second(0.5 * first(embedding(tokens)))) @ embedding.weight.t()


def labelled(tokens):
    return tokens, tokens.roll(1, -1)


def plain_loss(module, tokens):
    return cross_entropy(module(tokens), tokens.roll(1, 1))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("every", [0, 2])
def test_a_pipeline_of_one_stage_trains_as_torch_alone(stage, every):
    def main(engine, rank):
        assert type(engine) is PipelineEngine and engine.is_first_stage
        assert engine.module.activation_checkpoint_interval == every
        data = [tokens for step in batches(STEPS, 2, 2, rank) for tokens in step]
        source = iter(map(labelled, data))
        before = engine.eval_batch(iter(map(labelled, data[:2])))
        losses = [engine.train_batch(source).item() for _ in range(STEPS)]
        return before.item(), losses, weights(engine)

    plain = Plain(make(pipeline))
    steps = batches(STEPS, 2, 2)
    expected = []

    def loss(module, tokens):
        found = plain_loss(module, tokens)
        expected.append(found.item())
        return found

    block = {"pipeline": {"activation_checkpoint_interval": every}}
    config = config_of(stage, 2, accumulation=2, **block)
    results = on_ranks(2, main, lambda: make(pipeline), config)
    train_plainly(plain, loss, steps, lr=0.01, eps=EPS, clip=0.5, weight_decay=0.1)
    means = torch.tensor(expected).view(STEPS, -1).mean(1).tolist()
    for before, losses, _ in results:
        assert losses == pytest.approx(means, rel=1e-5)
        assert before == pytest.approx(means[0], rel=1e-5)
    assert_trained_as([found for *_, found in results], plain)


def test_batches_come_from_the_training_data_again_and_again():
    def main(engine, rank):
        losses = [engine.train_batch().item() for _ in range(4)]
        return engine.global_steps, losses

    data = [labelled(torch.full((7,), number % WORDS)) for number in range(24)]
    [(steps, losses)] = on_ranks(
        1, main, lambda: make(pipeline), config_of(0, 1), training_data=data
    )
    assert steps == 4 and losses[-1] < losses[0]


def test_recomputed_layers_run_twice_and_the_others_once():
    calls = []

    class Counted(nn.Linear):
        def forward(self, x):
            calls.append(self.number)
            return super().forward(x)

    layers = [Counted(3, 3) for _ in range(3)] + [nn.Tanh()]
    for number, layer in enumerate(layers[:3]):
        layer.number = number
    module = PipelineModule(layers, num_stages=1, activation_checkpoint_interval=3)
    module(torch.ones(2, 3)).sum().backward()
    assert calls == [0, 1, 2, 0, 1, 2]
    calls.clear()
    module.eval()(torch.ones(2, 3))
    module.train()
    module.set_checkpoint_interval(0)
    module(torch.ones(2, 3)).sum().backward()
    assert calls == [0, 1, 2, 0, 1, 2]


def test_outputs_are_returned_where_no_loss_is_asked_for():
    def main(engine, rank):
        tokens = torch.arange(14).view(2, 7) % WORDS
        of = lambda **how: engine.eval_batch(iter([labelled(tokens)] * 2), **how)
        loss, outputs = of(return_logits=True)
        single = of(compute_loss=False, num_micro_batches=1)
        each = of(reduce_output=None)
        assert torch.equal(outputs, torch.cat([single, single]))
        assert [one.item() for one in each] == [pytest.approx(loss.item())] * 2
        return single.shape

    config = config_of(0, 1, accumulation=2)
    [shape] = on_ranks(1, main, lambda: make(pipeline), config)
    assert shape == (2, 7, WORDS)


def test_what_one_stage_cannot_do_is_told():
    layers = [nn.Linear(2, 2)]
    for options, says in (
        ({}, "needs num_stages or topology"),
        ({"num_stages": 2}, "with 2 stages: .*num_stages=1"),
        ({"topology": PipeDataParallelTopology(2, 1)}, "with 2 stages"),
    ):
        with pytest.raises(ConfigError, match=says):
            PipelineModule(layers, **options)
    with pytest.raises(ConfigError, match="layer 1 is int"):
        PipelineModule([*layers, 3], num_stages=1)
    with pytest.raises(ConfigError, match="LayerSpec.*the class of a torch module"):
        LayerSpec(nn.Linear(2, 2))

    def main(engine, rank):
        for call in (engine, engine.backward, engine.step):
            with pytest.raises(PipelineError, match="train_batch"):
                call()
        with pytest.raises(PipelineError, match="without data"):
            engine.train_batch()
        with pytest.raises(PipelineError, match=r"is \(inputs, labels\)"):
            engine.train_batch(iter([torch.ones(2)]))

    on_ranks(1, main, lambda: make(pipeline), config_of(0, 1))


@pytest.mark.parametrize("interval", ["2", None, True, 0.5])
def test_an_interval_that_is_no_integer_is_told(interval):
    config = config_of(0, 1) | {
        "pipeline": {"activation_checkpoint_interval": interval}
    }
    with pytest.raises(ConfigError, match="activation_checkpoint_interval.* integer"):
        megatron_ds.initialize(model=pipeline(), config=config)


def test_deepspeeds_names_are_there():
    assert megatron_ds.PipelineModule is PipelineModule
    assert issubclass(PipelineEngine, megatron_ds.DeepSpeedEngine)
