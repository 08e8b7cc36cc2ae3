"""The messages of daemons about who lives."""

from typing import Annotated, TypeAlias

from msgspec import Meta

from ckptless.daemon.protocol.limits import (
    MOST_VOTERS,
    NodeNumber,
    Number,
)
from ckptless.daemon.protocol.messages import Message

# (node, its clock in ms, ms since the first who saw it saw it)
Pulse: TypeAlias = tuple[NodeNumber, Number, Number]


class Beat(Message, frozen=True, kw_only=True):
    """The sender lives. `pulses`: the newest known sign of life of each voter, see `pulses`."""

    pulses: Annotated[tuple[Pulse, ...], Meta(max_length=MOST_VOTERS)] = ()


class Suspect(Message, frozen=True, kw_only=True):
    """The sender does not hear `node`. Do you?"""

    node: NodeNumber


class Saw(Message, frozen=True, kw_only=True):
    """Answer to Suspect: whether anything on the node has answered the sender just now."""

    node: NodeNumber
    lives: bool


class Have(Message, frozen=True, kw_only=True):
    """The sender has a long message for all, which `origin` has said."""

    origin: NodeNumber
    serial: Number


class Want(Message, frozen=True, kw_only=True):
    """Answer to Have: send it."""

    origin: NodeNumber
    serial: Number
