"""Folders that DeepSpeed wrote, made once per test session, and our next step after them."""

import functools
import importlib.util
import os
import socket
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch

import megatron_ds
from megatron_ds.compat.conversion.files.torch_file import read_torch_file
from megatron_ds.moe import MoE
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness import deepspeed_modules as modules
from tests.harness import deepspeed_runs as runs
from tests.harness.limits import HUNG
from tests.harness.threads import run_ranks
from tests.harness.warm import warm_python

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install deepspeed",
)


KEEPERS = []


@functools.cache
def made(experts: bool = False) -> Path:
    """The folder with the cases of `runs.CASES` with or without experts."""
    KEEPERS.append(tempfile.TemporaryDirectory(prefix="deepspeed-"))
    cases = [case for case in runs.CASES if case.startswith("experts") == experts]
    run_deepspeed("make", KEEPERS[-1].name, *cases)
    return Path(KEEPERS[-1].name)


def run_deepspeed(*words: str) -> None:
    """The program of `deepspeed_runs` with these words."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = subprocess.run(
        [warm_python(), "-m", "tests.harness.deepspeed_runs", port, *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        timeout=HUNG,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def next_step(path: Path) -> dict:
    """loss, before, after of DeepSpeed's step after a checkpoint, of all stages and experts together."""
    ranks = [torch.load(file) for file in sorted(path.parent.glob(f"{path.name}?"))]
    joined = {
        key: {
            name: tensor
            for rank in reversed(ranks)
            for name, tensor in rank[key].items()
        }
        for key in ("before", "after")
    }
    logits = [rank["logits"] for rank in ranks]
    return (
        ranks[0] | joined | {"logits": None if logits[0] is None else torch.cat(logits)}
    )


def engine_config(case: str, stage: int, ranks: int) -> dict:
    """The JSON of `case` for another stage and number of ranks."""
    config = runs.config_of(
        stage, {k: v for k, v in runs.CASES[case][2].items() if k != "data_types"}
    )
    del (
        config["zero_force_ds_cpu_optimizer"],
        config["optimizer"]["params"]["torch_adam"],
    )
    if case.startswith("experts"):
        config["gradient_clipping"] = 0.0
    return config | {"train_micro_batch_size_per_gpu": 2 * runs.ranks_of(case) // ranks}


def our_next_step(
    case: str, folder: Path, stage: int, ranks: int, **options
) -> tuple[float, dict[str, torch.Tensor], tuple]:
    """(loss, weights, (engine's counters, client state)) of our engine, which loads the checkpoint first."""
    kind = runs.CASES[case][0]
    make = (
        partial(modules.Routed, MoE, min(ranks, modules.PARTS))
        if kind == "experts"
        else kind
    )
    drawn = [make() for _ in range(ranks)]  # threads share torch's random state

    def main(rank, world):
        mesh = Mesh(Grid.fit(ranks), rank, world.connect)
        engine, *_ = megatron_ds.initialize(
            model=drawn[rank],
            mpu=mesh,
            config=engine_config(case, stage, ranks),
            model_parameters=runs.groups_of(drawn[rank]),
        )
        path, client = engine.load_checkpoint(folder, **options)
        counters = (
            engine.global_steps,
            engine.global_samples,
            engine.skipped_steps,
            engine.get_lr()[0],
            engine.optimizer.loss_scale,
        )
        tokens = modules.tokens_of(
            runs.STEPS, None, runs.ranks_of(case), vocab=11
        ).chunk(ranks)[rank]
        loss = modules.loss_of(engine(tokens[:, :-1]), tokens)
        engine.backward(loss)
        engine.step()
        with engine.gathered_parameters():
            weights = {
                name: p.detach().float().clone()
                for name, p in engine.module.named_parameters()
            }
        masters = [
            (piece.spec, piece.start, piece.tensor.clone())
            for piece in engine.optimizer.pieces()
            if piece.kind == "weight"
        ]
        return loss.item(), weights, (counters, client, path), masters

    found = run_ranks(ranks, main)
    weights = found[0][1]
    for spec, start, values in (master for *_, masters in found for master in masters):
        weights.setdefault(spec.name, torch.empty(spec.shape)).view(-1)[
            start : start + len(values)
        ] = values
    return sum(loss for loss, *_ in found) / ranks, weights, found[0][2]


def step_of_torch(path: Path) -> dict[str, torch.Tensor]:
    """The weights after the next step of torch's AdamW in fp32, from what a file of stage 0 with fp16 holds.

    DeepSpeed's own step is not the reference there: version 0.19.8 divides the gradients by the loss scale
    without having multiplied the loss by it.
    """
    content, module = read_torch_file(path).content, modules.Small()
    groups, file = runs.groups_of(module), content["optimizer"]
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(content["module"][name].read())
        for group, masters in zip(groups, file["fp32_groups"]):
            for p, master in zip(group["params"], masters):
                p.copy_(master.read())
    state = file["optimizer_state_dict"]
    read = lambda value: value.read() if hasattr(value, "read") else value
    optimizer = torch.optim.AdamW(groups)
    optimizer.load_state_dict(
        {
            "param_groups": state["param_groups"],
            "state": {
                n: {kind: read(value) for kind, value in one.items()}
                for n, one in state["state"].items()
            },
        }
    )
    tokens = modules.tokens_of(runs.STEPS, vocab=11)
    modules.loss_of(module(tokens[:, :-1]), tokens).backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    optimizer.step()
    return {
        name: p.detach() for name, p in module.named_parameters() if p.requires_grad
    }
