"""Train a tiny model under a layout, and measure its difference from another layout, usually one process.

`train_layout` runs on one rank of any transport (processes in tools/compare_layouts.py, threads in the tests)
and returns a `Trace`: losses, gradient norms, and the rank's boxes of the final logical weights. `merge`
combines the traces of all ranks; `difference` compares two merged traces.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from megatron_ds.batch.batch import Batch
from megatron_ds.checkpoint.pieces import views, written_here
from megatron_ds.config import RunConfig
from megatron_ds.config.training_schedule import (
    make_batch_size,
    make_beta1,
    make_learning_rates,
    make_weight_decay,
)
from megatron_ds.data.loading.datasets import Datasets
from megatron_ds.data.loading.loader import Loader
from megatron_ds.data.samples.gpt_data import GPT_DATA
from megatron_ds.data.samples.packing import PackedDataset, build_packs
from megatron_ds.data.tokenizers.base import NullTokenizer
from megatron_ds.errors import ConfigError, LayoutError
from megatron_ds.extensions.preference.answer_pairs import PairDataset
from megatron_ds.models import MODELS
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.progress.ramps import Progress
from megatron_ds.registry import did_you_mean
from megatron_ds.training.build import Replica, build_replica
from megatron_ds.training.samples import build_loaders, rearranged
from megatron_ds.training.step import train_step

# Key of a layout → its flag. Those of SWITCHES are flags without a value, given if the value of the key is 1.
LAYOUT_KEYS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "dp": None,
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "cp": "--context-parallel-size",
    "comm_type": "--cp-comm-type",
    "hcp": "--hierarchical-context-parallel-sizes",
    "sp": "--sequence-parallel",
    "schedule": "--pipeline-schedule",
    "chunks": "--num-virtual-stages-per-pipeline-rank",
    "cut": "--pipeline-cut",
    "zero": "--zero-stage",
    "recompute": "--recompute-granularity",
    "layout": "--pipeline-layout",
    "mbs": "--micro-batch-size",
    "accumulate": "--zero-accumulate",
    "persist": "--stage3-param-persistence-threshold",
    "prefetch": "--stage3-prefetch-bucket-size",
    "pin": "--zero3-pin-stage",
    "bucket": "--reduce-bucket-size",
    "grads": "--main-grads-dtype",
    "comm": "--communication-data-type",
    "divide": "--gradient-predivide-factor",
    "prescale": "--prescale-gradients",
    "offload": "--offload-optimizer",
    "ratio": "--offload-optimizer-ratio",
    "offload_param": "--offload-param",
    "nvme": "--offload-nvme-path",
    "sub_group": "--sub-group-size",
    "hpz": "--zero-hpz-partition-size",
    "qw": "--zero-quantized-weights",
    "qg": "--zero-quantized-gradients",
    "logits": "--cross-entropy-chunks",
    "tiles": "--tiled-mlp",
    "inputs_in_cpu": "--checkpoint-in-cpu",
    "parts": "--distribute-saved-activations",
}
SWITCHES = {"sp", "prescale", "inputs_in_cpu", "parts", "qw", "qg"}
ENDLESS = 1 << 40  # samples
# of GPT mock samples: ids that are multiples of it end a document, which makes masks of all shapes
DOCUMENT_ENDS = 11


@dataclass(frozen=True)
class LayoutRequest:
    """A layout as the user wrote it ("tp=2,pp=2,dp=1,sp=1"), its world size and its flags.

    reference: the layout of one process to compare with. It has the same micro-batch size, because all
    micro-batches have the same weight, whatever the number of tokens in their loss.
    """

    text: str
    world_size: int
    flags: tuple[str, ...]
    reference: str


def parse_layout(text: str, **defaults: str) -> LayoutRequest:
    """The layout of a text such as "tp=2,pp=2". Raises ConfigError with the most similar key for an unknown
    one.

    defaults: values of keys that the text does not contain
    """
    values = dict(defaults)
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in LAYOUT_KEYS or not value:
            raise ConfigError(
                f"layout {text!r}: cannot read {item!r}{did_you_mean(key, list(LAYOUT_KEYS))}. "
                f"Write key=value pairs with keys {', '.join(LAYOUT_KEYS)}."
            )
        values[key] = value
    world = 1
    for axis in ("tp", "cp", "pp", "dp"):
        if not values.get(axis, "1").isdigit():
            raise ConfigError(
                f"layout {text!r}: {axis}={values[axis]} is not a positive number."
            )
        world *= int(values.get(axis, "1"))
    flags: list[str] = []
    for key, value in values.items():
        if key in SWITCHES:
            flags += [LAYOUT_KEYS[key]] if value == "1" else []
        elif LAYOUT_KEYS[key] and value != "none":
            flags += [LAYOUT_KEYS[key], *value.split()]
    return LayoutRequest(
        text, world, tuple(flags), f"tp=1,pp=1,dp=1,mbs={values.get('mbs', 1)}"
    )


@dataclass
class Trace:
    """Results of a training on one rank; after `merge`, on all ranks.

    losses, grad_norms  one number per step, the same on every rank
    metrics             of each step, what layers added, by name
    boxes               (name, logical shape, logical offset, values) of this rank's final weights
    """

    losses: list[float]
    grad_norms: list[float]
    metrics: list[Mapping[str, float]]
    boxes: list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]


def mock_samples(config: RunConfig, count: int, seed: int) -> Sequence:
    """Samples for `train_layout`, the same on every rank: random ids for a GPT, else mock samples of the
    model.
    """
    model, kind = config.model, MODELS[config.model.model].data
    if kind is GPT_DATA:
        return random_samples(count, model.seq_length, model.vocab_size, seed)
    made = kind.mock(count, config, SimpleNamespace(vocab_size=model.vocab_size), seed)
    return [made[i] for i in range(count)]


def random_samples(
    count: int, seq_length: int, vocab_size: int, seed: int
) -> torch.Tensor:
    """int64 [count, seq_length + 1], the same on every rank."""
    return torch.randint(
        vocab_size,
        (count, seq_length + 1),
        generator=torch.Generator().manual_seed(seed),
    )


def train_layout(
    config: RunConfig,
    mesh: Mesh,
    steps: int,
    samples: Sequence,
    *,
    watch: Callable[[Replica], None] | None = None,
) -> Trace:
    """Train `steps` steps on `samples`, as of `mock_samples` (global batches in turn, wrapping around).
    Collective over the world.

    watch: called with the replica before the first step, to inspect it or to add hooks to its modules.
    """
    replica = build_replica(config, mesh)
    if watch is not None:
        watch(replica)
    rates = make_learning_rates(config)
    weight_decay = make_weight_decay(config)
    batch_size = make_batch_size(config)
    beta1 = make_beta1(config)
    progress = Progress()
    losses = []
    norms = []
    metrics = []
    with closing(open_loader(config, samples, mesh)) as loader:
        for _ in range(steps):
            size = batch_size(progress)
            outcome = train_step(
                replica,
                replica.batches.training(loader, progress, size),
                progress,
                learning_rate={name: rate(progress) for name, rate in rates.items()},
                weight_decay=weight_decay(progress),
                beta1=beta1(progress) if beta1 else None,
            )
            progress = progress.after(
                size, size * config.model.seq_length, skipped=outcome.skipped
            )
            losses.append(outcome.loss)
            norms.append(outcome.grad_norm)
            metrics.append(outcome.named)
    return Trace(losses, norms, metrics, list(_weight_boxes(replica)))


def global_batch_share(
    samples: Sequence, first: int, size: int, config: RunConfig, mesh: Mesh
) -> Batch:
    """This rank's `Batch` of the global batch that starts at stream position `first`, in Megatron's sampling
    order."""
    data = mesh.samples
    with closing(open_loader(config, samples, mesh)) as loader:
        return loader.batch(first, size, data.rank, data.size).to(mesh.device)


def open_loader(config: RunConfig, samples: Sequence, mesh: Mesh) -> Loader:
    """The loader of a run over `samples`, repeated without end: packed, rearranged and sent as configured. A
    dataset that is packed already is read as it is.
    """
    words = NullTokenizer(config.model.vocab_size - 1)
    if isinstance(samples, PackedDataset | PairDataset):
        dataset = samples
    elif MODELS[config.model.model].data is not GPT_DATA:
        dataset = Cycle(samples)
    elif config.data.pack_documents:
        corpus = MockCorpus(_with_ends(samples, words.eod), words.eod)
        packs = build_packs(
            corpus.lengths,
            range(len(corpus.lengths)),
            config.model.seq_length,
            config.train.seed,
        )
        dataset = PackedDataset(
            corpus, packs, config.model.seq_length, ENDLESS, config.train.seed
        )
    else:
        dataset = Cycle([{"tokens": row} for row in _with_ends(samples, words.eod)])
    return build_loaders(
        config, rearranged(config, Datasets(dataset, None, None), words), words, mesh
    ).train


def _with_ends(samples: torch.Tensor, eod: int) -> np.ndarray:
    return samples.where(samples % DOCUMENT_ENDS != 0, eod).numpy()


class Cycle:
    """A dataset that repeats its samples without end."""

    def __init__(self, samples: Sequence):
        self.samples = samples

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, i: int):
        return self.samples[i % len(self.samples)]


class MockCorpus:
    """The documents in the concatenation of samples, with the interface that `PackedDataset` reads."""

    def __init__(self, rows: np.ndarray, eod: int):
        tokens = rows.ravel()
        self.documents = [
            d for d in np.split(tokens, np.flatnonzero(tokens == eod) + 1) if len(d)
        ]
        self.lengths = np.array([len(d) for d in self.documents], np.int32)

    def get(self, document: int, start: int, count: int) -> np.ndarray:
        return self.documents[document][start : start + count]

    def refuse_negative(self, ids: np.ndarray, place: str) -> None:
        """Do nothing: the tokens were drawn from the vocabulary."""


def _weight_boxes(replica):
    # All weights, also those below adapters, which a checkpoint leaves out.
    coordinates = replica.mesh.coordinates
    pieces = (*replica.optimizer.pieces(), *replica.step_state.pieces())
    for piece in written_here((p for p in pieces if p.kind == "weight"), coordinates):
        for view in views(piece, coordinates):
            yield (
                piece.spec.name,
                piece.spec.shape,
                view.offset,
                view.tensor.float().cpu().clone(),
            )


def merge(traces: Sequence[Trace]) -> tuple[Trace, dict[str, torch.Tensor]]:
    """The run's losses and norms, and its whole logical weights.

    Raises LayoutError if an element is on no rank or on several.
    """
    weights, seen = {}, {}
    for name, shape, offset, values in itertools.chain.from_iterable(
        t.boxes for t in traces
    ):
        target = weights.setdefault(name, torch.empty(shape))
        count = seen.setdefault(name, torch.zeros(shape, dtype=torch.int8))
        where = tuple(slice(o, o + n) for o, n in zip(offset, values.shape))
        target[where] = values
        count[where] += 1
    for name, count in seen.items():
        if not (count == 1).all():
            raise LayoutError(
                f"{name}: {int((count == 0).sum())} elements on no rank, "
                f"{int((count > 1).sum())} on several."
            )
    return traces[0], weights


@dataclass(frozen=True)
class Difference:
    """Largest relative differences: of any step's loss, any step's gradient norm; of final weights (see
    `difference`).
    """

    loss: float
    grad_norm: float
    weights: float

    def is_within(self, limit: "Difference") -> bool:
        return (
            self.loss <= limit.loss
            and self.grad_norm <= limit.grad_norm
            and self.weights <= limit.weights
        )

    def __str__(self) -> str:
        return f"loss {self.loss:.2e}, grad norm {self.grad_norm:.2e}, weights {self.weights:.2e}"


def difference(
    run: tuple[Trace, dict], reference: tuple[Trace, dict], model
) -> Difference:
    """weights: largest over tensors of ‖w − w₀‖ / ‖w₀‖ (Frobenius), of what the loss determines
    (`determined`).
    """
    (trace, weights), (trace0, weights0) = run, reference
    if weights.keys() != weights0.keys():
        raise LayoutError(
            f"different parameters: {sorted(weights.keys() ^ weights0.keys())}"
        )
    return Difference(
        _largest(trace.losses, trace0.losses),
        _largest(trace.grad_norms, trace0.grad_norms),
        max(
            _tensor_difference(
                determined(n, weights[n], model), determined(n, w0, model)
            )
            for n, w0 in weights0.items()
        ),
    )


def determined(name: str, values: torch.Tensor, model) -> torch.Tensor:
    """`values` without what the loss does not depend on.

    A bias of the keys adds the same number to all scores of a query, which does not change the softmax.
    Without rotary positions its gradient is zero except for rounding, and Adam normalizes that rounding to
    full steps. These rows are left out, and the bias of the norm of the keys, which does the same.
    """
    if model.is_rotary:
        return values
    if name.endswith("k_layernorm.bias"):
        return values[:0]
    if not name.endswith("linear_qkv.bias"):
        return values
    groups = values.view(
        model.query_groups, -1, model.head_dim
    )  # per group [queries.., key, value]
    return torch.cat((groups[:, :-2], groups[:, -1:]), dim=1)


def _largest(values: Sequence[float], reference: Sequence[float]) -> float:
    """A step that overflowed must overflow in both runs."""
    same = [
        (x, y)
        for x, y in zip(values, reference, strict=True)
        if math.isfinite(x) or math.isfinite(y)
    ]
    return max(
        (
            abs(x - y) / abs(y) if math.isfinite(x) and math.isfinite(y) else math.inf
            for x, y in same
        ),
        default=0.0,
    )


def _tensor_difference(w: torch.Tensor, w0: torch.Tensor) -> float:
    return float(
        (w.double() - w0.double()).norm() / w0.double().norm().clamp(min=1e-30)
    )
