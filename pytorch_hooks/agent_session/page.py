"""A rank's side of the page in which it says where it is: written at every step, without a system call."""

import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ckptless.daemon.protocol import page as p
from ckptless.daemon.protocol.errors import UsageError

# Collectives of groups beyond those that there is room for are counted nowhere.
NOWHERE = -1
MESSAGES = p.GROUPS_AT
# A day: who needs longer has another mistake. And what nobody has to say of a compilation.
MOST_S, COMPILE_S = 86400.0, 3600.0
FIRST_STEPS = 3
# The name of a phase of the script's own whose time is accounted for by itself.
CHECKPOINT = "checkpoint"
_STEP_AND_PHASE = struct.Struct("=2q")
_NUMBERS = {name: number for number, name in enumerate(p.OPERATIONS)}


def operation(name: str) -> int:
    """Return the number of a collective, by its name in torch."""
    return _NUMBERS.get(name, 0)


class Page:
    """The page of this process; memory of its own where no agent has given one.

    Phases and steps belong to the main thread. A group's calls are counted under its generation's lock.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = fd
        if fd is not None:
            os.set_inheritable(fd, False)
        self._map = mmap.mmap(-1 if fd is None else fd, p.NBYTES)
        self.words = memoryview(self._map).cast("q")
        self.words[0] = p.VERSION
        self._lock = threading.Lock()
        # Of the present step, in seconds: what was waited in works, in the last collective that only DDP's
        # own C++ waits for, and for data; when it began, and which it is of its generation.
        self._waited_s = self._data_s = self._tail_began_s = self._tail_s = self._began_s = 0.0
        self._steps = 0
        # Of all steps of this process, see `page.SPENT_AT`; and of the present one, what was a checkpoint's.
        self._took_s = self._all_data_s = self._commit_s = self._checkpoints_s = self._again_s = 0.0
        self._checkpoint_s = 0.0
        self._compiling = (p.COMPUTE, 0)
        # One object: by it they are found again.
        self.compile_hooks = self.compiles, self.compiled

    def stacks_fd(self) -> int:
        """Return where a signal handler writes stacks: behind the page, or to standard error."""
        if self.fd is None:
            return 2
        os.lseek(self.fd, p.NBYTES, os.SEEK_SET)
        return self.fd

    # ------------------------------------------------------------------------------------ groups

    def renew_groups(self) -> None:
        """A generation begins, whose groups are new."""
        with self._lock:
            self.words[p.GROUPS_USED] = 0
        self.add_group("", 0)

    def add_group(self, name: str, size: int) -> int:
        """Return where the calls of a group are counted from now on."""
        with self._lock:
            index = self.words[p.GROUPS_USED]
            if index >= p.GROUPS:
                return NOWHERE
            at = p.GROUPS_AT + index * p.GROUP_WORDS
            self._write(at, p.GROUP_NAME_WORDS, name)
            self.words[at + p.SIZE] = size
            self.words[at + p.BEGUN] = self.words[at + p.DONE] = self.words[at + p.QUEUED] = 0
            self.words[p.GROUPS_USED] = index + 1
            return at

    def call(self, at: int, number: int, elements: int, counter: int = p.BEGUN) -> None:
        """A collective of the group at `at` begins, of so many elements, or with that rank.

        `counter` is p.BEGUN, or p.QUEUED where it is given to a device.
        """
        if at != NOWHERE:
            words, at_counter = self.words, at + counter
            index = words[at + p.BEGUN] + words[at + p.QUEUED]
            words[at + p.CALLS_AT + index % p.CALLS] = number | elements << 8
            words[at_counter] = words[at_counter] + 1

    def done(self, at: int) -> None:
        """One of them is over."""
        if at != NOWHERE:
            self.words[at + p.DONE] += 1

    def _write(self, at: int, words: int, text: str) -> None:
        data = text.encode()[: 8 * words]
        self._map[8 * at : 8 * (at + words)] = data + bytes(8 * words - len(data))

    # ------------------------------------------------------------------------------------ phases

    def enter(self, phase: int) -> None:
        """Be in this phase from now on."""
        self.words[p.PHASE] = phase

    def waits(self, *, for_agent: bool) -> None:
        """Say whether the main thread waits for the agent."""
        self.words[p.WAITS] = for_agent

    @contextmanager
    def phase(self, name: str, up_to_s: float) -> Iterator[None]:
        """Be in a phase of the script's own, which may take so long. Raises UsageError."""
        if not 0 < up_to_s <= MOST_S:
            raise UsageError(f'run.phase("{name}", up_to={up_to_s!r}): up_to is to be 0 to {MOST_S:.0f} s')
        words, began = self.words, time.monotonic()
        before = words[p.PHASE], words[p.UNTIL], self._map[8 * p.NAME_AT : 8 * (p.NAME_AT + p.NAME_WORDS)]
        self._write(p.NAME_AT, p.NAME_WORDS, name)
        # Of one phase within another, the later end counts.
        words[p.UNTIL] = max(before[1], time.monotonic_ns() + int(up_to_s * 1e9))
        self.enter(p.OWN)
        try:
            yield
        finally:
            self._map[8 * p.NAME_AT : 8 * (p.NAME_AT + p.NAME_WORDS)] = before[2]
            words[p.UNTIL] = before[1]
            self.enter(before[0])
            if name == CHECKPOINT:
                self._checkpoint_s += time.monotonic() - began

    def compiles(self) -> None:
        """A compilation begins, which may take its time."""
        self._compiling = self.words[p.PHASE], self.words[p.UNTIL]
        self.words[p.UNTIL] = time.monotonic_ns() + int(COMPILE_S * 1e9)
        self.enter(p.COMPILE)

    def compiled(self) -> None:
        """It has ended."""
        phase, self.words[p.UNTIL] = self._compiling
        self.enter(phase)

    # ------------------------------------------------------------------------------------- steps

    def begin(self, step: int) -> None:
        """Training goes on from this step; what comes before the next one is no step's time."""
        self.words[p.UNTIL] = self._steps = 0
        self.words[p.STEP] = step
        self.enter(p.COMPUTE)

    def waited(self, since_s: float) -> None:
        """A thread has waited for a collective since then."""
        self._waited_s += time.monotonic() - since_s

    def tail(self, since_s: float) -> None:
        """A collective that began then is done, for whose future somebody waits: of these the last counts.

        DDP waits so at the end of a backward pass, for all that began in it.
        """
        if since_s >= self._tail_began_s:
            self._tail_began_s, self._tail_s = since_s, time.monotonic() - since_s

    def waited_for_data(self, seconds: float) -> None:
        """The script has waited so long for a batch."""
        self._data_s += seconds

    def stepped(self, step: int, now_s: float, commit_s: float, *, again: bool = False) -> None:
        """A step is done at this time, which held the script up for so long for its commit.

        `again`: it had been done before a fault.
        """
        # The first steps make what is made lazily.
        self._steps += 1
        took_s = now_s - self._began_s
        data_s = self._data_s
        p.ONE_STEP.pack_into(
            self._map,
            8 * (p.STEPS_AT + step % p.STEPS * p.STEP_WORDS),
            step,
            took_s if self._steps > FIRST_STEPS else 0.0,
            self._waited_s + self._tail_s,
            data_s,
            commit_s,
        )
        if again and self._steps > 1:
            self._again_s += took_s
        elif self._steps > 1:
            self._took_s += took_s
            self._all_data_s += data_s
            self._commit_s += commit_s
            self._checkpoints_s += self._checkpoint_s
        p.SPENT.pack_into(
            self._map,
            8 * p.SPENT_AT,
            now_s,
            self._took_s,
            self._all_data_s,
            self._commit_s,
            self._checkpoints_s,
            self._again_s,
        )
        _STEP_AND_PHASE.pack_into(self._map, 8 * p.STEP, step, p.COMPUTE)
        self._began_s = now_s
        self._waited_s = self._data_s = self._tail_s = self._checkpoint_s = 0.0
