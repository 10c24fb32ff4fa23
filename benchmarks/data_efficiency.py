"""Does it pay to let blocks see fewer tokens at first, or to begin with short sequences? Validation loss
against time.

    python benchmarks/data_efficiency.py --out FOLDER          all runs that FOLDER lacks, one after the other
    python benchmarks/data_efficiency.py --out FOLDER --only plain-200 random-ltd-320
    python benchmarks/data_efficiency.py --out FOLDER --show   table and picture of the runs that are there
    python benchmarks/data_efficiency.py --out FOLDER --times  a step by the tokens that its blocks keep

The corpus is the source code of your own Python's standard library, 11 million characters of English and
Python, seen less than once. Every run has its own length and its own learning-rate decay, so the last losses
can be compared: what matters is how long plain training takes to the loss that another run ends with, read
off the line between the two plain runs around it. Time is given in steps of plain training: those of other
kinds are timed beside it, in turns, since a shared machine may be a third slower in one run than in the next.
The table also has the seconds of each run. Evaluation is at full length, with all tokens.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
LENGTH = 512
BATCH = 4
EVERY = 10
STEPS_TIMED = [
    *((LENGTH, kept) for kept in (64, 128, 192, 256, 320, 384, 448, LENGTH)),
    *((length, length) for length in (64, 128, 192, 256, 320, 384, 448)),
]
JOB = (
    "--num-layers 6 --hidden-size 128 --num-attention-heads 2 --make-vocab-size-divisible-by 64 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--init-method-std 0.06 --hidden-dropout 0 --attention-dropout 0 --lr 2e-3 --min-lr 1e-4 "
    "--lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 --split 95,5,0 --tokenizer-type "
    f"HuggingFaceTokenizer --eval-iters 40 --seq-length {LENGTH} --micro-batch-size {BATCH} "
    f"--global-batch-size {BATCH} --log-interval {EVERY}"
).split()


@dataclass(frozen=True)
class Contestant:
    """flags: of what it does otherwise than a plain run, from the number of its steps."""

    kind: str
    steps: int
    flags: tuple = ()
    seed: int = 1234


def random_ltd(steps: int, least: int, part: float, seed: int = 1234) -> Contestant:
    """From `least` tokens to all of them in this part of the run."""
    flags = (
        "--random-ltd",
        "--random-ltd-min-tokens",
        least,
        "--random-ltd-steps",
        int(part * steps),
        "--random-ltd-tokens-per-step",
        32,
    )
    return Contestant(f"random-LTD from {least}", steps, flags, seed)


def curriculum(steps: int, least: int, part: float) -> tuple:
    """Flags: sequences from `least` tokens to their whole length in this part of the run."""
    return (
        "--curriculum-type",
        "seqlen_truncate",
        "--curriculum-min-length",
        least,
        "--curriculum-steps",
        int(part * steps),
        "--curriculum-length-step",
        32,
    )


HIGHER = (
    "--lr",
    "4e-3",
    "--min-lr",
    "2e-4",
)  # plain training learns a little less with it
CONTESTANTS = {
    **{f"plain-{steps}": Contestant("plain", steps) for steps in (180, 240, 320, 400)},
    "plain-320-again": Contestant("plain", 320, seed=4321),
    "random-ltd-320": random_ltd(320, 128, 2 / 3),
    "random-ltd-320-again": random_ltd(320, 128, 2 / 3, seed=4321),
    "plain-320-lr4": Contestant("plain, twice the rate", 320, HIGHER),
    "random-ltd-320-lr4": Contestant(
        "random-LTD, twice the rate", 320, (*random_ltd(320, 128, 2 / 3).flags, *HIGHER)
    ),
    "curriculum-400": Contestant("curriculum from 64", 400, curriculum(400, 64, 2 / 3)),
}


def prepare(out: Path) -> None:
    """Corpus, tokenizer and tokens, where they are not there yet."""
    if (out / "corpus_text_document.idx").exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    paths = (
        p
        for p in Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")
        if not LEFT_OUT & set(p.parts)
    )
    # The sources of Python's library, without repetitions, in the order of their hashes.
    texts = {path.read_text(encoding="utf-8", errors="ignore") for path in paths}
    ordered = sorted(
        filter(None, texts), key=lambda text: hashlib.sha256(text.encode()).digest()
    )
    (out / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ordered)
    )
    # The tokenizer, and the tokens.
    call(
        "tools/train_tokenizer.py",
        "--input",
        out / "corpus.jsonl",
        "--vocab-size",
        2048,
        "--output",
        out / "tokenizer",
    )
    call(
        "tools/preprocess_data.py",
        "--input",
        out / "corpus.jsonl",
        "--output-prefix",
        out / "corpus",
        "--append-eod",
        "--workers",
        2,
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        out / "tokenizer",
    )


def train(out: Path, name: str) -> None:
    """A run; its metrics appear under its name when it is complete."""
    c = CONTESTANTS[name]
    metrics = out / f"{name}.partial"
    metrics.unlink(missing_ok=True)
    call(
        "pretrain_gpt.py",
        *JOB,
        *c.flags,
        "--train-iters",
        c.steps,
        "--lr-warmup-iters",
        c.steps // 20,
        "--seed",
        c.seed,
        "--eval-interval",
        c.steps // 4,
        "--data-path",
        out / "corpus_text_document",
        "--tokenizer-model",
        out / "tokenizer",
        "--metrics-path",
        metrics,
    )
    metrics.rename(out / f"{name}.jsonl")


def call(script: str, *arguments) -> None:
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


@dataclass(frozen=True)
class Result:
    """seconds: of all training steps.  loss: of the last validation."""

    kind: str
    steps: int
    seconds: float
    layer_tokens: int
    loss: float


def read(out: Path, name: str) -> Result | None:
    path = out / f"{name}.jsonl"
    seconds = 0.0
    loss = 0.0
    tokens = 0
    if not path.exists():
        return None
    for record in map(json.loads, path.read_text().splitlines()):
        if record["kind"] == "train":
            seconds = seconds + EVERY * record["step_seconds"]
            tokens = record["layer_tokens"]
        elif record["kind"] == "validation":
            loss = record["loss"]
    return Result(
        CONTESTANTS[name].kind, CONTESTANTS[name].steps, seconds, tokens, loss
    )


def plain_cost(results: dict[str, Result], loss: float) -> float | None:
    """Steps of plain training that end with this loss; None where no two plain runs lie around it."""
    plain = sorted(
        (r.loss, r.steps)
        for name, r in results.items()
        if r.kind == "plain" and "again" not in name
    )
    around = [
        pair for pair in zip(plain, plain[1:]) if pair[0][0] <= loss <= pair[1][0]
    ]
    return between(list(around[0]), loss) if around else None


def show(out: Path, picture: Path | None) -> None:
    results = {name: result for name in CONTESTANTS if (result := read(out, name))}
    costs = {
        name: cost(out, CONTESTANTS[name]) or r.steps for name, r in results.items()
    }
    print(
        f"{'run':22} {'seconds':>8} {'in plain steps':>15} {'layer tokens':>13} {'last loss':>10}  plain "
        "takes to that loss"
    )
    for name, r in results.items():
        plain = plain_cost(results, r.loss) if r.kind != "plain" else None
        words = (
            f"{plain:.0f} steps: {1 - costs[name] / plain:+.1%} saved" if plain else ""
        )
        print(
            f"{name:22} {r.seconds:8.1f} {costs[name]:15.1f} {r.layer_tokens:13,} {r.loss:10.4f}  {words}"
        )
    if picture:
        draw(results, costs, picture)


def draw(results: dict[str, Result], costs: dict[str, float], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    kinds = list(dict.fromkeys(r.kind for r in results.values()))
    for number, kind in enumerate(kinds):
        runs = sorted(
            (costs[name], r.loss)
            for name, r in results.items()
            if r.kind == kind and "again" not in name
        )
        again = [
            (costs[name], r.loss)
            for name, r in results.items()
            if r.kind == kind and "again" in name
        ]
        axes.plot(
            *zip(*runs), "o-" if len(runs) > 1 else "o", color=f"C{number}", label=kind
        )
        if again:
            axes.plot(*zip(*again), "o", color=f"C{number}", fillstyle="none")
    axes.set(
        xlabel="time of the whole run, in steps of plain training",
        ylabel="validation loss at its end, all tokens",
        title="GPT of 6 blocks of 128 channels on the source of Python's standard library:\n"
        "whole runs, each with its own learning-rate decay; hollow: another seed",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def times(out: Path, rounds: int = 9) -> None:
    """Milliseconds of a step of so many positions, whose four middle blocks keep so many tokens: all of them
    in turns, in one process, so that a machine that changes its speed changes all alike."""
    import torch

    from megatron_ds.batch.batch import Batch
    from megatron_ds.config import parse
    from megatron_ds.host.allocator import set_allocator
    from megatron_ds.mpu.grid import Grid
    from megatron_ds.mpu.mesh import Mesh
    from megatron_ds.training.build import build_replica

    # A model that drops tokens, and one batch of them.
    set_allocator(keep_freed=True)
    replica = build_replica(
        config_of(Contestant("", 9, random_ltd(320, 128, 2 / 3).flags), parse),
        Mesh(Grid(), 0),
    )
    tokens = torch.randint(
        2047, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1)
    )
    # Steps of all lengths, in turns.
    taken = {}
    for _ in range(rounds):
        for length, kept in STEPS_TIMED:
            batch = Batch(
                tokens[:, :length],
                tokens[:, 1 : length + 1],
                torch.ones(BATCH, length),
                torch.arange(length).expand(BATCH, -1),
                tuple(range(BATCH)),
                kept_tokens=kept,
            )
            start = time.perf_counter()
            replica.optimizer.begin_step()
            replica.executor.run([batch])
            replica.optimizer.step(1e-3, 0.1)
            taken.setdefault((length, kept), []).append(
                1000 * (time.perf_counter() - start)
            )
    # The report: times beside what the FLOPs tell.
    rows = [
        [*key, statistics.median(ms[2:]), min(ms[2:]), max(ms[2:])]
        for key, ms in taken.items()
    ]
    (out / "times.json").write_text(json.dumps(rows))
    whole = next(row[2] for row in rows if row[:2] == [LENGTH, LENGTH])
    for length, kept, middle, least, most in rows:
        flops = step_flops(replica.config.model, length, kept) / step_flops(
            replica.config.model, LENGTH, LENGTH
        )
        print(
            f"{length:4} positions, {kept:4} kept: {middle:6.1f} ms ({least:.1f} to {most:.1f}), "
            f"{middle / whole:.3f} of a whole step; by FLOPs {flops:.3f}"
        )


def step_flops(model, length: int, kept: int) -> float:
    from megatron_ds.planning.flops import layers_of, model_flops

    # All blocks but the first and the last drop tokens.
    names = {f"decoder.layers.{number}" for number in (1, 2, 3, 4)}
    layers = [
        replace(layer, drops_tokens=layer.name in names) for layer in layers_of(model)
    ]
    return model_flops(layers, BATCH, length, 2048, kept)


def config_of(contestant: Contestant, parse):
    data = [
        "--mock-data",
        "--vocab-size",
        "2047",
        "--tokenizer-type",
        "NullTokenizer",
        "--train-iters",
        contestant.steps,
    ]
    job = [
        *JOB[: JOB.index("--split")],
        *JOB[JOB.index("--tokenizer-type") + 2 :],
        *data,
        *contestant.flags,
    ]
    return parse([str(word) for word in job], world_size=1)


def cost(out: Path, contestant: Contestant) -> float | None:
    """What a run takes, in whole plain steps: by the times of steps of its lengths and kept tokens, along
    lines between.
    """
    from megatron_ds.config import parse
    from megatron_ds.extensions.data_efficiency.curricula import length_difficulty
    from megatron_ds.extensions.data_efficiency.options import CurriculumConfig

    if not (out / "times.json").exists():
        return None
    rows = {
        (length, kept): middle
        for length, kept, middle, *_ in json.loads((out / "times.json").read_text())
    }
    config = config_of(contestant, parse)
    drop = config.kept_tokens
    grows = (
        length_difficulty(config.of(CurriculumConfig), LENGTH)
        if config.of(CurriculumConfig).curriculum_type
        else None
    )
    # The time of each step is interpolated between those that were measured.
    total = 0.0
    for step in range(contestant.steps):
        length = min(grows.at(step + 1), LENGTH) if grows else LENGTH
        kept = drop.kept_at(step, length) if drop else length
        assert length in (LENGTH, kept), (
            "steps of short sequences that drop tokens were not timed"
        )
        points = (
            sorted((n, ms) for (n, all_kept), ms in rows.items() if n == all_kept)
            if grows
            else sorted((n, ms) for (of, n), ms in rows.items() if of == LENGTH)
        )
        total += between(points, length if grows else kept)
    return total / rows[LENGTH, LENGTH]


def between(points: list[tuple[int, float]], x: int) -> float:
    (x0, y0), (x1, y1) = next(
        pair for pair in zip(points, points[1:]) if x <= pair[1][0]
    )
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=CONTESTANTS,
        default=list(CONTESTANTS),
        metavar="RUN",
    )
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    if args.times:
        times(args.out)
        return 0
    if not args.show:
        prepare(args.out)
        for name in args.only:
            if not (args.out / f"{name}.jsonl").exists():
                train(args.out, name)
    show(args.out, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
