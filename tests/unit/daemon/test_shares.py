"""Which chunks are asked of whom: everything once, and what one does not give by another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.agent.versions.shares import AHEAD, LEAST_NBYTES, MOST_NBYTES, SLOW_S, Piece, Shares

CHUNK = LEAST_NBYTES
NBYTES = 4 * CHUNK + 5


def test_pieces_are_whole_chunks_and_all_of_it() -> None:
    for chunk_nbytes in (4096, 3 << 20, LEAST_NBYTES, 3 * LEAST_NBYTES):
        shares, end = Shares([(0, NBYTES)], chunk_nbytes, 1), 0
        while (piece := shares.ask(0, 0.0)) is not None:
            assert piece.start == end
            assert piece.start % chunk_nbytes == 0
            end = piece.end
        assert end == NBYTES
    assert Shares([(0, 0)], CHUNK, 1).complete


def test_pieces_get_smaller_towards_the_end() -> None:
    """Those that are asked for ahead are not more than a source's share of what was open."""
    for sources in (1, 3):
        shares, found, left = Shares([(0, 64 * CHUNK)], CHUNK, sources), list[int](), 64
        while (piece := shares.ask(len(found) % sources, 0.0)) is not None:
            found.append(piece.nbytes // CHUNK)
            assert found[-1] == 1 or AHEAD * sources * found[-1] <= left
            left -= found[-1]
        assert found == sorted(found, reverse=True)
        assert (found[0], found[-1]) == (MOST_NBYTES // CHUNK, 1)


def test_who_is_asked_ahead_of_time_is_not_slow_for_that() -> None:
    shares = Shares([(0, 16 * CHUNK)], CHUNK, 2)
    mine, theirs = shares.ask(0, 0.0), shares.ask(1, 0.0)
    assert mine is not None
    assert theirs is not None
    assert shares.ask(1, 0.0) is not None
    shares.came(0, mine, 4.0, 0.0)
    shares.done(0, mine)
    shares.came(1, theirs, 100.0, 0.0)
    shares.done(1, theirs)
    assert shares.slow(0, 101.0) is None
    assert shares.slow(0, 200.0) == 1


def test_what_one_does_not_give_another_does() -> None:
    shares = Shares([(0, 2 * CHUNK)], CHUNK, 2)
    one, other = shares.ask(0, 0.0), shares.ask(1, 0.0)
    assert one is not None
    assert other is not None
    shares.done(1, other)
    assert shares.ask(1, 0.0) is None
    shares.back(0)
    assert shares.ask(1, 0.0) == one
    shares.done(1, one)
    assert shares.complete


def test_a_bad_piece_is_asked_for_again_with_a_look_at_it() -> None:
    shares = Shares([(0, CHUNK)], CHUNK, 1)
    piece = shares.ask(0, 0.0)
    assert piece is not None
    anew = shares.again(0, piece, 1.0)
    assert anew == Piece(0, CHUNK, verify=True)
    shares.back(0)
    assert shares.ask(1, 0.0) == piece, "whoever else gives it need not look first"


def test_a_slow_one_is_known_by_the_rate_of_the_idle() -> None:
    shares = Shares([(0, 2 * CHUNK)], CHUNK, 2)
    mine, theirs = shares.ask(0, 0.0), shares.ask(1, 0.0)
    assert mine is not None
    assert theirs is not None
    assert shares.slow(0, 1000.0) is None, "the idle one has given nothing yet itself"
    shares.came(0, mine, 2.0, 0.0)
    shares.done(0, mine)
    assert shares.slow(0, 2.0 * 4 + SLOW_S) is None
    assert shares.slow(0, 2.0 * 4 + SLOW_S + 0.1) == 1
    assert shares.slow(1, 1000.0) is None, "what is done is owed no more"


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["done", "again", "back"]))))
def test_whatever_happens_nothing_is_forgotten_or_counted_twice(
    chunks: int, story: list[tuple[int, str]]
) -> None:
    shares = Shares([(0, chunks * CHUNK)], CHUNK, 4)
    asked: dict[int, list[Piece]] = {n: [] for n in range(4)}
    there: list[int] = []
    for source, what in story:
        if (piece := shares.ask(source, 0.0)) is not None:
            asked[source].append(piece)
        if what == "back":
            shares.back(source)
            asked[source].clear()
        elif asked[source]:
            piece = asked[source].pop(0)
            if what == "again":
                piece = shares.again(source, piece, 0.0)
            shares.done(source, piece)
            there += range(piece.start, piece.end, CHUNK)
    for source in range(4):
        shares.back(source)
    while (piece := shares.ask(9, 0.0)) is not None:
        assert not shares.complete
        shares.done(9, piece)
        there += range(piece.start, piece.end, CHUNK)
    assert shares.complete
    assert sorted(there) == [n * CHUNK for n in range(chunks)]


def test_parts_of_a_payload_in_pieces_down_to_a_chunk() -> None:
    spans = [(0, 0), (CHUNK, 3 * CHUNK), (5 * CHUNK, 5 * CHUNK + 7)]
    shares, found = Shares(spans, CHUNK // 4, 2, CHUNK // 4), list[Piece]()
    while (piece := shares.ask(len(found) % 2, 0.0)) is not None:
        found.append(piece)
        shares.done((len(found) - 1) % 2, piece)
    assert shares.complete
    assert sum(piece.nbytes for piece in found) == 2 * CHUNK + 7
    assert all(any(start <= piece.start and piece.end <= end for start, end in spans) for piece in found)
    assert min(piece.nbytes for piece in found[:-1]) == CHUNK // 4
