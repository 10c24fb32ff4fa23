"""Small programs, one for each subject of DeepSpeed's interface, that take the module `deepspeed`:

    numbers, facts = PROGRAMS["accumulation"](Run(deepspeed, stage, folder, rank))

numbers: after each update the mean loss of this rank and a projection of each weight; facts: plain values.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

UPDATES, RANKS, WIDTH = 3, 2, 6
PROGRAMS = {}
# Those that DeepSpeed runs at some stages only (its safe_set_full_grad fails for matrices at stage 3).
STAGES = {
    "no_sync": (0, 1),
    "no_sync_accumulated": (0, 1),
    "no_sync_zeroed": (0, 1),
    "own_clipping": (0, 1, 2),
    "own_clipping_by_grad": (0,),
}


class Net(nn.Module):
    """Embedding, a frozen layer, an adapter of rank 2, a tied head."""

    def __init__(self, frozen: bool = False):
        super().__init__()
        self.embed, self.mid = (
            nn.Embedding(11, WIDTH),
            nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen),
        )
        self.down, self.up = (
            nn.Linear(WIDTH, 2, bias=False),
            nn.Linear(2, WIDTH, bias=False),
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(x + F.gelu(self.mid(x)) + self.up(self.down(x))))


@dataclass
class Run:
    """One program at one stage. ds: the module deepspeed, or what takes its place."""

    ds: Any
    stage: int
    folder: Path
    rank: int

    def engine(self, model: nn.Module | None = None, accumulation: int = 1, **config):
        """An engine over a new Net, with AdamW."""
        torch.manual_seed(3)
        model = Net() if model is None else model
        trained = [p for p in model.parameters() if p.requires_grad]
        adamw = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4, "torch_adam": True}
        zero = {
            "stage": self.stage,
            **({"stage3_param_persistence_threshold": 0} if self.stage == 3 else {}),
        }
        return self.ds.initialize(
            model=model,
            model_parameters=trained,
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": accumulation,
                "zero_force_ds_cpu_optimizer": False,
                "optimizer": {"type": "AdamW", "params": adamw},
                "zero_optimization": zero,
                **config,
            },
        )[0]

    def loss(self, engine, number: int) -> torch.Tensor:
        """The loss of a micro-batch of this rank."""
        draw = torch.Generator().manual_seed(100 * number + self.rank)
        tokens = torch.randint(11, (2, 5), generator=draw)
        return F.cross_entropy(
            engine(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten()
        )

    def weights(self, engine) -> list[float]:
        """A projection of each weight onto fixed numbers."""
        parameters = list(engine.module.parameters())
        with self.ds.zero.GatheredParameters(parameters):
            flat = [p.detach().float().reshape(-1) for p in parameters]
            return [float(p @ torch.cos(torch.arange(p.numel()) * 1.7)) for p in flat]

    def updates(
        self,
        engine,
        accumulation: int = 1,
        around=lambda place, engine: None,
        first: int = 0,
        count: int = UPDATES,
    ) -> list[list[float]]:
        """Train; around(place, engine) is called before, between and after backward and step."""
        numbers = []
        for update in range(first, first + count):
            losses = []
            for micro in range(accumulation):
                around("before", engine)
                loss = self.loss(engine, update * accumulation + micro)
                losses.append(float(loss))
                engine.backward(loss)
                around("backward", engine)
                engine.step()
                around("step", engine)
            numbers.append([sum(losses) / accumulation, *self.weights(engine)])
        return numbers


def program(function):
    """Add to PROGRAMS under its name."""
    PROGRAMS[function.__name__] = function
    return function


@program
def plain(run):
    return run.updates(run.engine()), {}


@program
def accumulation(run):
    return run.updates(run.engine(accumulation=2), 2), {}


@program
def clipping(run):
    return run.updates(run.engine(accumulation=2, gradient_clipping=0.1), 2), {}


def zeroes(place, caller, accumulation):
    """A loop that calls zero_grad in one place."""

    def loop(run):
        call = {
            "engine": lambda engine: engine.zero_grad(),
            "optimizer": lambda engine: engine.optimizer.zero_grad(),
            "module": lambda engine: engine.module.zero_grad(),
        }[caller]
        around = lambda where, engine: call(engine) if where == place else None
        return run.updates(
            run.engine(accumulation=accumulation), accumulation, around
        ), {}

    loop.__name__ = f"zero_grad_{caller}_{place}_{accumulation}"
    return program(loop)


for _caller in ("engine", "optimizer", "module"):
    for _place in ("before", "backward", "step"):
        for _accumulation in (1, 2):
            zeroes(_place, _caller, _accumulation)


@program
def no_sync(run):
    engine, numbers = run.engine(), []
    for update in range(UPDATES):
        with engine.no_sync():
            engine.backward(run.loss(engine, 2 * update))
        loss = run.loss(engine, 2 * update + 1)
        engine.backward(loss)
        engine.step()
        numbers.append([float(loss), *run.weights(engine)])
    return numbers, {}


@program
def no_sync_accumulated(run):
    engine, numbers = run.engine(accumulation=2), []
    engine.set_gradient_accumulation_boundary(True)
    for update in range(UPDATES):
        with engine.no_sync():
            engine.backward(run.loss(engine, 2 * update))
        loss = run.loss(engine, 2 * update + 1)
        engine.backward(loss)
        engine.step()
        numbers.append([float(loss), *run.weights(engine)])
    return numbers, {}


@program
def no_sync_zeroed(run):
    """zero_grad drops what was added in no_sync, and nothing afterwards."""
    engine, numbers = run.engine(), []
    for update in range(UPDATES):
        with engine.no_sync():
            engine.backward(run.loss(engine, 3 * update))
        engine.zero_grad()
        with engine.no_sync():
            engine.backward(run.loss(engine, 3 * update + 1))
        loss = run.loss(engine, 3 * update + 2)
        engine.backward(loss)
        engine.step()
        numbers.append([float(loss), *run.weights(engine)])
    return numbers, {}


@program
def own_clipping(run):
    from importlib import import_module

    utils = import_module(f"{run.ds.__name__}.utils")
    norms = []

    def clip(place, engine):
        if place == "backward":
            grads = {p: utils.safe_get_full_grad(p) for p in engine.module.parameters()}
            norm = float(sum(g.float().square().sum() for g in grads.values()).sqrt())
            norms.append(norm)
            for p, grad in grads.items():
                utils.safe_set_full_grad(p, grad * min(1.0, 0.1 / norm))

    numbers = run.updates(run.engine(), around=clip)
    return [[*row, norm] for row, norm in zip(numbers, norms)], {}


@program
def own_clipping_by_grad(run):
    clip = lambda place, engine: (
        place == "backward"
        and torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
    )
    return run.updates(run.engine(), around=clip), {}


@program
def client_state(run):
    engine = run.engine()
    before = run.updates(engine)
    given = {
        "epoch": 3,
        "best": 0.25,
        "mask": torch.arange(4),
        "names": ("a", "b"),
        "none": None,
    }
    nothing = engine.load_checkpoint(str(run.folder / "new"))
    engine.save_checkpoint(str(run.folder / "saved"), client_state=given)
    latest = (run.folder / "saved" / "latest").read_text().strip()
    again = run.engine()
    path, state = again.load_checkpoint(str(run.folder / "saved"))
    same = {
        key: torch.equal(state[key], value)
        if isinstance(value, torch.Tensor)
        else state[key] == value
        for key, value in given.items()
    }
    facts = {
        "nothing": list(nothing),
        "latest": latest,
        "path": path is not None,
        "same": same,
        "steps": again.global_steps,
    }
    return before + run.updates(again, first=UPDATES), facts


@program
def save_latest(run):
    engine, folder = run.engine(), str(run.folder / "saved")
    numbers = run.updates(engine)
    engine.save_checkpoint(folder, tag="first", client_state={"n": 1})
    numbers += run.updates(engine, first=UPDATES, count=1)
    engine.save_checkpoint(
        folder, tag="second", client_state={"n": 2}, save_latest=False
    )
    states = [
        engine.load_checkpoint(folder, tag=tag)[1]["n"] for tag in ("second", None)
    ]
    return numbers + run.updates(engine, first=UPDATES), {
        "states": states,
        "steps": engine.global_steps,
    }


@program
def exclude_frozen(run):
    engine, folder = run.engine(Net(frozen=True)), str(run.folder / "saved")
    numbers = run.updates(engine)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    torch.manual_seed(3)
    again = run.engine(Net(frozen=True))
    again.load_checkpoint(folder, load_module_strict=False)
    return numbers + run.updates(again, first=UPDATES), {}


@program
def custom_load(run):
    engine, folder = run.engine(), str(run.folder / "saved")
    numbers = run.updates(engine)
    engine.save_checkpoint(folder)
    again, seen = run.engine(), []

    def load(src, dst):
        seen.extend(sorted(src))
        dst.load_state_dict(src)

    again.load_checkpoint(folder, custom_load_fn=load, load_module_only=True)
    return [*numbers, [0.0, *run.weights(again)]], {"names": seen}


@program
def destroyed(run):
    engine = run.engine()
    numbers = run.updates(engine)
    module, shown = engine.module, run.weights(engine)
    engine.destroy()
    return [*numbers, [0.0, *shown]], {"same": engine.module is module}


@program
def gan(run):
    torch.manual_seed(5)
    models = nn.Linear(3, 4), nn.Linear(4, 1)
    generator, critic = run.engine(models[0]), run.engine(models[1])
    numbers = []
    for update in range(UPDATES):
        draw = torch.Generator().manual_seed(100 * update + run.rank)
        noise, real = (
            torch.randn(2, 3, generator=draw),
            torch.randn(2, 4, generator=draw),
        )
        loss = (
            F.softplus(critic(generator(noise).detach())).mean()
            + F.softplus(-critic(real)).mean()
        )
        critic.backward(loss)
        critic.step()
        for p in critic.module.parameters():
            p.requires_grad_(False)
        fooled = F.softplus(-critic(generator(noise))).mean()
        generator.backward(fooled)
        generator.step()
        for p in critic.module.parameters():
            p.requires_grad_(True)
        numbers.append(
            [float(loss), float(fooled), *run.weights(generator), *run.weights(critic)]
        )
    return numbers, {}


@program
def compiled(run):
    torch.manual_seed(3)
    return run.updates(run.engine(torch.compile(Net(), backend="eager"))), {}


@program
def two_forwards(run):
    engine, numbers = run.engine(), []
    for update in range(UPDATES):
        loss = run.loss(engine, 2 * update) + 0.5 * run.loss(engine, 2 * update + 1)
        engine.backward(loss)
        engine.step()
        numbers.append([float(loss), *run.weights(engine)])
    return numbers, {}


@program
def frozen(run):
    torch.manual_seed(3)
    return run.updates(run.engine(Net(frozen=True))), {}


@program
def adapter(run):
    torch.manual_seed(3)
    model = Net().requires_grad_(False)
    for layer in (model.down, model.up):
        layer.requires_grad_(True)
    return run.updates(run.engine(model)), {}


@program
def torchs_backward(run):
    engine, numbers = run.engine(), []
    for update in range(UPDATES):
        loss = run.loss(engine, update)
        loss.backward()
        engine.step()
        numbers.append([float(loss), *run.weights(engine)])
    return numbers, {}


@program
def bf16(run):
    engine, numbers = run.engine(bf16={"enabled": True}), []
    for update in range(UPDATES):
        loss = run.loss(engine, update).float()
        engine.backward(loss)
        engine.step()
        numbers.append([float(loss)])
    return numbers, {}
