"""The limit of open files is raised where it may be, and too low a limit is one clear error."""

import resource

import pytest

from megatron_ds.errors import ConfigError
from megatron_ds.host.file_limit import FEWEST, check_file_limit
from megatron_ds.mpu.launch import start
from megatron_ds.mpu.launch_facts import Launch

pytestmark = pytest.mark.plan


@pytest.fixture
def limit(monkeypatch):
    """Sets what getrlimit returns; the list has what setrlimit was given."""
    found = []

    def set_to(soft, hard):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        monkeypatch.setattr(
            resource, "setrlimit", lambda _, values: found.append(values)
        )
        return found

    return set_to


def test_a_low_limit_is_raised_as_far_as_it_may(limit):
    assert (limit(16, 4096), check_file_limit(2))[0] == [(1024, 4096)]
    assert (limit(32, resource.RLIM_INFINITY), check_file_limit(2))[0][-1] == (
        1024,
        resource.RLIM_INFINITY,
    )


@pytest.mark.parametrize("soft", [1024, 4096, resource.RLIM_INFINITY])
def test_a_usual_limit_is_left_alone(soft, limit):
    assert (limit(soft, resource.RLIM_INFINITY), check_file_limit(8))[0] == []


@pytest.mark.parametrize("hard", [16, 48, FEWEST - 1])
def test_ranks_that_could_not_connect_are_refused_before_they_try(hard, limit):
    limit(16, hard)
    with pytest.raises(
        ConfigError, match=f"may open {hard} files .*4 ranks need 64 or more"
    ):
        start(Launch(rank=0, world_size=4))
    assert start(Launch()).type in ("cpu", "cuda")  # one rank connects to none
