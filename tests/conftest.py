"""A busy machine makes a test slow, not wrong: random cases have no deadlines of their own, only pytest's time limit."""

from hypothesis import settings

settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")
