"""A hostfile is read strictly: what is in it, which hosts a job takes, and each mistake in one sentence."""

from __future__ import annotations

import pytest

from ckptless.daemon.launch.hostfile import Host, choose, read_hosts, slots_of
from ckptless.daemon.protocol.errors import UsageError

FILE = """\
# the rack by the door
node1 slots=8
node2.example.org  slots=8 address=10.1.0.2   # 10.1.0.2 is on ib0

node3 address=fd00::3 slots=8
n
"""


def test_lines() -> None:
    assert read_hosts(FILE, "it") == (
        Host("node1", 8),
        Host("node2.example.org", 8, "10.1.0.2"),
        Host("node3", 8, "fd00::3"),
        Host("n"),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it has 0 hosts: name from 1"),
        ("# nobody\n\n", "it has 0 hosts"),
        ("a\nb\na slots=2", "it, line 3: a is there twice"),
        ("a\n-oProxyCommand=x", "it, line 2: '-oProxyCommand=x' is no host's name"),
        ("me@a", "line 1: 'me@a' is no host's name"),
        ("a;b", "is no host's name"),
        ("a.", "is no host's name"),
        ("a" * 300, "is no host's name"),
        ("a slots=0", "'slots=0' is not understood: give slots=N or address=A, each once"),
        ("a slots=-1", "'slots=-1' is not understood"),
        ("a slots=123456", "is not understood"),
        ("a slots=1 slots=1", "'slots=1' is not understood"),
        ("a slots", "'slots' is not understood"),
        ("a slot=1", "'slot=1' is not understood"),
        ("a max_slots=2", "'max_slots=2' is not understood"),
        ("a address=", "'address=' is not understood"),
        ("a address=-x", "'address=-x' is not understood"),
        ("a address=1.2.3.4;x", "is not understood"),
        ("a b", "'b' is not understood"),
        ("a \x1b[2J", r"'\x1b[2J' is not understood"),
    ],
)
def test_mistakes(text: str, words: str) -> None:
    with pytest.raises(UsageError) as found:
        read_hosts(text, "it")
    assert words in str(found.value)
    assert "\n" not in str(found.value)


HOSTS = tuple(Host(name) for name in "abcde")


@pytest.mark.parametrize(
    ("nodes", "spares", "found"),
    [(None, 0, "abcde"), (None, 1, "abcde"), (2, 0, "ab"), (2, 2, "abde"), (4, 1, "abcde"), (1, 4, "abcde")],
)
def test_the_first_train_and_the_last_wait(nodes: int | None, spares: int, found: str) -> None:
    chosen = choose(HOSTS, nodes, spares, "it")
    assert [host.name for host in chosen] == list(found)


@pytest.mark.parametrize(
    ("nodes", "spares", "words"),
    [
        (5, 1, "--nodes 5 and --spares 1 take 6 hosts, and it has 5"),
        (6, 0, "take 6 hosts"),
        (None, 5, "--nodes 1 and --spares 5 take 6 hosts"),
        (None, 9, "take 10 hosts"),
    ],
)
def test_too_few(nodes: int | None, spares: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        choose(HOSTS, nodes, spares, "it")


def test_slots_are_the_same_on_all_hosts() -> None:
    assert slots_of([Host("a", 2), Host("b", 2)], "it") == 2
    assert slots_of([Host("a"), Host("b")], "it") is None
    with pytest.raises(UsageError, match=r"it: slots differ \(a 2, b 4\): give all"):
        slots_of([Host("a", 2), Host("b", 4)], "it")
    with pytest.raises(UsageError, match=r"slots differ \(a 2, b none\)"):
        slots_of([Host("a", 2), Host("b")], "it")
