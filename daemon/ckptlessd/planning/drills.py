"""Pure: the drill of a job as one daemon knows it: whether one waits, and which faults follow from it.

A drill is a fault that somebody wants to have. It is answered as any other; what is recorded of it says so.
"""

import dataclasses
import math
from dataclasses import dataclass

from ckptless.daemon.ckptlessd.planning.faults import Finding
from ckptless.daemon.protocol.messages import Drill, Strike
from ckptless.daemon.protocol.model import DrillKind

# The daemon that was asked says this much later than the others that nothing has come of it.
GRACE_S = 2.0
# So long after a drill the fault that it makes is found, as a rule; until then there is no other one.
FOUND_S = 5.0
# What ends or hangs by it, and what follows for others.
_OF_ITS_SLOT, _OF_ALL = ("died", "hung"), ("broken", "stall")


@dataclass
class Drills:
    """One drill waits at a time, and the last one that was done is remembered. Times in seconds.

    `waits_for`: why the leader has not done it yet, as it was told last.
    """

    waiting: Drill | None = None
    waits_for: str = ""
    struck: Strike | None = None
    _until: float = -math.inf
    _here: bool = False
    _struck_s: float = -math.inf
    _marks_s: float = 0.0

    def ask(self, drill: Drill, until: float, *, here: bool) -> None:
        """Have it wait until then; `here`: this daemon was asked, and is to say so where nothing comes of it.

        Of two that were asked for at the same moment at two daemons the first one counts.
        """
        if self.waiting is None:
            self.waiting, self._until, self._here, self.waits_for = drill, until, here, ""

    def expire(self, now: float) -> Drill | None:
        """Forget one that has waited for too long; return it if it was asked for here."""
        if self.waiting is None or now < self._until + GRACE_S * self._here:
            return None
        drill, self.waiting = self.waiting, None
        return drill if self._here else None

    def strike(self, order: Strike, now: float, stall_s: float) -> None:
        """It is done now; `stall_s`: the longest time until what follows from it is found."""
        self.waiting, self.struck, self._struck_s, self._marks_s = None, order, now, stall_s

    def busy(self, generation: int, now: float) -> str | None:
        """Return why there can be no other drill in this generation now, or None."""
        if self.waiting is not None:
            return f"another one waits for its step: {self.waiting.what}"
        if self.struck is None or self.struck.generation != generation:
            return None
        drill = self.struck.drill
        return f"one is under way: {drill.what}" if now < self._over_s + FOUND_S else None

    def ends_agent(self, node: int, generation: int) -> bool:
        """Whether the end of this node's agent is a drill."""
        return self._is_of("kill-agent", node, generation)

    def cuts_off(self, node: int, generation: int, now: float) -> bool:
        """Whether this node is silent since a drill has cut it off."""
        return self._is_of("cut-node", node, generation) and now <= self._over_s + self._marks_s

    def _is_of(self, kind: DrillKind, node: int, generation: int) -> bool:
        struck = self.struck
        return struck is not None and (struck.drill.kind, struck.drill.node, struck.generation) == (
            kind,
            node,
            generation,
        )

    def marked(self, finding: Finding, generation: int, now: float) -> Finding:
        """Return the finding, with the drill as its source where it follows from that."""
        struck = self.struck
        if struck is None or struck.generation != generation or now > self._over_s + self._marks_s:
            return finding
        place = struck.place
        its = struck.drill.rank is not None and (finding.node, finding.slot) == (place.node, place.slot)
        follows = finding.kind in _OF_ALL or (its and finding.kind in _OF_ITS_SLOT)
        return dataclasses.replace(finding, source="drill") if follows else finding

    @property
    def _over_s(self) -> float:
        """When the drill itself was over."""
        return self._struck_s + (self.struck.drill.for_s if self.struck is not None else 0.0)
