"""A rank's copies of what it commits: in order, or beside its next step where that has proved right."""

from collections.abc import Callable

from ckptless.pytorch_hooks.commit.device_copy import DeviceCopies
from ckptless.pytorch_hooks.commit.overlap import Policy
from ckptless.pytorch_hooks.commit.versions import Versions, Written
from ckptless.pytorch_hooks.errors import StateMoved
from ckptless.pytorch_hooks.state import TensorSet


class Copying:
    """Asks `policy`, and tells of its end by `tell(sentence)`, once. Main thread only."""

    def __init__(self, versions: Versions, policy: Policy, tell: Callable[[str], None]) -> None:
        self._versions, self._policy, self._tell = versions, policy, tell
        # Copied in order, and to be compared with what lives when the next update begins.
        self._trial: tuple[TensorSet, Written] | None = None
        self._known: TensorSet | None = None

    def write(self, tensors: TensorSet, step: int, generation: int, shard: int, rank: int) -> Written:
        """Copy all tensors, or begin to. As `Versions.write`."""
        if tensors is not self._known:
            self._known = tensors
            # One for the life of the process: it is what has pinned the memory, and knows that it is.
            on_device = any(tensor.is_cuda for _name, tensor in tensors.named())
            if on_device and not isinstance(self._versions.device, DeviceCopies):
                self._versions.device = DeviceCopies()
            if on_device and (why_not := self._policy.refuse_device()) is not None:
                self._tell(why_not)
        write = self._versions.begin if self._policy.overlaps else self._versions.write
        written = write(tensors, step, generation, shard, rank)
        self._trial = (tensors, written) if self._policy.open else None
        return written

    def before_update(self) -> None:
        """An optimizer's step begins. Raises StateMoved, with a sentence that says what to do."""
        trial, self._trial = self._trial, None
        if trial is None:
            self._say(self._versions.fence)
            return
        tensors, written = trial
        differs = tensors.differs(written.payload)
        if (why_not := self._policy.compared(differs)) is not None:
            self._tell(why_not)

    def wait(self) -> None:
        """As `Versions.wait`."""
        self._say(self._versions.wait)

    def leave(self) -> None:
        """As `Versions.leave`."""
        self._trial = None
        moved = self._versions.leave()
        if moved is not None:
            self._refuse(moved)

    def _say(self, do: Callable[[], None]) -> None:
        try:
            do()
        except StateMoved as error:
            raise StateMoved(self._refuse(str(error))) from None

    def _refuse(self, name: str) -> str:
        known = self._policy.why_not
        if known is None:
            known = self._policy.refuse(name)
            self._tell(known)
        return known
