"""`linear_scan`: linear recurrences of a state [dk, dv] for each head, in chunks of tokens.

    S_t = a_t S_{t-1} + k_t v_tᵀ,                                  o_t = S_tᵀ q_t        without β: state space duality
    S_t = a_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ,           o_t = S_tᵀ q_t        with β: gated delta rule

where a_t = exp(g_t). The first is that of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060, section 6), the second that of
gated delta networks (Yang et al. 2024, arXiv:2412.06464, equations 10 to 13). Within a chunk of C tokens both are
products of matrices. With G the sum of g since the chunk began, Γ_ij = exp(G_i - G_j) for j ≤ i, S the state before it:

    U = β V,  W = 0                                                without β (which is 1)
    (I + tril(β K Kᵀ ∘ Γ, -1)) [U, W] = β [V, K ∘ exp(G)]          with β: forward substitution
    V' = U - W S
    O  = (Q ∘ exp(G)) S + (Q Kᵀ ∘ Γ) V'
    S ← exp(G_C) S + (K ∘ exp(G_C - G))ᵀ V'

The host issues five operations for each chunk after the first; everything else is one operation for all chunks.

Shapes: s tokens, b sequences, n heads in g groups that share q and k, dk and dv channels of keys and of values.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ...ops.kernel_table import Operation, random_generator, random_tensors
from ...ops.work import CallWork, Product
from .chunk_masks import ChunkMasks, chunk_masks

CHUNK = 64
"""Tokens of a chunk. Sums of twice as many squares cost more than the passes over the states that they save."""
CHUNKS = 3
"""The dimension of chunks."""


@Operation
def linear_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Return o [s, b, n, dv] in the dtype of v, from a state of 0; computed in fp32 at least.

    q, k       [s, b, g, dk]: heads i n/g to (i+1) n/g - 1 use those of group i
    v          [s, b, n, dv]
    decay      [s, b, n], the logarithms g of the factors of the state, at most 0
    beta       [s, b, n], between 0 and 2, of the delta rule with keys of length 1; None: no delta rule
    documents  int64 [b, s], not decreasing: the state begins at 0 in each. None: sequences are one document
    chunk      tokens of a chunk; changes the rounding alone
    """
    chunks = ScanChunks(q, k, v, decay, beta, chunk)
    masks = chunk_masks(documents, chunk, chunks.dtype, q.device)
    return chunks.scanned(masks).to(v.dtype)


class ScanChunks:
    """The arguments, cut into c chunks: [b, g, n/g or 1, c, C, ..], in fp32 at least."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
        chunk: int,
    ):
        self.length = len(q)
        self.groups = q.shape[2]
        self.chunk = chunk
        self.dtype = torch.promote_types(v.dtype, torch.float32)
        self.q = self._cut(q)
        self.k = self._cut(k)
        self.v = self._cut(v)
        self.beta = None if beta is None else self._cut(beta[..., None])
        # Sum of the logarithms since the chunk began, [b, g, n/g, c, C, 1].
        self.total = self._cut(decay[..., None]).cumsum(-2)

    def _cut(self, x: torch.Tensor) -> torch.Tensor:
        """x [s, b, heads, d] → [b, g, heads/g, c, C, d]; 0 fills the last chunk."""
        missing = -len(x) % self.chunk
        x = F.pad(x.to(self.dtype), (0, 0, 0, 0, 0, 0, 0, missing))
        x = x.unflatten(0, (-1, self.chunk))
        x = x.unflatten(3, (self.groups, -1))
        return x.permute(2, 3, 4, 0, 1, 5)

    def _joined(self, chunks: list[torch.Tensor]) -> torch.Tensor:
        """Return the tokens of chunks, each [b, g, n/g, C, d] → [s, b, n, d]."""
        x = torch.stack(chunks)
        x = x.permute(0, 4, 1, 2, 3, 5)
        heads = x.flatten(3, 4)
        return heads.flatten(0, 1)[: self.length]

    def _since_begin(self, masks: ChunkMasks) -> torch.Tensor:
        """Return the factors from the state before a chunk to each of its tokens."""
        return self.total.exp() * masks.reads

    def scanned(
        self, masks: ChunkMasks, keep: Callable[..., None] | None = None
    ) -> torch.Tensor:
        """Return o [s, b, n, dv].

        keep: takes what the state within each chunk follows from: the factors between its tokens, those from the
        state before it, V' and the states before chunks but the first
        """
        # Within chunks, for all of them at once.
        gap = self.total - self.total.mT
        fade = gap.masked_fill(~masks.within, -torch.inf).exp()
        read = self.q * self._since_begin(masks)
        scores = self.q @ self.k.mT
        inner = scores * fade
        left = self.total[..., -1:, :] - self.total
        write = self.k * (left.exp() * masks.writes)
        values, of_state = self._values(fade, masks)
        keeps = self.total[..., -1:, :].exp() * masks.passes
        # Views of the chunks, one each.
        reads = read.unbind(CHUNKS)
        inners = inner.unbind(CHUNKS)
        writes = write.unbind(CHUNKS)
        news = values.unbind(CHUNKS)
        of_states = None if of_state is None else of_state.unbind(CHUNKS)
        kept = keeps.unbind(CHUNKS)
        # From chunk to chunk. The state is 0 before the first, and nothing reads that after the last.
        new = news[0]
        parts = [inners[0] @ new]
        state = None
        corrected = [new]
        states = []
        for i in range(1, len(news)):
            added = writes[i - 1].mT @ new
            state = added if state is None else state * kept[i - 1] + added
            new = news[i]
            if of_states is not None:
                new = new - of_states[i] @ state
            # The sum of what tokens read of the state and of their own chunk.
            of_earlier = reads[i] @ state
            parts.append(of_earlier + inners[i] @ new)
            if keep is not None:
                corrected.append(new)
                states.append(state)
        if keep is not None:
            keep(fade, self._since_begin(masks), corrected, states)
        return self._joined(parts)

    def _values(
        self, fade: torch.Tensor, masks: ChunkMasks
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return U [.., C, dv] and W [.., C, dk], None for 0."""
        if self.beta is None:
            return self.v, None
        squares = self.k @ self.k.mT
        weighed = self.beta * fade * squares
        faded = self.k * self._since_begin(masks)
        right = self.beta * torch.cat((self.v, faded), -1)
        # Substitution takes the diagonal for 1, whatever it has.
        solved = torch.linalg.solve_triangular(
            weighed,
            right,
            upper=False,
            unitriangular=True,
        )
        sizes = (self.v.shape[-1], self.k.shape[-1])
        values, of_state = solved.split(sizes, -1)
        return values, of_state


linear_scan.benchmark_sizes = ((4096, 128),)


@linear_scan.example
def _delta_example(
    rows: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple:
    """Two groups of two heads, keys of length 1, several documents in each of two sequences."""
    of_keys = (rows, 2, 2, width)
    of_values = (rows, 2, 4, width)
    of_gates = (rows, 2, 4)
    shapes = (of_keys, of_keys, of_values, of_gates, of_gates)
    q, k, v, gates, beta = random_tensors(dtype, device, *shapes)
    # Numbers as models have them.
    k = F.normalize(k.detach(), dim=-1).requires_grad_()
    decay = -F.softplus(gates.detach()).requires_grad_()
    beta = beta.detach().sigmoid().requires_grad_()
    # A document ends after one of ten tokens.
    draw = random_generator(device, 2 * rows)
    chances = torch.rand(2, rows, generator=draw, device=draw.device)
    ends = chances < 0.1
    documents = ends.cumsum(1).to(device)
    return q, k, v, decay, beta, documents, 16


@linear_scan.example
def _state_space_example(
    rows: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple:
    """The same without β and documents; the last chunk is not full."""
    q, k, v, decay, *_ = _delta_example(rows, width, dtype, device)
    return q, k, v, decay, None, None, 16


@linear_scan.states_work()
def _scan_work(q, k, v, decay, beta=None, documents=None, chunk=CHUNK) -> CallWork:
    """State the products above; one with a triangular inverse counts as one with the inverse."""
    s, b, groups, dk = q.shape
    heads, dv = v.shape[2:]
    has_rule = beta is not None
    of_one = scan_products(s, groups, heads, dk, dv, has_rule, chunk)
    products = tuple(each._replace(number=each.number * b) for each in of_one)
    # The result has the size of v.
    passed = (q, k, v, v, decay)
    moved = sum(x.numel() * x.element_size() for x in passed)
    dtype = torch.promote_types(v.dtype, torch.float32)
    return CallWork(products, nbytes=moved, dtype=dtype)


def scan_products(
    s: int,
    groups: int,
    heads: int,
    dk: int,
    dv: int,
    has_rule: bool,
    chunk: int = CHUNK,
) -> tuple[Product, ...]:
    """Return the products of a scan of one sequence. has_rule: the delta rule."""
    count = -(-s // chunk)
    within = heads * count
    between = heads * (count - 1)  # states between chunks
    scores = (1 + has_rule) * groups * count
    products = (
        Product(scores, chunk, chunk, dk),  # Q Kᵀ, K Kᵀ
        Product(within, chunk, dv, chunk),  # (Q Kᵀ ∘ Γ) V'
        Product(between, chunk, dv, dk),  # Q S
        Product(between, dk, dv, chunk),  # Kᵀ V'
    )
    if not has_rule:
        return products
    return (
        *products,
        Product(within, chunk, dk + dv, chunk),  # U, W
        Product(between, chunk, dv, dk),  # W S
    )
