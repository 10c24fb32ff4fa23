"""Whether experts lower the loss at equal arithmetic: the same text, tokens, batches and active FLOPs, dense
or with 8 experts of which a token passes 2.

    python benchmarks/moe_equal_flops.py --data library --output equal_flops --steps 1200 --seeds 1234 1

The text is the source of Python's standard library without its tests, tokenized into the folder --data at the
first run. A folder that holds a corpus already, such as that of examples/moe_tiny_cpu.sh, is used as it is.

An expert has half the width of the dense feed-forward, so a token passes as many multiplications in both,
but for the router. Two processes of one thread train at the same time, for each seed. Prints the validation
losses and draws the difference of experts from dense.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from library_corpus import HERE, is_finished, losses, make_corpus

WIDTH = 352
EXPERTS = "8 experts, top 2"
KINDS = {
    "dense": ["--ffn-hidden-size", str(WIDTH)],
    EXPERTS: [
        "--ffn-hidden-size",
        str(WIDTH),
        "--num-experts",
        "8",
        "--moe-router-topk",
        "2",
        "--moe-ffn-hidden-size",
        str(WIDTH // 2),
        "--moe-aux-loss-coeff",
        "0.01",
    ],
}


def job(args: argparse.Namespace, seed: int, metrics: Path) -> list[str]:
    flags = f"""
        --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128
        --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
        --init-method-std 0.06 --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 8
        --global-batch-size 8 --lr {args.lr} --min-lr {args.lr / 20} --lr-decay-style cosine
        --train-iters {args.steps} --lr-warmup-iters {args.steps // 24} --weight-decay 0.1 --adam-beta2 0.95
        --seed {seed} --split 95,5,0 --tokenizer-type HuggingFaceTokenizer
        --eval-interval {args.steps // 10} --eval-iters 10 --log-interval {args.steps // 10}
        --no-progress-bar""".split()
    return [
        sys.executable,
        str(HERE / "pretrain_gpt.py"),
        *flags,
        "--metrics-jsonl",
        str(metrics),
        "--data-path",
        str(args.data / "corpus_text_document"),
        "--tokenizer-model",
        str(args.data / "tokenizer"),
    ]


def run(args: argparse.Namespace) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """(kind, seed) → [(step, validation loss)]. A curve that was finished before is read."""
    args.output.mkdir(parents=True, exist_ok=True)
    curves = {}
    for seed in args.seeds:
        files = {
            kind: args.output / f"{kind.split()[0]}_{seed}.jsonl" for kind in KINDS
        }
        started = [
            subprocess.Popen(
                [*job(args, seed, path), *KINDS[kind]],
                stdout=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for kind, path in files.items()
            if not is_finished(path, args.steps)
        ]
        if codes := [process.wait() for process in started if process.wait()]:
            raise SystemExit(f"a run ended with {codes}")
        curves |= {(kind, seed): losses(path) for kind, path in files.items()}
    return curves


def draw(curves, output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for color, seed in enumerate(sorted({seed for _, seed in curves})):
        dense = dict(curves["dense", seed])
        points = [(step, loss - dense[step]) for step, loss in curves[EXPERTS, seed]]
        axes.plot(
            *zip(*points),
            color=f"C{color}",
            marker="o",
            markersize=4,
            label=f"seed {seed}: {points[-1][1]:+.3f} at the end",
        )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(
        xlabel="step",
        ylabel="loss of experts − loss of dense (nats)",
        title="8 experts, top 2, beside a dense GPT of 4 layers of 128 channels, equal active FLOPs;\n"
        "validation loss on the source of Python's standard library",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(output, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with corpus and tokenizer"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for metrics and the picture"
    )
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234])
    args = parser.parse_args()
    make_corpus(args.data)
    curves = run(args)
    print(
        "| | " + " | ".join(f"{step}" for step, _ in next(iter(curves.values()))) + " |"
    )
    for (kind, seed), points in curves.items():
        print(
            f"| {kind}, seed {seed} | "
            + " | ".join(f"{loss:.3f}" for _, loss in points)
            + " |"
        )
    draw(curves, args.output / "equal_flops.svg")


if __name__ == "__main__":
    main()
