"""Hostlists: expanded, compressed, and never more than asked for."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.slurm.hostlist import MAX_NAMES, compress, expand, is_node_name


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ""),
        ("node01", "node01"),
        ("node[01-03,07],gpu5", "node01 node02 node03 node07 gpu5"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[09-11]", "n09 n10 n11"),
        ("n[98-101]", "n98 n99 n100 n101"),
        ("rack[1-2]node[01-02]", "rack1node01 rack1node02 rack2node01 rack2node02"),
        ("n[1-2]-ib[0,3]", "n1-ib0 n1-ib3 n2-ib0 n2-ib3"),
        ("a,b.example.org,c-1", "a b.example.org c-1"),
        ("n[2,1,1]", "n2 n1 n1"),
        ("[1-2]n", "1n 2n"),
    ],
)
def test_expand(text: str, names: str) -> None:
    assert expand(text) == tuple(names.split())


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("", ""),
        ("node01", "node01"),
        ("node01 node02 node03 node07 gpu5", "gpu5,node[01-03,07]"),
        ("n9 n10 n11", "n[9-11]"),
        ("n09 n10 n11", "n[09-11]"),
        ("n1 n01 n001", "n[1,01,001]"),
        ("n99 n100", "n[99-100]"),
        ("b a a", "a,b"),
        ("r1n1 r1n2 r2n1", "r1n[1-2],r2n1"),
        ("n1-ib n2-ib", "n[1-2]-ib"),
    ],
)
def test_compress(names: str, text: str) -> None:
    assert compress(names.split()) == text


UNREADABLE = [
    ",",
    "a,",
    ",a",
    "a,,b",
    "n[",
    "n]",
    "n[]",
    "n[1",
    "n1]",
    "n[1-]",
    "n[-1]",
    "n[3-1]",
    "n[1-2-3]",
]
UNREADABLE += [
    "n[[1]]",
    "n[1]]",
    "n 1",
    "n\n",
    "-n",
    "n;ls",
    "$(ls)",
    "n[1,]",
    "n[1 ]",
    "(null)",
    "n[0x1-0x3]",
]
UNREADABLE += ["n[a-b]", "é", "n[٣]", ".", "n=1"]


@pytest.mark.parametrize("bad", UNREADABLE)
def test_what_is_no_hostlist(bad: str) -> None:
    with pytest.raises(ProtocolError):
        expand(bad)


@pytest.mark.parametrize(
    "bomb",
    [
        "n[1-999999999999999999]",
        "n[0-9]" * 60,
        "n[1-100000][1-100000][1-100000]",
        "n[1-99999],m[1-99999]",
        ",".join(["n[1-60000]"] * 1000),
        f"n[{','.join(['1-99999'] * 5000)}]",
        "a," * 600_000 + "a",
        "[" * 100_000,
    ],
)
def test_a_few_characters_make_no_flood(bomb: str) -> None:
    began = time.process_time()
    with pytest.raises(ProtocolError):
        expand(bomb)
    assert time.process_time() - began < 2.0


def test_the_limit_is_exact() -> None:
    assert len(expand(f"n[1-{MAX_NAMES}]")) == MAX_NAMES
    assert len(expand("n[1-3],m[1-2]", most=5)) == 5
    with pytest.raises(ProtocolError, match="more names"):
        expand("n[1-3],m[1-2]", most=4)


NAMES = st.builds(
    "{}{}{}".format,
    st.sampled_from(["n", "gpu", "n1-", "r01n"]),
    st.integers(0, 120),
    st.sampled_from(["", "-ib", "x"]),
)


@given(st.lists(NAMES, max_size=40))
def test_round_trip(names: list[str]) -> None:
    again = expand(compress(names))
    assert sorted(again) == sorted(set(names))


@given(st.sets(st.integers(0, 1200)), st.integers(1, 5))
def test_runs_are_as_short_as_can_be(numbers: set[int], width: int) -> None:
    names = [f"n{number:0{width}d}" for number in numbers]
    text = compress(names)
    assert sorted(expand(text)) == sorted(names)
    gaps = sum(number + 1 not in numbers for number in numbers)
    # A run also ends where its numbers get longer than those it began with were padded to.
    assert len([part for part in text.split(",") if part]) <= gaps + 4


@given(st.text(max_size=80) | st.text(alphabet="n0123456789[]-,. ", max_size=80))
def test_anything_at_all(text: str) -> None:
    try:
        names = expand(text, most=1000)
    except ProtocolError:
        return
    assert len(names) <= 1000
    assert all(is_node_name(name) for name in names)
    assert sorted(expand(compress(names))) == sorted(set(names))


@pytest.mark.parametrize(
    "bad", ["", "-w", "a b", "a,b", "n[1]", "a/b", "../x", "ä", "a" * 255, "n\n", "a=b", "@a"]
)
def test_what_is_no_node_name(bad: str) -> None:
    assert not is_node_name(bad)
    with pytest.raises(ProtocolError):
        compress([bad])
