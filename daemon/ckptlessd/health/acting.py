"""Does what the verdicts of this node are worth: tells Slurm, has jobs leave, and takes it back.

One thing at a time, the strongest action that stands. Slurm is told first, and what all nodes have told it
decides whether this one goes on; see `breaker`. What somebody else has drained is left as it is, and what
somebody undrains is drained again only where the same is seen again.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ckptless.daemon.ckptlessd.health.breaker import SETTLED_S, WINDOW_S, is_among_first
from ckptless.daemon.ckptlessd.health.meanings import ACTIONS
from ckptless.daemon.ckptlessd.health.verdicts import Key, Verdict
from ckptless.daemon.ckptlessd.recovery.events import Leave
from ckptless.daemon.protocol.errors import CkptlessError
from ckptless.daemon.protocol.health import Action
from ckptless.daemon.settings.options import HealthSettings
from ckptless.daemon.slurm.adapter import Node
from ckptless.daemon.slurm.errors import SlurmUnreachableError
from ckptless.daemon.slurm.reason import reason_text

logger = logging.getLogger(__name__)

# So often Slurm is asked whether all is as it was left.
ASK_S = 30.0
# Every reason of ours for a node's health begins so, and goes on with the probe.
OURS = reason_text("health ")


class Nodes(Protocol):
    """Slurm's word on all nodes, and what it is told of this one. Each call raises SlurmError."""

    async def now(self) -> Sequence[Node]:
        """Return all nodes as Slurm knows them at this moment."""

    async def drain(self, reason: str) -> None:
        """Have no new job start on this node."""

    async def undrain(self) -> None:
        """Have jobs start on this node again."""


@dataclass
class Acting:
    """Owned by the daemon's event loop. `leave` hands jobs the word that they are to leave this node.

    `told` hears, of a verdict, what was done for it or why nothing was, in words.
    """

    me: str
    nodes: Nodes
    settings: HealthSettings
    leave: Callable[[Leave | None], None]
    told: Callable[[Verdict, str], None]
    # Marks that this daemon has made, and when (monotonic); and those that it may act upon.
    _marked: dict[str, float] = field(default_factory=dict)
    _confirmed: set[str] = field(default_factory=set)
    # Marks that Slurm has taken; and how often those verdicts were seen when somebody took theirs back.
    _drained: set[str] = field(default_factory=set)
    _undrained: dict[Key, int] = field(default_factory=dict)
    # Marks that were one too many, and until when (monotonic) nothing is done for them.
    _held: dict[str, float] = field(default_factory=dict)
    _well_since: float | None = None
    _trouble: str = ""
    # What it was about the last time, and when Slurm is asked again (monotonic).
    _subject: Key | None = None
    _next_s: float = 0.0

    def action(self, verdict: Verdict) -> Action:
        """Return what is to be done for it: no more than the site allows."""
        return min(verdict.meaning.action, self.settings.act, key=ACTIONS.index)

    async def look(self, standing: Iterable[Verdict]) -> None:
        """See to it that what stands is done, and nothing else."""
        now_s = time.monotonic()
        wanted = [one for one in standing if self.action(one) != "note"]
        acts = [
            one
            for one in wanted
            if self._held.get(_mark(one), 0.0) <= now_s and self._undrained.get(one.key) != one.count
        ]
        subject = acts[0].key if acts else None
        if subject == self._subject and now_s < self._next_s:
            return
        self._subject, self._next_s = subject, now_s + ASK_S
        try:
            if acts:
                self._well_since = None
                await self._act(acts, now_s)
            else:
                self.leave(None)
                await self._recover(now_s, well=not wanted)
        except SlurmUnreachableError as error:
            self._note_trouble(f"Slurm cannot be asked: {error}")
        except CkptlessError as error:
            self._note_trouble(f"Slurm refuses it: {error}")
            for one in acts[:1]:
                self.told(one, f"nothing: Slurm refuses to drain it: {error}")
        else:
            self._trouble = ""

    def recall(self, verdict: Verdict) -> None:
        """Take one for which an earlier life of this daemon has drained the node."""
        self._drained.add(_mark(verdict))

    async def _act(self, acts: Sequence[Verdict], now_s: float) -> None:
        verdict = acts[0]
        nodes = await self.nodes.now()
        mine = next((node for node in nodes if node.name == self.me), None)
        mark = _mark(verdict)
        if mine is None:
            return
        if not mine.draining and mark in self._drained:
            self._drained.clear()
            self._undrained = {one.key: one.count for one in acts}
            self.leave(None)
            self.told(verdict, "nothing any more: somebody has undrained the node")
            return
        if not mine.draining:
            self._marked[mark] = now_s
            self._confirmed.discard(mark)
            self._next_s = now_s + SETTLED_S
            await self.nodes.drain(reason_text(f"health {verdict.key.probe}: {verdict.words}"))
            self._drained.add(mark)
            self.told(verdict, "drained")
            return
        if not mine.reason.startswith(OURS):
            self.told(verdict, f"nothing: it is drained already ({mine.reason})")
            self.leave(None)
            return
        if now_s - self._marked.get(mark, 0.0) < SETTLED_S:
            return
        # Drained for another probe's word, which was no word too many, it is drained.
        if mine.reason.startswith(mark) and mark not in self._confirmed:
            if not is_among_first(self.me, nodes, mark, self.settings.most_per_hour, time.time()):
                await self._hold(verdict, mark, now_s)
                return
            self._confirmed.add(mark)
        self._tell_jobs(verdict)

    async def _hold(self, verdict: Verdict, mark: str, now_s: float) -> None:
        """One node too many by this probe's word: take the mark back, and leave it at that for a while."""
        self._held[mark] = now_s + WINDOW_S
        self._drained.discard(mark)
        self.leave(None)
        await self.nodes.undrain()
        most = self.settings.most_per_hour
        text = f"nothing: {verdict.key.probe} has taken {most} nodes out within an hour (most_per_hour)"
        self.told(verdict, text)

    def _tell_jobs(self, verdict: Verdict) -> None:
        action = self.action(verdict)
        if action == "drain":
            self.leave(None)
            self.told(verdict, "drained")
            return
        evict = action == "evict"
        reason = f"unwell ({verdict.key.probe}: {verdict.words})"
        self.leave(Leave(reason, "health", at_once=evict, shrink=evict))
        where = "" if evict else " for a spare, where they have one"
        self.told(verdict, f"drained, and jobs leave it{where}")

    async def _recover(self, now_s: float, *, well: bool) -> None:
        """Take back what was drained here, once the node has been well for as long as the site wants it."""
        if not well or self.settings.undrain_after_s is None:
            self._well_since = None
            return
        if self._well_since is None:
            self._well_since = now_s
        if now_s - self._well_since < self.settings.undrain_after_s:
            return
        self._well_since = now_s
        mine = next((node for node in await self.nodes.now() if node.name == self.me), None)
        if mine is not None and mine.draining and not mine.down and mine.reason.startswith(OURS):
            logger.warning("health: %s is well again, and undrained; it was %s", self.me, mine.reason)
            await self.nodes.undrain()
            self._marked.clear()
            self._confirmed.clear()
            self._drained.clear()

    def _note_trouble(self, text: str) -> None:
        if text != self._trouble:
            logger.warning("health: %s", text)
        self._trouble = text


def _mark(verdict: Verdict) -> str:
    """Return how a reason in Slurm begins that is of this probe."""
    return reason_text(f"health {verdict.key.probe}: ")
