"""`Cluster`: devices of one kind and the links among them, from a file of YAML.

device: a100-80g                # a device of the package, or a file of its own
devices_per_host: 8
inside: 300e9                   # bytes/s that a device sends to others of its host
outside: 25e9                   # bytes/s that a device sends to other hosts, its share of the adapters
latency: 10e-6                  # seconds of a message beside its bytes
host_link: 25e9                 # bytes/s between a device and the memory of its host
activations: 0                  # bytes/s within a host of tensor- and context-parallel messages; 0: as inside
overlap: 1.0                    # share of a message that passes while its device computes; 0 where the processors
                                # that compute move the bytes
link: 0.8                       # share of these that messages reach: fitted
dollars_per_hour: 1.5           # of one device; 0: no cost is printed
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .device import Device, checked, device_of, read_device, read_values

FOLDER = Path(__file__).parent / "clusters"


@dataclass(frozen=True)
class Cluster:
    """Hosts with devices of one kind; fields as in the file."""

    device: Device
    devices_per_host: float = 8
    inside: float = 100e9
    outside: float = 12.5e9
    latency: float = 10e-6
    host_link: float = 12e9
    activations: float = 0.0
    overlap: float = 1.0
    link: float = 0.8
    dollars_per_hour: float = 0.0


def read_cluster(name: str) -> Cluster:
    """Return the cluster of a file, or one that comes with the package. Raises ConfigError for a file that is none."""
    values = dict(read_values(name, FOLDER, "--cluster"))
    given = values.pop("device", None)
    if given is None:
        raise ConfigError(f"{name}: `device` names the devices; it is missing.")
    links = checked(_Links, values, name)
    if links.overlap > 1:
        raise ConfigError(
            f"{name}: overlap is {links.overlap}, a share of a message: 0 to 1."
        )
    return replace(_cluster_of(links), device=_device(given, name))


@dataclass(frozen=True)
class _Links:
    """The numbers of a file."""

    devices_per_host: float = Cluster.devices_per_host
    inside: float = Cluster.inside
    outside: float = Cluster.outside
    latency: float = Cluster.latency
    host_link: float = Cluster.host_link
    activations: float = Cluster.activations
    overlap: float = Cluster.overlap
    link: float = Cluster.link
    dollars_per_hour: float = Cluster.dollars_per_hour


def _cluster_of(links: _Links) -> Cluster:
    return Cluster(device=None, **vars(links))  # type: ignore[arg-type]  # put in place by the caller


def _device(given: Any, where: str) -> Device:
    """Return the device that a file of a cluster names, or that is written into it."""
    if isinstance(given, Mapping):
        return device_of(given, where)
    beside = Path(where).parent / str(given)
    return read_device(str(beside) if beside.is_file() else str(given))
