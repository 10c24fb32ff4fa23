"""From a command line to a trained model: the order in which a run comes to life.

    parse and check the config        no process group yet: every error of the user's is told here, once, exit code 2
    --dry-run                         say the plan, and end
    launch                            torchrun, Slurm, Open MPI or one rank
    tokenizer, data, engine           then the checkpoint, if there is one
    train                             exit code 0 also after SIGTERM, SIGUSR1 and the first Ctrl-C
"""

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..checkpoint.save import check_writable
from ..config import RunConfig, Source, parse
from ..config.guard import main_guard
from ..config.launched import rank_in
from ..data.datasets import build_datasets, fit_default_split
from ..data.sampler import ORDERS
from ..data.tokenizers import TOKENIZERS, build_tokenizer
from ..errors import DeviceMemoryError
from ..models import MODELS
from ..mpu import launch as launching
from ..mpu.launch import Launch
from ..mpu.mesh import Mesh
from ..optim import OPTIMIZERS
from ..pipeline.schedules import SCHEDULES
from .build import build_engine
from .dry_run import dry_run, names_its_world
from .join import joined
from .log import Log, check_folder, check_log, open_log
from .persist import describe_run, load_run
from .plan import RULES
from .samples import build_loaders, rearranged, wanted_samples
from .startup import describe
from .together import together
from .tokenizer_files import keep_tokenizer_files
from .trainer import Trainer

# Options that name an entry of a registry, and the registry; config lies below them all and cannot know.
KNOWN_NAMES = {"model.model": MODELS, "parallel.pipeline_schedule": SCHEDULES, "optimizer.optimizer": OPTIMIZERS,
               "data.tokenizer_type": TOKENIZERS, "data.dataloader_type": ORDERS}
logger = logging.getLogger(__name__)


def pretrain(argv: Sequence[str] | None = None, **defaults) -> int:
    """Run a pretraining job from flags (default: the command line); returns the exit code.

    defaults: what an entry script prefers, by name of the option; flags and files win over it.
    """
    return main_guard(lambda: _pretrain(argv, defaults))


def _pretrain(argv, defaults: Mapping[str, object]) -> int:
    started = time.monotonic()
    argv = sys.argv[1:] if argv is None else list(argv)
    launch = Launch(rank_in(os.environ)) if names_its_world(argv) else launching.read_launch(os.environ)
    _set_up_logging(launch.rank)
    config = parse(argv, world_size=launch.world_size, env=os.environ, known=KNOWN_NAMES, rules=RULES,
                   defaults=defaults)
    if config.plan.is_dry:
        return dry_run(config, launch)
    with joined(config, launch) as mesh:
        try:
            reason = train(config, mesh, launch.source, started)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(_what_would_fit(error, mesh)) from error
        if mesh.rank == 0:
            logger.info("training ended: %s", reason)
    return 0


def train(as_given: RunConfig, mesh: Mesh, source: str, started: float) -> str:
    """Build everything on this rank and train; why it ended. Collective over the world."""
    config, tokenizer, loaders = together(mesh.group("world"), lambda: _open_data(as_given, mesh))
    together(mesh.group("world"), lambda: _check_outputs(config, mesh.rank))
    engine = build_engine(config, mesh)
    if mesh.rank == 0:
        logger.info("%s", describe(engine, source))
    copies = together(mesh.group("world"), lambda: keep_tokenizer_files(config), only=0)
    description = describe_run(config, as_given, tokenizer) | copies
    progress = load_run(engine, description)
    log = open_log(config, progress.step) if mesh.rank == 0 else Log(())
    return Trainer(engine, loaders, log, progress, description, started).run()


def _what_would_fit(error: Exception, mesh: Mesh) -> str:
    place = ", ".join(f"{axis} {mesh.coordinate(axis)} of {mesh.size(axis)}" for axis in ("tp", "pp", "dp"))
    said = str(error).split(" If reserved but unallocated")[0].strip()
    return (f"out of memory on {mesh.device} of rank {mesh.rank} ({place}). What saves most, in this order: a smaller "
            "--micro-batch-size, --recompute-granularity full, --bf16, --use-distributed-optimizer, more "
            f"--tensor-model-parallel-size or --pipeline-model-parallel-size. The device said: {said}")


def _open_data(config: RunConfig, mesh: Mesh):
    """(config with the tokenizer's vocabulary size, tokenizer, loaders); reads files, talks to nobody."""
    tokenizer = build_tokenizer(config.data, config.model)
    config = config.with_values({"model.vocab_size": tokenizer.vocab_size}, Source("derived", "the tokenizer"))
    kind = MODELS[config.model.model].data
    config = fit_default_split(config, wanted_samples(config), kind)
    datasets = build_datasets(config, wanted_samples(config), tokenizer, kind,
                              one_epoch=bool(config.curriculum.curriculum_metrics))
    return config, tokenizer, build_loaders(config, rearranged(config, datasets, tokenizer), tokenizer, mesh)


def _check_outputs(config: RunConfig, rank: int) -> None:
    """Where the run will write, hours from now, can be written to."""
    if config.checkpoint.save:
        check_writable(config.checkpoint.save)
    if config.logging.trace:
        check_folder("--trace", Path(config.logging.trace))
    if rank == 0:
        check_log(config)


def _set_up_logging(rank: int) -> None:
    """Rank 0 speaks; the others only to warn, with their rank."""
    level, form = (logging.INFO, "%(message)s") if rank == 0 else (logging.WARNING, f"[rank {rank}] %(message)s")
    logging.basicConfig(level=level, format=form, stream=sys.stdout, force=True)
