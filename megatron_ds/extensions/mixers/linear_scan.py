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

import torch
import torch.nn.functional as F

from ...ops.kernel_table import Operation, random_generator, random_tensors
from ...ops.work import CallWork, Product
from .chunk_masks import ChunkMasks, chunk_masks

CHUNK = 64
"""Tokens of a chunk. Sums of twice as many squares cost more than the passes over the states that they save."""


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
    chunks = _Chunks(q, k, v, decay, beta, chunk)
    masks = chunk_masks(documents, chunk, chunks.dtype, q.device)
    return chunks.scanned(masks).to(v.dtype)


class _Chunks:
    """The arguments, cut into c chunks: [b, g, n/g or 1, c, C, ..], in fp32 at least."""

    def __init__(self, q, k, v, decay, beta, chunk):
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
        x = x.unflatten(0, (-1, self.chunk)).unflatten(3, (self.groups, -1))
        return x.permute(2, 3, 4, 0, 1, 5)

    def scanned(self, masks: ChunkMasks) -> torch.Tensor:
        """Return o [s, b, n, dv]."""
        # Within chunks, for all of them at once.
        gap = self.total - self.total.transpose(-1, -2)
        fade = gap.masked_fill(~masks.within, -torch.inf).exp()
        read = self.q * (self.total.exp() * masks.reads)
        inner = (self.q @ self.k.transpose(-1, -2)) * fade
        write = self.k * ((self.total[..., -1:, :] - self.total).exp() * masks.writes)
        values, of_state = self._values(fade, masks)
        keeps = self.total[..., -1:, :].exp() * masks.passes
        # From chunk to chunk. The state is 0 before the first, and nothing reads that after the last.
        parts = [inner[:, :, :, 0] @ values[:, :, :, 0]]
        new = values[:, :, :, 0]
        state = None
        for i in range(1, values.shape[3]):
            added = write[:, :, :, i - 1].transpose(-1, -2) @ new
            state = added if state is None else state * keeps[:, :, :, i - 1] + added
            new = values[:, :, :, i]
            if of_state is not None:
                new = new - of_state[:, :, :, i] @ state
            parts.append(read[:, :, :, i] @ state + inner[:, :, :, i] @ new)
        out = torch.stack(parts, 3)  # [b, g, n/g, c, C, dv]
        out = out.permute(3, 4, 0, 1, 2, 5).flatten(3, 4).flatten(0, 1)
        return out[: self.length]

    def _values(
        self, fade: torch.Tensor, masks: ChunkMasks
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return U [.., C, dv] and W [.., C, dk], None for 0."""
        if self.beta is None:
            return self.v, None
        weighed = self.beta * fade * (self.k @ self.k.transpose(-1, -2))
        # Substitution takes the diagonal for 1, whatever it has.
        faded = self.k * (self.total.exp() * masks.reads)
        right = self.beta * torch.cat((self.v, faded), -1)
        solved = torch.linalg.solve_triangular(
            weighed, right, upper=False, unitriangular=True
        )
        values, of_state = solved.split((self.v.shape[-1], self.k.shape[-1]), -1)
        return values, of_state


linear_scan.benchmark_sizes = ((4096, 128),)


@linear_scan.example
def _delta_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    """Two groups of two heads, keys of length 1, several documents in each of two sequences."""
    shapes = (rows, 2, 2, width), (rows, 2, 2, width), (rows, 2, 4, width)
    q, k, v, gates, beta = random_tensors(
        dtype, device, *shapes, (rows, 2, 4), (rows, 2, 4)
    )
    k = F.normalize(k.detach(), dim=-1).requires_grad_()
    decay = -F.softplus(gates.detach()).requires_grad_()
    beta = beta.detach().sigmoid().requires_grad_()
    draw = random_generator(device, 2 * rows)
    ends = torch.rand(2, rows, generator=draw, device=draw.device) < 0.1
    return q, k, v, decay, beta, ends.cumsum(1).to(device), 16


@linear_scan.example
def _state_space_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
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
    products = scan_products(s, groups, heads, dk, dv, has_rule, chunk)
    moved = sum(x.numel() * x.element_size() for x in (q, k, v, v, decay))
    dtype = torch.promote_types(v.dtype, torch.float32)
    return CallWork(
        tuple(p._replace(number=p.number * b) for p in products),
        nbytes=moved,
        dtype=dtype,
    )


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
    passed = count - 1  # states between chunks
    scores = (1 + has_rule) * groups * count
    products = (
        Product(scores, chunk, chunk, dk),  # Q Kᵀ, K Kᵀ
        Product(heads * count, chunk, dv, chunk),  # (Q Kᵀ ∘ Γ) V'
        Product(heads * passed, chunk, dv, dk),  # Q S
        Product(heads * passed, dk, dv, chunk),  # Kᵀ V'
    )
    if not has_rule:
        return products
    return (
        *products,
        Product(heads * count, chunk, dk + dv, chunk),  # U, W
        Product(heads * passed, chunk, dv, dk),  # W S
    )
