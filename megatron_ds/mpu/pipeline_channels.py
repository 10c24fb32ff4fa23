"""`channels_over`: the channels of a rank of a pipeline, those between ranks where there are others."""

from .group import Group
from .own_channels import OwnChannels


def channels_over(group: Group) -> OwnChannels:
    """Return the channels of a rank of a pipeline."""
    if group.size == 1:
        return OwnChannels(group)
    from .channels import Channels

    return Channels(group)
