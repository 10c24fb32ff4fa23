"""What reports need of a run: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)
SUMMARIZED = own(".run_summary:Summarized")

FEATURES = [Feature("report", observers=(lambda config: SUMMARIZED(),))]
