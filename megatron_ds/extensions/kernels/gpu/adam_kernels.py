"""AdamW over rows of flat tensors, a launch for all that are alike: csrc/gpu/adam.cu."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ....host.device_copies import on_device
from ....ops import adam
from ....ops.kernel_table import GPU
from ....ops.meta_tensors import has_memory
from ....ops.update_rows import AdamRow, AdamStep
from .gpu_kernel import GpuKernel, type_name

KERNEL = GpuKernel(
    "adam.cu",
    "adamw",
    "ptr ptr i32 i32 f32 f32 f32 f32 f32 f32 f32 f32 ptr ptr",
    examples=[
        ("float", "float"),
        ("float", "bf16"),
        ("bf16", "bf16"),
        ("fp16", "fp16"),
    ],
)
THREADS = 256
# elements of a block
CHUNK = 8192
SHORT_CHUNK = 2048
MANY_ELEMENTS = 1 << 23  # from which on a GPU is full with blocks of CHUNK elements
MOST_PLANNED = 64  # parameter groups whose tables are kept
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
LOWS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AdamLaunch:
    """Rows of the same dtypes. table: on their device, as csrc/gpu/adam.cu reads it, with addresses."""

    types: tuple[str, str]
    table: torch.Tensor
    chunk: int
    blocks: int

    def start(
        self,
        base: torch.Tensor | None,
        rates: Sequence[float],
        divisor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        """base: the tensor from which addresses count. The others: as csrc/gpu/adam.cu has them."""
        KERNEL(
            self.types,
            self.blocks,
            THREADS,
            self.table,
            base,
            len(self.table),
            self.chunk,
            *rates,
            divisor,
            skip,
        )


def adamw(grad: torch.Tensor, rows: Sequence[AdamRow], how: AdamStep) -> None:
    """`ops.adam.adamw` with the bits of its reference. Rows of one step and the same dtypes are one launch.

    The host does not wait for numbers of `how` that are on the device. Raises ValueError for tensors that it
    cannot take.
    """
    if not has_memory(rows[0].p):
        return
    divisor = how.divisor if isinstance(how.divisor, torch.Tensor) else None
    grad_scale = how.grad_scale if divisor is None else 1.0
    beta1, beta2 = how.betas
    for step, alike in _by_step(rows):
        launches = _launches(alike)
        rates = (
            1 - beta1,
            beta2,
            1 - beta2,
            (1 - beta2**step) ** -0.5,
            how.eps,
            1 - how.lr * how.weight_decay,
            how.lr / (1 - beta1**step),
            grad_scale,
        )
        for launch in launches:
            launch.start(None, rates, divisor, how.skip)


def _by_step(rows: Sequence[AdamRow]) -> Iterable[tuple[int, Sequence[AdamRow]]]:
    if len(steps := {r.step for r in rows}) == 1:
        return [(rows[0].step, rows)]
    return [(step, [r for r in rows if r.step == step]) for step in sorted(steps)]


_PLANNED: dict[tuple, tuple[AdamLaunch, ...]] = {}


def _launches(rows: Sequence[AdamRow]) -> tuple[AdamLaunch, ...]:
    """Tensors are where they were in the last step: then they are neither checked nor listed again."""
    addresses = tuple(
        [
            (
                r.p.data_ptr(),
                r.grad.data_ptr(),
                r.m.data_ptr(),
                r.v.data_ptr(),
                None if r.low is None else r.low.data_ptr(),
                r.p.numel(),
                r.grad.dtype,
                None if r.low is None else r.low.dtype,
            )
            for r in rows
        ]
    )
    planned = _PLANNED.get(addresses)
    if planned is None:
        if len(_PLANNED) >= MOST_PLANNED:
            _PLANNED.clear()
        planned = _PLANNED[addresses] = plan(rows)
    return planned


def plan(rows: Sequence[AdamRow]) -> tuple[AdamLaunch, ...]:
    """Return the launches for rows of one step. Raises ValueError for tensors that they cannot take."""
    groups: dict[tuple, list] = {}
    for r in rows:
        _check(r)
        if r.p.numel():
            groups.setdefault(
                (r.grad.dtype, None if r.low is None else r.low.dtype), []
            ).append(r)
    return tuple(map(_plan_launch, groups.values()))


def _plan_launch(rows: Sequence[AdamRow]) -> AdamLaunch:
    # A row for each parameter: addresses, length, first chunk.
    table = np.array(
        [
            [
                r.p.data_ptr(),
                r.grad.data_ptr(),
                r.m.data_ptr(),
                r.v.data_ptr(),
                0 if r.low is None else r.low.data_ptr(),
                r.p.numel(),
                0,
            ]
            for r in rows
        ],
        np.int64,
    )
    # The last column is the number of chunks before a row.
    chunk = CHUNK if table[:, 5].sum() >= MANY_ELEMENTS else SHORT_CHUNK
    ends = np.cumsum(-(-table[:, 5] // chunk))
    table[1:, 6] = ends[:-1]
    types = (
        type_name(rows[0].grad),
        "float" if rows[0].low is None else type_name(rows[0].low),
    )
    return AdamLaunch(
        types,
        on_device(torch.from_numpy(table), rows[0].p.device),
        chunk,
        int(ends[-1]),
    )


def _check(r: AdamRow) -> None:
    low = [] if r.low is None else [r.low]
    for t in (r.grad, r.m, r.v, *low, r.p):
        if t.device != r.p.device or t.numel() != r.p.numel() or not t.is_contiguous():
            how = "" if t.is_contiguous() else "not "
            raise ValueError(
                f"GPU Adam got {t.numel()} elements on {t.device}, {how}contiguous, beside a "
                f"parameter of {r.p.numel()} on {r.p.device}: all must be on one device, "
                "contiguous, and equally long."
            )
    wrong = [t.dtype for t in (r.p, r.m, r.v) if t.dtype != torch.float32]
    wrong += [r.grad.dtype] * (r.grad.dtype not in GRADIENTS) + [
        t.dtype for t in low if t.dtype not in LOWS
    ]
    if wrong:
        raise ValueError(
            f"GPU Adam got {wrong[0]}: parameter and moments must be fp32, gradients fp32, bf16 "
            "or fp16, low bf16 or fp16."
        )
    if r.step < 1:
        raise ValueError(
            f"GPU Adam got step {r.step}: updates count from 1, bias corrections divide by zero "
            "at 0."
        )


adam.adamw.kernel("cuda", devices=GPU)(adamw)
