"""Batches a second from a memory-mapped corpus: our loader beside megatron-core's GPTDataset.

    python benchmarks/loader.py --peer-python /path/to/python    half a minute; the peer's has megatron-core
    python benchmarks/loader.py                                  ours alone

A corpus of mock documents (lengths log-normal, 490 tokens on average, uint16) is written once; samples of s +
1 tokens in shuffled order are read from it by one thread, the file being in memory. Both make whole batches:
tokens, labels, loss mask and positions, ours by `Loader`, the peer's by `torch.utils.data.default_collate`
over `GPTDataset[i]`, which is what Megatron's data loader does in its worker. `sample` is `dataset[i]` alone,
which for the peer holds all four. Contestants are processes that take turns; both must read the same tokens.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

VOCAB = 50257
SEED = 1234
BATCH = 16


def write_corpus(prefix: Path, documents: int) -> None:
    from megatron_ds.data.text.indexed import IndexedWriter

    draw = np.random.default_rng(3)
    with IndexedWriter(prefix, np.uint16) as writer:
        for length in np.maximum(1, draw.lognormal(5.7, 1.0, documents)).astype(
            np.int64
        ):
            writer.add_document(draw.integers(0, VOCAB, length))


def ours(prefix: str, seq_length: int, samples: int, cache: str):
    """(dataset, function from sample numbers to a checksum of their batch)."""
    from megatron_ds.data.loading.loader import Loader
    from megatron_ds.data.samples.gpt_corpus import open_gpt_dataset
    from megatron_ds.data.samples.gpt_data import GPTCollator
    from megatron_ds.data.text.indexed import IndexedDataset

    corpus = IndexedDataset(prefix)
    dataset = open_gpt_dataset(
        corpus,
        range(len(corpus)),
        title="GPTDataset-train",
        seq_length=seq_length,
        num_samples=samples,
        seed=SEED,
        cache=cache,
    )
    loader = Loader(dataset, GPTCollator(seq_length, VOCAB), micro_batch_size=BATCH)
    return dataset, lambda first: loader.batch(first, BATCH)


def megatron(prefix: str, seq_length: int, samples: int, cache: str):
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from torch.utils.data import default_collate

    class Tokenizer:
        eod = 0
        pad = -1
        vocab_size = VOCAB
        unique_identifiers = {"name": "none"}

    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=seq_length,
        blend=([prefix], None),
        split="100,0,0",
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=cache,
    )
    dataset = BlendedMegatronDatasetBuilder(
        GPTDataset, [samples, 0, 0], lambda: True, config
    ).build()[0]
    return dataset, lambda first: default_collate(
        [dataset[i] for i in range(first, first + BATCH)]
    )


def tokens_of(batch):
    return batch["tokens"] if isinstance(batch, dict) else batch.tokens


def serve(contestant: str, prefix: str, cache: str, samples: int) -> None:
    """Answers each line "what seq_length" with the seconds of one pass over all samples, and a checksum."""
    import torch

    torch.set_num_threads(1)
    made = {}
    print("ready", flush=True)
    for line in sys.stdin:
        what, seq_length = line.split()
        if seq_length not in made:
            made[seq_length] = globals()[contestant](
                prefix, int(seq_length), samples, cache
            )
        dataset, batch = made[seq_length]
        begin = time.perf_counter()
        if what == "batch":
            for first in range(0, samples - BATCH + 1, BATCH):
                batch(first)
        else:
            for i in range(samples):
                dataset[i]
        seconds = time.perf_counter() - begin
        check = [
            int(tokens_of(batch(first)).sum())
            for first in range(0, samples - BATCH, samples // 7)
        ]
        print(json.dumps([seconds, check]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", help="a Python with megatron-core")
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=[2048, 512, 256])
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(*args.serve, args.samples)
    # One corpus, which a process of each contestant serves.
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        write_corpus(prefix, args.documents)
        pythons = {"ours": sys.executable} | (
            {"megatron": args.peer_python} if args.peer_python else {}
        )
        children = {
            name: subprocess.Popen(
                [
                    python,
                    __file__,
                    "--samples",
                    str(args.samples),
                    "--serve",
                    name,
                    str(prefix),
                    f"{folder}/{name}",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for name, python in pythons.items()
        }
        try:
            for name, child in children.items():
                while "ready" not in child.stdout.readline():
                    assert child.poll() is None, f"{name} did not start"
            # Contestants take turns.
            for seq_length in args.seq_lengths:
                for what in ("batch", "sample"):
                    report(children, what, seq_length, args)
        finally:
            for child in children.values():
                child.kill()


def ask(child: subprocess.Popen, request: str) -> tuple[float, list[int]]:
    child.stdin.write(request + "\n")
    child.stdin.flush()
    while not (line := child.stdout.readline()).startswith("["):  # the peer talks
        assert line or child.poll() is None, "a contestant died"
    return json.loads(line)


def report(children: dict, what: str, seq_length: int, args) -> None:
    rows = {name: [] for name in children}
    # builds, and warms the file
    checks = [ask(child, f"{what} {seq_length}")[1] for child in children.values()]
    assert all(check == checks[0] for check in checks), (
        "the contestants read other tokens"
    )
    for _ in range(args.rounds):
        for name, child in children.items():
            rows[name].append(ask(child, f"{what} {seq_length}")[0])
    for name, seconds in rows.items():
        rates = sorted(args.samples / s for s in seconds)
        batch = statistics.median(seconds) / args.samples * BATCH * 1e3
        print(
            f"{seq_length:6d}  {what:6s}  {name:9s}  {statistics.median(rates):9.0f} samples/s "
            f"({rates[0]:.0f}–{rates[-1]:.0f})  {batch:.3f} ms a batch of {BATCH}"
        )
    if len(rows) > 1:
        ratios = sorted(
            theirs / mine for mine, theirs in zip(rows["ours"], rows["megatron"])
        )
        print(
            f"{seq_length:6d}  {what:6s}  ratio      {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f}–{ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
