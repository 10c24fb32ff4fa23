"""`OwnChannels`: messages of a pipeline rank to itself, between the stages that it holds; `channels_over`.

A pipeline of one rank has no others. channels.py adds those between ranks.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Protocol

import torch

from .group import Group


class Posted(Protocol):
    """A message that has been asked for."""

    def wait(self) -> torch.Tensor:
        """Return the message. Raises CommunicationError when it does not arrive in time."""


class OwnChannels:
    """The channels of one rank. Destinations and sources are positions in `group`, the rank's own included."""

    def __init__(self, group: Group):
        self.group = group
        self._own: dict[tuple, deque[torch.Tensor]] = defaultdict(deque)

    def announce(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        """Begin a step whose micro-batches have these shapes; peers compare them with theirs.

        The comparison with a peer happens at the first message to or from it in this step.
        """

    def send(
        self, kind: str, destination: int, tensor: torch.Tensor, chunk: int = 0
    ) -> None:
        """Start sending `tensor`, which must not change until it has arrived. `kind` is "act" or "grad".

        Waits for the message two before in the channel.
        """
        self._own[kind, chunk].append(tensor.detach().contiguous())

    def recv(
        self,
        kind: str,
        source: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        chunk: int = 0,
    ) -> "Posted":
        """Post the receive of the channel's next message, whose shape and dtype are not sent; the result's `wait`
        returns it.

        Waits for the message before it.
        """
        return FromItself(self._own[kind, chunk])

    def drain(self) -> None:
        """Wait until all messages of this rank have been sent. Call it at the end of a step."""
        assert not any(self._own.values()), (
            "a message from this rank to itself was never received"
        )


class FromItself:
    """A message of a rank to itself."""

    __slots__ = ("_messages",)

    def __init__(self, messages: deque[torch.Tensor]):
        self._messages = messages

    def wait(self) -> torch.Tensor:
        """Return the message. IndexError where none has been sent."""
        return self._messages.popleft()


def channels_over(group: Group) -> OwnChannels:
    """Return the channels of a rank of a pipeline."""
    if group.size == 1:
        return OwnChannels(group)
    from .channels import Channels

    return Channels(group)
