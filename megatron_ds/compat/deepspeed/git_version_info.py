"""`deepspeed.git_version_info`: what DeepSpeed writes down when it is installed."""

import torch

from .installation import VERSION

version = VERSION
git_hash = git_branch = "[none]"
accelerator_name = ""
installed_ops: dict[str, bool] = {}
"""No operation is compiled under DeepSpeed's names; docs/reference/kernels.md lists those of this package."""

torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": torch.version.hip or "0.0",
    "bf16_support": False,
}
"""Of the installed torch. "0.0": not known, or not there."""
