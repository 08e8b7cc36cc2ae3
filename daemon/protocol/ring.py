"""The messages about batches: a rank's reader and its agent, a producer and its agent.

A connection is a reader's or a producer's, as its first message says. Batches go by number: number `seq` of
`stream`, where a stream is what one data-parallel replica trains on, or one epoch of that. A position is
bytes that only the loader understands; with it the batches from a number on can be made again.

Each batch lies in a memfd of its own, which the agent makes, the producer fills and seals, and readers map.
"""

import fcntl
from typing import Annotated, TypeAlias

from msgspec import Meta

from ckptless.daemon.protocol.limits import Nbytes, Protocol
from ckptless.daemon.protocol.messages import Message

ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
"""With these the kernel refuses every change of a batch, for good."""
POSITION_LIMIT = 1 << 20
SEQ_LIMIT = 1 << 62
WINDOW_LIMIT = 256
# Sent to a reader beyond what it has said it took: it neither waits for the agent nor tells it each time.
AHEAD = 8
# Streams whose numbers differ by a multiple of this are one replica's, of one epoch after the other.
STREAMS = 1 << 20
TEXT_LIMIT = 64 << 10
WAITED_LIMIT_S = 1e9

Seq: TypeAlias = Annotated[int, Meta(ge=0, lt=SEQ_LIMIT)]
Position: TypeAlias = Annotated[bytes, Meta(max_length=POSITION_LIMIT)]
Text: TypeAlias = Annotated[str, Meta(max_length=TEXT_LIMIT)]

# ----------------------------------------------------------------------------------- reader, agent


class RingOpen(Message, frozen=True, kw_only=True):
    """First message of a reader. A ring is known by `loader`, a name, and `manifest`, 32 hex digits.

    `reader` is the index of the process's slot: whoever opens under the same one takes over from it. Of each
    stream so many batches are made ahead as `window` says, and all of them take `budget_nbytes`.
    """

    protocol: Protocol
    loader: Annotated[str, Meta(min_length=1, max_length=256)]
    manifest: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    reader: Annotated[int, Meta(ge=0, lt=1 << 16)]
    window: Annotated[int, Meta(ge=1, le=WINDOW_LIMIT)]
    budget_nbytes: Annotated[int, Meta(ge=1, lt=SEQ_LIMIT)]


class RingSeek(Message, frozen=True, kw_only=True):
    """The reader wants the batches of `stream` from `seq` on, which follow `position`.

    `number` goes up with each; what is sent has it.
    """

    number: Seq
    stream: Seq
    seq: Seq
    position: Position


class RingTook(Message, frozen=True, kw_only=True):
    """I have taken batch `seq`; no recovery will ask me for any before number `done`.

    Since I told last I have taken `count`, and waited `waits` times for one, `waited_s` seconds in all.
    """

    number: Seq
    seq: Seq
    done: Seq
    count: Seq = 0
    waits: Seq = 0
    waited_s: Annotated[float, Meta(ge=0, le=WAITED_LIMIT_S)] = 0.0


class RingDone(Message, frozen=True, kw_only=True):
    """I do not need this ring any more."""


class RingEntry(Message, frozen=True, kw_only=True):
    """Batch `seq`: its memfd, sealed, comes with it (SCM_RIGHTS)."""

    number: Seq
    seq: Seq
    nbytes: Nbytes


class RingEnd(Message, frozen=True, kw_only=True):
    """The stream has no batch `seq`."""

    number: Seq
    seq: Seq


class RingBroken(Message, frozen=True, kw_only=True):
    """Batch `seq` could not be made: why. Another RingSeek has it tried again."""

    number: Seq
    seq: Seq
    text: Text


class RingLease(Message, frozen=True, kw_only=True):
    """Start the producer of this ring; it says `lease` in its hello."""

    lease: Seq


# --------------------------------------------------------------------------------- producer, agent


class ProducerHello(Message, frozen=True, kw_only=True):
    """First message of a producer."""

    protocol: Protocol
    lease: Seq


class RingMake(Message, frozen=True, kw_only=True):
    """Make batch `seq` of `stream`; the memfd to write it to comes with it (SCM_RIGHTS).

    It is the next one of whoever has just made `seq` - 1 in the same `history`, and for all others the
    (`seq` - `base`)-th after `position`, from 0.
    """

    stream: Seq
    history: Seq
    seq: Seq
    base: Seq
    position: Position


class RingMade(Message, frozen=True, kw_only=True):
    """The batch lies in its memfd, which is sealed. `position` is the one after it."""

    stream: Seq
    seq: Seq
    nbytes: Annotated[int, Meta(ge=0, lt=SEQ_LIMIT)]
    position: Position


class RingAtEnd(Message, frozen=True, kw_only=True):
    """The stream has no batch `seq`."""

    stream: Seq
    seq: Seq


class RingFailed(Message, frozen=True, kw_only=True):
    """Batch `seq` cannot be made: why."""

    stream: Seq
    seq: Seq
    text: Text


FromReader: TypeAlias = RingOpen | RingSeek | RingTook | RingDone
ToReader: TypeAlias = RingEntry | RingEnd | RingBroken | RingLease
FromProducer: TypeAlias = ProducerHello | RingMade | RingAtEnd | RingFailed
ToProducer: TypeAlias = RingMake
FromRing: TypeAlias = FromReader | FromProducer
ToRing: TypeAlias = ToReader | ToProducer
