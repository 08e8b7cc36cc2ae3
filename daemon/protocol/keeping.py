"""The messages about memory that a daemon keeps over a requeue: agent and daemon; ckptctl and daemon.

    agent: Keep(sizes)    daemon: KeepAnswer(go)      agent: a memfd of each size    daemon: KeepAnswer(kept)
    agent: Claim          daemon: Claimed(sizes)      daemon: a memfd of each size   agent: Taken

On a connection of its own. The first memfd is the catalog of what lies in the others; no daemon reads any.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from ckptless.daemon.protocol.limits import (
    OF_RANKS,
    Age,
    Clipped,
    Digest,
    Generation,
    Number,
    Protocol,
    Rank,
    RankCount,
    RecordBytes,
    SlotCount,
    Step,
    Text,
    TryCount,
    Uid,
)
from ckptless.daemon.protocol.messages import Message, TensorsAt
from ckptless.daemon.protocol.model import Value

MAX_NAME = 256
MAX_PIECES = 1024
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 31)]
Nbytes: TypeAlias = Annotated[int, Meta(gt=0, le=1 << 50)]
Sizes: TypeAlias = Annotated[tuple[Nbytes, ...], Meta(min_length=1, max_length=MAX_PIECES)]


class Keep(Message, frozen=True, kw_only=True):
    """Agent to daemon: keep my memory for the job's next start; these are the memfds' sizes.

    `program` is a digest of what the run is of, so that another run of the job does not get it. `restarts`:
    how often Slurm has started the job again.
    """

    protocol: Protocol
    run: Name
    program: Name
    restarts: Count
    nbytes: Sizes


class KeepAnswer(Clipped, Message, frozen=True, kw_only=True):
    """go: send the memfds. kept: they are here. refused: `text` says why."""

    verdict: Literal["go", "kept", "refused"]
    text: Text = ""


class Claim(Message, frozen=True, kw_only=True):
    """Agent to daemon: give me what an earlier start of my job has left; the fields are those of `Keep`."""

    protocol: Protocol
    run: Name
    program: Name
    restarts: Count


class Claimed(Message, frozen=True, kw_only=True):
    """Daemon to agent: memfds of these sizes follow; none, where nothing is kept."""

    nbytes: Annotated[tuple[Nbytes, ...], Meta(max_length=MAX_PIECES)] = ()


class Taken(Message, frozen=True, kw_only=True):
    """Agent to daemon: I have them."""


class WhatIsKept(Message, frozen=True, kw_only=True):
    """ckptctl to daemon: what do you keep?"""

    protocol: Protocol


class KeptMemory(Value, frozen=True, kw_only=True):
    """The memory that a daemon keeps of one run of user `uid`; it is dropped in `left_s` seconds."""

    run: Name
    uid: Uid
    restarts: TryCount
    nbytes: Nbytes
    age_s: Age
    left_s: Age


class KeptList(Message, frozen=True, kw_only=True):
    """Answer to WhatIsKept: what the asker may see, and how many bytes may be kept on the node."""

    kept: Annotated[tuple[KeptMemory, ...], OF_RANKS]
    limit_nbytes: Number


# ------------------------------------------------------------------------------------ the catalog


class KeptRegion(Value, frozen=True, kw_only=True):
    """A memfd behind the catalog: slots for a shard's tensors."""

    shard: Rank
    slot_nbytes: Nbytes
    slots: SlotCount


class KeptTensors(Value, frozen=True, kw_only=True):
    """A version; `at.region` is the place of its memfd, counted from 0 behind the catalog."""

    shard: Rank
    step: Step
    at: TensorsAt


class KeptRecord(Value, frozen=True, kw_only=True):
    """A rank's record; `digest` is its xxh3_128."""

    rank: Rank
    shard: Rank
    step: Step
    record: RecordBytes
    digest: Digest


class Catalog(Value, frozen=True, kw_only=True):
    """The holdings of a node when its agent ended: of which run and generation; `digests` as in Holdings.

    So many `ranks` have committed it, from generation `cut` on.
    """

    run: Name
    generation: Generation
    cut: Generation
    ranks: RankCount
    regions: Annotated[tuple[KeptRegion, ...], OF_RANKS]
    tensors: Annotated[tuple[KeptTensors, ...], OF_RANKS]
    records: Annotated[tuple[KeptRecord, ...], OF_RANKS]
    digests: Annotated[tuple[tuple[Rank, Step, Rank, Digest], ...], OF_RANKS] = ()
