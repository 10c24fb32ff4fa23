"""Rules about ZeRO, and about where and in which format it keeps and sends state."""

import os
from collections.abc import Iterator
from pathlib import Path

from ..messages import divisors, either, given
from ..run import RunConfig

DIVISORS = ("zero.gradient_predivide_factor", "zero.prescale_gradients")


def zero_options(config: RunConfig) -> Iterator[str]:
    """Hierarchical weights and gradient dtypes have limits."""
    # Groups of hierarchical weights.
    h = config.zero.zero_hpz_partition_size
    n = config.data_parallel_size
    if config.zero.stage == 3 and n % h:
        yield (
            f"[zero_hpz_partition_size] does not divide {n} data-parallel rank{'s' if n > 1 else ''} into equal "
            f"groups. Use --zero-hpz-partition-size {either(divisors(n))}; 1 is off."
        )
    if h > 1 and config.zero.offload_param == "nvme":
        yield (
            "[zero_hpz_partition_size] keeps a copy of the weights in each group of ranks, but "
            "[offload_param] saves memory, and several ranks would write the same pages of the disk. "
            "Remove one of the two, or use --offload-param cpu."
        )
    # The dtype in which gradients accumulate.
    grads = config.optimizer.gradient_dtype
    params = config.optimizer.params_dtype
    if grads not in ("float32", params):
        yield (
            f"[main_grads_dtype], but the weights are {params}: gradients accumulate in fp32 or in the "
            "dtype of the weights. Use --main-grads-dtype fp32."
        )


def quantization(config: RunConfig) -> Iterator[str]:
    """ZeRO++: blocks need something that is quantized, on the device, in no other dtype."""
    zero = config.zero
    if zero.zero_quantized_weights and zero.offload_param != "none":
        yield (
            "[zero_quantized_weights] needs the weights of a rank on its device, where they are encoded "
            "after each update, but [offload_param]. Remove one of the two; --offload-optimizer can "
            "remain."
        )
    if zero.zero_quantized_gradients and zero.communication_data_type:
        yield (
            "[zero_quantized_gradients] sends gradients as 4-bit integers, but [communication_data_type] "
            "asks for another format. Remove one of the two."
        )


def communication(config: RunConfig) -> Iterator[str]:
    """Dividing gradients prevents an overflow of fp16. `combine` leaves these options out otherwise."""
    if config.optimizer.main_grads_dtype == "fp16":
        yield from given(
            config,
            DIVISORS,
            "prevents overflow when gradients are reduced in fp16 and "
            "accumulate in fp32. Here they also accumulate in fp16, where the "
            "division would round the smallest to 0. Remove it, or use "
            "--communication-data-type fp16 --main-grads-dtype fp32.",
        )
    if not any(map(config.is_default, DIVISORS)):
        yield (
            "[gradient_predivide_factor] and [prescale_gradients] both set the divisor of gradients; the "
            "second sets it to the number of data-parallel ranks. Give only one."
        )


def offloading(config: RunConfig) -> Iterator[str]:
    """Offloading needs a ZeRO stage that splits what is offloaded; a disk needs a writable folder."""
    zero = config.zero
    folders = zero.disk_folders()
    # Each folder of a disk is there and writable.
    for path, folder in folders.items():
        of_weights = (
            path == "zero.offload_param" and zero.offload_param_nvme_path is not None
        )
        flag = "--offload-param-nvme-path" if of_weights else "--offload-nvme-path"
        if folder is None:
            yield (
                f"[{path}] needs a folder for its scratch file. Give one on a fast local disk with "
                "--offload-nvme-path."
            )
        elif config.plan.is_dry:
            continue  # the folder is on the machines that will run
        elif wrong := _why_not_writable(Path(folder)):
            yield (
                f"[{path}]: no scratch file can be made in {folder}, because {wrong}. Give another folder "
                f"with {flag}, or create it on every node."
            )


def _why_not_writable(folder: Path) -> str | None:
    """Why nothing can be written in the folder, nor the folder be made; None: it can."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return f"{there} is not a folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"


ZERO_RULES = (zero_options, quantization, communication, offloading)
