"""Two ends that hold one key understand each other, however the bytes come; nobody else is understood."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.api.errors import CkptlessError, MismatchError, PeerError, ProtocolError
from ckptless.daemon.peers import handshake
from ckptless.daemon.peers.keyed import Keyed
from ckptless.daemon.peers.vouch import KeyVouch

KEY = b"k" * 32
LIMIT = 1000
BODIES = st.lists(st.binary(max_size=100), max_size=4)


class Pair:
    """A dialler, node 0, and an acceptor, node 1, with all that each has said and taken."""

    def __init__(self, key: bytes = KEY, wanted: int = 1, job: str = "job") -> None:
        mine = handshake.opening("job", 0, store=True)
        self.dialler = Keyed(KeyVouch(KEY).bind, mine, wanted, LIMIT)
        said = self.dialler.begin()
        theirs = handshake.decode(said[handshake.LENGTH_BYTES :], handshake.Opening)
        assert theirs == mine
        self.acceptor = Keyed(KeyVouch(key).bind, handshake.opening(job, 1), theirs.node, LIMIT, theirs)

    def proved(self) -> "Pair":
        """After a handshake."""
        proof, _ = self.dialler.feed(self.acceptor.begin())
        self.acceptor.feed(proof)
        assert self.dialler.proved
        assert self.acceptor.proved
        return self


def feed(keyed: Keyed, data: bytes, sizes: list[int]) -> tuple[bytes, list[bytes]]:
    """In pieces of these sizes, and the rest."""
    reply, at = b"", 0
    bodies: list[bytes] = []
    for size in [*sizes, len(data)]:
        more, came = keyed.feed(data[at : at + size])
        reply, bodies, at = reply + more, bodies + came, at + size
    return reply, bodies


@given(BODIES, BODIES, st.lists(st.integers(0, 60)))
def test_both_ways_in_any_pieces(there: list[bytes], back: list[bytes], sizes: list[int]) -> None:
    pair = Pair()
    proof, _ = feed(pair.dialler, pair.acceptor.begin(), sizes)
    # What goes with the proof is taken with it.
    _, came = feed(pair.acceptor, proof + b"".join(map(pair.dialler.seal, there)), sizes)
    assert came == there
    assert feed(pair.dialler, b"".join(map(pair.acceptor.seal, back)), sizes) == (b"", back)
    assert pair.dialler.missing_nbytes == pair.acceptor.missing_nbytes == 0


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=3), st.integers(0, 1 << 16), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_waited_for(bodies: list[bytes], place: int, mask: int) -> None:
    """At any place of what the acceptor, and then the dialler, says."""
    for stage in ("answer", "proof"):
        pair = Pair()
        said = pair.acceptor.begin()
        hears = pair.dialler
        if stage == "proof":
            proof, _ = pair.dialler.feed(said)
            said = proof + b"".join(map(pair.dialler.seal, bodies))
            hears = pair.acceptor
        changed = bytearray(said)
        changed[place % len(said)] ^= mask
        came: list[bytes] = []
        with contextlib.suppress(CkptlessError):
            for byte in bytes(changed):
                came += hears.feed(bytes([byte]))[1]
        # What came before it was sound.
        assert came == bodies[: len(came)]
        assert len(came) < len(bodies) or stage == "answer"
        assert stage == "proof" or not hears.proved


@given(st.binary(max_size=300))
def test_noise_is_only_refused(noise: bytes) -> None:
    for hears in (Pair().dialler, Pair().acceptor, Pair().proved().dialler, Pair().proved().acceptor):
        was = hears.proved
        with contextlib.suppress(CkptlessError):
            hears.begin()
            _, bodies = hears.feed(noise)
            assert bodies == []
        assert hears.proved == was


def test_another_key_proves_nothing_to_either_end() -> None:
    pair = Pair(key=b"x" * 32)
    answer = pair.acceptor.begin()
    with pytest.raises(PeerError, match="does not hold the key"):
        pair.dialler.feed(answer)
    with pytest.raises(PeerError, match="does not hold the key"):
        pair.acceptor.feed(handshake.encode(handshake.Proof(b"p" * 32)))


def test_a_proof_is_of_one_connection() -> None:
    """Nor is an answer's that of the one who answers."""
    one, other = Pair(), Pair()
    proof, _ = one.dialler.feed(one.acceptor.begin())
    answer = other.acceptor.begin()
    with pytest.raises(PeerError, match="does not hold the key"):
        other.acceptor.feed(proof)
    found = handshake.decode(answer[handshake.LENGTH_BYTES :], handshake.Answer)
    third = Pair()
    third.acceptor.begin()
    with pytest.raises(PeerError, match="does not hold the key"):
        third.acceptor.feed(handshake.encode(handshake.Proof(found.proof)))


def test_another_node_or_job_is_not_taken() -> None:
    pair = Pair(wanted=7)
    with pytest.raises(PeerError, match="node-1 answers in place of node-7"):
        pair.dialler.feed(pair.acceptor.begin())
    pair = Pair(job="other")
    with pytest.raises(ProtocolError, match="asked for job 'job', got one of 'other'"):
        pair.dialler.feed(pair.acceptor.begin())


def test_an_end_of_another_version_is_told_apart() -> None:
    answer = handshake.Answer(handshake.Opening(99, "job", 1, b"n" * handshake.NONCE_BYTES), b"")
    with pytest.raises(MismatchError, match="speaks protocol 99"):
        Pair().dialler.feed(handshake.encode(answer))


def test_a_credential_where_there_is_a_key() -> None:
    theirs = handshake.Opening(1, "job", 0, b"n" * handshake.NONCE_BYTES, b"credential", store=True)
    keyed = Keyed(KeyVouch(KEY).bind, handshake.opening("job", 1), 0, LIMIT, theirs)
    with pytest.raises(PeerError, match="credential"):
        keyed.begin()


def test_what_is_too_long_is_not_waited_for() -> None:
    pair = Pair().proved()
    with pytest.raises(ProtocolError, match="the limit here is 1000"):
        pair.acceptor.feed(pair.dialler.seal(bytes(LIMIT + 1))[: handshake.HEAD_BYTES])
    with pytest.raises(ProtocolError, match="a greeting of"):
        Pair().dialler.feed((handshake.GREETING_LIMIT + 1).to_bytes(4, "little"))
    pair.dialler.feed(pair.acceptor.seal(bytes(LIMIT))[:-3])
    assert pair.dialler.missing_nbytes == 3
