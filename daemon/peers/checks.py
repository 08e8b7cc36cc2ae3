"""Pure: whether a message of another daemon speaks of this job's nodes only."""

from collections.abc import Collection, Iterator

from ckptless.daemon.api.errors import ProtocolError
from ckptless.daemon.control.decree import Decided, Decree, Promise, Propose
from ckptless.daemon.membership.messages import Beat, Saw, Suspect
from ckptless.daemon.peers import messages as p


def check_nodes(message: p.DaemonMessage, nodes: Collection[int]) -> None:
    """Raises ProtocolError where it names a node that the job does not have."""
    stranger = next((node for node in _named(message) if node not in nodes), None)
    if stranger is not None:
        raise ProtocolError(f"{type(message).__name__} of node {stranger}, which the job does not have")


def _named(message: p.DaemonMessage) -> Iterator[int]:
    match message:
        case Suspect() | Saw() | p.Gone():
            yield message.node
        case Beat():
            yield from (node for node, _, _ in message.pulses)
        case p.Forwarded():
            yield message.report.node
        case p.Meeting():
            yield from (report.node for report in message.reports)
            yield from (lost[0] for lost in message.standing.lost)
            yield from message.standing.apart
        case p.Agree(say=Decided() | Propose() as say):
            yield from _of_decree(say.decree)
        case p.Agree(say=Promise() as promise) if promise.vote is not None:
            yield from _of_decree(promise.vote.decree)
        case p.Relayed():
            yield message.origin
            yield from _named(message.said)
        case _:
            return


def _of_decree(decree: Decree) -> Iterator[int]:
    yield from decree.voters
    if decree.assignment is not None:
        yield from {place.node for place in decree.assignment.places}
        yield from (info.node for info in decree.assignment.nodes)
