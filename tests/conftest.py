"""A busy machine makes a test slow, not wrong: random cases have no deadlines of their own, only pytest's
time limit."""

import logging

import pytest
from hypothesis import settings

settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")


@pytest.fixture(autouse=True)
def _root_logger_as_before():
    """A run that a test starts in this process configures the root logger; the next test finds it as it
    was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
