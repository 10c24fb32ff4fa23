"""Kept tokens and consumed layer-tokens of random-LTD against DeepSpeed's own scheduler, on random schedules.

    PYTHONPATH=. PYTHON_WITH_DEEPSPEED benchmarks/random_ltd_integers.py --cases 1000

Needs deepspeed (0.19.8 was used), and of megatron_ds the plain functions alone. Ends with 1 if any number
differs.
"""

import argparse
import random
import sys

from deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler

from megatron_ds.extensions.data_efficiency.difficulty import Rise
from megatron_ds.progress.kept_tokens import KeptTokens


def upstream_of(
    least: int,
    most: int,
    steps: int,
    multiple: int,
    blocks: int,
    dropping: int,
    batch: int,
) -> RandomLTDScheduler:
    return RandomLTDScheduler(
        {
            "total_layer_num": blocks,
            "random_ltd_layer_num": dropping,
            "global_batch_size": batch,
            "layer_token_lr_schedule": {"enabled": False},
            "random_ltd_schedule": {
                "min_value": least,
                "max_value": most,
                "schedule_type": "fixed_linear",
                "schedule_config": {"require_steps": steps, "seq_per_step": multiple},
            },
        }
    )


def compare(draw: random.Random) -> tuple[int, int]:
    """(numbers compared, numbers that differ) of one random schedule."""
    least = draw.randint(1, 512)
    steps = draw.randint(1, 300)
    multiple = draw.choice((1, 7, 8, 16, 64, draw.randint(1, 200)))
    most = least + draw.choice((0, 1, draw.randint(0, 100), draw.randint(0, 8192)))
    blocks = draw.randint(1, 96)
    batch = draw.randint(1, 2048)
    dropping = draw.randint(1, blocks)
    # The same schedule in both libraries.
    drop = KeptTokens(
        tuple(range(dropping)), blocks, Rise(least, most, steps, multiple, lowest=0)
    )
    upstream = upstream_of(least, most, steps, multiple, blocks, dropping, batch)
    # Each step's number of tokens, and the sum so far.
    compared = differ = consumed = 0
    for step in range(steps + draw.randint(1, 100)):
        upstream.update_seq(step)
        consumed += batch * drop.layer_tokens(step, most)
        state = upstream.state_dict()
        compared = compared + 2
        differ = differ + (drop.kept_at(step) != upstream.get_current_seq())
        differ += consumed != state["consumed_layer_tokens"]
    # The total, which both compute without the steps.
    total = upstream_of(
        least, most, steps, multiple, blocks, dropping, batch
    ).get_total_layer_tokens(steps)
    ours = batch * sum(drop.layer_tokens(step, most) for step in range(steps))
    return compared + 1, differ + (ours != total)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    results = [compare(draw) for _ in range(args.cases)]
    compared, differ = (sum(column) for column in zip(*results))
    print(f"{args.cases} schedules, {compared} numbers compared, {differ} differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
