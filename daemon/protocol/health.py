"""The messages of `ckptctl health` and a daemon: how its node is, and what says so."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta
from msgspec.structs import replace

from ckptless.daemon.protocol.limits import Age, Name, Number, Protocol, Text
from ckptless.daemon.protocol.messages import Message
from ckptless.daemon.protocol.model import Value

MAX_CODE, MAX_WHERE, MAX_EVIDENCE = 64, 128, 500
# Of one node: what stands now, and the newest of what has ended.
MOST_VERDICTS = 256

Action: TypeAlias = Literal["note", "drain", "move", "evict"]
Code: TypeAlias = Annotated[str, Meta(max_length=MAX_CODE)]


class ProbeState(Value, frozen=True, kw_only=True):
    """How one probe of a daemon does. `text`: why it is off, hangs or has failed.

    `looks`: how often it has looked; `age_s`: since it did so last, None: never; `cost_s`: how long
    that took.
    """

    name: Name
    state: Literal["looks", "off", "hangs", "failed"]
    text: Text = ""
    looks: Number = 0
    age_s: Age | None = None
    cost_s: Age = 0.0


class VerdictRecord(Value, frozen=True, kw_only=True):
    """One thing that is, or was, not well with a node, as it is kept and told.

    `action` is what is to be done for it, `done` what was. `count`: how often it was seen, from `first_s` to
    `last_s`; it counts since `begun_s`, and until `ended_s`. Times are seconds since the Unix epoch.
    `evidence` is "" for those who may not read the kernel's log.
    """

    probe: Name
    code: Code
    where: Annotated[str, Meta(max_length=MAX_WHERE)]
    action: Action
    text: Text
    evidence: Annotated[str, Meta(max_length=MAX_EVIDENCE)] = ""
    count: Number
    first_s: Age
    last_s: Age
    begun_s: Age
    ended_s: Age | None = None
    done: Text = ""

    def ended(self, now_s: float) -> "VerdictRecord":
        """Return the same as it is over."""
        return replace(self, ended_s=now_s)

    def without_evidence(self) -> "VerdictRecord":
        """Return the same for those who may not read the kernel's log."""
        return replace(self, evidence="")


class WhatIsWell(Message, frozen=True, kw_only=True):
    """ckptctl to daemon: how is this node?"""

    protocol: Protocol


class HealthReport(Message, frozen=True, kw_only=True):
    """Answer to WhatIsWell: every probe, what stands, and what has ended lately, the newest first.

    `act` is the most that the site allows; None: no probe looks here, as a local run's daemon has none.
    """

    node: Name
    act: Action | None
    probes: Annotated[tuple[ProbeState, ...], Meta(max_length=256)] = ()
    verdicts: Annotated[tuple[VerdictRecord, ...], Meta(max_length=MOST_VERDICTS)] = ()
