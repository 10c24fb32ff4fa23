"""`Device`: how fast one device computes, from a file of YAML.

    name: NVIDIA A100 80GB
    memory: 80e9                    # bytes
    peak: {bfloat16: 312e12, float16: 312e12, float32: 19.5e12}     # FLOP/s of dense products
    bandwidth: 2039e9               # bytes/s of its memory
    processors: 108                 # that share the tiles of a product; 0: a product is not cut into tiles
    constants: {product: 0.76, attention: 0.4, memory: 0.8, launch: 5e-6}
    fitted: what the constants were fitted to

The first numbers are those of a data sheet. The constants are the shares of the peak, and of the bandwidth, that
kernels reach, the seconds from one launch to the next, and those of a byte of new memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ...config.sources.bounded_yaml import load_yaml
from ...errors import ConfigError
from ...host.regular_file import read_text

FOLDER = Path(__file__).parent / "devices"


@dataclass(frozen=True)
class Constants:
    """What is fitted.

    product    share of the peak that large products of matrices reach
    attention  share of the peak that attention reaches
    memory     share of the bandwidth that other kernels reach
    launch     seconds of a kernel beside its work
    page       seconds of a byte of new memory, in runs of processors that return freed memory
    """

    product: float = 0.8
    attention: float = 0.4
    memory: float = 0.8
    launch: float = 5e-6
    page: float = 0.0

    def keeping_pages(self) -> "Constants":
        """Return the constants of a run that keeps freed memory."""
        return replace(self, page=0.0)


@dataclass(frozen=True)
class Device:
    """One device; fields as in the file."""

    name: str
    memory: float
    peak: Mapping[str, float]
    bandwidth: float
    processors: int = 0
    constants: Constants = Constants()
    fitted: str = ""

    def peak_of(self, dtype: torch.dtype) -> float:
        """Return FLOP/s of products of a dtype, those of fp32 for one that the file does not list."""
        name = str(dtype).removeprefix("torch.")
        return self.peak.get(name, self.peak["float32"])


def read_device(name: str, folder: Path = FOLDER) -> Device:
    """Return the device of a file, or one that comes with the package. Raises ConfigError for a file that is none."""
    return device_of(read_values(name, folder, "device"), name)


def device_of(values: Mapping[str, Any], where: str) -> Device:
    """Return the device of the values of a file. Raises ConfigError for unknown names and numbers that are none."""
    constants = numbers_of(
        values.get("constants", {}), Constants, f"{where}: constants"
    )
    rest = {name: value for name, value in values.items() if name != "constants"}
    device = checked(Device, rest, where, text=("name", "fitted"))
    peak = device.peak
    if not isinstance(peak, Mapping) or "float32" not in peak:
        raise ConfigError(
            f"{where}: peak is {peak!r}, and must list FLOP/s by dtype, float32 among them."
        )
    as_numbers = {
        dtype: number(value, f"{where}: peak of {dtype}")
        for dtype, value in peak.items()
    }
    return Device(
        **{**vars(device), "peak": as_numbers, "constants": Constants(**constants)}
    )


# ---- Files of this kind.


def read_values(name: str, folder: Path, noun: str) -> Mapping[str, Any]:
    """Return the mapping of a file; name: a path, or a file of the package without its ending.

    Raises ConfigError if there is no such file, or if it is no mapping.
    """
    own = folder / f"{name}.yaml"
    path = own if own.exists() else Path(name)
    if not path.is_file():
        known = ", ".join(sorted(found.stem for found in folder.glob("*.yaml")))
        raise ConfigError(
            f"{noun} {name!r}: there is no such file, and the package has {known}. Give one of them, or "
            "the path of a file of YAML."
        )
    values = load_yaml(read_text(path, ConfigError))
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: it must be a mapping of names to values.")
    return values


def checked(
    kind: type, values: Mapping[str, Any], where: str, text: tuple[str, ...] = ()
) -> Any:
    """Return an object of a dataclass from the values of a file: numbers, except for the fields in `text` and for
    mappings. Raises ConfigError for names that it has not, and for a missing one."""
    known = {field.name for field in fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(
            f"{where}: {', '.join(unknown)} is not known. Known: {', '.join(sorted(known))}."
        )
    taken = {
        name: value
        if name in text or isinstance(value, Mapping)
        else number(value, f"{where}: {name}")
        for name, value in values.items()
    }
    try:
        return kind(**taken)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}.") from None


def numbers_of(values: Any, kind: type, where: str) -> dict[str, float]:
    """Return the numbers of a mapping for a dataclass. Raises ConfigError as `checked`."""
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{where} must be a mapping of names to numbers, not {values!r}."
        )
    return vars(checked(kind, values, where))


def number(value: Any, where: str) -> float:
    """Return a number, also one that YAML reads as text, such as 1e9. Raises ConfigError unless it is finite and at
    least 0."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = -1.0
    if not 0 <= found < float("inf"):
        raise ConfigError(f"{where} is {value!r}, and must be a number of 0 or more.")
    return found
