"""What a launcher and its hosts say to each other through ssh, and nodes that meet by an address.

Frames are those of `protocol/codec.py`. The launcher says Begin and Peers, then Beat for as long as it is
there, and Signal for what it gets itself; a host says Here, then Console, and Ended.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta

from ckptless.daemon.protocol.limits import MOST_NODES, Name, NodeNumber, Protocol
from ckptless.daemon.protocol.messages import JobSpec, Message, Outcome
from ckptless.daemon.settings.config import Peer

# A command line and an environment are of some MiB at most; a table has a line for each node.
LAUNCHER_LIMIT, HOST_LIMIT, MEMBER_LIMIT = 16 << 20, 1 << 20, 64 << 10
CONSOLE_NBYTES = 64 << 10
# The launcher's life as a host sees it: what ssh's own end does not tell, a cable does.
BEAT_S, SILENT_S = 5.0, 60.0

# One string of an environment is at most so long, its name among it (MAX_ARG_STRLEN).
Text: TypeAlias = Annotated[str, Meta(max_length=128 << 10)]
Env: TypeAlias = Annotated[dict[Text, Text], Meta(max_length=64 << 10)]
PeerTable: TypeAlias = Annotated[tuple[Peer, ...], Meta(max_length=MOST_NODES)]
Path: TypeAlias = Annotated[str, Meta(max_length=4096)]
ListenPort: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]


class Begin(Message, frozen=True, kw_only=True):
    """First word to a host: its node and all that the node is told; `env` is for its ranks, `key` the job's.

    `config` is a SharedConfig, in JSON as agents get it. `state_dir` "" is the host's own default; `port` 0
    is any free one.
    """

    protocol: Protocol
    node: NodeNumber
    name: Name
    address: Name
    port: ListenPort
    key: Annotated[bytes, Meta(min_length=16, max_length=64)]
    config: Annotated[bytes, Meta(max_length=8 << 20)]
    env: Env
    state_dir: Path = ""
    verbose: bool = False


class Peers(Message, frozen=True, kw_only=True):
    """All nodes of the job, and where their daemons listen."""

    peers: PeerTable


class Beat(Message, frozen=True, kw_only=True):
    """The launcher is there."""


class Signal(Message, frozen=True, kw_only=True):
    """The launcher has got a signal, and what it means is meant for the host's node."""

    number: Annotated[int, Meta(ge=1, le=31)]


class Here(Message, frozen=True, kw_only=True):
    """First word of a host: it has the node's port."""

    protocol: Protocol
    port: ListenPort


class Console(Message, frozen=True, kw_only=True):
    """Output of the host's ranks."""

    data: Annotated[bytes, Meta(max_length=CONSOLE_NBYTES)]


class Ended(Message, frozen=True, kw_only=True):
    """Last word of a host: nothing of its node is left; `outcome` is the job's end, if its daemon knew it."""

    outcome: Outcome | None


class Join(Message, frozen=True, kw_only=True):
    """First word of a node to node 0: where its daemon will listen, and the job by its own command line."""

    peer: Peer
    spec: JobSpec


class Table(Message, frozen=True, kw_only=True):
    """All nodes have come: the job as node 0 has it, and where all daemons listen."""

    spec: JobSpec
    peers: PeerTable


class Refused(Message, frozen=True, kw_only=True):
    """This node cannot be part of the job."""

    reason: Annotated[str, Meta(max_length=2000)]


ToHost: TypeAlias = Begin | Peers | Beat | Signal
FromHost: TypeAlias = Here | Console | Ended
FromMember: TypeAlias = Join
ToMember: TypeAlias = Table | Refused
Met: TypeAlias = FromMember | ToMember
