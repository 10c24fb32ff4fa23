"""Evaluate a checkpoint at any layout, without converting it.

Zero-shot, from a file (Megatron's tasks):

  megatron-ds evaluate --load runs/a --task WIKITEXT103 --valid-data wiki.test.tokens --overlapping-eval 32
  megatron-ds evaluate --load runs/a --task LAMBADA --valid-data lambada_test.jsonl --strict-lambada

Benchmarks of lm-evaluation-harness (python -m pip install "megatron_ds[eval]"):

  torchrun --nproc-per-node 8 -m megatron_ds evaluate --load runs/a --tasks hellaswag,arc_easy \\
      --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

--load takes the folder of a run (its --save), or of another program's checkpoint. All flags of a layout and of
memory are those of training; the model and the tokenizer are the checkpoint's.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_ds.cli import Arguments, writing
from megatron_ds.console import set_up_logging
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.evaluation.checkpoint_model import (
    LoadedModel,
    check_flags,
    evaluation_config,
    load_model,
    own_flags,
)
from megatron_ds.extensions.evaluation.detokenizers import DETOKENIZERS
from megatron_ds.extensions.evaluation.harness import (
    HarnessRun,
    HarnessTasks,
    check_harness,
)
from megatron_ds.extensions.evaluation.leading_rank import Score, lead
from megatron_ds.extensions.evaluation.scorer import Scorer
from megatron_ds.extensions.evaluation.zero_shot import lambada, wikitext103
from megatron_ds.mpu import launch as launching
from megatron_ds.training.distributed import joined

Results = Mapping[str, Any]
STRIDE = 32  # tokens between two windows, as in Megatron
# The flags of each --task, and of --tasks.
OF_A_FILE = ("valid_data", "detokenizer")
USED = {
    "WIKITEXT103": (*OF_A_FILE, "overlapping_eval"),
    "LAMBADA": (*OF_A_FILE, "strict_lambada"),
    None: ("include_path", "num_fewshot", "limit", "bootstrap"),
}
LEAST = {"overlapping_eval": 1, "num_fewshot": 0, "limit": 1, "bootstrap": 0}


def run_tool(argv: Sequence[str] | None = None) -> int:
    """Evaluate, and print the results on rank 0."""
    with launching.reported_to_others():
        args, rest = own_flags(_parser(), argv)
        check_flags(rest)
        check(args)
        launch = launching.read_launch(os.environ)
        _set_up_logging(launch.rank)
        config = evaluation_config(rest, launch)
    with joined(config, launch) as mesh:
        model = load_model(config, mesh, args.iteration)
        results = TASKS[args.task](model, args) if args.task else harness(model, args)
    if launch.rank == 0:
        show(results, args.output)
    return 0


def _parser() -> Arguments:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--iteration", type=int, help="step of the checkpoint (default: the latest)")
    # Flags of Megatron's tasks.
    add("--task", choices=tuple(TASKS), help="a zero-shot task of Megatron")
    add("--valid-data", type=Path, metavar="FILE", help="the file of --task")
    add(
        "--overlapping-eval",
        type=int,
        metavar="TOKENS",
        help="tokens between two windows of WIKITEXT103 (default 32)",
    )
    add(
        "--strict-lambada",
        action="store_true",
        help="the target is the last word instead of the last token",
    )
    add(
        "--detokenizer",
        choices=tuple(DETOKENIZERS),
        help="how separated tokens of the file become text (default: wikitext for WIKITEXT103, else none)",
    )
    # Flags of tasks of lm-evaluation-harness.
    add("--tasks", metavar="A,B", help="names of tasks of lm-evaluation-harness")
    add(
        "--include-path",
        metavar="DIR",
        help="folder with YAML files of further tasks",
    )
    add("--num-fewshot", type=int, help="examples before each question")
    add("--limit", type=int, help="only the first documents of each task")
    add(
        "--bootstrap",
        type=int,
        metavar="N",
        help="resamples for standard errors (default 0: none; lm_eval's own default is 100000)",
    )
    add("--output", type=Path, metavar="FILE", help="write the results as JSON, too")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError unless the flags name one kind of evaluation, with its data."""
    if (args.task is None) == (args.tasks is None):
        given = "both" if args.task else "neither"
        raise ConfigError(
            f"{given} of --task and --tasks is given. Use --task {' or '.join(TASKS)} with --valid-data FILE, or "
            "--tasks with names of lm-evaluation-harness."
        )
    # A flag of the other kind would have no effect.
    chosen = f"--task {args.task}" if args.task else "--tasks"
    for name in dict.fromkeys(chain(*USED.values())):
        value = getattr(args, name)
        if value is None or value is False:
            continue
        flag = f"--{name.replace('_', '-')}"
        if name not in USED[args.task]:
            raise ConfigError(f"{flag} has no effect with {chosen}. Remove it.")
        if value < LEAST.get(name, value):
            raise ConfigError(f"{flag} {value}: use {LEAST[name]} or more.")
    if args.tasks:
        check_harness()
    if args.task and args.valid_data is None:
        raise ConfigError(
            f"--task {args.task} needs --valid-data FILE, the text to evaluate on."
        )


def _set_up_logging(rank: int) -> None:
    """Log everything on rank 0, and warnings on others. Standard output gets the results only."""
    set_up_logging(logging.WARNING if rank else logging.INFO, stream=sys.stderr)


def _wikitext103(model: LoadedModel, args: argparse.Namespace) -> Results:
    return _zero_shot(
        model,
        lambda score: wikitext103(
            score,
            model.tokenizer,
            args.valid_data,
            length=model.replica.config.model.seq_length,
            stride=args.overlapping_eval or STRIDE,
            detokenizer=args.detokenizer or "wikitext",
        ),
        "WIKITEXT103",
    )


def _lambada(model: LoadedModel, args: argparse.Namespace) -> Results:
    return _zero_shot(
        model,
        lambda score: lambada(
            score,
            model.tokenizer,
            args.valid_data,
            length=model.replica.config.model.positions,
            strict=args.strict_lambada,
            detokenizer=args.detokenizer or "none",
        ),
        "LAMBADA",
    )


TASKS: dict[str, Callable[[LoadedModel, argparse.Namespace], Results]] = {
    "WIKITEXT103": _wikitext103,
    "LAMBADA": _lambada,
}


def _zero_shot(
    model: LoadedModel, work: Callable[[Score], Results], name: str
) -> Results:
    return {name: lead(Scorer(model.replica), work)}


def harness(model: LoadedModel, args: argparse.Namespace) -> Results:
    """Return the results of tasks of lm-evaluation-harness."""
    wanted = HarnessTasks(
        tuple(args.tasks.split(",")),
        args.include_path,
        args.num_fewshot,
        args.limit,
        args.bootstrap or 0,
    )
    return HarnessRun(Scorer(model.replica), model.tokenizer, wanted).results()


def show(results: Results, output: Path | None) -> None:
    """Print the numbers of each task, and write them as JSON if a file is given."""
    for task, numbers in results.items():
        print(task)
        for name, value in numbers.items():
            text = f"{value:.6f}" if isinstance(value, float) else str(value)
            print(f"  {name.replace('_', ' '):<24}{text}")
    if output is not None:
        with writing(output):
            output.write_text(json.dumps(results, indent=1) + "\n")
