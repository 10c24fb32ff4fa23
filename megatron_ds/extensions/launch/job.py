"""`Job`: all that a node needs to start its ranks, as one value that travels as one word of a command line.

Ranks are numbered host by host. The word is urlsafe base64 of compressed JSON: no shell on the way changes any
character of the user's arguments, and thousands of hosts fit into one word.
"""

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import ConfigError
from ...launch_env import OWN_LAUNCHER, RESTARTS, RUN
from . import cores, devices


@dataclass(frozen=True)
class RankProgram:
    """What each rank runs.

    words        the script or module, and its arguments
    python       the interpreter; "" runs the script itself
    is_module    the first word is a module, as of `python -m`
    has_local_rank  append --local_rank=N to the arguments
    """

    words: tuple[str, ...]
    python: str
    is_module: bool = False
    has_local_rank: bool = False

    def command(self, local_rank: int) -> list[str]:
        """Return the command line of a rank."""
        interpreter = [self.python, "-u"] if self.python else []
        if self.python and self.is_module:
            interpreter.append("-m")
        first, *arguments = self.words
        flag = [f"--local_rank={local_rank}"] if self.has_local_rank else []
        return [*interpreter, first, *flag, *arguments]


@dataclass(frozen=True)
class Rank:
    """A process: its number in the job and on its node, and its slot there."""

    rank: int
    local_rank: int
    slot: int


@dataclass(frozen=True)
class Job:
    """A training on some hosts.

    name             unlike that of any other job; letters and digits
    slots            host → its slots, in the order of ranks
    variables        environment variables of all ranks
    folder           the working directory, the same path on every host
    log_folder       of a file for each rank; "" for none
    bound_cores      the cores that ranks of a host share out among them; None binds nothing, () means all
                     that the agent may use
    grace_seconds    from SIGTERM to SIGKILL of ranks that are to end
    hang_seconds     what a rank may take beside two median steps without an instruction; 0 does not watch ranks
    restarts         how often the job was started again
    run              identifier of a run that begins, the same after restarts
    end_seconds      what a rank that was named may take beyond that before the job ends
    patience_seconds  what it may take while it starts, saves or reads data
    has_numbers       the slots are numbers of devices, whatever CUDA_VISIBLE_DEVICES lists on their host
    """

    name: str
    slots: Mapping[str, Sequence[int]]
    program: RankProgram
    variables: Mapping[str, str]
    folder: str
    master_address: str
    master_port: int
    log_folder: str = ""
    bound_cores: Sequence[int] | None = None
    grace_seconds: float = 30.0
    hang_seconds: float = 8.0
    end_seconds: float = 60.0
    patience_seconds: float = 1800.0
    restarts: int = 0
    run: str = ""
    has_numbers: bool = False

    @property
    def hosts(self) -> list[str]:
        """Their names, in the order of ranks."""
        return list(self.slots)

    @property
    def world_size(self) -> int:
        """Ranks of all hosts."""
        return sum(map(len, self.slots.values()))

    def ranks(self, host: str) -> Iterator[Rank]:
        """Yield the ranks of a host."""
        before = self.hosts.index(host)
        first = sum(len(self.slots[other]) for other in self.hosts[:before])
        for i, slot in enumerate(self.slots[host]):
            yield Rank(first + i, i, slot)

    def environment(
        self, host: str, rank: Rank, environ: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Return the variables of one rank: torchrun's names, and those that DeepSpeed's launcher adds.

        environ: of the host, whose devices may be listed there
        """
        slots = self.slots[host]
        given = {} if self.has_numbers else environ or {}
        node = self.hosts.index(host)
        return {
            **self.variables,
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
            "WORLD_SIZE": str(self.world_size),
            "RANK": str(rank.rank),
            "LOCAL_RANK": str(rank.local_rank),
            "LOCAL_WORLD_SIZE": str(len(slots)),
            "LOCAL_SIZE": str(len(slots)),
            "GROUP_RANK": str(node),
            "CROSS_RANK": str(node),
            "CROSS_SIZE": str(len(self.slots)),
            devices.VISIBLE: devices.visible(slots, given, host),
            OWN_LAUNCHER: self.name,
            RESTARTS: str(self.restarts),
            RUN: self.run,
        }

    def cores(self, host: str, rank: Rank) -> list[int]:
        """Return the cores that a rank is bound to: an equal share of those of its host; [] for no bound."""
        if self.bound_cores is None:
            return []
        available = [[core] for core in self.bound_cores] or cores.physical_cores()
        ranks = len(self.slots[host])
        found = cores.share(available, ranks, rank.local_rank)
        if not found:
            raise ConfigError(
                f"{len(available)} cores cannot be shared by {ranks} ranks of {host}. Leave "
                "out --bind_cores_to_rank, or give more cores by --bind_core_list."
            )
        return found

    def encoded(self) -> str:
        """One word of letters, digits, -, _ and =."""
        text = json.dumps(asdict(self), separators=(",", ":"))
        return base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()

    @classmethod
    def decoded(cls, word: str) -> "Job":
        """Return the job that a word encodes. Raises ConfigError for another word."""
        try:
            text = zlib.decompress(base64.urlsafe_b64decode(word))
            values: dict[str, Any] = json.loads(text)
            program = values.pop("program")
            words = tuple(program.pop("words"))
            return cls(program=RankProgram(words=words, **program), **values)
        except (ValueError, TypeError, KeyError, AttributeError, zlib.error) as error:
            raise ConfigError(
                f"--job is no job of megatron-ds launch: {error}."
            ) from error
