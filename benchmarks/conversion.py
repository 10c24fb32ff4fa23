"""Conversion of a checkpoint beside `cp` of the same files: bytes moved per second, and memory.

    python benchmarks/conversion.py                               # 2.1 GB of a 7B model's layers, 3 rounds
    python benchmarks/conversion.py --layers 32 --shard-mb 5000 --rounds 1 --folder /mnt/disk    # 13.5 GB

A Hugging Face folder with the widths of Llama-2-7B and random bf16 weights is written in shards. Contestants
take turns in each round:

    cp         `cp -r` of the folder, then sync of the copy
    direct     the read and write calls of a conversion alone, with O_DIRECT: as many bytes, no conversion
    to ours    tools/convert_checkpoint.py: bf16 folder → checkpoint of this package in fp32
    back       that checkpoint → bf16 folder
    rewrite    bf16 folder → bf16 folder

Before each of them all files are synced and dropped from the page cache (posix_fadvise), so that every
contestant reads from the disk; all of them end with their files on the disk. Seconds are those of a whole
process, with the start of Python. The speed is (bytes read + bytes written) / seconds. Memory is the highest
resident size of the process.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from megatron_ds.checkpoint.safetensors_folder import TensorEntry, write_folder
from megatron_ds.host.large_pages import aligned_empty
from megatron_ds.mpu.group import solo

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "convert_checkpoint.py"
WIDTH = 4096
FFN = 11008
HEADS = 32
VOCABULARY = 32000
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}
BLOCK = 16 << 20  # bytes of one system call of `direct`
COPIES = ("cp", "direct")


@dataclass(frozen=True)
class Result:
    """seconds; bytes read and written; highest resident size in bytes; CPU seconds, faults of pages."""

    seconds: float
    read: int
    written: int
    memory: int
    cpu: float
    faults: int

    @property
    def speed(self) -> float:
        """Bytes per second."""
        return (self.read + self.written) / self.seconds


# ------------------------------------------------------------------ files
def entries(layers: int) -> list[TensorEntry]:
    """Names and shapes of a Llama with these widths."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {
            f"{at}self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"
        }
        shapes |= {
            f"{at}mlp.{name}_proj.weight": (FFN, WIDTH) for name in ("gate", "up")
        }
        shapes |= {
            f"{at}mlp.down_proj.weight": (WIDTH, FFN),
            f"{at}input_layernorm.weight": (WIDTH,),
            f"{at}post_attention_layernorm.weight": (WIDTH,),
        }
    shapes |= {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}
    return [TensorEntry(name, shape, torch.bfloat16) for name, shape in shapes.items()]


def make_folder(folder: Path, layers: int, shard_bytes: int) -> None:
    """Random weights: slices of one array of random numbers, each from another place."""
    pool = (
        torch.randn(1 << 24, generator=torch.Generator().manual_seed(0))
        .mul_(0.02)
        .bfloat16()
    )
    places = random.Random(0)

    def values(entry: TensorEntry) -> torch.Tensor:
        numel = torch.Size(entry.shape).numel()
        return (
            pool.roll(places.randrange(len(pool)))
            .repeat(-(-numel // len(pool)))[:numel]
            .view(entry.shape)
        )

    write_folder(
        folder,
        entries(layers),
        lambda ordered: map(values, ordered),
        solo(),
        shard_bytes,
    )
    (folder / "config.json").write_text(
        json.dumps(CONFIG | {"num_hidden_layers": layers})
    )


def size_of_files(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def drop_from_cache(folder: Path) -> None:
    """Sync all files below a folder, and remove them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ------------------------------------------------------------------ contestants
def run(command: list[str], source: Path, target: Path) -> Result:
    """A process that reads one folder and writes another, with the sync of what it wrote."""
    drop_from_cache(source)
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{' '.join(command)} failed")
    for path in target.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    return Result(
        time.perf_counter() - start,
        size_of_files(source),
        size_of_files(target),
        usage.ru_maxrss << 10,
        usage.ru_utime + usage.ru_stime,
        usage.ru_minflt,
    )


def direct(source: Path, target: Path, written: int) -> Result:
    """All files of `source` read and `written` bytes written, by one thread each, with O_DIRECT."""
    drop_from_cache(source)
    paths = [path for path in sorted(source.rglob("*")) if path.stat().st_size >= BLOCK]
    into, out = (aligned_empty(BLOCK, torch.uint8).random_().numpy() for _ in range(2))

    def read() -> None:
        for path in paths:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            at = 0
            while count := os.preadv(fd, [into], at):
                at += count
            os.close(fd)

    start = time.perf_counter()
    before = time.process_time()
    reader = threading.Thread(target=read)
    reader.start()
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    for at in range(0, written, BLOCK):
        os.pwrite(fd, out, at)
    os.fsync(fd)
    os.close(fd)
    reader.join()
    return Result(
        time.perf_counter() - start,
        sum(path.stat().st_size for path in paths),
        written,
        0,
        time.process_time() - before,
        0,
    )


def contestants(folder: Path) -> Iterator[tuple[str, Result]]:
    """One round. `source` is in the folder; everything else is removed as soon as it is not needed."""
    source, copy, ours, back = (
        folder / name for name in ("source", "copy", "ours", "back")
    )
    convert = [sys.executable, str(TOOL)]
    written = 2 * size_of_files(source)
    steps = {
        "cp": (["cp", "-r", str(source), str(copy)], source, copy),
        "to ours": (
            [*convert, "--load", str(source), "--save", str(ours)],
            source,
            ours,
        ),
        "back": ([*convert, "--load", str(ours), "--save", str(back)], ours, back),
        "rewrite": (
            [
                *convert,
                "--load",
                str(source),
                "--to",
                "huggingface",
                "--save",
                str(copy),
            ],
            source,
            copy,
        ),
    }
    for name, step in steps.items():
        yield name, run(*step)
        shutil.rmtree(copy, ignore_errors=True)
        if name == "cp":
            yield "direct", direct(source, copy, written)
            copy.unlink()
    for path in (ours, back):
        shutil.rmtree(path)


# ------------------------------------------------------------------ output
def table(results: dict[str, list[Result]]) -> str:
    """Medians of the rounds, with the least and the greatest; the share is of `cp` in the same round."""
    lines = [
        "| | s | read + written, GB | MB/s | of cp's | CPU s | memory, MiB |",
        "|---|" + 6 * "---|",
    ]
    for name, found in results.items():
        shares = [one.speed / cp.speed for one, cp in zip(found, results["cp"])]
        middle = lambda values, form: (
            f"{statistics.median(values):{form}} "
            f"({min(values):{form}}–{max(values):{form}})"
        )
        lines.append(
            f"| {name} | {middle([one.seconds for one in found], '.1f')} | "
            f"{found[0].read / 1e9:.2f} + {found[0].written / 1e9:.2f} | "
            f"{middle([one.speed / 1e6 for one in found], '.0f')} | {middle(shares, '.2f')} | "
            f"{middle([one.cpu for one in found], '.1f')} | "
            f"{'–' if name in COPIES else max(one.memory for one in found) >> 20} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="on the disk to measure; needs five times the size of the model",
    )
    parser.add_argument(
        "--layers", type=int, default=4, help="32 are those of a 7B model"
    )
    parser.add_argument("--shard-mb", type=int, default=500, help="size of a file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--output", type=Path, help="a file for all figures, as JSON lines"
    )
    args = parser.parse_args()
    results: dict[str, list[Result]] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        # in a process of its own: the memory of this one counts as that of its children until they begin
        maker = get_context("spawn").Process(
            target=make_folder,
            args=(folder / "source", args.layers, args.shard_mb * 10**6),
        )
        maker.start()
        maker.join()
        for _ in range(args.rounds):
            for name, result in contestants(folder):
                results.setdefault(name, []).append(result)
                print(
                    f"{name:8} {result.seconds:6.1f} s {result.speed / 1e6:6.0f} MB/s "
                    f"{result.cpu:6.1f} CPU s {result.faults:8} faults",
                    flush=True,
                )
                if args.output:
                    with open(args.output, "a") as file:
                        file.write(json.dumps({"name": name, **vars(result)}) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
