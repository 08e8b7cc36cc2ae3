"""Pure: what becomes of the state that an agent holds when a generation is of another cut."""

from typing import Literal, TypeAlias

from ckptless.daemon.protocol.messages import Assignment

# forget-former: what was set aside is not needed.   set-aside: keep what is here for another number of ranks.
# take-back: what was set aside is what goes on.     forget-here: nobody goes on with the cut that is here.
CutMove: TypeAlias = Literal["forget-former", "set-aside", "take-back", "forget-here"]


def cut_moves(cut: int, former: int | None, assignment: Assignment) -> list[CutMove]:
    """Return what to do, in order; `cut` is that of what is here, `former` that of what is set aside, if any.

    What is set aside stays until enough is committed of the new cut, or it is restored from, or replaced.
    """
    found: list[CutMove] = []
    wanted = assignment.former.cut if assignment.former is not None else None
    if wanted is not None and wanted != former:
        found += ["forget-former"] * (former is not None)
        former = None
        if cut == wanted:
            # Nothing is here after that, of whatever cut.
            return [*found, "set-aside"]
    if assignment.cut == cut:
        return found
    return [*found, "take-back" if former == assignment.cut else "forget-here"]
