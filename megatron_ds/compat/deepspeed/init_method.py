"""`init_method` of `init_distributed`: where ranks meet, as a URL.

    None, "env://"                   at MASTER_ADDR and MASTER_PORT of the environment
    "tcp://HOST:PORT"                there; rank 0 runs on HOST
    "file:///FOLDER/NEW_FILE"        in a file that all ranks can write and that no other job has used

Rank and world size are arguments, or `?rank=R&world_size=N` of the URL, or in the environment.
"""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from ...errors import ConfigError
from ...mpu.launch import read_launch
from ...mpu.launch_facts import Launch

NUMBERS = {"rank": "RANK", "world_size": "WORLD_SIZE"}


def launch_by(
    init_method: str | None,
    rank: int,
    world_size: int,
    env: MutableMapping[str, str] = os.environ,
) -> Launch:
    """Return the launch of this process. Writes into `env` what a launcher would have set.

    rank, world_size: negative if they were not given. Raises ConfigError for a wrong URL, for numbers that are
    missing, and where the environment has others.
    """
    init_method = init_method or "env://"
    url = urlsplit(init_method)
    if url.scheme not in ("env", "tcp", "file"):
        raise ConfigError(
            f"init_method={init_method!r}: the methods are env://, tcp://HOST:PORT and file:///FOLDER/NEW_FILE. "
            "Leave it out to meet at MASTER_ADDR and MASTER_PORT."
        )
    # The numbers, then the place.
    given = {"rank": rank, "world_size": world_size}
    for name, values in parse_qs(url.query).items():
        if name in given and given[name] < 0 and values[0].isdecimal():
            given[name] = int(values[0])
    for name, number in given.items():
        _write_number(name, number, env)
    if url.scheme == "env":
        return read_launch(env)
    missing = [name for name, variable in NUMBERS.items() if not env.get(variable)]
    if missing:
        raise ConfigError(
            f"init_method={init_method!r} without {' and '.join(missing)}: no variable of a launcher "
            f"numbers this process. Call init_distributed(init_method=…, rank=R, world_size=N), or set "
            f"{' and '.join(NUMBERS[name] for name in missing)}."
        )
    return (
        _by_file(url.netloc, url.path, env)
        if url.scheme == "file"
        else _by_tcp(init_method, env)
    )


def _write_number(name: str, number: int, env: MutableMapping[str, str]) -> None:
    if number < 0:
        return
    variable = NUMBERS[name]
    found = env.setdefault(variable, str(number))
    if found != str(number):
        raise ConfigError(
            f"init_distributed got {name}={number}, but {variable} is {found} in the environment. Leave the "
            "argument out where a launcher starts the ranks."
        )


def _by_tcp(init_method: str, env: MutableMapping[str, str]) -> Launch:
    url = urlsplit(init_method)
    host = url.hostname
    digits = url.netloc.rpartition(":")[2]
    port = int(digits) if digits.isdecimal() else 0
    if not host or not port:
        raise ConfigError(
            f"init_method={init_method!r} has no host and port. Write tcp://HOST:PORT, with the host of rank 0."
        )
    # torchrun's agent has the store, at its own port.
    agents = f"{env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}"
    if _has_agent(env) and agents != f"{host}:{port}":
        raise ConfigError(
            f"init_method={init_method!r}, but torchrun's ranks meet at {agents}. Leave init_method out, or "
            "start the program without torchrun."
        )
    env.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    return read_launch(env)


def _by_file(host: str, path: str, env: MutableMapping[str, str]) -> Launch:
    """Without LOCAL_RANK, ranks that share a file are taken to be on one host."""
    if (
        host not in ("", "localhost")
        or not Path(path).parent.is_dir()
        or Path(path).is_dir()
    ):
        raise ConfigError(
            f"init_method='file://{host}{path}' is not a file in a folder that exists. Write three slashes and an "
            "absolute path, file:///FOLDER/NEW_FILE, which all ranks can write."
        )
    env.setdefault("MASTER_ADDR", "localhost")
    return replace(read_launch(env), file=path)


def _has_agent(env: Mapping[str, str]) -> bool:
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
