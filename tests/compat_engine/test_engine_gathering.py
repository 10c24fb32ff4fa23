"""Stage 3 for modules that know nothing of it: what is whole when, what travels, and modules of many
kinds."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import megatron_ds
from megatron_ds.compat.engine.module_specs import find_layers
from megatron_ds.errors import ConfigError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.engine_runs import (
    EPS,
    WIDTH,
    Block,
    Stack,
    batches,
    config_of,
    loss_of,
    make,
    on_ranks,
    train,
    weights,
)
from tests.harness.plain_training import train_plainly
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

DEEP = dict(depth=6)


def units_of(engine):
    return list(
        dict.fromkeys(
            unit for needs in engine.optimizer.gathering_of(0).needs for unit in needs
        )
    )


def num_whole(engine):
    return sum(not unit.is_free for unit in units_of(engine))


# ---------------------------------------------------------------------------------------------------- layers
def test_layers_are_the_elements_of_lists_and_what_is_left_over():
    names = lambda module: [layer.name for layer in find_layers(module)]
    assert names(make(Stack)) == [
        "embed",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "norm",
        "head",
    ]
    assert names(
        nn.Sequential(
            nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        )
    ) == ["0", "2.0", "2.1"], "a large part is taken apart"
    assert names(
        nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])])
    ) == ["0.0", "0.1"]
    assert names(nn.Transformer(8, 2, 5, 5, 8, batch_first=True)) == [
        *(f"encoder.layers.{i}" for i in range(5)),
        "encoder.norm",
        *(f"decoder.layers.{i}" for i in range(5)),
        "decoder.norm",
    ]
    shared = nn.Linear(2, 2)
    assert names(nn.ModuleList([shared, shared])) == ["0"]


# ----------------------------------------------------------------------------------------- what is whole when
@pytest.mark.parametrize("prefetch, most_whole", [(0, 1), (None, 2), (10**6, 9)])
def test_only_the_layer_at_work_and_those_ahead_are_whole(prefetch, most_whole):
    def main(engine, rank):
        assert num_whole(engine) == 0
        most = [0]
        look = lambda *_: most.__setitem__(0, max(most[0], num_whole(engine)))
        for layer in find_layers(engine.module):
            layer.module.register_forward_pre_hook(look)
        for p in engine.module.parameters():
            p.register_post_accumulate_grad_hook(look)
        train(engine, rank, 1)
        most[0] = 0  # the order is known from the first forward
        train(engine, rank, 2, first=1)
        return most[0], num_whole(engine), len(units_of(engine))

    config = config_of(3, 2)
    if prefetch is not None:
        config["zero_optimization"]["stage3_prefetch_bucket_size"] = prefetch
    for most, afterwards, total in on_ranks(
        2, main, lambda: make(Stack, **DEEP), config
    ):
        assert (most, afterwards, total) == (most_whole, 0, 9)


def test_a_step_sends_three_times_the_parameters_at_most():
    """Gathered in forward and backward, but the last layer once and the embedding not for its backward;
    reduced once."""

    def main(engine, rank):
        train(engine, rank, 1)
        engine.world.data.traffic.clear()
        train(engine, rank, 1, first=1)
        sent = engine.world.data.traffic.bytes
        numel = {unit.layer: unit.numel for unit in units_of(engine)}
        return (
            {
                op: sum(n for (o, _, _), n in sent.items() if o == op)
                for op in ("all_gather", "reduce_scatter")
            },
            numel,
        )

    for sent, numel in on_ranks(2, main, lambda: make(Stack, **DEEP), config_of(3, 2)):
        psi = 4 * sum(numel.values())
        assert sent["reduce_scatter"] == psi
        assert sent["all_gather"] == 2 * psi - 4 * numel[0] - 4 * numel[max(numel)]


def test_gradients_are_reduced_while_backward_goes_on():
    """At most a few layers' whole gradients are held at a time."""
    held = lambda depth: on_ranks(
        2,
        lambda engine, rank: train(engine, rank, 2) and engine.optimizer.working_bytes,
        lambda: make(Stack, depth=depth),
        config_of(3, 2),
    )[0]
    assert held(12) == held(6)


def test_evaluation_gathers_too_and_leaves_nothing_behind():
    def main(engine, rank):
        tokens = batches(1, 1, 2, 0)[0][0]
        with torch.no_grad():
            outputs = engine.eval()(tokens), engine(tokens)
        engine.train()
        train(engine, rank, 1)
        return outputs, num_whole(engine)

    expected = make(Stack)(batches(1, 1, 2, 0)[0][0])
    for outputs, whole in on_ranks(2, main, lambda: make(Stack), config_of(3, 2)):
        assert all(torch.equal(output, expected) for output in outputs) and whole == 0


def test_a_forward_that_fails_or_is_dropped_does_no_harm():
    def main(engine, rank):
        with pytest.raises(IndexError):
            engine(torch.full((1, 2), 99))
        engine(batches(1, 1, 2, rank)[0][0])  # with a graph, and never backward
        engine.zero_grad()
        assert num_whole(engine) == 0
        return train(engine, rank), weights(engine)

    plain = make(Stack)
    norms = train_plainly(
        plain, loss_of, batches(3, 1, 2), lr=0.01, eps=EPS, clip=0.5, weight_decay=0.1
    )
    for found, after in on_ranks(2, main, lambda: make(Stack), config_of(3, 2)):
        assert found == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(
            after["head.weight"], plain.head.weight.detach(), rtol=1e-5, atol=1e-6
        )


# -------------------------------------------------------------------------------------- modules of many kinds
class Wrapped(Block):
    """Its output comes in an object of its own."""

    def forward(self, x):
        return SimpleNamespace(
            hidden=super().forward(x.hidden if isinstance(x, SimpleNamespace) else x),
            notes=["x", None],
        )


class InPlace(nn.Module):
    """Writes into its input, and takes it as a keyword."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, *, x):
        return self.linear(F.relu_(x))


class Branches(nn.Module):
    """A list of pairs without a forward; two inputs that need gradients; an output of several; a call inside
    a call."""

    def __init__(self, width):
        super().__init__()
        pair = lambda: nn.ModuleList(
            [nn.Linear(width, width), nn.Bilinear(width, width, width)]
        )
        self.pairs = nn.ModuleList(pair() for _ in range(2))
        self.gate = nn.Parameter(torch.ones(width))

    def forward(self, x):
        memory = torch.tanh(x)
        for one, two in self.pairs:
            x = x + two(one(x), memory)
        return {"x": x * self.gate, "rest": (memory,)}


class Enclosing(nn.Module):
    """A layer inside a layer, which returns what the inner one does."""

    def __init__(self, width):
        super().__init__()
        self.gate, self.inner = (
            nn.Parameter(torch.ones(width, 3)),
            nn.Linear(width, width),
        )

    def forward(self, x):
        return self.inner(x @ self.gate @ self.gate.T)


class Borrower(nn.Module):
    """Reads a weight of a layer that has its turn, and its backward, at another time."""

    def __init__(self, lender):
        super().__init__()
        self.linear, self.lenders = nn.Linear(WIDTH, WIDTH), [lender]

    def forward(self, x):
        return F.linear(self.linear(x), self.lenders[0].weight)


def borrowed():
    lender = nn.Linear(WIDTH, WIDTH)
    return nn.ModuleList([Borrower(lender), lender])


class Reentrant(nn.Module):
    """Recomputed in the old way: a backward inside of the backward."""

    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class Zoo(nn.Module):
    def __init__(self, animal):
        super().__init__()
        self.embed, self.animal, self.head = (
            nn.Embedding(11, WIDTH),
            animal(),
            nn.Linear(WIDTH, 11),
        )

    def forward(self, tokens):
        x = self.embed(tokens)
        if isinstance(self.animal, nn.ModuleList):
            for part in self.animal:
                x = part(x=x + 0) if isinstance(part, InPlace) else part(x)
        else:
            x = self.animal(x)
        x = (
            x.hidden
            if isinstance(x, SimpleNamespace)
            else x["x"]
            if isinstance(x, dict)
            else x
        )
        return self.head(x[0] if isinstance(x, tuple) else x)


ANIMALS = {
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, 2),
    "wrapped": lambda: nn.ModuleList([Wrapped(WIDTH), Wrapped(WIDTH)]),
    "in place": lambda: nn.ModuleList([InPlace(WIDTH), InPlace(WIDTH)]),
    "branches": lambda: Branches(WIDTH),
    "enclosing": lambda: Enclosing(WIDTH),
    "borrowed": borrowed,
    "reentrant": lambda: Reentrant(WIDTH),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 2, 9, dropout=0.0), 2, None, False
    ),
    "sequential": lambda: nn.Sequential(
        nn.Linear(WIDTH, 9),
        nn.ReLU(inplace=True),
        nn.Linear(9, WIDTH),
        nn.LayerNorm(WIDTH),
    ),
    "channels last": lambda: nn.Sequential(
        nn.Unflatten(2, (1, 2, 7)),
        nn.Flatten(0, 1),
        nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last),
        nn.Conv2d(3, 1, 1),
        nn.Unflatten(0, (-1, 7)),
        nn.Flatten(2),
    ),
    "normed": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("name", ANIMALS)
def test_modules_of_many_kinds_train_as_with_torch_alone(name):
    build = lambda: make(Zoo, animal=ANIMALS[name])
    plain = build()
    norms = train_plainly(
        plain, loss_of, batches(2, 1, 2), lr=0.01, eps=EPS, clip=0.5, weight_decay=0.1
    )
    for found, after in on_ranks(
        2,
        lambda engine, rank: (train(engine, rank, 2), weights(engine)),
        build,
        config_of(3, 2),
    ):
        assert found == pytest.approx(norms, rel=1e-5)
        for key, p in plain.named_parameters():
            torch.testing.assert_close(after[key], p.detach(), rtol=1e-5, atol=2e-6)


def test_a_parameter_read_by_a_stranger_is_told_once(caplog):
    class Stranger(Stack):
        def forward(self, tokens):
            return super().forward(tokens) @ self.embed.weight @ self.embed.weight.T

    plain = make(Stranger)
    norms = train_plainly(
        plain, loss_of, batches(3, 1, 2), lr=0.01, eps=EPS, clip=0.5, weight_decay=0.1
    )
    for found in on_ranks(2, train, lambda: make(Stranger), config_of(3, 2)):
        assert found == pytest.approx(norms, rel=1e-5)
    told = [
        record.getMessage()
        for record in caplog.records
        if "read outside" in record.getMessage()
    ]
    assert len(told) == 2 and told[0].startswith("embed.weight")  # a rank each


def test_modules_added_to_one_of_shards_go_to_its_device_and_must_have_values():
    models = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]

    def main(rank, world):
        mesh, model = Mesh(Grid.fit(2), rank, world.connect), models[rank]
        megatron_ds.zero.Init(module=model, mpu=mesh)
        assert model[0].weight.is_meta and model[0].weight.device == torch.device("cpu")
        model.append(nn.Linear(4, 4).to(model[0].weight.device)).append(
            nn.Linear(4, 4, device="meta")
        )
        with pytest.raises(
            ConfigError,
            match="2 tensors on the meta device have no values, first 2.weight",
        ):
            megatron_ds.initialize(model=model, mpu=mesh, config=config_of(3, 2))
        del model[2]
        nn.init.ones_(model[1].weight)
        engine = megatron_ds.initialize(
            model=model, mpu=mesh, config=config_of(3, 2)
        ).engine
        return engine.full_state_dict()

    whole = run_ranks(2, main)[0]
    assert torch.equal(whole["1.weight"], torch.ones(4, 4)) and whole["0.weight"].any()
