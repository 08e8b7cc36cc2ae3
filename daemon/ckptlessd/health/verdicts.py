"""Pure: from findings to verdicts: strikes, hysteresis, and what is the worst that stands."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptless.daemon.ckptlessd.health.meanings import ACTIONS, Meaning, meaning
from ckptless.daemon.ckptlessd.health.probe import Finding
from ckptless.daemon.protocol.health import Action, VerdictRecord

# Of one probe, at a time: one that makes up a new place in every look takes no more than this.
MOST_PER_PROBE = 64


class Key(NamedTuple):
    """What a verdict is about: the same thing seen again is the same verdict."""

    probe: str
    code: str
    where: str


@dataclass
class Verdict:
    """One thing that was found, by one probe. Times are seconds since the Unix epoch.

    `stands` from its last strike on; `count` is how often it was seen, `evidence` what was read the last
    time.
    """

    key: Key
    meaning: Meaning
    first_s: float
    last_s: float
    evidence: str
    count: int = 0
    stands: bool = False
    begun_s: float | None = None
    _strikes: deque[float] = field(default_factory=deque)

    def seen(self, evidence: str, now_s: float) -> None:
        """Count one more."""
        self.last_s, self.evidence, self.count = now_s, evidence, self.count + 1
        self._strikes.append(now_s)
        while self._strikes[0] < now_s - self.meaning.window_s or len(self._strikes) > self.meaning.strikes:
            self._strikes.popleft()
        if not self.stands and len(self._strikes) >= self.meaning.strikes:
            self.stands, self.begun_s = True, now_s

    @property
    def words(self) -> str:
        """Return what it is, where, and what that means."""
        where = f" ({self.key.where})" if self.key.where else ""
        return f"{self.key.code}{where}: {self.meaning.text}"

    def is_over(self, now_s: float) -> bool:
        """Whether it was not seen for as long as it counts."""
        return now_s - self.last_s > self.meaning.window_s


@dataclass
class Verdicts:
    """All that was found of this node and counts still. `own` are the site's actions by code.

    `dropped`: probes of which something was not taken, as they find too much at a time.
    """

    own: Mapping[str, Action] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    _known: dict[Key, Verdict] = field(default_factory=dict)

    def hear(self, probe: str, findings: Iterable[Finding], now_s: float) -> list[Verdict]:
        """Take what a probe has found in one look; return the verdicts that begin to stand with it."""
        begun: list[Verdict] = []
        for one in findings:
            key = Key(probe, one.code, one.where)
            known = self._known.get(key)
            if known is None:
                if sum(key.probe == probe for key in self._known) >= MOST_PER_PROBE:
                    self.dropped.add(probe)
                    continue
                known = Verdict(key, meaning(one.code, self.own), now_s, now_s, one.evidence)
                self._known[key] = known
            stood = known.stands
            known.seen(one.evidence, now_s)
            if known.stands and not stood:
                begun.append(known)
        return begun

    def recall(self, record: VerdictRecord) -> Verdict:
        """Take one that stood when the daemon ended, on a node that has not booted since."""
        key = Key(record.probe, record.code, record.where)
        means = meaning(record.code, self.own)
        known = Verdict(key, means, record.first_s, record.last_s, record.evidence, record.count)
        known.stands, known.begun_s = True, record.begun_s
        self._known[key] = known
        return known

    def expire(self, now_s: float) -> list[Verdict]:
        """Forget what was not seen for as long as it counts; return those of it that stood."""
        over = [one for one in self._known.values() if one.is_over(now_s)]
        for one in over:
            del self._known[one.key]
        return [one for one in over if one.stands]

    @property
    def standing(self) -> list[Verdict]:
        """Return those that stand, the strongest action first, of the same action the oldest."""
        found = [one for one in self._known.values() if one.stands]
        return sorted(found, key=lambda one: (-ACTIONS.index(one.meaning.action), one.begun_s or 0.0))
