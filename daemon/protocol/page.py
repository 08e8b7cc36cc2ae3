"""The page of shared memory in which a rank says where it is: its layout, and how its agent reads it.

A rank writes single words of 8 bytes into a memfd of its agent's, without a system call: so its agent sees
how far it is also where its interpreter is held, or its process is stopped. What the agent finds there is the
rank's word: it is read with bounds, and nothing but where a rank stands follows from it.

    word                       of 64 bits, in this machine's order
    0                          VERSION; 0 where the rank has not taken the page yet
    1 to 5                     step, phase, until when that may last (ns of CLOCK_MONOTONIC; 0: nobody said),
                               whether it waits for its agent, how many groups there are
    NAME_AT                    the name of a phase that is the script's own, UTF-8
    GROUPS_AT                  GROUPS times: name, size, collectives begun and done, and given to a device,
                               the last CALLS of both, each its number in OPERATIONS and, from bit 8, its
                               elements; the first is of no group and has the messages of all, and the rank
                               that each is to or from, plus 1
    STEPS_AT                   STEPS times, step n at n % STEPS: its number, and in seconds (doubles) how long
                               it took, and of that waited for others, for data, and was committed
    SPENT_AT                   when the newest step was done (CLOCK_MONOTONIC), and in seconds (doubles) what
                               the steps of this process took that were done for the first time; of that,
                               waited for data, for commits, in checkpoints; and what was done again

Step and collective counters only grow within a generation, whose begin makes all groups anew.
"""

import mmap
import statistics
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ckptless.daemon.protocol.limits import MOST_GROUPS, MOST_RANKS
from ckptless.daemon.protocol.model import Pace

VERSION = 2
STEP, PHASE, UNTIL, WAITS, GROUPS_USED = range(1, 6)
NAME_AT, NAME_WORDS = 8, 8
GROUPS_AT, GROUPS, GROUP_WORDS = 16, MOST_GROUPS, 20
GROUP_NAME_WORDS, SIZE, BEGUN, DONE, QUEUED, CALLS_AT, CALLS = 6, 6, 7, 8, 9, 10, 8
STEPS_AT, STEPS, STEP_WORDS = GROUPS_AT + GROUPS * GROUP_WORDS, 64, 5
ONE_STEP = struct.Struct("=q4d")
# What moves where the rank gets on: all but the steps, of which the newest moves with STEP.
MOVING_NBYTES = STEPS_AT * 8
SPENT_AT, SPENT = STEPS_AT + STEPS * STEP_WORDS, struct.Struct("=6d")
WORDS = SPENT_AT + SPENT.size // 8
# Whole pages; the stacks that a signal has written (see STACKS_SIGNAL) come after them.
NBYTES = -(-WORDS * 8 // mmap.PAGESIZE) * mmap.PAGESIZE

PHASES = ("", "compute", "data", "optimizer", "commit", "compile", "own")
COMPUTE, DATA, OPTIMIZER, COMMIT, COMPILE, OWN = range(1, 7)
POINT_TO_POINT = ("send", "recv", "recv_anysource")
OPERATIONS = (
    *("another call", "allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced"),
    *("_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced"),
    *("all_gather_single_coalesced", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced", "broadcast", "barrier"),
    *("reduce", "gather", "scatter", "alltoall", "alltoall_base", "all_to_all_single", *POINT_TO_POINT),
)
# What a rank waits in that has asked its agent for something, in place of a collective.
FOR_AGENT = "its agent"
MOST_ELEMENTS, MOST_S, MOST_COUNTED = 1 << 48, 1e9, 1 << 61


@dataclass(frozen=True)
class GroupCalls:
    """The collectives of one group on one rank: how many began and are done, and the oldest that is not.

    Of those on a device nobody knows when they are done: `queued` were given to it.
    `elements`: of messages, which belong to no group, the other rank plus 1, or 0 for any.
    """

    name: str
    size: int
    begun: int
    done: int
    queued: int
    operation: str
    elements: int


@dataclass(frozen=True)
class Stepped:
    """One step's time in seconds, and how much of it went where; the rest is the rank's own work."""

    step: int
    took_s: float
    waited_s: float
    data_s: float
    commit_s: float

    @property
    def own_s(self) -> float:
        """What the rank was busy for by itself: neither for others, nor for copies."""
        return max(0.0, self.took_s - self.waited_s - self.commit_s)


def pace_of(ones: Sequence[Stepped | Pace]) -> Pace:
    """Return the medians of these steps, or of the paces of several ranks; there is one at least."""
    return Pace(
        step=ones[-1].step,
        took_s=statistics.median(one.took_s for one in ones),
        own_s=statistics.median(one.own_s for one in ones),
        waited_s=statistics.median(one.waited_s for one in ones),
        data_s=statistics.median(one.data_s for one in ones),
        commit_s=statistics.median(one.commit_s for one in ones),
    )


class PageReader:
    """A rank's page, as its agent reads it. The mapping is this object's, `fd` the caller's."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, NBYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        self._words = memoryview(self._map).cast("q")

    @property
    def taken(self) -> bool:
        """Whether a rank writes it."""
        return self._words[0] == VERSION

    def moving(self) -> bytes:
        """Return what is another one whenever the rank has got on."""
        return self._map[:MOVING_NBYTES]

    @property
    def step(self) -> int:
        """The newest step that is done."""
        return self._count(STEP)

    @property
    def phase(self) -> str:
        """What the rank is doing; of the script's own phases the name that it has given."""
        number = self._words[PHASE]
        if number == OWN:
            return self._text(NAME_AT, NAME_WORDS) or "own"
        return PHASES[number] if 0 < number < len(PHASES) else "compute"

    @property
    def until(self) -> float | None:
        """Until when its phase may last, by the script's word; None: it has said nothing."""
        until = self._words[UNTIL]
        return until / 1e9 if until > 0 else None

    @property
    def waits(self) -> bool:
        """Whether the rank waits for its agent, and through it for others."""
        return self._words[WAITS] != 0

    def groups(self) -> list[GroupCalls]:
        """Return its groups, in the order in which they were made."""
        used = max(0, min(self._words[GROUPS_USED], GROUPS))
        return [self._group(GROUPS_AT + index * GROUP_WORDS) for index in range(used)]

    def _group(self, at: int) -> GroupCalls:
        begun, queued = self._count(at + BEGUN), self._count(at + QUEUED)
        done = min(self._count(at + DONE), begun)
        # Of more than are kept, the oldest one that is.
        oldest = begun + queued - min(max(1, begun - done), CALLS)
        call = self._words[at + CALLS_AT + oldest % CALLS]
        number, elements = call & 0xFF, call >> 8
        return GroupCalls(
            name=self._text(at, GROUP_NAME_WORDS),
            size=self._count(at + SIZE, MOST_RANKS),
            begun=begun,
            done=done,
            queued=queued,
            operation=OPERATIONS[number] if number < len(OPERATIONS) else OPERATIONS[0],
            elements=max(0, min(elements, MOST_ELEMENTS)),
        )

    def steps_after(self, step: int) -> list[Stepped]:
        """Return the steps after `step` that are still there, in order."""
        found: list[Stepped] = []
        newest = self.step
        for number in range(max(step + 1, newest - STEPS + 1, 0), newest + 1):
            there, *parts = ONE_STEP.unpack_from(self._map, 8 * (STEPS_AT + number % STEPS * STEP_WORDS))
            took_s, waited_s, data_s, commit_s = (part if 0 <= part < MOST_S else 0.0 for part in parts)
            # A step that is not this one's, or that took no time: a generation has begun here.
            if there == number and took_s:
                found.append(Stepped(number, took_s, waited_s, data_s, commit_s))
        return found

    def spent(self) -> tuple[float, tuple[float, ...]]:
        """Return when the newest step was done, 0 for none; and seconds, in the order of `Spent`'s fields."""
        words = SPENT.unpack_from(self._map, 8 * SPENT_AT)
        at_s, took_s, data_s, commit_s, checkpoint_s, redone_s = (
            s if 0 <= s < MOST_S else 0.0 for s in words
        )
        training_s = max(0.0, took_s - data_s - commit_s - checkpoint_s)
        return at_s, (training_s, data_s, commit_s, checkpoint_s, redone_s)

    def _count(self, at: int, most: int = MOST_COUNTED) -> int:
        return max(0, min(self._words[at], most))

    def _text(self, at: int, words: int) -> str:
        data = self._map[8 * at : 8 * (at + words)]
        return data.split(b"\0", 1)[0].decode(errors="replace")

    def close(self) -> None:
        """Let go of it."""
        self._words.release()
        self._map.close()
