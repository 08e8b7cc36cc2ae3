"""Pure: what the first generation goes on from: memory that daemons kept, a step on the disk, or nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.planning.sources import NoCommonStepError, Sources, Told, sources_of
from ckptless.daemon.protocol.messages import Place


@dataclass(frozen=True)
class Start:
    """`sources` is of memory, and empty where ranks build anew (and read the disk, if that has a step).

    `text` tells what was chosen, "" where there was no choice.
    """

    sources: Sources
    text: str


def start_from(nodes: Iterable[NodeView], places: Sequence[Place], saved_step: int | None) -> Start:
    """The newer of memory and disk, memory where both have the same step; memory only if all of it is there.

    Only what one run held in one generation belongs together.
    """
    best, whose, why = Sources(), "", ""
    for origin, told in sorted(_origins(nodes).items()):
        try:
            found = sources_of(told, places)
        except NoCommonStepError as error:
            why = str(error)
            continue
        if found.step is not None and (best.step is None or found.step > best.step):
            best, whose = found, f"run {origin[0]}, kept on {len(told)} node{'s' * (len(told) > 1)}"
    memory = (
        f"memory of {whose}, has step {best.step}" if whose else f"memory is not whole ({why})" if why else ""
    )
    disk = f"the disk has step {saved_step}" if saved_step is not None else ""
    if best.step is not None and (saved_step is None or best.step >= saved_step):
        return Start(best, "; ".join(filter(None, (f"step {best.step} from the memory of {whose}", disk))))
    if saved_step is not None:
        return Start(Sources(), "; ".join(filter(None, (f"step {saved_step} from the disk", memory))))
    return Start(Sources(), f"from the beginning; {memory}" if memory else "")


def _origins(nodes: Iterable[NodeView]) -> dict[tuple[str, int], list[Told]]:
    origins: dict[tuple[str, int], list[Told]] = {}
    for view in sorted(nodes, key=lambda view: view.node):
        brought = view.hello.brought if view.usable and view.hello is not None else None
        if brought is not None:
            origins.setdefault((brought.run, brought.generation), []).append((view.node, brought.holdings))
    return origins
