"""Pure: what the first generation goes on from: memory that daemons kept, a step on the disk, or nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.planning.sources import NoCommonStepError, Sources, Told, sources_of
from ckptless.daemon.protocol.messages import Place

# The cut of what an earlier start has left: no generation of this one has that number.
KEPT_CUT = 0
# What belongs together: run, generation, cut, and number of ranks.
_Origin: TypeAlias = tuple[str, int, int, int]


@dataclass(frozen=True)
class Start:
    """`sources` is of memory, and empty where ranks build anew (and read the disk, if that has a step).

    It may be of another number of ranks than there are now, and is of the cut KEPT_CUT then.
    `text` tells what was chosen, "" where there was no choice.
    """

    sources: Sources
    text: str


def start_from(nodes: Iterable[NodeView], places: Sequence[Place], saved_step: int | None) -> Start:
    """The newer of memory and disk, memory where both have the same step; memory only if all of it is there.

    Only what one run held in one generation, as the state of the same ranks, belongs together.
    """
    best, whose, why = Sources(), "", ""
    for origin, told in sorted(_origins(nodes).items()):
        run, _generation, _cut, ranks = origin
        same = ranks == len(places)
        try:
            # Where other ranks were is of no matter: each rank takes its part of several.
            found = sources_of(told, places if same else [Place(node=0, slot=0)] * ranks)
        except NoCommonStepError as error:
            why = str(error)
            continue
        if found.step is not None and (best.step is None or found.step > best.step):
            best = found if same else replace(found, cut=KEPT_CUT)
            whose = f"run {run}, kept on {len(told)} node{'s' * (len(told) > 1)}"
            whose += "" if same else f" by {ranks} ranks"
    memory = (
        f"memory of {whose}, has step {best.step}" if whose else f"memory is not whole ({why})" if why else ""
    )
    disk = f"the disk has step {saved_step}" if saved_step is not None else ""
    if best.step is not None and (saved_step is None or best.step >= saved_step):
        return Start(best, "; ".join(filter(None, (f"step {best.step} from the memory of {whose}", disk))))
    if saved_step is not None:
        return Start(Sources(), "; ".join(filter(None, (f"step {saved_step} from the disk", memory))))
    return Start(Sources(), f"from the beginning; {memory}" if memory else "")


def _origins(nodes: Iterable[NodeView]) -> dict[_Origin, list[Told]]:
    origins: dict[_Origin, list[Told]] = {}
    for view in sorted(nodes, key=lambda view: view.node):
        brought = view.hello.brought if view.usable and view.hello is not None else None
        if brought is not None:
            origin = (brought.run, brought.generation, brought.holdings.cut, brought.ranks)
            origins.setdefault(origin, []).append((view.node, brought.holdings))
    return origins
