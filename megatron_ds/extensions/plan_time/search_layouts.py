"""The fastest layouts of a training on a number of devices, by planned seconds.

    megatron-ds search train.sh --gpus 384 --cluster a100-80g
    megatron-ds search --gpus 8 --cluster h100 --top 5 --picture layouts.png --num-layers 32 --hidden-size 4096 \\
        --num-attention-heads 32 --seq-length 4096 --global-batch-size 512 --vocab-size 32000 --bf16 --lr 1e-4 \\
        --train-iters 1000 --mock-data

The training is a recipe, the first word (a shell script, a YAML or a JSON, as for `megatron-ds check`), or the flags of
pretrain_gpt.py. Of these the search changes the sizes of tensor, pipeline, context and expert parallelism, sequence
parallelism, the stages of a pipeline rank, --micro-batch-size, recomputation and the stage of ZeRO. Layouts whose
planned peak exceeds the memory of a device are left out. Records of layers are kept in the folder megatron_ds of the
user's cache (XDG_CACHE_HOME); --no-cache neither reads nor writes them.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from ...cli import Arguments
from ...config import RunConfig, Source
from ...config.parse import read
from ...errors import ConfigError
from ...features import Provided
from ..dry_run.plan_tables import table
from ..dry_run.world_plan import with_vocabulary
from .cluster import Cluster, read_cluster
from .layer_record import RecordCache
from .layouts import RunLayout
from .picture import draw_layouts
from .search import PlannedLayout, Search

RECIPES: Provided = Provided("recipe configuration")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the layouts; returns 1 if none fits."""
    words = list(sys.argv[1:] if argv is None else argv)
    # A recipe comes first: further words may be values of flags of the training.
    recipe = words.pop(0) if words and not words[0].startswith("-") else None
    args, flags = _parser().parse_known_args(words)
    cluster = read_cluster(args.cluster)
    config = _config(recipe, flags, args.gpus)
    search = Search(
        config,
        args.gpus,
        cluster,
        args.device,
        None if args.no_cache else RecordCache(),
        _bar,
    )
    tried = search.tried()
    found = search.best(tried, args.top)
    if args.picture:
        draw_layouts(Path(args.picture), tried, found, cluster.device.memory)
    print("\n".join(_lines(found, len(tried), config, cluster)))
    return 0 if found else 1


def _parser() -> Arguments:
    parser = Arguments(description=__doc__)
    parser.add_argument("--gpus", type=int, required=True, help="number of devices")
    parser.add_argument(
        "--cluster",
        required=True,
        help="devices and links: a file of YAML, or one of the package, such as a100-80g",
    )
    parser.add_argument("--top", type=int, default=10, help="layouts to show (10)")
    parser.add_argument(
        "--picture", help="file for a picture of memory and time of all layouts"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="kind of device"
    )
    parser.add_argument(
        "--no-cache", action="store_true", help="record all layers anew, and keep none"
    )
    return parser


def _config(recipe: str | None, flags: Sequence[str], ranks: int) -> RunConfig:
    """Return the configuration of a recipe or of flags. Raises ConfigError for both, and for none."""
    if ranks < 1:
        raise ConfigError(f"--gpus {ranks} is not a number of devices; give 1 or more.")
    if recipe is not None and flags:
        raise ConfigError(
            f"both {recipe} and flags ({' '.join(flags[:3])} …) describe the training; give one of them."
        )
    if recipe is not None:
        config = RECIPES.get()(Path(recipe), ranks)
    else:
        config = read(flags, world_size=ranks)
    dry = config.with_values(
        {"plan.dry_run": "cuda"}, Source("derived", "the search of layouts")
    )
    return with_vocabulary(dry)[0]


def _bar(what: str, items: Iterable, total: int) -> Iterable:
    """Show a progress bar, in a terminal alone."""
    return tqdm(items, what, total, disable=not sys.stderr.isatty(), leave=False)


def _lines(
    found: Sequence[PlannedLayout], tried: int, config: RunConfig, cluster: Cluster
) -> Iterable[str]:
    """Yield the table of the layouts and the flags of the fastest."""
    memory = cluster.device.memory / 1e9
    if not found:
        yield f"none of {tried:,} layouts fits {memory:.0f} GB. Use more devices, or a smaller model."
        return
    yield f"{len(found)} of {tried:,} layouts, the fastest that fit {memory:.0f} GB of {cluster.device.name}:"
    rows = [["", *COLUMNS, "seconds", "MFU", "peak GB"]]
    for number, one in enumerate(found, 1):
        rows.append(
            [
                str(number),
                *_cells(one.layout),
                f"{one.seconds:.3f}",
                f"{one.mfu:.1%}",
                f"{one.peak / 1e9:.1f}",
            ]
        )
    yield from table(rows)
    yield "flags of the fastest:"
    yield f"  {found[0].layout.flags(config.model.num_layers)}"


COLUMNS = ("tp", "pp", "chunks", "cp", "ep", "etp", "batch", "recompute", "zero")


def _cells(layout: RunLayout) -> list[str]:
    return [
        str(layout.tp),
        str(layout.pp),
        str(layout.chunks),
        str(layout.cp),
        str(layout.ep),
        str(layout.etp),
        str(layout.micro_batch),
        layout.recompute or "none",
        str(layout.zero),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
