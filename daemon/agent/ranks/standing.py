"""Looks at the pages of this node's ranks, and finds out what a rank is at that does not get on."""

import fcntl
import os
from dataclasses import dataclass, field

from ckptless.daemon.agent.core import stillness
from ckptless.daemon.agent.core.slots import Slot
from ckptless.daemon.agent.ranks.activity import activity
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol import page as p

LOOK_S = 0.25
# Of the stacks that a process writes so much is read.
STACKS_NBYTES = 1 << 18


@dataclass
class Page:
    """A process's page, which lives as long as the process.

    `newest` is the newest step that was seen, and `since` when; `step` the newest whose time is known,
    `generation` the slot's.
    """

    fd: int
    reader: p.PageReader
    watched: stillness.Watched
    step: int = -1
    newest: int = -1
    since: float = 0.0
    generation: int = 0
    # Those of which no pace is told yet.
    steps: list[p.Stepped] = field(default_factory=list)
    # What the slot has been told that steps took.
    spent: tuple[float, ...] = (0.0,) * 5
    stacks_at: int = p.NBYTES
    closed: bool = False

    @classmethod
    def make(cls, now: float) -> "Page":
        """Raises OSError."""
        fd = os.memfd_create("ckptless-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, p.NBYTES)
            # What is mapped here stays; stacks make it longer.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            return cls(fd, p.PageReader(fd), stillness.Watched(now))
        except OSError:
            os.close(fd)
            raise

    def count(self, slot: Slot, *, own: bool) -> None:
        """Tell the slot what steps took since the last time; the newest, too, if it is still its `own`."""
        if not self.reader.taken:
            return
        done_at, spent = self.reader.spent()
        if spent != self.spent:
            slot.spend([max(0.0, one - told) for one, told in zip(spent, self.spent, strict=True)], done_at)
            self.spent = spent
        if own and slot.phase == "restored" and self.reader.step > (slot.step or 0):
            # Of those that are not committed the rank tells only now and then.
            slot.step = self.reader.step

    def new_stacks(self) -> str:
        """Return what a signal has had the process write since the last time."""
        data = os.pread(self.fd, STACKS_NBYTES, self.stacks_at)
        self.stacks_at += len(data)
        return data.decode(errors="replace")

    def close(self) -> None:
        """Its process has ended."""
        self.closed = True
        self.reader.close()
        os.close(self.fd)


def is_in_script(still: m.Still) -> bool:
    """Whether it is worth asking where the script is: it waits in no collective, as far as the page says.

    Where its interpreter is held, the thread that says that a collective is over waits for it, too.
    """
    return still.call is None or still.how == "deaf"


class Standing:
    """How all ranks of a node get on. Owned by the agent's event loop."""

    def __init__(self, stall_s: float) -> None:
        self._rhythm = stillness.Rhythm()
        # Before the longest stall is over the leader must know who waits for whom.
        self._told_after_s = stall_s / 2

    def look(self, page: Page, slot: Slot, pid: int, now: float) -> tuple[m.Still | None, float | None]:
        """Return how a rank stands still, and until when it may be without a step by its script's word.

        Both are None where it is not for long enough to be told of. Where the script is, `Watched.at`, is
        for somebody to ask the process.
        """
        one, reader = page.watched, page.reader
        # A recovery may be over between two looks.
        other, page.generation = slot.generation != page.generation, slot.generation
        if not reader.taken or slot.phase != "restored" or other:
            one.see(b"", now)
            one.stood_s = 0.0
            page.newest, page.since = reader.step, now
            page.steps.clear()
            return None, None
        self._learn(page, slot, now)
        still_s = one.see(reader.moving(), now)
        late_after_s = self._rhythm.late_after_s
        late = late_after_s is not None and still_s >= late_after_s
        told_after_s = min(late_after_s or self._told_after_s, self._told_after_s)
        # It takes two looks, which come when they may.
        ahead_s = stillness.OVER_S + 2 * LOOK_S
        if still_s >= max(stillness.LOOK_AFTER_S, told_after_s - ahead_s) and one.asks(now):
            one.act(activity(pid), now)
        # Also of one that gets on: an evaluation may have its collectives.
        said_after_s = min(stillness.FLOOR_S, self._told_after_s)
        until = reader.until if now - page.since >= said_after_s else None
        if still_s < told_after_s:
            return None, until
        occupant, groups = slot.occupant, reader.groups()
        silent_s = now - occupant.heard_at if occupant is not None and not occupant.released else 0.0
        still = m.Still(
            still_s=still_s,
            late=late,
            how=one.how(silent_s, late_after_s),
            phase=reader.phase,
            longest_s=self._rhythm.longest_s,
            over=until is not None and until <= now,
            call=stillness.waits_in(groups, for_agent=reader.waits),
            queued=tuple((group.name, group.queued) for group in groups if group.queued),
            at=one.at or "",
        )
        return still, until

    def _learn(self, page: Page, slot: Slot, now: float) -> None:
        if page.reader.step > page.newest:
            page.newest, page.since = page.reader.step, now
            self._rhythm.stood(page.watched.stood_s)
            page.watched.stood_s = 0.0
        found = page.reader.steps_after(page.step)
        if not found:
            return
        page.step = found[-1].step
        self._rhythm.take(found)
        page.steps += found
        if len(page.steps) >= stillness.WINDOW:
            slot.pace = p.pace_of(page.steps)
            page.steps.clear()
