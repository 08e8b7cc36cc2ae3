"""Whether a rank's commits are copied in order, or beside its next step (`overlap.py`).

A version that was written to while it was copied is given up, and that costs the step. So the first copies
of a process are made in order and compared, when the next update begins, with what lives: a script that
writes between commit and update in each step never gets any other. Copies beside the training are made only
where the script asks for them: a write that the trials do not meet (weights that are exchanged for an
evaluation now and then) has the step done again.
"""

from collections.abc import Callable
from typing import Literal

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.commit.versions import Versions, WrittenVersion
from ckptless.pytorch_hooks.errors import FrozenChanged, StateMoved
from ckptless.pytorch_hooks.state import TensorSet

# Copies that are compared with what lives, before any is made beside the training.
TRIALS = 2

Wanted = Literal["on", "off"]


class Copying:
    """Chooses how each commit is copied. `tell(sentence)` is called once, where overlap ends. Main thread."""

    def __init__(self, versions: Versions, overlap: Wanted, tell: Callable[[str], None]) -> None:
        self._versions, self._tell = versions, tell
        self._wanted = overlap == "on"
        self._tried = 0
        # The sentence that says why commits are copied in order, once something has ended overlap.
        self._why_not: str | None = None
        # Copied in order, and to be compared with what lives when the next update begins.
        self._trial: tuple[TensorSet, WrittenVersion] | None = None

    def write(self, tensors: TensorSet, step: int, generation: int, shard: int, rank: int) -> WrittenVersion:
        """Copy all tensors, or begin to. As `Versions.write`."""
        overlaps = self._wanted and self._tried >= TRIALS
        write = self._versions.begin if overlaps else self._versions.write
        written = write(tensors, step, generation, shard, rank)
        self._trial = (tensors, written) if self._wanted and not overlaps else None
        return written

    def before_update(self) -> None:
        """An optimizer's step begins. Raises StateMoved, with a sentence that says what to do."""
        trial, self._trial = self._trial, None
        if trial is None:
            self._say(self._versions.fence)
            return
        tensors, written = trial
        moved = tensors.differs(written.payload)
        if moved is None:
            self._tried += 1
        else:
            self._refuse_moved(moved)

    def wait(self) -> None:
        """Do as `Versions.wait`."""
        self._say(self._versions.wait)

    def leave(self) -> None:
        """Do as `Versions.leave`."""
        self._trial = None
        moved = self._versions.leave()
        if moved is not None:
            self._refuse_moved(moved)

    def _say(self, do: Callable[[], None]) -> None:
        try:
            do()
        except FrozenChanged:
            raise
        except StateMoved as error:
            raise StateMoved(self._refuse_moved(str(error))) from None

    def _refuse_moved(self, name: str) -> str:
        return self._refuse(
            f"{name} is changed between run.commit and optimizer.step, so that commits are copied while the "
            "training waits: change it before run.commit, or do not say overlap='on' in ckptless.run"
        )

    def _refuse(self, why_not: str) -> str:
        """Copy in order from now on; give the sentence that says why."""
        if self._wanted:
            self._wanted, self._why_not = False, why_not
            self._tell(why_not)
        return self._why_not or why_not


def checked_overlap(wanted: object) -> Wanted:
    """Return the mode that the user has asked for. Raises UsageError."""
    if wanted == "on":
        return "on"
    if wanted == "off":
        return "off"
    raise UsageError(f'overlap={wanted!r}: say "on" or "off"')
