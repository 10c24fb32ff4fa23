"""AdamW."""

from dataclasses import replace

import torch

from megatron_ds.extensions.kernels.gpu import adam_kernels
from megatron_ds.ops.update_rows import AdamRow

NUMEL, CUTS = 5000, (0, 3, 1028, 5000)
RATES = (0.1, 0.9, 0.1, 1.0, 1e-8, 1.0, 0.1, 1.0)


def launch() -> None:
    """Aligned rows, and rows in which one tensor is not; several chunks; all that is optional, and nothing.

    All tensors are parts of one, from which the addresses in the table count.
    """
    for dtype in (torch.float32, torch.bfloat16):
        numbers = () if dtype == torch.float32 else (torch.ones(()), torch.zeros(()))
        for shifted in range(6):  # 5: none
            memory = torch.ones(5 * (NUMEL + 4))
            parts = [
                part[i == shifted :] for i, part in enumerate(memory.split(NUMEL + 4))
            ]
            p, grads, m, v = parts[0], parts[1].view(dtype), *parts[2:4]
            lows = None if dtype == torch.float32 else parts[4].view(dtype)
            rows = [
                AdamRow(
                    p[a:b],
                    grads[a:b],
                    m[a:b],
                    v[a:b],
                    1,
                    None if lows is None else lows[a:b],
                )
                for a, b in zip(CUTS, CUTS[1:])
            ]
            for planned in adam_kernels.plan(rows):
                table = planned.table.clone()
                addresses = table[:, : 4 if lows is None else 5]
                addresses -= memory.data_ptr()
                replace(planned, table=table).start(memory, RATES, *numbers)
