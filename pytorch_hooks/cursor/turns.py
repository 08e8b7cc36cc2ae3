"""What the byte code of a script's functions says of the loops that it is in."""

from __future__ import annotations

import dis
import functools
import sys
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from types import CodeType, FrameType
from typing import TypeAlias

_ENDS = ("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
# Where an instruction has a variable, by the words of its name.
_PLACES = ("FAST", "NAME", "GLOBAL", "DEREF")


@functools.cache
def carried(code: CodeType, at: int) -> frozenset[str]:
    """Return the variables that a turn of a loop around the instruction at `at` reads before it sets them.

    And that it sets: liveness where the loop begins, of what is in the loop alone.
    """
    return frozenset[str]().union(*(live & sets for live, sets in _of_loops(code, at)))


@functools.cache
def only_read(code: CodeType, at: int) -> frozenset[str]:
    """Return those that a turn of a loop around it reads, and none sets: it may change what is in them."""
    return frozenset[str]().union(*(live - sets for live, sets in _of_loops(code, at)))


def _of_loops(code: CodeType, at: int) -> list[tuple[set[str], set[str]]]:
    """Return, of each loop around an instruction, what is live where it begins, and what is set in it."""
    steps, jumps = _read(code)
    found = []
    for begin, end in _loops(steps, jumps, at).items():
        loop = [one for one in steps if begin <= one.offset <= end]
        uses = {one.offset: _uses(one) for one in loop}
        found.append(
            (_live(loop, jumps, uses), {name for each in uses.values() for name, is_set in each if is_set})
        )
    return found


Place: TypeAlias = tuple[tuple[CodeType, int], ...]
"""Functions that are under way, the outermost first, each with the instruction that it is at."""


def here() -> Place:
    """Return where the script is that has called ckptless, and in whatever it has called by itself."""
    found: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        is_ours = str(frame.f_globals.get("__name__")).partition(".")[0] == "ckptless"
        if is_ours and found:
            break
        if not is_ours:
            found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(reversed(found))


def is_behind(first: Place, then: Place, *, is_later: bool) -> bool:
    """Whether one place stands behind another one, in the same turn of a loop around both.

    `is_later`: the same place in a loop does.
    """
    around: set[int] = set()
    for (code, at), (other, later) in zip(first, then, strict=False):
        if code is not other:
            return False
        around |= _around(code, at) & _around(code, later)
        if at != later:
            return at < later and bool(around)
    return is_later and bool(around)


def is_in_loop(code: CodeType, at: int) -> bool:
    """Whether there is a loop around the instruction at `at`."""
    return bool(_around(code, at))


@functools.cache
def _around(code: CodeType, at: int) -> frozenset[int]:
    return frozenset(_loops(*_read(code), at))


@functools.cache
def left_behind(code: CodeType, at: int) -> int | None:
    """Return a line that may end the innermost loop around the instruction at `at`, behind it; or None.

    In the same turn, and not by an exception. A `while` asks at the end of a turn, too, which is as good as
    at its begin; it does so in the line that it begins with, which is before.
    """
    steps, jumps = _read(code)
    loops = _loops(steps, jumps, at)
    if not loops:
        return None
    begin = max(loops)
    after, known = _after(steps), {one.offset: one for one in steps}
    # What Python keeps for a call stands behind its instruction.
    call = max(offset for offset in known if offset <= at)
    here = _line(known[call])
    # The next turn: a `while` begins again at its end, and for a `continue` at its first question.
    asked = _line(known[loops[begin]])
    turns = {offset for offset in loops if offset == begin or _line(known[offset]) == asked}
    # With the line that was asked last.
    todo, seen = [(call, 0)], set[int]()
    while todo:
        offset, line = todo.pop()
        one = known[offset]
        is_out = not begin <= offset <= loops[begin] or one.opname.startswith("RETURN")
        if is_out and line > here and not _raises(offset, after, known):
            return line
        if is_out or offset in seen:
            continue
        seen.add(offset)
        if "_IF_" in one.opname:
            line = _line(one)
        nexts = {then[offset] for then in (after, jumps) if offset in then} - turns
        todo += [(following, line) for following in nexts]
    return None


def _line(one: dis.Instruction) -> int:
    return (one.positions.lineno if one.positions is not None else None) or 0


def _raises(offset: int, after: Mapping[int, int], known: Mapping[int, dis.Instruction]) -> bool:
    """Whether what begins here goes straight to an exception, as an `assert` does."""
    while offset in after:
        offset = after[offset]
    return known[offset].opname.startswith("RAISE")


def _read(code: CodeType) -> tuple[list[dis.Instruction], dict[int, int]]:
    """Return a function's instructions, and where those that jump go, by offsets."""
    steps = list(dis.get_instructions(code))
    return steps, {one.offset: one.argval for one in steps if one.opcode in (*dis.hasjrel, *dis.hasjabs)}


def _loops(steps: list[dis.Instruction], jumps: Mapping[int, int], at: int) -> dict[int, int]:
    """Return the loops around the instruction at `at`: where each ends, by where it begins."""
    ends: dict[int, int] = {}
    for offset in _reached(steps, jumps) & jumps.keys():
        target = jumps[offset]
        if target <= at <= offset:
            ends[target] = max(offset, ends.get(target, 0))
    return ends


def _after(steps: list[dis.Instruction]) -> dict[int, int]:
    """Return what follows on each instruction that something follows on, by offsets."""
    return {one.offset: then.offset for one, then in pairwise(steps) if not one.opname.startswith(_ENDS)}


def _reached(steps: list[dis.Instruction], jumps: Mapping[int, int]) -> set[int]:
    """Return what is reached without an exception: what handles one jumps back into the middle of a loop."""
    after, reached, todo = _after(steps), set[int](), [steps[0].offset]
    while todo:
        offset = todo.pop()
        if offset not in reached:
            reached.add(offset)
            todo += [then[offset] for then in (after, jumps) if offset in then]
    return reached


def _live(
    loop: list[dis.Instruction], jumps: Mapping[int, int], uses: Mapping[int, list[tuple[str, bool]]]
) -> set[str]:
    """Return what may be read before it is set, from the first of these instructions on."""
    begin, after = loop[0].offset, _after(loop)
    before: dict[int, set[str]] = defaultdict(set)
    grew = True
    while grew:
        grew = False
        for one in reversed(loop):
            # The next turn is another one.
            then = {after.get(one.offset, -1), jumps.get(one.offset, -1)} - {begin}
            live = set().union(*(before[offset] for offset in then))
            for name, is_set in reversed(uses[one.offset]):
                (live.discard if is_set else live.add)(name)
            grew |= live != before[one.offset]
            before[one.offset] = live
    return before[begin]


def _uses(one: dis.Instruction) -> list[tuple[str, bool]]:
    """Return the variables of an instruction, and whether it sets them; some instructions have two."""
    words = one.opname.split("_")
    parts = [pair for pair in pairwise(words) if pair[0] in ("LOAD", "STORE", "DELETE")]
    names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
    named = [(name, how) for (how, of), name in zip(parts, names, strict=False) if of in _PLACES]
    return [(str(name), how == "STORE") for name, how in named]
