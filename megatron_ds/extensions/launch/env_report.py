"""Print what this machine offers to a training, and what is missing for what.

megatron-ds env                # for reading
megatron-ds env --json         # for a bug report
megatron-ds launch --hostfile hosts --module megatron_ds env --check     # measures the network, too

`--check` runs on all ranks of a launcher (megatron-ds launch, torchrun, srun): bandwidth of the all-reduce, of
a ring and of pairs, ranks that are slow, clocks, and with --folder whether all ranks see one folder. Its exit
code is 1 if something is wrong. Without torch the rest of the report is printed.
"""

import argparse
import importlib
import json
import os
import pkgutil
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...cli import Arguments
from ...errors import ConfigError
from ...host import COMPILED
from ...host.packages import install_command
from ...version import __version__
from .variables import PREFIXES

Section = dict[str, Any]

PACKAGES = (
    "torch",
    "numpy",
    "tokenizers",
    "sentencepiece",
    "safetensors",
    "tensorboard",
    "triton",
    "deepspeed",
    "megatron-core",
    "accelerate",
)
OTHER_MODULES = {"_async_io": "asynchronous I/O", "_bpe": "words of a tokenizer"}
# What an optional package is for, and how it is installed.
EXTRAS = {
    "pyarrow": ("Parquet files as corpora", "megatron_ds[data]"),
    "zstandard": ("corpora compressed by zstd", "megatron_ds[data]"),
    "nltk": ("sentences for BERT", "megatron_ds[data]"),
    "h5py": ("HDF5 files as corpora", "megatron_ds[data]"),
    "upath": ("checkpoints in object stores", "megatron_ds[stores]"),
    "s3fs": ("checkpoints at s3://", "megatron_ds[stores]"),
    "gcsfs": ("checkpoints at gs://", "megatron_ds[stores]"),
    "ray": ("ranks as actors of Ray", "megatron_ds[ray]"),
    "matplotlib": ("plots", "megatron_ds[report]"),
    "rich": ("the view of megatron-ds watch", "megatron_ds[report]"),
    "tensorboard": ("curves in TensorBoard", "megatron_ds[report]"),
    "transformers": (
        "chat templates, proofs of converted checkpoints",
        "megatron_ds[hf]",
    ),
    "sentencepiece": ("tokenizers of sentencepiece", "megatron_ds[hf]"),
    "uvicorn": ("megatron-ds serve", "megatron_ds[serve]"),
    "lm_eval": ("tasks of lm-evaluation-harness", "megatron_ds[eval]"),
    "wandb": ("logs in Weights & Biases", "megatron_ds[wandb]"),
    "comet_ml": ("logs in Comet", "megatron_ds[comet]"),
    "mlflow": ("logs in MLflow", "megatron_ds[mlflow]"),
    "opentelemetry": ("traces and gauges by OpenTelemetry", "megatron_ds[otel]"),
    "triton": ("FlexAttention on GPUs", "triton"),
}
PROGRAMS = {
    "ssh": "launch --launcher ssh",
    "pdsh": "launch --launcher pdsh",
    "srun": "launch --launcher slurm",
    "mpirun": "launch --launcher openmpi",
}
LEAST_SHARED_GIB = 1  # of /dev/shm, which NCCL and data workers use
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")


# ----------------------------------------------------------------------------------------------- sections
def versions() -> Section:
    """This package, Python, the system, and the packages that matter."""
    found: Section = {
        "megatron_ds": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "glibc": " ".join(platform.libc_ver()) or None,
    }
    return found | {name: version_of(name) for name in PACKAGES}


def version_of(package: str) -> str | None:
    """Return the installed version; None without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def devices() -> Section:
    """Processor, memory, GPUs, and torch's libraries for them."""
    found: Section = {
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "memory (GiB)": round(
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1
        ),
    }
    if find_spec("torch") is None:
        return found | {"GPUs": "unknown: torch is not installed"}
    import torch

    found["cuda of torch"] = torch.version.cuda
    count = torch.cuda.device_count()
    found["GPUs"] = count
    for i in range(count):
        each = torch.cuda.get_device_properties(i)
        memory = each.total_memory / 2**30
        capability = f"sm_{each.major}{each.minor}"
        found[f"GPU {i}"] = f"{each.name}, {memory:.1f} GiB, {capability}"
    if count:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def modules() -> Section:
    """Compiled modules: whether each is there, else the reason."""
    found: Section = {}
    for name, what in (COMPILED | OTHER_MODULES).items():
        try:
            importlib.import_module(f"megatron_ds.{name}")
            found[what] = "compiled"
        except ImportError as reason:
            found[what] = f"not compiled ({reason}): reinstall with a C++17 compiler"
    return found


def kernels() -> Section:
    """Operation → the implementation that runs first on this machine, and why others do not."""
    if find_spec("torch") is None:
        return {"kernels": "unknown: torch is not installed"}
    import torch

    from ... import ops
    from ...ops.kernel_table import OPERATIONS

    # operations are registered by their modules
    for found in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        importlib.import_module(found.name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows: Section = {}
    for name, operation in sorted(OPERATIONS.items()):
        first = operation.first_choice(device, dtype)
        reasons = [
            f"{each.name}: {reason}"
            for each in operation.implementations
            if (each.devices is None or device in each.devices)
            and (each.dtypes is None or dtype in each.dtypes)
            and (reason := each.available())
        ]
        rows[name] = (
            f"{first}; not {'; '.join(dict.fromkeys(reasons))}" if reasons else first
        )
    return rows


def network() -> Section:
    """This host's name, its network interfaces and InfiniBand devices."""
    found: Section = {"host": socket.gethostname()}
    for _, name in socket.if_nameindex():
        state = _read(f"/sys/class/net/{name}/operstate")
        speed = _read(f"/sys/class/net/{name}/speed")
        rate = f", {speed} Mbit/s" if speed.isdigit() else ""
        found[name] = (state or "state unknown") + rate
    rails = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    found["InfiniBand"] = ", ".join(rails) or None
    return found


def variables(environ: Mapping[str, str] = os.environ) -> Section:
    """Return the variables that a launcher passes on; those with secrets without their values."""
    return {
        name: "(set)" if _is_secret(name, value) else value
        for name, value in sorted(environ.items())
        if name.startswith(PREFIXES) or name.startswith(("CUDA", "SLURM_JOB"))
    }


def _is_secret(name: str, value: str) -> bool:
    """Return whether a variable looks like a secret, by a word of its name or by an address with a password."""
    host = value.partition("://")[2].partition("/")[0]
    return "@" in host or any(word in name for word in SECRET)


def limits() -> Section:
    """Shared memory, disk of the current folder, and limits of this process."""
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "/dev/shm": _space("/dev/shm"),
        "current folder": f"{Path.cwd()}: {_space('.')}",
        "open files": f"{files} (up to {most_files})",
        "locked memory": _amount(locked),
    }


def missing() -> Section:
    """Optional packages and programs that are absent → what they are for."""
    found = {
        name: f"{what}: {install_command(source)}"
        for name, (what, source) in EXTRAS.items()
        if find_spec(name) is None
    }
    for name, what in PROGRAMS.items():
        if shutil.which(name) is None:
            found[name] = what
    if find_spec("torch") is None:
        command = install_command("megatron_ds")
        found["torch"] = f"everything but this report: {command}"
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free / 2**30
        if free < LEAST_SHARED_GIB:
            found["/dev/shm"] = (
                f"{free:.2f} GiB free: NCCL and data workers may need {LEAST_SHARED_GIB} GiB "
                "(docker run --ipc=host or --shm-size)"
            )
    return found


SECTIONS: dict[str, Callable[[], Section]] = {
    "versions": versions,
    "devices": devices,
    "compiled modules": modules,
    "kernels": kernels,
    "network": network,
    "variables": variables,
    "limits": limits,
    "missing": missing,
}


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _space(path: str) -> str | None:
    if not Path(path).is_dir():
        return None
    found = shutil.disk_usage(path)
    return f"{found.free / 2**30:.1f} GiB free of {found.total / 2**30:.1f}"


def _amount(number: int) -> str:
    return (
        "unlimited" if number == resource.RLIM_INFINITY else f"{number / 2**20:.0f} MiB"
    )


# ------------------------------------------------------------------------------------------------ command
def text_of(report: Mapping[str, Section]) -> str:
    """Return the report for reading: a heading and aligned rows a section."""
    lines = []
    for title, section in report.items():
        lines += ["", title]
        width = max(map(len, section), default=0)
        for name, value in section.items():
            lines.append(f"  {name:<{width}}  {'–' if value is None else value}")
        if not section:
            lines.append("  nothing")
    return "\n".join(lines[1:])


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags of the command. Raises ConfigError."""
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON")
    add("--check", action="store_true", help="measure the ranks of a launcher")
    add("--folder", type=Path, help="with --check: a folder that all ranks are to see")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report, or check the ranks; the exit code."""
    args = parse_arguments(argv)
    if args.folder and not args.check:
        raise ConfigError("--folder is checked by --check: give both.")
    if args.check:
        from .cluster_check import check  # needs torch

        return check(args.folder, as_json=args.json)
    report = {title: section() for title, section in SECTIONS.items()}
    print(json.dumps(report, indent=1) if args.json else text_of(report))
    return 0
