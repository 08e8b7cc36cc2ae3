"""Copies of a commit that run beside the next step: when they may, and whether what they took is whole.

A *device* makes the copies (`host_copy`, `device_copy`). What keeps a torn version from being sealed:

- An optimizer's step begins with `Versions.fence`: what it changes comes after the copies.
- In the CPU's memory everything is digested when the copies begin, and what has been copied is digested
  again: whoever wrote in between, and by whatever way, it is not the same (`HostCopies`). Nothing like that
  is done on a device; there a script gets no such copies (`Policy.refuse_device`).
- Writes that torch counts are found without that, and named: the main thread looks at the counters once,
  between two of its own operations (`Guard.close`), when the copies are over or nothing more will be written
  before they are. A write that is under way is not counted yet: therefore no other thread can look.
- That a version is given up costs the step. So the first copies of a process are no overlapped ones, and are
  compared, when the next update begins, with what lives (`Policy`): a script that writes between commit and
  update in each step never gets any other.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Literal, Protocol, TypeVar, get_args

import torch

from ckptless.daemon.api.errors import UsageError
from ckptless.pytorch_hooks.state import Copy, private

# Copies that are compared with what lives, before any is made beside the training.
TRIALS = 2

Wanted = Literal["on", "off"]


Ticket = TypeVar("Ticket")


class Device(Protocol[Ticket]):
    """Makes copies after all that the training has done so far, and before what it does after a fence."""

    def hold(self, memory: torch.Tensor) -> None:
        """All targets lie in this memory (uint8, on the CPU) until `release`. Main thread."""

    def release(self) -> None:
        """That memory is to be unmapped; nothing is being copied. Main thread."""

    def begin(self, now: Sequence[Copy], later: Sequence[Copy]) -> Ticket:
        """Copy `now` before all that the training does from here on, and `later` before its next fence.

        What the training has done or queued by now comes before either. Main thread.
        """

    def complete(self, ticket: Ticket, came: Callable[[int], None]) -> str | None:
        """Until all is there; `came(upto)`, when what lies before that offset is. In a thread of its own.

        The name of a tensor that is not what it was when the copies began, where the device can tell.
        """

    def fence(self, ticket: Ticket) -> None:
        """What the training does from here on comes after the copies. The thread that updates."""


class Guard:
    """Whether somebody has written to the tensors since this was made."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies
        self._counts = [_counts(one) for one in copies]
        self._closed: SimpleQueue[None] = SimpleQueue()
        self._is_closed = False
        self.moved: str | None = None

    def close(self) -> None:
        """Look, once. Main thread, while none of its writes is under way; also in the middle of a `close`."""
        if self._is_closed:
            return
        for one, counts in zip(self._copies, self._counts, strict=True):
            if _counts(one) != counts:
                self.moved = one.name
                break
        self._is_closed = True
        self._copies, self._counts = (), []
        # Of all that wakes a thread only this may be interrupted by itself.
        self._closed.put(None)

    def wait(self, ask: Callable[[Callable[[], None]], None], torn: str | None = None) -> str | None:
        """The copies are over: the first tensor that was written to, if one was. Not in the main thread.

        `ask(close)` has the main thread close it as soon as it can. It ends no generation and no process
        without closing it itself: that is the deadline. `torn` is what the copies themselves have found.
        """
        if not self._is_closed:
            ask(self.close)
            # no deadline: see above
            self._closed.get()
        self.moved = self.moved or torn
        return self.moved


def _counts(one: Copy) -> tuple[int, int]:
    # A DTensor and its part are counted apart. `source` is an alias, which shares the part's counter.
    return private.version(one.living), private.version(one.source)


# ------------------------------------------------------------------------- between two bytecodes

_asked: deque[Callable[[], None]] = deque()


def _answer(_nothing: object) -> int:
    while _asked:
        _asked.popleft()()
    return 0


_ANSWER = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_answer)


def between_bytecodes(call: Callable[[], None]) -> None:
    """Have the main thread make this call when it is between two bytecodes: then no operation is under way.

    It must not raise, and not take a lock. Where the main thread is in one long call it is made after that.
    """
    _asked.append(call)
    # Full (-1) means that it is about to do what it was asked before, which is to empty the same queue.
    ctypes.pythonapi.Py_AddPendingCall(_ANSWER, None)


# ------------------------------------------------------------------------------------------- policy


@dataclass
class Policy:
    """Whether the next copies may run beside the training. Pure; main thread only.

    Only where the script says "on": a write that the trials do not meet (weights that are exchanged for an
    evaluation now and then) has the step done again.
    """

    wanted: Wanted = "off"
    tried: int = 0
    why_not: str | None = None

    @property
    def open(self) -> bool:
        """Whether it is still to be found out, by comparing."""
        return self.wanted == "on" and self.why_not is None and self.tried < TRIALS

    @property
    def overlaps(self) -> bool:
        """Whether they may."""
        return self.wanted != "off" and self.why_not is None and self.tried >= TRIALS

    def compared(self, differs: str | None) -> str | None:
        """What was copied in order has been compared; a sentence where that ends it."""
        if differs is None:
            self.tried += 1
            return None
        return self.refuse(differs)

    def refuse_device(self) -> str | None:
        """Tensors lie on a device, whose copies nobody can prove whole; a sentence where that ends it."""
        if self.wanted == "off" or self.why_not is not None:
            return None
        self.why_not = (
            "commits are copied while the training waits: overlap='on' is so far only for tensors that lie "
            "in the CPU's memory"
        )
        return self.why_not

    def refuse(self, name: str) -> str:
        """Somebody but an optimizer changes `name` between a commit and the update: never again."""
        self.why_not = (
            f"{name} is changed between run.commit and optimizer.step, so that commits are copied while the "
            "training waits: change it before run.commit, or do not say overlap='on' in ckptless.run"
        )
        return self.why_not


def overlap_policy(wanted: object) -> Policy:
    """By what the user has said. Raises UsageError."""
    for known in get_args(Wanted):
        if wanted == known:
            return Policy(known)
    raise UsageError(f'overlap={wanted!r}: say "on" or "off"')
