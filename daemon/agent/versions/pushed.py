"""What is on its way to other nodes that are to hold it."""

from collections.abc import Callable, Sequence

from ckptless.daemon.agent.versions.holders import Version
from ckptless.daemon.api.messages import NodeInfo
from ckptless.daemon.peers import messages as p


def nothing() -> None:
    """Nobody waits for it."""


def both(one: Callable[[], None], other: Callable[[], None]) -> Callable[[], None]:
    """Call one, then the other."""

    def call() -> None:
        one()
        other()

    return call


class Pushed:
    """Something that holders are given: who has it, and who has not got it yet; then `acked` is called.

    `targets` finds out who is to hold it, of the nodes that can be reached.
    """

    def __init__(
        self,
        what: p.PutRecord | Version,
        targets: Callable[[], Sequence[NodeInfo]],
        acked: Callable[[], None],
    ) -> None:
        self.what, self.targets, self.acked = what, targets, acked
        self.missing: set[int] = set()
        self.held: set[int] = set()
