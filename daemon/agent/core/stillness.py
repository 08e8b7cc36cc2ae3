"""Pure: from what a rank's page shows over time to how long its steps are, and whether it stands still."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.limits import MOST_RANKS
from ckptless.daemon.protocol.page import FOR_AGENT, GroupCalls, Stepped

# A rank is late after so many times the longest of the last so many steps of its node, and after so many
# times the longest ever: an evaluation comes again. And never sooner than this: a scheduler, a disk or a
# collector of garbage may hold it up for a while.
TIMES, RECENT, TIMES_EVER, FLOOR_S = 5, 256, 2, 3.5
# Of fewer steps there is no rhythm.
FEWEST = 32
# What its process does is looked at over so long, before it is late and from then on; and never before it has
# stood still for so long.
OVER_S, LOOK_AFTER_S = 2.0, 1.0
# Who runs for no more of the time, and wants to run for no more of it, is asleep.
ASLEEP = 0.1
# An interpreter that runs answers sooner.
DEAF_S = 3.0
# Who runs and is late spins where it has been in one place of its code for as long again as made it late, and
# for so long at least; has run for so long of that; and has asked the kernel for memory or files no more
# often in a second than this.
SPINS_S, SPINS_RAN_S, SPINS_ASKED = 8.0, 4.0, 20.0
# Steps of which a rank's pace is the median.
WINDOW = 12


@dataclass
class Rhythm:
    """How long the steps of a node's ranks took, since its agent began; `longest_s` of the recent ones.

    The first steps of a generation are none. But what one of them took without a sign of getting on counts:
    so long may last what a rank was replaced for in vain.
    """

    longest_s: float = 0.0
    _ever_s: float = 0.0
    _newest: int = -1
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def take(self, steps: Sequence[Stepped]) -> None:
        """Note steps that are done, which all ranks make together."""
        new = [step for step in steps if step.step > self._newest]
        if not new:
            return
        self._newest = new[-1].step
        self._recent.extend(step.took_s for step in new)
        self.longest_s = max(self._recent, default=0.0)
        self._ever_s = max(self._ever_s, self.longest_s)

    def stood(self, still_s: float) -> None:
        """Note that ranks have stood still for so long, and have made their step all the same."""
        self._ever_s = max(self._ever_s, still_s)

    @property
    def late_after_s(self) -> float | None:
        """After how long without a sign of getting on a rank is late; None while nobody knows."""
        if len(self._recent) < FEWEST:
            return None
        return max(FLOOR_S, TIMES * self.longest_s, TIMES_EVER * self._ever_s)


@dataclass(frozen=True)
class Activity:
    """What the kernel says of a process and its children: how long they ran, and each thread waited to run.

    `wanted_s`: by the threads' numbers. `asked`: how often they had a page of memory given, or have read or
    written. `blocked`: one of the process waits for a disk. `stopped`: by a signal.
    """

    ran_s: float
    wanted_s: Mapping[int, float] = field(default_factory=dict)
    asked: int = 0
    blocked: bool = False
    stopped: bool = False

    def since(self, before: "Activity") -> float:
        """Return for how many seconds since then something ran or wanted to."""
        wanted = sum(wanted_s - before.wanted_s.get(one, 0.0) for one, wanted_s in self.wanted_s.items())
        return self.ran_s - before.ran_s + wanted


@dataclass
class Watched:
    """One rank's process, since it was given a page. Times are seconds of the agent's clock."""

    moved_at: float
    # The longest standstill since the newest step.
    stood_s: float = 0.0
    _seen: bytes = b""
    _since: tuple[float, Activity] | None = None
    _how: m.Stillness = "working"
    # The place in the script, once it was asked for in this standstill.
    at: str | None = None
    # The main thread's place as it was first asked for; when it was last, and what the kernel said then.
    _placed: object = None
    _asked: tuple[float, Activity] | None = None
    # How long it has been there, has run, and how often it has asked for something; None: it was elsewhere.
    _there: tuple[float, float, int] | None = (0.0, 0.0, 0)

    def see(self, moving: bytes, now: float) -> float:
        """Take the page's words; return for how long they have been these."""
        if moving != self._seen:
            self._seen, self.moved_at = moving, now
            self._since, self._how, self.at = None, "working", None
            self._placed, self._asked, self._there = None, None, (0.0, 0.0, 0)
        self.stood_s = max(self.stood_s, now - self.moved_at)
        return now - self.moved_at

    def asks(self, now: float) -> bool:
        """Whether the kernel is to be asked again."""
        return self._since is None or now - self._since[0] >= OVER_S

    def act(self, activity: Activity | None, now: float) -> None:
        """Take what the kernel says; None: nothing that is known."""
        if activity is None:
            self._since, self._how = None, "working"
        elif activity.stopped:
            self._how = "stopped"
        elif self._since is None:
            self._since = now, activity
        elif now - self._since[0] >= OVER_S:
            began, before = self._since
            idle = activity.since(before) <= ASLEEP * (now - began)
            still = idle and not (activity.blocked or before.blocked)
            self._how, self._since = ("asleep" if still else "working"), (now, activity)

    def asks_where(self, now: float) -> bool:
        """Whether it runs, and is to be asked again whether it still is in the same place."""
        due = self._asked is None or now - self._asked[0] >= OVER_S
        return self._how == "working" and self._there is not None and due

    def found(self, place: object, before: Activity | None, after: Activity | None, now: float) -> None:
        """Take its main thread's place, and what the kernel said before and after that was asked for.

        Between these it has written where it is. False and None: nobody knows.
        """
        if not place or before is None or after is None:
            self._there = None
        elif self._asked is None:
            self._placed, self._asked = place, (now, after)
        elif self._there is not None:
            (at, last), (there_s, ran_s, asked) = self._asked, self._there
            stays = place == self._placed and not before.blocked
            there = (
                there_s + now - at,
                ran_s + before.ran_s - last.ran_s,
                asked + before.asked - last.asked,
            )
            self._there = there if stays else None
            self._asked = now, after

    def how(self, silent_s: float, late_after_s: float | None = None) -> m.Stillness:
        """Return what it is at, where it has not answered for so long, and is late after so long."""
        if self._how != "stopped" and silent_s > DEAF_S:
            return "deaf"
        if self._how != "working" or self._there is None or late_after_s is None:
            return self._how
        there_s, ran_s, asked = self._there
        spins = there_s >= max(SPINS_S, late_after_s) and ran_s >= SPINS_RAN_S
        return "spinning" if spins and asked <= SPINS_ASKED * there_s else "working"


def waits_in(groups: Sequence[GroupCalls], *, for_agent: bool) -> m.Call | None:
    """Return what a rank waits in, the collective that began first among those that are not done."""
    for group in groups:
        if group.begun == group.done:
            continue
        if not group.name:
            peer = group.elements - 1 if 0 < group.elements <= MOST_RANKS else None
            return m.Call(group="", operation=group.operation, peer=peer)
        return m.Call(
            group=group.name,
            size=group.size,
            number=group.done + 1,
            operation=group.operation,
            elements=group.elements,
        )
    return m.Call(group="", operation=FOR_AGENT) if for_agent else None
