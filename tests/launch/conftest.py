"""Hosts of the launcher's tests: two sshd, and a Slurm with two slurmd."""

import pytest

from tests.harness.clusters import Slurm, missing, ssh_hosts


@pytest.fixture(scope="session")
def hosts(tmp_path_factory):
    """Two hosts that ssh reaches."""
    if reason := missing("sshd", "ssh", "ssh-keygen"):
        pytest.skip(reason)
    with ssh_hosts(tmp_path_factory.mktemp("ssh")) as found:
        yield found


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A Slurm of two nodes."""
    if reason := missing("slurmctld", "slurmd", "srun", "munged"):
        pytest.skip(reason)
    with Slurm(tmp_path_factory.mktemp("slurm")) as found:
        yield found
