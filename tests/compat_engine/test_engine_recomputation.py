"""Stage 3 with activation checkpointing of every kind: results of plain torch, and few layers whole."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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

pytestmark = pytest.mark.threads

DEPTH = 6


class OwnForward(Block):
    """Checkpoints inside its own forward, as layers of transformers do."""

    reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class OwnForwardAgain(OwnForward):
    reentrant = True


class Inner(OwnForward):
    """A layer with parameters of its own around another layer, both recomputed."""

    def __init__(self, width):
        super().__init__(width)
        self.inner = OwnForward(width)

    def forward(self, x):
        return checkpoint(
            lambda x: Block.forward(self, self.inner(x)),
            x,
            use_reentrant=self.reentrant,
        )


class InnerAgain(Inner):
    reentrant = True


class Recomputed(Stack):
    """A stack whose forward checkpoints runs of `run` blocks; `twice`: a checkpoint in the checkpoint."""

    def __init__(
        self, block=Block, run=0, reentrant=False, twice=False, order=range(DEPTH)
    ):
        super().__init__(0)
        self.blocks = nn.ModuleList(block(WIDTH) for _ in range(DEPTH))
        self.run, self.reentrant, self.twice, self.order = (
            run,
            reentrant,
            twice,
            list(order),
        )

    def forward(self, tokens):
        x = self.embed(tokens)
        for start in range(0, len(self.order), self.run or 1):
            indices = self.order[start : start + (self.run or 1)]
            x = (
                self._checkpoint(self._several, x, indices)
                if self.run
                else self._several(x, indices)
            )
        return self.head(self.norm(x))

    def _checkpoint(self, function, *args):
        return checkpoint(function, *args, use_reentrant=self.reentrant)

    def _several(self, x, indices):
        for i in indices:
            x = self._checkpoint(self.blocks[i], x) if self.twice else self.blocks[i](x)
        return x


class RecomputedEmbedding(Stack):
    """The backward of an embedding does not read its weight, its recomputation does."""

    def forward(self, tokens):
        x = checkpoint(self.embed, tokens, use_reentrant=False)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# name → (module, most layers that are whole at a time)
KINDS = {
    "own forward": (lambda: make(Recomputed, block=OwnForward), 2),
    "own forward, re-entrant": (lambda: make(Recomputed, block=OwnForwardAgain), 2),
    "inner layers": (lambda: make(Recomputed, block=Inner), 2),
    "inner layers, re-entrant": (lambda: make(Recomputed, block=InnerAgain), 2),
    "around": (lambda: make(Recomputed, run=1), 2),
    "around, re-entrant": (lambda: make(Recomputed, run=1, reentrant=True), 2),
    "runs": (lambda: make(Recomputed, run=3), 3),
    "runs, re-entrant": (lambda: make(Recomputed, run=3, reentrant=True), 3),
    "nested": (lambda: make(Recomputed, run=3, twice=True), 3),
    "nested, re-entrant": (
        lambda: make(Recomputed, run=3, reentrant=True, twice=True),
        3,
    ),
    "again": (lambda: make(Recomputed, run=1, order=[0, 1, 0, 2, 3, 4, 5, 4]), 3),
    "again, re-entrant": (
        lambda: make(Recomputed, run=1, reentrant=True, order=[0, 1, 0, 2, 3, 4, 5, 4]),
        3,
    ),
    "embedding": (lambda: make(RecomputedEmbedding), 2),
}


@pytest.mark.parametrize("name", KINDS)
def test_recomputed_layers_are_freed_and_train_as_with_torch_alone(name, caplog):
    build, allowed = KINDS[name]

    def main(engine, rank):
        units = list(dict.fromkeys(engine.gathering._unit_of.values()))
        gathered = lambda: sum(not unit.is_free for unit in units)
        seen = []
        look = lambda *_: seen.append(gathered())
        for p in engine.module.parameters():
            p.register_post_accumulate_grad_hook(look)
        for module in engine.module.modules():
            module.register_forward_pre_hook(look)
        norms = train(engine, rank, 1)
        seen.clear()
        for tokens in batches(2, 1, 2, rank)[1]:
            loss = loss_of(engine, tokens)
            after_forward = gathered()
            engine.backward(loss)
            assert (after_forward, gathered()) == (1, 0)
            engine.step()
        norms.append(engine.get_global_grad_norm())
        total = sum(unit.nbytes for unit in units)
        return norms, weights(engine), max(seen), total, engine.optimizer.working_bytes

    plain = build()
    norms = train_plainly(
        plain, loss_of, batches(2, 1, 2), lr=0.01, eps=EPS, clip=0.5, weight_decay=0.1
    )
    for found, after, most, total, working in on_ranks(2, main, build, config_of(3, 2)):
        assert most <= allowed and working < 0.7 * total, (
            "weights and whole gradients of few layers"
        )
        assert found == pytest.approx(norms, rel=1e-5)
        for key, p in plain.named_parameters():
            torch.testing.assert_close(after[key], p.detach(), rtol=1e-5, atol=2e-6)
    assert not caplog.records, "a warning"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_transformers_frees_its_layers(reentrant, caplog):
    transformers = pytest.importorskip("transformers")

    def build(recomputes=True):
        torch.manual_seed(2)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=23,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=4,
                num_attention_heads=2,
            )
        )
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model.train()

    def main(engine, rank):
        units = list(dict.fromkeys(engine.gathering._unit_of.values()))
        gathered = lambda: sum(not unit.is_free for unit in units)
        seen, losses = [], []
        for p in engine.module.parameters():
            p.register_post_accumulate_grad_hook(lambda _: seen.append(gathered()))
        for tokens in batches(3, 1, 2, rank):
            loss = engine(input_ids=tokens[0], labels=tokens[0], use_cache=False).loss
            seen.append(gathered())
            engine.backward(loss)
            assert gathered() == 0
            engine.step()
            losses.append(loss.item())
        return losses, max(seen)

    expected = on_ranks(2, main, lambda: build(False), config_of(3, 2))
    caplog.clear()
    for (losses, most), (plain, _) in zip(
        on_ranks(2, main, build, config_of(3, 2)), expected
    ):
        assert losses == pytest.approx(plain, rel=1e-6) and most <= 2
    assert not [r for r in caplog.records if r.name.startswith("megatron_ds")], (
        "a warning"
    )
