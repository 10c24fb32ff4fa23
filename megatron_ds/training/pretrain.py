"""From a command line to a trained model: the order in which a run comes to life.

    parse and check the config        no process group yet: every error of the user's is told here, once, exit code 2
    launch                            torchrun, Slurm, Open MPI or one rank
    tokenizer, data, engine           then the checkpoint, if there is one
    train                             exit code 0 also after SIGTERM, SIGUSR1 and the first Ctrl-C
"""

import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..checkpoint.save import check_writable
from ..config import RunConfig, parse
from ..config.guard import main_guard
from ..data.datasets import build_datasets
from ..data.tokenizers import build_tokenizer
from ..mpu import launch as launching
from ..mpu.grid import Grid
from ..mpu.mesh import Mesh
from ..mpu.state import set_mesh
from .build import build_engine
from .log import Log, open_log
from .persist import load_run, run_identity
from .samples import build_loaders, wanted_samples
from .startup import describe
from .trainer import Trainer

logger = logging.getLogger(__name__)


def pretrain(argv: Sequence[str] | None = None, defaults: dict | None = None) -> int:
    """Run a pretraining job from flags; returns the exit code.

    defaults: values an entry script fixes, such as {"model": "gpt"}; flags and files win over them.
    """
    launch = launching.read_launch(os.environ)
    return main_guard(lambda: _pretrain(launch, argv, defaults or {}), rank=launch.rank)


def _pretrain(launch, argv, defaults: dict) -> int:
    started = time.monotonic()
    _set_up_logging(launch.rank)
    argv = sys.argv[1:] if argv is None else list(argv)
    config = parse(argv, world_size=launch.world_size, defaults=defaults)
    tokenizer = build_tokenizer(config.data, config.model)
    config = with_vocabulary(config, tokenizer)
    if config.checkpoint.save and launch.rank == 0:
        check_writable(config.checkpoint.save)
    connect = launching.start(launch, timeout_minutes=config.parallel.distributed_timeout_minutes)
    try:
        mesh = make_mesh(config, launch, connect)
        set_mesh(mesh)
        reason = train(config, mesh, tokenizer, launch.source, started)
        if mesh.rank == 0:
            logger.info("training ended: %s", reason)
    finally:
        launching.stop()
    return 0


def with_vocabulary(config: RunConfig, tokenizer) -> RunConfig:
    """The config with the tokenizer's true vocabulary size filled in."""
    return replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))


def make_mesh(config: RunConfig, launch, connect) -> Mesh:
    p = config.parallel
    grid = Grid.fit(launch.world_size, tp=p.tensor_model_parallel_size, cp=p.context_parallel_size,
                    ep=p.expert_model_parallel_size, pp=p.pipeline_model_parallel_size, order=p.rank_order)
    return Mesh(grid, launch.rank, connect, device=local_device(launch.local_rank))


def local_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def train(config: RunConfig, mesh: Mesh, tokenizer, source: str, started: float) -> str:
    """Build everything on this rank and train; why it ended. Collective over the world."""
    datasets = build_datasets(config, wanted_samples(config), tokenizer)
    engine = build_engine(config, mesh)
    if mesh.rank == 0:
        logger.info("%s", describe(engine, source))
    identity = run_identity(config, tokenizer)
    progress = load_run(engine, identity)
    log = open_log(config.logging, progress.step) if mesh.rank == 0 else Log(())
    loaders = build_loaders(config, datasets, tokenizer)
    return Trainer(engine, loaders, log, progress, identity, started).run()


def _set_up_logging(rank: int) -> None:
    """Rank 0 speaks; the others only to warn, with their rank."""
    level, form = (logging.INFO, "%(message)s") if rank == 0 else (logging.WARNING, f"[rank {rank}] %(message)s")
    logging.basicConfig(level=level, format=form, stream=sys.stdout, force=True)
