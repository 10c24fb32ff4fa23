"""The number of files and connections that this process may have open."""

import logging
import resource

from ..errors import ConfigError

FEWEST = 64  # 2 and 4 ranks fail at 48 and work at 64; 8 need up to 73
USUAL = 1024
logger = logging.getLogger(__name__)


def check_file_limit(ranks: int) -> None:
    """Raise the limit of a process with connections to other ranks to the usual one, where that is allowed.

    Raises ConfigError for a limit below which groups of processes cannot connect: the error would be that of
    any file or connection, on some ranks only, while the others wait.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = USUAL if hard == resource.RLIM_INFINITY else min(hard, USUAL)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        logger.info(
            "the limit of open files was %d, which is few for %d ranks; it is now %d",
            soft,
            ranks,
            most,
        )
        soft = most
    if ranks > 1 and soft != resource.RLIM_INFINITY and soft < FEWEST:
        raise ConfigError(
            f"this process may open {soft} files and connections, and {ranks} ranks need "
            f"{FEWEST} or more. Raise the limit before the start: ulimit -n 4096; for a "
            "service, LimitNOFILE=; in Slurm, PropagateResourceLimits."
        )
