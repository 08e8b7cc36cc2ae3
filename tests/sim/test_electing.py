"""Elections beside bad disks: each ends, whoever dies as it leads."""

from collections import Counter

import pytest

from ckptless.daemon.ckptlessd.consensus.agreement import Agreement

from .electing import Daemon, Electorate, election
from .story import Violation


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_no_election_hangs(first: int) -> None:
    for seed in range(first, first + 100):
        election(seed)


@pytest.mark.parametrize("seed", [116812, 208595])
def test_what_was_found_once(seed: int) -> None:
    """Tries that end each other for long; a leader that one who was led by more does not follow."""
    election(seed)


def test_what_they_are_for_happens() -> None:
    injected: Counter[str] = Counter()
    for seed in range(50):
        injected += election(seed).injected
    assert injected.keys() >= {"leader", "daemon", "cut", "full", "hung", "slow", "lost"}
    assert injected["election beside a bad disk"] > 50


def test_an_election_replays_exactly() -> None:
    one, other = Electorate(7), Electorate(7)
    one.run()
    other.run()
    assert (one.events.now, one.injected) == (other.events.now, other.injected)


def _fails(first: int = 0) -> None:
    """Pass once one of 300 seeds fails."""
    for seed in range(first, first + 300):
        try:
            election(seed)
        except Violation:
            return
    pytest.fail("none of 300 seeds fails")


def test_finds_a_disk_that_is_never_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agreement, "_try_disk", lambda _self, _now: None)
    _fails()


def test_finds_a_daemon_that_stands_on_a_ballot_that_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else tries to lead, since it does. Of the seeds from 0 on it takes 1125."""

    def not_saved(self: Agreement, reason: str, _now: float) -> None:
        self.trouble = self.trouble or reason

    monkeypatch.setattr(Agreement, "not_saved", not_saved)
    _fails(1100)


def test_finds_votes_that_are_written_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk is asked for more of them than it can take, by all who ask again."""
    write = Daemon._write

    def write_one(self: Daemon) -> None:
        votes, self._votes = self._votes, self._votes[:1]
        idle = not self._writing
        write(self)
        self._votes = votes[1:] if idle else votes

    monkeypatch.setattr(Daemon, "_write", write_one)
    _fails()
