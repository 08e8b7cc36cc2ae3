"""Frozen tensors on a device: a slot that has the bytes of one already gets them no second time.

That nobody has written to a tensor is known twice over. Torch counts writes in place, but not those through
`.data`, of a kernel of somebody's own, or of a CUDA graph; so the device adds up the tensor's bytes at each
commit, too, and what was left out of a version that would have needed it makes that version void. A tensor is
left out once that was so at `TRIALS` commits; one that is found to change unseen never is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ckptless.pytorch_hooks.devices.sums import DeviceSums, summable
from ckptless.pytorch_hooks.errors import FrozenChanged
from ckptless.pytorch_hooks.state import TensorCopy, private

# Commits in a row at which a tensor's bytes were what its version counter said, before it is left out: more
# than there are slots, so that each of them has been written since whatever was before.
TRIALS = 4


class _Mark(NamedTuple):
    """A tensor as torch counts: where it lies, and how often it was written to in place."""

    pointer: int
    version: int


@dataclass
class _Known:
    """A tensor as it was at the last commit, and at how many in a row its bytes were as its mark had them."""

    mark: _Mark
    sums: torch.Tensor | None = None
    quiet: int = 0
    # It changes without being counted.
    unseen: bool = False


@dataclass(frozen=True)
class _Look:
    """The frozen tensors at one commit: their marks, which of them were left out, and their sums to come."""

    marks: dict[str, _Mark]
    left_out: frozenset[str]
    sums: DeviceSums


class Frozen:
    """The frozen tensors of one rank, and which slots have them. `begin` and `forget`: the main thread.

    `end`: the thread that completes a commit, while the main thread waits for it or does neither.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        # Of each slot what was copied into it, and through which view: one that is made anew is zeroed first.
        self._slots: dict[int, dict[str, tuple[_Mark, torch.Tensor]]] = {}
        self._look: _Look | None = None

    def begin(self, slot: int, copies: Sequence[TensorCopy], device: torch.device) -> list[TensorCopy]:
        """Return what has to be copied into a slot. Queues sums on the device, and waits for nothing."""
        watched = [one for one in copies if one.frozen and summable(one.source, device)]
        if not watched:
            return list(copies)
        marks = {one.name: _mark(one.source) for one in watched}
        there = self._slots.get(slot, {})
        left_out = frozenset(one.name for one in watched if _has(there, one) and self._is_quiet(one))
        self._slots[slot] = {one.name: (marks[one.name], one.target) for one in watched}
        self._look = _Look(marks, left_out, DeviceSums([one.source for one in watched]))
        return [one for one in copies if one.name not in left_out]

    def end(self) -> None:
        """Look at the sums of this commit, once they are there. Raises FrozenChanged: the version is void."""
        look, self._look = self._look, None
        if look is None:
            return
        changed = None
        for (name, mark), sums in zip(look.marks.items(), look.sums.read(), strict=True):
            known = self._known.get(name)
            if known is None or known.mark != mark or known.sums is None:
                unseen = known is not None and known.unseen
                self._known[name] = _Known(mark, sums, unseen=unseen)
            elif torch.equal(known.sums, sums):
                known.quiet += 1
            else:
                self._known[name] = _Known(mark, sums, unseen=True)
                changed = name if name in look.left_out else changed
        if changed is not None:
            raise FrozenChanged(
                f"{changed} needs no gradient, and is written to in a way that torch does not count (.data, "
                "or a kernel of its own): this step is not committed, and the tensor is copied at every "
                "commit from now on"
            )

    def forget(self) -> None:
        """Note that the slots may hold anything from now on."""
        self._slots.clear()
        self._look = None

    def _is_quiet(self, copy: TensorCopy) -> bool:
        known = self._known.get(copy.name)
        return (
            known is not None
            and known.mark == _mark(copy.source)
            and known.quiet >= TRIALS
            and not known.unseen
        )


def _has(there: Mapping[str, tuple[_Mark, torch.Tensor]], copy: TensorCopy) -> bool:
    """Whether a slot has what a tensor is now, as far as torch counts."""
    mark, target = there.get(copy.name, (None, None))
    return target is copy.target and mark == _mark(copy.source)


def _mark(source: torch.Tensor) -> _Mark:
    return _Mark(source.data_ptr(), private.version(source))
