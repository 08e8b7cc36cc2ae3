"""What a daemon goes on from as it meets a job: its votes, nothing, or the knowledge that it forgot."""

import pytest

from ckptless.daemon.ckptlessd.consensus.quorum import first_decree
from ckptless.daemon.ckptlessd.session import Forgotten, recall
from ckptless.daemon.protocol.peers.agreement import NO_BALLOT, Durable

NOW, BEFORE = "b" * 32, "a" * 32
VOTES = Durable(promised=NO_BALLOT, vote=None, known=first_decree(range(4)))


@pytest.mark.parametrize(
    ("kept", "agents", "expected"),
    [
        (None, "", "begins"),
        (NOW + "7", "", "goes on"),
        (NOW + "7.3", NOW + "7.3", "goes on"),
        (NOW + "7.4", NOW + "7.3", "goes on"),
        # Its disk is older than what its agent has heard of.
        (NOW + "7.2", NOW + "7.3", "something later"),
        (NOW + "7", NOW + "7.1", "something later"),
        # Another disk, or one that was made anew.
        (NOW + "8.9", NOW + "7.3", "something later"),
        (None, NOW + "7", "nothing is left"),
        # The number was used before: by another job, or by this one before it was requeued.
        (BEFORE + "7.9", "", "begins"),
        (BEFORE + "7.9", NOW + "7.1", "nothing is left"),
    ],
)
def test_what_counts(kept: str | None, agents: str, expected: str) -> None:
    found = recall((kept, VOTES) if kept is not None else None, NOW, agents)
    match found:
        case None:
            assert expected == "begins"
        case Forgotten(why):
            assert expected in why
        case (identity, votes):
            assert (expected, identity, votes) == ("goes on", kept, VOTES)
