"""How fast each optimizer lowers the loss of a small GPT on real text: equal tokens, batches and initial
weights.

    python benchmarks/optimizer_convergence.py --data library --output convergence

The model and its text are those of moe_equal_flops.py, 1.1 million parameters and the source of Python's
standard library. For each optimizer every learning rate of its list is tried with the first seed; the best
one is repeated with the other seeds. Optimizers that compress need two workers, so they run on two ranks with
half of each batch. All other runs are one process of one thread. Prints a table and draws the curves; runs
that are finished in --output are read.

The table has the steps after which the mean curve reaches the final loss of Adam, between two evaluations on
a straight line.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from library_corpus import HERE, is_finished, losses, make_corpus

Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class Entrant:
    """An optimizer. flags: may contain {warmup}, the steps before compression begins."""

    flags: str
    rates: tuple[float, ...]
    ranks: int = 1


ENTRANTS = {
    "Adam": Entrant("--optimizer adam --adam-beta2 0.95", (2e-3, 4e-3, 8e-3)),
    "LAMB": Entrant(
        "--optimizer lamb --adam-beta2 0.95 --lamb-min-coeff 0 --lamb-form paper",
        (5e-3, 1e-2, 2e-2),
    ),
    "Lion": Entrant(
        "--optimizer lion --lion-beta1 0.9 --lion-beta2 0.99 --weight-decay 0.5",
        (5e-4, 1e-3, 2e-3),
    ),
    "Muon": Entrant(
        "--optimizer muon --adam-beta2 0.95 --muon-momentum 0.95 --muon-use-nesterov "
        "--muon-scale-mode match_rms_adamw",
        (2e-3, 4e-3, 8e-3),
    ),
    "1-bit Adam": Entrant(
        "--optimizer onebit_adam --adam-beta2 0.999 --freeze-step {warmup}",
        (2e-3, 4e-3),
        ranks=2,
    ),
    "0/1 Adam": Entrant(
        "--optimizer zero_one_adam --adam-beta2 0.999 --var-freeze-step {warmup}",
        (2e-3, 4e-3),
        ranks=2,
    ),
}


@dataclass(frozen=True)
class Trial:
    """One run."""

    name: str
    rate: float
    seed: int

    def path(self, output: Path) -> Path:
        """The file of the metrics of this run."""
        return (
            output
            / f"{self.name.replace('/', '-').replace(' ', '_')}_{self.rate:g}_{self.seed}.jsonl"
        )


def command(args: argparse.Namespace, trial: Trial) -> list[str]:
    entrant = ENTRANTS[trial.name]
    flags = f"""
        --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128
        --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
        --init-method-std 0.06 --hidden-dropout 0 --attention-dropout 0
        --micro-batch-size {8 // entrant.ranks} --global-batch-size 8 --lr {trial.rate}
        --min-lr {trial.rate / 20} --lr-decay-style cosine --train-iters {args.steps}
        --lr-warmup-iters {args.steps // 24} --weight-decay 0.1 --seed {trial.seed} --split 95,5,0
        --tokenizer-type HuggingFaceTokenizer --eval-interval {args.steps // 20} --eval-iters 20
        --log-interval {args.steps // 20} --no-progress-bar
        {entrant.flags.format(warmup=args.steps // 5)}""".split()
    start = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(entrant.ranks),
    ]
    return [
        sys.executable,
        *(start if entrant.ranks > 1 else ()),
        str(HERE / "pretrain_gpt.py"),
        *flags,
        "--metrics-jsonl",
        str(trial.path(args.output)),
        "--data-path",
        str(args.data / "corpus_text_document"),
        "--tokenizer-model",
        str(args.data / "tokenizer"),
    ]


def run_all(args: argparse.Namespace, trials: Iterable[Trial]) -> None:
    """Run the trials that are not finished, --at-once at a time."""
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(partial(run, args), trials))


def run(args: argparse.Namespace, trial: Trial) -> None:
    path = trial.path(args.output)
    if not is_finished(path, args.steps):
        path.unlink(missing_ok=True)
        done = subprocess.run(
            command(args, trial),
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        if done.returncode:
            raise SystemExit(
                f"{trial} ended with {done.returncode}:\n{done.stderr[-2000:]}"
            )


def final(args: argparse.Namespace, trial: Trial) -> float:
    return losses(trial.path(args.output))[-1][1]


def mean_curve(curves: list[Curve]) -> Curve:
    return [
        (points[0][0], fmean(loss for _, loss in points)) for points in zip(*curves)
    ]


def steps_to(loss: float, curve: Curve) -> float | None:
    """The step at which a curve first reaches the loss; None if it does not."""
    for (step, above), (next_step, below) in zip(curve, curve[1:]):
        if above > loss >= below:
            return step + (next_step - step) * (above - loss) / (above - below)
    return None


def draw(curves: dict[str, Curve], output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, points in curves.items():
        axes.plot(
            *zip(*points),
            marker="o",
            markersize=3,
            label=f"{name}: {points[-1][1]:.3f}",
        )
    axes.set(
        xlabel="step",
        ylabel="validation loss (nats per token)",
        title="GPT of 1.1 M parameters on the source of Python's standard library,\n"
        "equal tokens, mean of seeds",
    )
    axes.set_ylim(top=min(points[0][1] for points in curves.values()))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(output, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with corpus and tokenizer"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for metrics and the picture"
    )
    parser.add_argument(
        "--optimizers", nargs="+", choices=list(ENTRANTS), default=list(ENTRANTS)
    )
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1])
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time")
    args = parser.parse_args()
    # Each optimizer with each of its rates, by one seed.
    make_corpus(args.data)
    args.output.mkdir(parents=True, exist_ok=True)
    tried = {
        name: [Trial(name, rate, args.seeds[0]) for rate in ENTRANTS[name].rates]
        for name in args.optimizers
    }
    run_all(args, (trial for trials in tried.values() for trial in trials))
    # The best rate of each, by all seeds.
    best = {
        name: min(trials, key=partial(final, args)).rate
        for name, trials in tried.items()
    }
    repeated = {
        name: [Trial(name, best[name], seed) for seed in args.seeds]
        for name in args.optimizers
    }
    run_all(args, (trial for trials in repeated.values() for trial in trials))
    # The report, relative to Adam's last loss.
    curves = {
        name: mean_curve([losses(trial.path(args.output)) for trial in trials])
        for name, trials in repeated.items()
    }
    goal = curves["Adam"][-1][1] if "Adam" in curves else None
    print(
        "| optimizer | rates: loss | best | loss, mean of seeds (least to most) | steps to Adam's |"
    )
    print("|---|---|---|---|---|")
    for name, trials in repeated.items():
        found = sorted(final(args, trial) for trial in trials)
        reached = steps_to(goal, curves[name]) if goal else None
        print(
            f"| {name} | {', '.join(f'{t.rate:g}: {final(args, t):.3f}' for t in tried[name])} | "
            f"{best[name]:g} | {fmean(found):.3f} ({found[0]:.3f} to {found[-1]:.3f}) | "
            f"{'not reached' if reached is None else f'{reached:.0f}'} |"
        )
    draw(curves, args.output / "optimizers.svg")


if __name__ == "__main__":
    main()
