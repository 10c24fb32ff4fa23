"""Continue a text with a trained model, from a checkpoint of any layout.

megatron-ds generate --load quickstart/checkpoints --prompt "If the file" --max-new-tokens 60
torchrun --nproc-per-node 2 megatron-ds generate --load … --prompt … --tensor-model-parallel-size 2
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megatron_ds.checkpoint.folder import is_ours
from megatron_ds.checkpoint.load import latest, load_weights, read_run
from megatron_ds.checkpoint.place import place_of
from megatron_ds.checkpoint.run_file import require, require_whole_model
from megatron_ds.checkpoint.tokenizer_files import FIELDS, tokenizer_of
from megatron_ds.cli import Arguments
from megatron_ds.config import RunConfig
from megatron_ds.config.sources.config_text import from_dict
from megatron_ds.data.tokenizers import Tokenizer
from megatron_ds.errors import CheckpointError, ConfigError
from megatron_ds.models import MODELS, build_stage
from megatron_ds.models.generation import Ending, Sampling, generate
from megatron_ds.moe.balance import StepState
from megatron_ds.mpu import launch as launching
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.group import solo
from megatron_ds.mpu.launch import connect_torch
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.planning.run_model import DTYPES


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of the command. Raises ConfigError."""
    parser = Arguments(__doc__)
    add = parser.add_argument
    # The checkpoint and the prompts.
    add(
        "--load",
        type=place_of,
        required=True,
        help="checkpoint folder of a run (its --save)",
    )
    add(
        "--prompt",
        action="append",
        required=True,
        help="text to continue; may be given several times",
    )
    add(
        "--iteration",
        type=int,
        help="step of the checkpoint to load (default: the latest)",
    )
    add(
        "--max-new-tokens",
        type=int,
        default=64,
        help="generate at most this many tokens (default 64)",
    )
    add(
        "--min-new-tokens",
        type=int,
        default=0,
        help="generate at least this many tokens (default 0)",
    )
    add(
        "--temperature",
        type=float,
        default=1.0,
        help="divides the logits; lower values give more likely text, 0 is greedy (default 1)",
    )
    add(
        "--greedy",
        action="store_true",
        help="always select the most likely token; the same as --temperature 0",
    )
    add(
        "--top-k",
        type=int,
        default=0,
        help="sample from the k most likely tokens only (default 0: no limit)",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the most likely tokens whose probabilities sum to this (default 1: no limit)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="the same seed gives the same text at every tensor-parallel size (default 0)",
    )
    add(
        "--tokenizer-model",
        metavar="PATH",
        help="read the tokenizer here instead of the copy beside the checkpoints; it must be the same one",
    )
    add(
        "--vocab-file",
        metavar="FILE",
        help="the same, for tokenizers with a vocabulary file",
    )
    add("--merge-file", metavar="FILE", help="the same, for GPT2BPETokenizer")
    add(
        "--ignore-eod",
        action="store_true",
        help="continue after the end-of-document token",
    )
    add(
        "--tensor-model-parallel-size",
        type=int,
        default=None,
        help="default: the number of processes",
    )
    add(
        "--context-parallel-size",
        type=int,
        default=1,
        help="only 1: each rank holds whole sequences",
    )
    return parser.parse_args(argv)


def main(args: argparse.Namespace, launch: launching.Launch) -> int:
    """Load the model, and print the text that continues each prompt."""
    with launching.reported_to_others(launch):
        config, tokenizer, step = prepare(args, launch)
    sampling = Sampling(
        0.0 if args.greedy else args.temperature, args.top_k, args.top_p, args.seed
    )
    # From here on all ranks work together.
    device = launching.start(launch)
    try:
        mesh = Mesh(Grid(tp=launch.world_size), launch.rank, connect_torch, device)
        modules = load_model(config, mesh, args.load, step)
        for prompt in args.prompt:
            show(prompt, tokenizer, modules, config, mesh, sampling, args)
    finally:
        launching.stop()
    return 0


def prepare(
    args: argparse.Namespace, launch: launching.Launch
) -> tuple[RunConfig, Tokenizer, int]:
    """The configuration of the saved run, its tokenizer, and the iteration to load.

    Raises ConfigError for sizes that generation cannot use, and CheckpointError where there is no checkpoint.
    """
    if args.max_new_tokens < 1:
        raise ConfigError(
            f"--max-new-tokens {args.max_new_tokens} generates no text. Use a positive number."
        )
    if args.context_parallel_size != 1:
        raise ConfigError(
            f"--context-parallel-size {args.context_parallel_size}: a key-value cache holds "
            "whole sequences on each rank. Use 1; checkpoints of every size load."
        )
    tp_size = args.tensor_model_parallel_size or launch.world_size
    if tp_size != launch.world_size:
        raise ConfigError(
            f"--tensor-model-parallel-size {tp_size} with {launch.world_size} process(es): "
            f"generation splits the model over all processes. Start {tp_size} with torchrun "
            f"--nproc-per-node {tp_size}."
        )
    # The model of the checkpoint, with its own tokenizer unless another is given.
    step = find_step(args.load, args.iteration)
    run = read_run(args.load, step)
    require(run, args.load, "config")
    require_whole_model(run, args.load)
    config = from_dict(run["config"])
    given = {field: getattr(args, field) for field in FIELDS if getattr(args, field)}
    tokenizer = tokenizer_of(args.load, run, config, given)
    config = replace(
        config, model=replace(config.model, vocab_size=tokenizer.vocab_size)
    )
    return config, tokenizer, step


def find_step(directory: Path, iteration: int | None) -> int:
    """The iteration to load.

    Raises CheckpointError where there is none, or where the folder is itself a checkpoint.
    """
    if is_ours(directory):
        number = directory.resolve().name.removeprefix("iter_").lstrip("0") or "0"
        raise CheckpointError(
            f"--load {directory} is a checkpoint, and --load takes the folder that holds "
            "it. Use --load "
            f"{directory.resolve().parent}{f' --iteration {number}' * number.isdecimal()}."
        )
    step = iteration if iteration is not None else latest(directory)
    if step is None:
        what = (
            "contains no complete checkpoint"
            if directory.is_dir()
            else "does not exist"
        )
        raise CheckpointError(
            f"--load {directory} {what}. Give the folder that was --save in training."
        )
    return step


def load_model(
    config: RunConfig, mesh: Mesh, directory: Path, step: int
) -> torch.nn.ModuleList:
    """The whole model on this tensor-parallel rank, weights and bias of experts from the checkpoint."""
    ctx = ParallelContext(
        mesh,
        dtype=DTYPES[config.optimizer.params_dtype],
        device=mesh.device,
        seed=config.train.seed,
    )
    modules = build_stage(MODELS[config.model.model](config.model, ctx))
    state = StepState(modules, solo(), mesh.device)
    load_weights(
        directory,
        step,
        list(modules.parameters()),
        tp=mesh.group("tp"),
        remembered=state.pieces(),
    )
    return modules


def show(
    prompt: str,
    tokenizer: Tokenizer,
    modules: torch.nn.ModuleList,
    config: RunConfig,
    mesh: Mesh,
    sampling: Sampling,
    args: argparse.Namespace,
) -> None:
    """Print the text that continues one prompt, as it is generated."""
    # The text continues up to the last position of the model.
    ids = tokenizer.encode(prompt)
    room = config.model.positions - len(ids)
    if room < 1:
        raise ConfigError(
            f"--prompt of {len(ids)} tokens fills all {config.model.positions} positions. "
            "Shorten it."
        )
    stop = (
        (lambda token: False)
        if args.ignore_eod
        else (lambda token: token == tokenizer.eod)
    )
    ending = Ending(
        min(args.max_new_tokens, room), args.min_new_tokens, stop, tokenizer.eod
    )
    # All ranks generate the same tokens; one prints them.
    tokens = list(
        generate(
            modules,
            ids,
            ending=ending,
            sampling=sampling,
            tp=mesh.group("tp"),
            vocab_size=config.model.vocab_size,
        )
    )
    if mesh.rank == 0:
        if tokens and stop(tokens[-1]):
            tokens.pop()
        print(tokenizer.decode(ids + tokens), flush=True)
        if len(args.prompt) > 1:
            print("-" * 80, flush=True)


def run_tool(argv: Sequence[str] | None = None) -> int:
    """Run the command; its errors are raised."""
    with launching.reported_to_others():
        args = parse_arguments(argv)
        launch = launching.read_launch(os.environ)
    return main(args, launch)
