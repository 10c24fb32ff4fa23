"""Bytes of state and traffic of every ZeRO stage, measured on real gloo ranks, beside the figures of the
paper.

    python benchmarks/zero_memory.py                       1, 2, 4 and 8 ranks, about two minutes on two cores
    python benchmarks/zero_memory.py --ranks 1 3 --hidden 128

Memory: after a step, every tensor that is alive in the rank's process, found by the garbage collector, each
storage once, less single numbers, what was alive before the model was built, and the buffers that gradients
only fill up in (`working_bytes`). So nothing is taken from the optimizer's own accounting but that. Traffic:
what the collectives counted in one step of one micro-batch, less the norm's 24 bytes. Both are compared with
the paper, within 0.5 %, and with what zero/prediction.py predicts, to the byte. Prints two
Markdown tables; exit code 1 when a figure is off.

Rajbhandari et al. 2020 (arXiv:1910.02054): section 5, figure 1 for memory, section 7 for traffic. Ψ elements,
N ranks, with w, g, o bytes an element for weights, gradients, and optimizer (masters and moments):

    stage     0           1               2               3
    memory    (w+g+o)Ψ    (w+g)Ψ + oΨ/N   wΨ + (g+o)Ψ/N   (w+g+o)Ψ/N
    traffic   2Ψ          2Ψ              2Ψ              3Ψ              elements, × (N-1)/N
"""

import argparse
import gc
import itertools
import multiprocessing
import os
import socket
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.mpu.param_spec import DATA_AXES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
SEQ_LENGTH = 32
VOCAB = 8192
NORM_BYTES = 24
TOLERANCE = 0.005
SMALL_BYTES = (
    64  # storages below are single numbers: a count of steps for each parameter, scales
)


@dataclass(frozen=True)
class Precision:
    """w, g, o: bytes an element of weights, gradients, and masters with moments."""

    name: str
    flags: tuple[str, ...]
    w: int
    g: int
    o: int

    def promised(self, stage: int, psi: int, n: int) -> float:
        split = {0: 0, 1: self.o, 2: self.g + self.o, 3: self.w + self.g + self.o}[
            stage
        ]
        return psi * (self.w + self.g + self.o - split + split / n)

    def formula(self, stage: int) -> str:
        split = {0: 0, 1: self.o, 2: self.g + self.o, 3: self.w + self.g + self.o}[
            stage
        ]
        whole = self.w + self.g + self.o - split
        return " + ".join(
            ([f"{whole}Ψ"] if whole else []) + ([f"{split}Ψ/N"] if split else [])
        )


PRECISIONS = (
    Precision(
        "bf16, gradients bf16", ("--bf16", "--main-grads-dtype", "bf16"), 2, 2, 12
    ),
    Precision("bf16, gradients fp32", ("--bf16",), 2, 4, 12),
    Precision("fp32", (), 4, 4, 8),
)


@dataclass(frozen=True)
class Measured:
    """Figures of a rank. state, predicted_state, working: bytes. sent, predicted_sent: payload bytes by operation.

    elements  what a ring sends, in elements of what is sent
    psi       parameters of the model
    """

    psi: int
    state: int
    predicted_state: int
    working: int
    sent: dict[str, int]
    predicted_sent: dict[str, int]
    elements: float


def flags_of(
    args: argparse.Namespace, precision: Precision, stage: int, n: int
) -> list[str]:
    return [
        "--num-layers",
        str(args.layers),
        "--hidden-size",
        str(args.hidden),
        "--num-attention-heads",
        "4",
        "--seq-length",
        str(SEQ_LENGTH),
        "--max-position-embeddings",
        str(SEQ_LENGTH),
        "--vocab-size",
        str(VOCAB),
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        str(n),
        "--train-iters",
        "1",
        "--lr",
        "1e-3",
        "--mock-data",
        "--tokenizer-type",
        "NullTokenizer",
        "--zero-stage",
        str(stage),
        *precision.flags,
    ]


def measure(flags: list[str], rank: int, n: int, port: int) -> Measured:
    """One rank, in a worker process: build, step, look."""
    import torch

    from megatron_ds.config import parse
    from megatron_ds.mpu import launch as launching
    from megatron_ds.progress.ramps import Progress
    from megatron_ds.training.build import build_replica
    from megatron_ds.training.distributed import joined
    from megatron_ds.training.step import train_step
    from tests.harness.layout_comparison import global_batch_share, random_samples

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The rank, as a launcher would start it.
    config = parse(flags, world_size=n)
    launch = launching.read_launch(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(n),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    )
    # One step: what is alive after it is the state.
    before = live_storages()
    with joined(config, launch) as mesh:
        replica = build_replica(config, mesh)
        batch = global_batch_share(
            random_samples(n, SEQ_LENGTH, VOCAB, seed=1), 0, n, config, mesh
        )
        mesh.traffic.clear()
        train_step(replica, batch, Progress(), learning_rate=1e-3, weight_decay=0.1)
        del batch
        state = sum(size for key, size in live_storages().items() if key not in before)
        bytes_sent = {
            op: count
            for (op, axes, _), count in mesh.traffic.bytes.items()
            if axes == "dp-cp"
        }
        wire = {
            op: count
            for (op, axes, _), count in mesh.traffic.wire_bytes().items()
            if axes == "dp-cp"
        }
    # The norm's messages are not counted: they do not grow with the model.
    if n > 1:
        wire["all_reduce"] *= 1 - NORM_BYTES / bytes_sent["all_reduce"]
        bytes_sent["all_reduce"] -= NORM_BYTES
    itemsize = {"all_gather": replica.parameters[0].dtype.itemsize}
    gradient_bytes = 4 if config.optimizer.gradient_dtype == "float32" else 2
    return Measured(
        psi=sum(p.spec.numel for p in replica.parameters),
        working=replica.optimizer.working_bytes,
        state=state - replica.optimizer.working_bytes,
        predicted_state=predicted_bytes(replica, config, rank, n, gradient_bytes),
        sent={op: count for op, count in bytes_sent.items() if count},
        predicted_sent={
            op: count
            for (op, _), count in replica.optimizer.traffic(
                1, config.zero.stage >= 2, False
            ).items()
        },
        elements=sum(
            count / itemsize.get(op, gradient_bytes) for op, count in wire.items()
        ),
    )


def live_storages() -> dict[int, int]:
    """Bytes of the storage of every tensor alive in this process, by address."""
    import torch

    gc.collect()
    tensors = [
        t
        for t in gc.get_objects()
        if issubclass(type(t), torch.Tensor) and t.device.type != "meta"
    ]
    storages = [t.untyped_storage() for t in tensors]
    return {s.data_ptr(): s.nbytes() for s in storages if s.nbytes() >= SMALL_BYTES}


def predicted_bytes(replica, config, rank: int, n: int, gradient_bytes: int) -> int:
    """From names and sizes alone."""

    from megatron_ds.zero.prediction import ElementBytes, predict_sets
    from megatron_ds.zero.set_plan import Fact, plan_sets
    from megatron_ds.zero.settings import ZeroSettings

    layer_of = {
        p: i
        for i, module in reversed(list(enumerate(replica.modules)))
        for p in module.parameters()
    }
    dtype = replica.parameters[0].dtype
    facts = [
        Fact(p.spec.name, p.spec.numel, str(dtype), stage=0, layer=layer_of[p])
        for p in replica.parameters
    ]
    plans = plan_sets(facts, ZeroSettings.from_config(config), {DATA_AXES: n})
    return predict_sets(
        plans, {DATA_AXES: rank}, ElementBytes(dtype.itemsize, gradient_bytes)
    ).total


def run(
    pool: ProcessPoolExecutor,
    args: argparse.Namespace,
    precision: Precision,
    stage: int,
    n: int,
) -> list[Measured]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    flags = flags_of(args, precision, stage, n)
    return [
        rank.result()
        for rank in [pool.submit(measure, flags, rank, n, port) for rank in range(n)]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--hidden",
        type=int,
        default=264,
        help="not a multiple of 64, so that there is padding",
    )
    args = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["megatron_ds.training.build", "megatron_ds.training.distributed"]
    )
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    results: dict[tuple, list[Measured]] = {}
    with ProcessPoolExecutor(max(args.ranks), mp_context=context) as pool:
        for precision in PRECISIONS:
            for stage in range(4):
                for n in args.ranks:
                    results[precision, stage, n] = run(pool, args, precision, stage, n)
                    print(
                        f"{precision.name}, stage {stage}, {n} ranks",
                        file=sys.stderr,
                        flush=True,
                    )
    return show(results, args)


def show(results: dict[tuple, list[Measured]], args: argparse.Namespace) -> int:
    psi = next(iter(results.values()))[0].psi
    wrong = []
    several = [n for n in args.ranks if n > 1]
    print(
        f"Ψ = {psi:,} parameters: {args.layers} layers, hidden size {args.hidden}, vocabulary {VOCAB}\n"
    )
    _head("state per rank, MiB (off the promise)", args.ranks)
    for precision, stage in itertools.product(PRECISIONS, range(4)):
        cells = [
            _memory_cell(
                results[precision, stage, n],
                precision.promised(stage, psi, n),
                wrong,
                (precision.name, stage, n),
            )
            for n in args.ranks
        ]
        print(
            f"| {precision.name} | {stage} | {precision.formula(stage)} | {' | '.join(cells)} |"
        )
    print()
    _head("sent per rank and step, in Ψ (N − 1)/N elements", several)
    for precision, stage in itertools.product(PRECISIONS, range(4)):
        promised = 3 if stage == 3 else 2
        cells = [
            _traffic_cell(
                results[precision, stage, n],
                promised,
                psi * (n - 1) / n,
                wrong,
                (precision.name, stage, n),
            )
            for n in several
        ]
        print(f"| {precision.name} | {stage} | {promised} | {' | '.join(cells)} |")
    working = max(r.working for ranks in results.values() for r in ranks)
    print(
        f"\nBuffers that gradients fill up in, stages 2 and 3, come on top: at most {working / 2**20:.2f} "
        "MiB."
    )
    print(
        "\n".join(f"OFF: {line}" for line in wrong)
        if wrong
        else "All bytes, of state and sent, equal those predicted on every rank."
    )
    return 1 if wrong else 0


def _head(what: str, ranks: list[int]) -> None:
    print(f"| {what} | stage | promised | {' | '.join(f'N = {n}' for n in ranks)} |")
    print(f"|---|---|---|{'---|' * len(ranks)}")


def _memory_cell(
    ranks: list[Measured], promised: float, wrong: list, case: tuple
) -> str:
    """The rank that holds the most."""
    wrong += [
        f"{case}, rank {i}: {r.state} bytes of state, predicted {r.predicted_state}"
        for i, r in enumerate(ranks)
        if r.state != r.predicted_state
    ]
    most = max(r.state for r in ranks)
    if abs(most / promised - 1) > TOLERANCE:
        wrong.append(f"{case}: {most} bytes of state, promised {promised:.0f}")
    return f"{most / 2**20:.2f} ({100 * (most / promised - 1):+.2f} %)"


def _traffic_cell(
    ranks: list[Measured], promised: int, unit: float, wrong: list, case: tuple
) -> str:
    wrong += [
        f"{case}, rank {i}: {r.sent} sent, predicted {r.predicted_sent}"
        for i, r in enumerate(ranks)
        if r.sent != r.predicted_sent
    ]
    most = max(r.elements for r in ranks) / unit
    if abs(most / promised - 1) > TOLERANCE:
        wrong.append(f"{case}: {most} Ψ (N-1)/N elements sent, promised {promised}")
    return f"{most:.4f}"


if __name__ == "__main__":
    sys.exit(main())
