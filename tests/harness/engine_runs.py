"""Modules that know nothing of an engine, and engines that train them on threaded ranks."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import megatron_ds
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.threads import run_ranks

WIDTH, SAMPLES, STEPS = 14, 12, 3
# some gradients are zero but for rounding (of an attention's key bias), and Adam would make steps of them
EPS = 1e-4


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(3 * width, width),
        )

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Odd(nn.Module):
    """Much of what modules do: a tied weight read by its owner's parent, a layer used twice, one registered
    before its turn, one never used, a frozen one, a parameter of the root's own, nn.MultiheadAttention, a
    buffer, recomputation."""

    def __init__(self, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.head = nn.Linear(WIDTH, WIDTH)
        self.embed = nn.Embedding(11, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.unused = nn.Linear(WIDTH, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(WIDTH, 6) / 9)
        self.register_buffer("offset", torch.linspace(-1, 1, WIDTH))

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.frozen(x)
        for block in (*self.blocks, self.blocks[0]):
            x = (
                checkpoint(block, x, use_reentrant=False)
                if self.recompute
                else block(x)
            )
        x = x + self.attention(x, x, x)[0] + (self.shift @ self.shift[:6].T).sum(1)
        x = x + self.offset.to(x.dtype)
        return F.linear(self.scale * self.head(x), self.embed.weight)


class Stack(nn.Module):
    """Registered in the order of use, each layer used once."""

    def __init__(self, depth=3):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(kind=Odd, seed=3, **options):
    torch.manual_seed(seed)
    return kind(**options)


def batches(steps, accumulation, ranks, rank=None):
    """tokens [samples of a rank, 7] for each micro-batch of each step; of all ranks when rank is None."""
    generator, result = torch.Generator().manual_seed(8), []
    for _ in range(steps):
        tokens = torch.randint(
            11,
            (accumulation, ranks, SAMPLES // ranks // accumulation, 7),
            generator=generator,
        )
        result.append(list(tokens.flatten(0, 1) if rank is None else tokens[:, rank]))
    return result


def loss_of(module, tokens):
    logits = module(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(1, 1).flatten())


def config_of(stage, ranks, accumulation=1, **more):
    return {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.01, "weight_decay": 0.1, "eps": EPS},
        },
        "zero_optimization": {
            "stage": stage,
            **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}),
        },
        **more,
    }


def on_ranks(ranks, main, model, config, **options):
    """main(engine, rank) on every rank."""
    # drawn one after the other: torch has one random state for all threads
    models = [model() for _ in range(ranks)]

    def run(rank, world):
        mesh = Mesh(Grid.fit(ranks), rank, world.connect)
        engine, *_ = megatron_ds.initialize(
            model=models[rank], config=config, mpu=mesh, **options
        )
        return main(engine, rank)

    return run_ranks(ranks, run)


def train(engine, rank, steps=STEPS, first=0):
    """Gradient norms; the data is that of steps first .. first + steps."""
    norms = []
    for microbatches in batches(
        first + steps,
        engine.gradient_accumulation_steps(),
        engine.world.data.size,
        rank,
    )[first:]:
        for tokens in microbatches:
            engine.backward(loss_of(engine, tokens))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def weights(engine):
    with engine.gathered_parameters():
        return {
            name: p.detach().clone() for name, p in engine.module.named_parameters()
        }


def train_and_show(engine, rank):
    return train(engine, rank), weights(engine)


def assert_trained_as(results, expected):
    """Each rank has the parameters of the module that torch trained alone."""
    for found in results:
        for name, p in expected.named_parameters():
            torch.testing.assert_close(
                found[name],
                p.detach(),
                rtol=1e-5,
                atol=2e-6,
                msg=lambda m, n=name: f"{n}: {m}",
            )
