"""Frozen tensors on a device: a slot that has the bytes of one already gets them no second time.

That nobody has written to a tensor is known twice over. Torch counts writes in place, but not those through
`.data`, of a kernel of somebody's own, or of a CUDA graph; so the device adds up the tensor's bytes at each
commit, too, and what was left out of a version that would have needed it makes that version void. A tensor is
left out once that was so at `TRIALS` commits; one that is found to change unseen never is. What is written to
between two commits, by whatever way, is not added up at the second one: a moving average costs nothing here.

What is not copied is not digested either: whole chunks are left out, with the digests of when they came. So
memory that rots is found by whoever reads it.
"""

from collections.abc import Sequence
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
    # None before it was the same at two commits.
    sums: torch.Tensor | None = None
    quiet: int = 0
    # It changes without being counted.
    unseen: bool = False


@dataclass
class _Slot:
    """The tensors that a slot has, each with the view that it was copied through, and its chunks' digests.

    A view that is made anew is zeroed first. There are no digests before the version has been sealed.
    """

    tensors: dict[str, tuple[_Mark, torch.Tensor]]
    chunks: tuple[int, ...] = ()

    def has(self, copy: TensorCopy, mark: _Mark) -> bool:
        """Whether it has what a tensor with this mark is."""
        known, target = self.tensors.get(copy.name, (None, None))
        return target is copy.target and known == mark


@dataclass(frozen=True)
class _Look:
    """The tensors that were as before by their marks, which were left out, and the sums to come of all."""

    names: list[str]
    left_out: frozenset[str]
    sums: DeviceSums


class Needed(NamedTuple):
    """The copies that a slot needs, and by number the digests of the chunks of which nothing is copied."""

    copies: list[TensorCopy]
    digests: dict[int, int]


class Frozen:
    """The frozen tensors of one rank, and which slots have them. `begin` and `forget`: the main thread.

    `end` and `sealed`: the thread that completes a commit; the main thread begins no other meanwhile.
    """

    def __init__(self, chunk_nbytes: int) -> None:
        self._chunk_nbytes = chunk_nbytes
        self._known: dict[str, _Known] = {}
        self._slots: dict[int, _Slot] = {}
        self._look: _Look | None = None
        # Of the tensors that were quiet the last time, in that layout, what is whole chunks.
        self._whole: tuple[str, frozenset[str], frozenset[str], set[int]] = (
            "",
            frozenset(),
            frozenset(),
            set(),
        )

    def begin(self, slot: int, copies: Sequence[TensorCopy], device: torch.device, layout: str) -> Needed:
        """Return what has to be copied into a slot. Queues sums on the device, and waits for nothing.

        `copies` are all of a layout, which has this digest.
        """
        watched = [one for one in copies if one.frozen and summable(one.source, device)]
        if not watched:
            return Needed(list(copies), {})
        marks = {one.name: _mark(one.source) for one in watched}
        there = self._slots.get(slot)
        digests: tuple[int, ...] = ()
        quiet: frozenset[str] = frozenset()
        if there is not None and there.chunks:
            digests = there.chunks
            quiet = frozenset(
                one.name
                for one in watched
                if there.has(one, marks[one.name]) and self._is_quiet(one.name, marks[one.name])
            )
        left_out, chunks = self._whole_chunks(quiet, copies, layout)
        self._slots[slot] = _Slot({one.name: (marks[one.name], one.target) for one in watched})
        self._look = self._begin_look(watched, marks, left_out)
        return Needed([one for one in copies if one.name not in left_out], {i: digests[i] for i in chunks})

    def _begin_look(
        self, watched: Sequence[TensorCopy], marks: dict[str, _Mark], left_out: frozenset[str]
    ) -> _Look | None:
        """Queue the sums of those that were not written to since the last commit, as far as torch counts."""
        same: list[TensorCopy] = []
        for one in watched:
            known = self._known.get(one.name)
            if known is None or known.mark != marks[one.name]:
                unseen = known is not None and known.unseen
                self._known[one.name] = _Known(marks[one.name], unseen=unseen)
            elif not known.unseen:
                same.append(one)
        if not same:
            return None
        return _Look([one.name for one in same], left_out, DeviceSums([one.source for one in same]))

    def end(self) -> None:
        """Look at the sums of this commit, once they are there. Raises FrozenChanged: the version is void."""
        look, self._look = self._look, None
        if look is None:
            return
        changed = None
        for name, sums in zip(look.names, look.sums.read(), strict=True):
            known = self._known[name]
            if known.sums is None:
                known.sums = sums
            elif torch.equal(known.sums, sums):
                known.quiet += 1
            else:
                known.unseen = True
                changed = name if name in look.left_out else changed
        if changed is not None:
            raise FrozenChanged(
                f"{changed} needs no gradient, and is written to in a way that torch does not count (.data, "
                "or a kernel of its own): this step is not committed, and the tensor is copied at every "
                "commit from now on"
            )

    def sealed(self, slot: int, chunks: tuple[int, ...]) -> None:
        """Note the digests of what a slot has now."""
        if slot in self._slots:
            self._slots[slot].chunks = chunks

    def forget(self) -> None:
        """Note that the slots may hold anything from now on."""
        self._slots.clear()
        self._look = None

    def _is_quiet(self, name: str, mark: _Mark) -> bool:
        known = self._known.get(name)
        return known is not None and known.mark == mark and known.quiet >= TRIALS and not known.unseen

    def _whole_chunks(
        self, quiet: frozenset[str], copies: Sequence[TensorCopy], layout: str
    ) -> tuple[frozenset[str], set[int]]:
        """Return which of these tensors share no chunk with any other, and the chunks that they take."""
        if not quiet:
            return quiet, set()
        if self._whole[:2] == (layout, quiet):
            return self._whole[2:]
        chunks = {one.name: self._chunks_of(one) for one in copies}
        whole = quiet
        while True:
            mixed = {number for name, numbers in chunks.items() if name not in whole for number in numbers}
            left = frozenset(name for name in whole if mixed.isdisjoint(chunks[name]))
            if left == whole:
                break
            whole = left
        self._whole = layout, quiet, whole, {number for name in whole for number in chunks[name]}
        return self._whole[2:]

    def _chunks_of(self, one: TensorCopy) -> range:
        last = one.offset + one.target.numel() * one.target.element_size() - 1
        return range(one.offset // self._chunk_nbytes, last // self._chunk_nbytes + 1)


def _mark(source: torch.Tensor) -> _Mark:
    return _Mark(source.data_ptr(), private.version(source))
