"""Text to tokens on one core: tools/preprocess_data.py, and Megatron's way of doing the same.

    python benchmarks/preprocess.py                                              ours alone
    python benchmarks/preprocess.py --peer-python PEER/bin/python --rounds 3   one that has megatron-core

The text is that of this Python: the documentation that tools/build_corpus.py finds, that of the installed
packages, and their sources until --megabytes are there, no document twice. A byte-level BPE of 32,768 entries
is trained on it first (--vocab-size). All are held to one core (`taskset`) and take turns. Ours is timed as a whole
command, from its start to the finished pair of files; the peer only from the first line it reads, as its imports take
long and a corpus could be longer. The files are compared, ids and index, byte for byte.

The peer does what Megatron's tools/preprocess_data.py does with --workers 1: a pool of one process that
parses each line and encodes it with megatron-core's own HuggingFaceTokenizer, fed by `imap` in chunks of 32,
and megatron-core's IndexedDatasetBuilder in the parent. It gets --peer-documents of the documents, as it is
slow; rates are per byte of input.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]


# ------------------------------------------------------------------------------------------------------------
# the peer
class Peer:
    """Megatron's steps over megatron-core's parts; `encoder` lives in the worker."""

    encoder = None

    @classmethod
    def start(cls, folder: str) -> None:
        from megatron.core.tokenizers import MegatronTokenizer

        cls.encoder = MegatronTokenizer.from_pretrained(
            folder, metadata_path={"library": "huggingface"}, use_fast=True
        )

    @classmethod
    def encode(cls, line: str) -> tuple[list[int], list[int]]:
        ids = cls.encoder.tokenize(json.loads(line)["text"])
        lengths = [len(ids)] if ids else []
        if ids:
            ids.append(cls.encoder.eod)
            lengths[-1] += 1
        return ids, lengths


def run_peer(text: str, folder: str, output: str) -> None:
    import numpy as np
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    Peer.start(folder)
    builder = IndexedDatasetBuilder(
        f"{output}.bin", dtype=DType.optimal_dtype(Peer.encoder.vocab_size)
    )
    with (
        open(text, encoding="utf-8") as lines,
        multiprocessing.Pool(1, Peer.start, (folder,)) as pool,
    ):
        pool.apply(Peer.encode, ('{"text": "The worker is there."}',))
        start = time.perf_counter()
        for ids, lengths in pool.imap(Peer.encode, lines, 32):
            builder.add_document(np.array(ids, np.int64), lengths)
    builder.finalize(f"{output}.idx")
    print(time.perf_counter() - start)


# ------------------------------------------------------------------------------------------------------------
# the text
def write_corpus(path: Path, megabytes: float) -> None:
    sys.path.insert(0, str(ROOT))
    from megatron_ds.extensions.corpora import build_corpus as own

    standard, installed = (
        Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")
    )
    own.LEFT_OUT = own.LEFT_OUT - {"site-packages", "dist-packages"}
    # Documentation: the help of Python, docstrings of its library and of installed packages. Then sources, in an order
    # that looks random and is always the same.
    files = sorted(p for root in (standard, installed) for p in root.rglob("*.py"))
    files.sort(key=lambda p: by_hash(p.name))
    documentation = chain(
        own.help_topics(), own.docstrings(standard), own.docstrings(installed)
    )
    texts: set[str] = set()
    size = 0
    for text in chain(map(own.prose, documentation), sources(files)):
        if size > megabytes * 1e6:
            break
        if text and text not in texts:
            texts.add(text)
            size += len(text.encode())
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(
            json.dumps({"text": t}, ensure_ascii=False) + "\n"
            for t in sorted(texts, key=by_hash)
        )


def sources(files: list[Path]) -> Iterator[str]:
    """Their texts, of those that are UTF-8."""
    for file in files:
        try:
            yield file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue


def by_hash(text: str) -> bytes:
    """A key that puts texts into an order that looks random and is always the same."""
    return hashlib.sha256(text.encode()).digest()


def prepare(folder: Path, megabytes: float, part: int, vocab_size: int) -> None:
    """corpus.jsonl, its first lines as part.jsonl, and tokenizer/ with what transformers wants to see in it."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.jsonl"
    tokenizer = folder / "tokenizer"
    if not corpus.exists():
        write_corpus(corpus, megabytes)
    if not tokenizer.exists():
        subprocess.run(
            [
                sys.executable,
                ROOT / "tools/train_tokenizer.py",
                "--input",
                corpus,
                "--vocab-size",
                str(vocab_size),
                "--output",
                tokenizer,
            ],
            check=True,
            env=environment(),
        )
        (tokenizer / "tokenizer_config.json").write_text(
            json.dumps(
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "eos_token": "<|endoftext|>",
                }
            )
        )
    with open(corpus, "rb") as source, open(folder / "part.jsonl", "wb") as target:
        target.writelines(line for _, line in zip(range(part), source))


# ------------------------------------------------------------------------------------------------------------
# the race
def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }


def command(name: str, folder: Path, peer_python: str | None) -> list[str]:
    """ours, ours/BACKEND, ours/part or peer; the last two on part.jsonl."""
    if name == "peer":
        return [
            peer_python,
            __file__,
            "--run-peer",
            *(str(folder / end) for end in ("part.jsonl", "tokenizer", "peer")),
        ]
    what = name.partition("/")[2]
    text = "part" if what == "part" else "corpus"
    return [
        sys.executable,
        str(ROOT / "tools/preprocess_data.py"),
        "--input",
        str(folder / f"{text}.jsonl"),
        "--append-eod",
        "--output-prefix",
        str(folder / name.replace("/", "_")),
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        str(folder / "tokenizer"),
        "--log-interval",
        "100000000",
        "--tokenizer-backend",
        what if what not in ("", "part") else "auto",
    ]


def race(args: argparse.Namespace) -> None:
    folder = Path(args.folder)
    prepare(folder, args.megabytes, args.peer_documents, args.vocab_size)
    sizes = {
        text: (folder / f"{text}.jsonl").stat().st_size for text in ("corpus", "part")
    }
    names = ["ours", *(f"ours/{backend}" for backend in args.backends)] + (
        ["ours/part", "peer"] if args.peer_python else []
    )
    # Each round runs all contestants, on one core.
    seconds = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            start = time.perf_counter()
            done = subprocess.run(
                [
                    "taskset",
                    "-c",
                    str(args.core),
                    *command(name, folder, args.peer_python),
                ],
                check=True,
                env=environment(),
                stdout=subprocess.PIPE,
                text=True,
            )
            whole = time.perf_counter() - start
            seconds[name].append(
                float(done.stdout.split()[-1]) if name == "peer" else whole
            )
    # The report.
    for name, times in seconds.items():
        size = sizes["part" if name in ("ours/part", "peer") else "corpus"] / 1e6
        low = min(times)
        middle = statistics.median(times)
        high = max(times)
        print(
            f"{name:20} {size:6.1f} MB  {middle:8.2f} s ({low:.2f} to {high:.2f})  {size / middle:7.2f} "
            "MB/s on one core"
        )
    if args.peer_python:
        ratio = [
            (sizes["corpus"] / ours) / (sizes["part"] / peer)
            for ours, peer in zip(seconds["ours"], seconds["peer"])
        ]
        print(
            f"ours over the peer, round by round: {', '.join(f'{r:.1f}' for r in ratio)}"
        )
        # The files of both.
        for end in ("bin", "idx"):
            mine = folder / f"ours_part_text_document.{end}"
            theirs = folder / f"peer.{end}"
            print(
                f".{end}: {'the same bytes' if mine.read_bytes() == theirs.read_bytes() else 'DIFFERENT'}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder",
        default="preprocess_benchmark",
        help="for text, tokenizer and output",
    )
    parser.add_argument("--megabytes", type=float, default=60, help="of text")
    parser.add_argument(
        "--peer-python", help="interpreter with megatron-core and transformers"
    )
    parser.add_argument(
        "--peer-documents",
        type=int,
        default=6000,
        help="how many documents the peer gets",
    )
    parser.add_argument(
        "--backends", nargs="*", default=[], help="backends to try beside auto"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--run-peer", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument(
        "--vocab-size", type=int, default=32_768, help="of the tokenizer"
    )
    args = parser.parse_args()
    run_peer(*args.run_peer) if args.run_peer else race(args)


if __name__ == "__main__":
    main()
