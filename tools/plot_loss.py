"""Draw the loss curve of a run from its metrics.jsonl.

    python tools/plot_loss.py --metrics quickstart/metrics.jsonl --output loss.png
"""

import argparse
import json
import sys
from pathlib import Path

from megatron_ds.config.guard import main_guard
from megatron_ds.errors import ConfigError, DataError


def read(path: Path) -> dict[str, list[dict]]:
    """Records by kind ("train", "validation", "test"), each in order of steps."""
    if not path.exists():
        raise DataError(f"--metrics {path}: no such file. A run writes it when started with --metrics-jsonl.")
    records: dict[str, list[dict]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            records.setdefault(record["kind"], []).append(record)
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{path}, line {number}: not a record of a run. Was the file edited, or cut short?") from None
    return records


def draw(records: dict[str, list[dict]], output: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("drawing needs matplotlib, which is not installed: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for kind, style in (("train", "-"), ("validation", "o--"), ("test", "s")):
        rows = [r for r in records.get(kind, ()) if r["loss"] is not None]
        if rows:
            axes.plot([r["step"] for r in rows], [r["loss"] for r in rows], style, label=kind)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metrics", type=Path, required=True, help="metrics.jsonl of a run")
    parser.add_argument("--output", type=Path, required=True, help="picture to write (.png, .svg, .pdf)")
    args = parser.parse_args()
    draw(read(args.metrics), args.output)
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main_guard(main))
