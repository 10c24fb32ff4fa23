"""Closed forms of what a micro-batch keeps for its backward, in bytes, layer by layer: the check of the
planner's runs.

The tensors that our layers save, counted as storages: a view keeps all that it is a view of. With s
positions, b samples, t tensor-parallel ranks, e bytes a number, and S = s / t with sequence parallelism, else
s; n heads of d channels, f the feed-forward width and V the padded vocabulary, each divided by t:

    norm, twice a block  its input S b h e, two statistics a row      linear after it    its input S b h e
    attention            q, k, v; what the core needs (`_core`)       projection         its input s b n d e
    activation           its input s b f e; gated 2, ReLU 0 times     second linear      its input s b f e
    hidden dropout       a byte an element, S b h; on GPUs nothing    head               its input S b h e
    loss                 probabilities, and 17 bytes a token; on      embedding          rows, 8 bytes a token
                         GPUs logits, and 12 bytes a token;
                         by chunks 12 bytes a token alone

A block that drops tokens keeps what it needs of those it sees, and where they stand: eight bytes a token
(nine with sequence parallelism), rotary tables of its own, and the fields of the batch that recomputation
needs.

Full recomputation keeps the block's input only, selective all but what core attention needs beside q, k and
v. So this is Korthikanti et al. 2022 (arXiv:2205.05198), equations 1 to 4, for the layers as they are:
attention that keeps no scores where it is fused, and where its probabilities drop out six bytes or more of
each, on GPUs two numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron_ds.config.options.model import ModelConfig
from megatron_ds.extensions.kernels.cpu import (
    compiled_attention,
    compiled_norms,
    compiled_rotary,
)
from megatron_ds.mpu.context import SequenceSlice
from megatron_ds.ops.widened_products import has_products, working_elements

BLOCKS = ("block", "dropping block")


@dataclass(frozen=True)
class Workload:
    """One micro-batch on one rank.

    vocab   rows of the padded vocabulary on this rank;  device  "cpu" or "cuda"
    apart   attention keeps the documents of a sample apart
    kept_tokens  of each sample, by blocks that drop tokens; None: all
    logits  are kept; else the head and the loss go by chunks
    picked  the positions are some of a longer sequence
    """

    model: ModelConfig
    samples: int
    positions: int
    tp: int
    sequence_parallel: bool
    dtype: torch.dtype
    vocab: int
    device: str
    apart: bool = False
    kept_tokens: int | None = None
    logits: bool = True
    picked: bool = False

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def tokens(self) -> int:
        return self.samples * self.positions

    @property
    def drops(self) -> bool:
        """Whether blocks that may drop tokens do."""
        return self.kept_tokens is not None and self.kept_tokens < self.positions

    @property
    def rows(self) -> int:
        """Tokens of which this rank holds hidden states between linear layers."""
        part = SequenceSlice.of(
            tp=(0, self.tp), sequence_parallel=self.sequence_parallel
        )
        return self.samples * len(part.rows(self.positions))

    @property
    def hidden_bytes(self) -> int:
        """Hidden states between layers: what stages send one another, too."""
        return self.rows * self.model.hidden_size * self.itemsize

    @property
    def query_bytes(self) -> int:
        return (
            self.tokens
            * self.model.num_attention_heads
            // self.tp
            * self.model.head_dim
            * self.itemsize
        )

    @property
    def key_bytes(self) -> int:
        return (
            self.tokens
            * self.model.query_groups
            // self.tp
            * self.model.head_dim
            * self.itemsize
        )

    @property
    def wide_bytes(self) -> int:
        """Between the two linears of the feed-forward block, after the activation."""
        return self.tokens * self.model.ffn_size // self.tp * self.itemsize

    @property
    def scores(self) -> int:
        """Elements of all attention scores, if they were made."""
        return self.tokens * self.positions * self.model.num_attention_heads // self.tp


def kept_by_stage(
    work: Workload,
    kinds: Sequence[str],
    recompute: str | None = None,
    recomputed: int | None = None,
) -> int:
    """Bytes that a micro-batch keeps on a stage of these layers. recomputed: of its blocks only so many;
    None: all."""
    kept = 0
    blocks = 0
    wants_tables = False
    if kinds[0] == "dropping block" and work.drops:
        kept = (
            work.hidden_bytes
        )  # a stage keeps its input, of which other layers keep no copy
    for kind in kinds:
        blocks += kind in BLOCKS
        how = recompute if recomputed is None or blocks <= recomputed else None
        kept += kept_by_layer(work, kind, how)
        wants_tables |= (
            kind in BLOCKS
            and how != "full"
            and not (kind == "dropping block" and work.drops)
        )
    return kept + (
        _rotary_tables(work) + _document_bias(work, recompute) if wants_tables else 0
    )


def kept_by_layer(work: Workload, kind: str, recompute: str | None = None) -> int:
    """kind: as `models.Layer.sort` has it; another one counts as nothing."""
    if kind == "dropping block":
        return (
            _kept_by_dropping(work, recompute)
            if work.drops
            else kept_by_layer(work, "block", recompute)
        )
    if kind in ("embedding", "bert_embedding"):
        makes_rows = (
            work.tp > 1 or work.samples > 1
        )  # else they are a view of the batch
        return work.tokens * (8 * makes_rows + (work.tp > 1)) + _dropout(work)
    if kind == "norm":
        return work.hidden_bytes + _statistics(work) + _scale(work)
    if kind == "head":
        numbers = 17 if work.device == "cpu" and work.logits else 12
        logits = work.itemsize * work.vocab * work.logits
        return work.hidden_bytes + work.tokens * (logits + numbers) + 20
    if kind == "bert_head":
        return _bert_head(work)
    if kind != "block":
        return 0
    if recompute == "full":
        return work.hidden_bytes
    core = _arguments(work) if recompute == "selective" else _core(work)
    norms = 2 * (work.hidden_bytes + _statistics(work) + _scale(work))
    if work.model.use_parallel_residual:
        norms -= work.hidden_bytes  # both have the same input
    inputs = 2 * work.hidden_bytes + work.query_bytes + work.wide_bytes
    return norms + inputs + core + _into_activation(work) + 2 * _dropout(work)


def _kept_by_dropping(work: Workload, recompute: str | None) -> int:
    seen = replace(work, positions=work.kept_tokens, picked=True)
    places = seen.tokens * (8 + (work.sequence_parallel and work.tp > 1))
    # Attention keeps the documents, recomputation the batch: positions, tokens, labels, places, the mask in
    # fp32.
    batch = seen.tokens * (8 * work.apart + (4 * 8 + 4 if recompute else 0))
    tables = seen.samples * _rotary_tables(seen) if recompute != "full" else 0
    return (
        kept_by_layer(seen, "block", recompute)
        + places
        + batch
        + tables
        + _document_bias(seen, recompute)
    )


def workspace_bytes(work: Workload, kinds: Sequence[str]) -> int:
    """The bytes of products in fp32 where there are none of the dtype."""
    most: dict[str, int] = {}
    if _is_widened(work):
        for kind in kinds:
            tokens = (
                work.kept_tokens * work.samples
                if kind == "dropping block" and work.drops
                else work.tokens
            )
            for n, m in _linears(work, kind):  # forward, gradients of input and weight
                for shape in ((tokens, n, m), (tokens, m, n), (m, tokens, n)):
                    for role, numel in working_elements(*shape).items():
                        most[role] = max(most.get(role, 0), numel)
    return 4 * sum(most.values())


def _linears(work: Workload, kind: str) -> list[tuple[int, int]]:
    """(in, out) features of the layer's matrices on this rank."""
    model, tp = work.model, work.tp
    h = model.hidden_size
    q = model.num_attention_heads * model.head_dim // tp
    f = model.ffn_size // tp
    k = model.query_groups * model.head_dim // tp
    if kind in BLOCKS:
        return [(h, q + 2 * k), (q, h), (h, 2 * f if model.is_gated else f), (f, h)]
    return {"head": [(h, work.vocab)], "bert_head": [(h, h), (h, work.vocab)]}.get(
        kind, []
    )


def _bert_head(work: Workload) -> int:
    """The head's of a GPT; before it the input of the dense layer, of the activation and of the norm; and of
    the binary head the pooled first position, and the position itself where it had to come from another rank,
    and two probabilities."""
    transform = 3 * work.hidden_bytes + _statistics(work) + _scale(work)
    order = 0
    if work.model.bert_binary_head:
        first = work.samples * work.model.hidden_size * work.itemsize
        order = first * (2 if work.sequence_parallel else 1) + 8 * work.samples + 16
    return kept_by_layer(work, "head") + transform + order


def _statistics(work: Workload, rows: int | None = None) -> int:
    """The statistics that a norm keeps beside its input. rows: those of the rank if None."""
    rows = work.rows if rows is None else rows
    if work.model.normalization == "RMSNorm":
        return 4 * rows
    in_fp32 = (
        work.device != "cpu"
        or work.dtype in compiled_norms.DTYPES
        and compiled_norms.extension()
    )
    return 2 * rows * (4 if in_fp32 else work.itemsize)


def _scale(work: Workload) -> int:
    """One plus the weight of a norm, if that is what it multiplies by."""
    return (
        work.model.hidden_size * work.itemsize if work.model.apply_layernorm_1p else 0
    )


def _head_norms(work: Workload) -> int:
    """Statistics of each head of queries and keys, scales, and queries put together, which are the input.

    The keys before their norm are in the projection, whose values attention keeps."""
    if not work.model.qk_layernorm:
        return 0
    heads = (
        work.tokens
        * (work.model.num_attention_heads + work.model.query_groups)
        // work.tp
    )
    scales = (
        2 * work.model.head_dim * work.itemsize if work.model.apply_layernorm_1p else 0
    )
    return _statistics(work, heads) + scales + _queries_together(work)


def _queries_together(work: Workload) -> int:
    """A copy of the queries, if those of several groups lie apart."""
    several = (
        work.model.query_groups // work.tp > 1 and work.query_bytes > work.key_bytes
    )
    return work.query_bytes if several else 0


def _dropout(work: Workload) -> int:
    """The mask of hidden dropout. Kernels for GPUs draw it once more in backward."""
    return (
        work.rows * work.model.hidden_size
        if work.model.hidden_dropout and work.device == "cpu"
        else 0
    )


def _rotary_tables(work: Workload) -> int:
    """Cosines and sines, shared by all blocks of a stage."""
    model = work.model
    if not model.is_rotary:
        return 0
    channels = int(model.head_dim * model.rotary_percent) // 2 * 2
    return 2 * 4 * work.positions * (channels // 2)


def _document_bias(work: Workload, recompute: str | None) -> int:
    """What is added to the scores of documents that are kept apart, or with dropout their mask, shared by all
    blocks of a stage. Compiled attention needs none."""
    if not work.apart or recompute or _is_compiled(work):
        return 0
    if work.model.attention_dropout:
        return work.tokens * work.positions if work.device == "cpu" else 0
    return work.tokens * work.positions * (4 if _is_widened(work) else work.itemsize)


def _is_compiled(work: Workload) -> bool:
    model = work.model
    has_places = work.picked and model.position_embedding_type == "alibi"
    is_known = work.device == "cpu" and not model.attention_dropout and not has_places
    return (
        is_known
        and not _is_widened(work)
        and model.head_dim in compiled_attention.CHANNELS
        and work.dtype in compiled_attention.NAMES
        and not compiled_attention.reason_against(work.dtype)
    )


def _is_widened(work: Workload) -> bool:
    return work.device == "cpu" and not has_products(work.dtype)


def _into_activation(work: Workload) -> int:
    parts = 2 if work.model.is_gated else 1
    return work.wide_bytes * {"relu": 0}.get(work.model.activation, parts)


def _arguments(work: Workload) -> int:
    """The storages behind q, k and v: slices of one projection, unless they were turned; queries of several
    groups are put together."""
    q, k = work.query_bytes, work.key_bytes
    if work.model.is_rotary or work.model.qk_layernorm:
        turned = 0 if _copies_values(work) else q + k
        return (q + 2 * k) + turned + _head_norms(work)
    return (q + 2 * k) + _queries_together(work)


def _copies_values(work: Workload) -> bool:
    """Whether turning queries and keys copies values, too, so that nothing of the projection is kept."""
    if work.device != "cpu":
        return True
    is_compiled = (
        work.dtype in compiled_rotary.DTYPES and compiled_rotary.extension() is not None
    )
    return is_compiled and not work.model.qk_layernorm


def _core(work: Workload) -> int:
    """What core attention keeps, its output apart."""
    causal = work.model.model != "bert"
    own = None
    if _is_widened(work):  # then it works on copies in fp32
        work = replace(work, dtype=torch.float32)
        own = work.query_bytes + 2 * work.key_bytes
    model, q = work.model, work.query_bytes
    if model.attention_dropout and work.device != "cpu":
        # before and after dropout; seeds, from which backward draws the mask again; that of picked tokens
        of_mask = (
            work.scores
            if work.picked
            else 8 * work.samples * model.num_attention_heads // work.tp
        )
        return 2 * work.scores * work.itemsize + of_mask + _unfused_arguments(work, own)
    if model.attention_dropout:
        # in fp32; the mask; those that stay, as they compute
        probabilities = work.scores * (4 + 1 + work.itemsize)
        # what no query sees; queries that see nothing
        forbidden = work.positions**2 if causal else work.samples
        closed = work.tokens * (work.positions + 1) if work.apart else forbidden
        return probabilities + closed + _unfused_arguments(work, own)
    sums = (
        4 * work.tokens * model.num_attention_heads // work.tp
    )  # logarithms of the sums of exponentials
    # the output, once more as the projection takes it
    copied = q if own or work.device != "cpu" and work.samples > 1 else 0
    # which keys count, as numbers to be added
    padding = 0 if causal or _is_compiled(work) else work.tokens * work.itemsize
    arguments = own or _arguments(work)
    if _is_compiled(work) and (
        model.is_rotary or model.qk_layernorm
    ):  # values are copied
        arguments = work.query_bytes + 2 * work.key_bytes + _head_norms(work)
    return arguments + sums + copied + padding


def _unfused_arguments(work: Workload, own: int | None) -> int:
    """Scaled queries; keys and values, repeated where several queries share them. own: bytes of q, k and v,
    if copies."""
    q, k = work.query_bytes, work.key_bytes
    if q > k and work.samples * work.model.query_groups > work.tp:
        return 3 * q
    if own:
        return q + 2 * k
    if work.model.is_rotary:
        return q + k + (k if _copies_values(work) else q + 2 * k)
    return q + (q + 2 * k)
