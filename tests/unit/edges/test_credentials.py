"""Who may speak for a daemon: by a key or by MUNGE, over real sockets; everybody else is only refused."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.daemon.protocol.errors import CkptlessError, PeerError, ProtocolError
from ckptless.daemon.protocol.messages import PROTOCOL
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.peers.membership import Beat
from ckptless.daemon.transport import handshake, link
from ckptless.daemon.transport.credentials import Credentials, KeyCredentials, MungeCredentials
from ckptless.daemon.transport.handshake import GREETING_LIMIT, Answer, Opening, Proof, Sealer
from ckptless.daemon.transport.link import Link
from ckptless.daemon.transport.munge import CredentialError, CredentialKind
from tests.unit.daemon.served import serve

from .fake_munge import Cell, FakeMunge

JOB = "4711"
KEY = b"k" * 32
STRANGER = 65534
DEADLINE_S = 30.0
DIAL_S = 10.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
DaemonLink = Link[p.DaemonMessage]
Made = DaemonLink | BaseException


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


async def ends() -> tuple[Streams, Streams]:
    """Both ends of one TCP connection."""
    accepted: asyncio.Queue[Streams] = asyncio.Queue()

    def connected(*streams: Any) -> None:
        accepted.put_nowait(streams)

    server, port = await serve("127.0.0.1", 0, connected)
    try:
        return await asyncio.open_connection("127.0.0.1", port), await accepted.get()
    finally:
        server.close()


async def accept(streams: Streams, credentials: Credentials) -> Made:
    try:
        return await Link.accept(streams, lambda _job: 1, credentials, p.DaemonMessage)
    except BaseException as error:  # noqa: BLE001  # which one it was is what the tests are about
        return error


async def pair(dialler: Credentials, acceptor: Credentials) -> tuple[Made, Made]:
    """Return what both ends make of each other: a link, or why not."""
    accepting: asyncio.Queue[asyncio.Task[Made]] = asyncio.Queue()

    def connected(*streams: Any) -> None:
        accepting.put_nowait(asyncio.create_task(accept(streams, acceptor)))

    server, port = await serve("127.0.0.1", 0, connected)
    dialled: Made
    try:
        dialled = await Link.dial(("127.0.0.1", port), (JOB, 0), dialler, p.DaemonMessage, DIAL_S)
    except (OSError, TimeoutError, CkptlessError) as error:
        dialled = error
    finally:
        server.close()
    return dialled, await (await accepting.get())


async def links(dialler: Credentials, acceptor: Credentials) -> tuple[DaemonLink, DaemonLink]:
    one, other = await pair(dialler, acceptor)
    assert isinstance(one, Link), one
    assert isinstance(other, Link), other
    return one, other


def close(*made: Made) -> None:
    for one in made:
        if isinstance(one, Link):
            one.close()


def run(runner: asyncio.Runner, work: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await work

    runner.run(limited())


def keys() -> tuple[Credentials, Credentials]:
    return KeyCredentials(KEY), KeyCredentials(KEY)


def mungeds() -> tuple[Credentials, Credentials]:
    cell = Cell()
    return MungeCredentials(FakeMunge(cell)), MungeCredentials(FakeMunge(cell))


Both = Callable[[], tuple[Credentials, Credentials]]


# ------------------------------------------------------------------------------------ those who may


@pytest.mark.parametrize("both", [keys, mungeds])
def test_they_hear_each_other(loop: asyncio.Runner, both: Both) -> None:
    async def scenario() -> None:
        dialled, accepted = await links(*both())
        assert (dialled.job, dialled.node, accepted.job, accepted.node) == (JOB, 1, JOB, 0)
        for number in range(20):
            gone = p.Gone(job=JOB, node=number, reason="x", age_s=0.5, source="lease", dark=True)
            dialled.send(gone)
            accepted.send(Beat())
            assert await accepted.receive() == gone
            assert await dialled.receive() == Beat()
        close(dialled, accepted)

    run(loop, scenario())


def test_root_may_speak_for_a_daemon_of_another_user(
    loop: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemons run as SlurmUser; root's word counts all the same."""
    real = os.getuid()

    async def scenario() -> None:
        cell = Cell()
        root, slurm = MungeCredentials(FakeMunge(cell, 0)), MungeCredentials(FakeMunge(cell, real))
        for dialler, acceptor in ((root, slurm), (slurm, root)):
            close(*await links(dialler, acceptor))

    run(loop, scenario())


# --------------------------------------------------------------------------------- those who may not


def test_another_user_who_dials(loop: asyncio.Runner) -> None:
    async def scenario() -> None:
        cell = Cell()
        dialled, accepted = await pair(
            MungeCredentials(FakeMunge(cell, STRANGER)), MungeCredentials(FakeMunge(cell, os.getuid()))
        )
        assert isinstance(accepted, PeerError)
        assert f"uid {STRANGER} may not speak" in str(accepted)
        assert isinstance(dialled, PeerError | ConnectionError)

    run(loop, scenario())


def test_another_user_who_listens_on_the_daemons_port(loop: asyncio.Runner) -> None:
    async def scenario() -> None:
        cell = Cell()
        dialled, accepted = await pair(
            MungeCredentials(FakeMunge(cell, os.getuid())), MungeCredentials(FakeMunge(cell, STRANGER))
        )
        assert isinstance(dialled, PeerError)
        assert f"uid {STRANGER} may not speak" in str(dialled)
        assert isinstance(accepted, PeerError | ConnectionError)

    run(loop, scenario())


@pytest.mark.parametrize("both", [keys, mungeds])
@pytest.mark.parametrize("turned", [False, True])
def test_who_vouches_in_another_way(loop: asyncio.Runner, both: Both, turned: bool) -> None:
    async def scenario() -> None:
        other: Credentials = MungeCredentials(FakeMunge(Cell())) if both is keys else KeyCredentials(KEY)
        ways = (both()[0], other)
        made = await pair(*(reversed(ways) if turned else ways))
        for one in made:
            assert isinstance(one, CkptlessError | ConnectionError)
        assert any(isinstance(one, PeerError) for one in made)

    run(loop, scenario())


def test_another_clusters_munged(loop: asyncio.Runner) -> None:
    async def scenario() -> None:
        _, accepted = await pair(MungeCredentials(FakeMunge(Cell())), MungeCredentials(FakeMunge(Cell())))
        assert isinstance(accepted, CredentialError)
        assert accepted.kind is CredentialKind.BOGUS

    run(loop, scenario())


# ------------------------------------------------------------------------ credentials out of their place


def frame(message: object) -> bytes:
    body = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))


async def say(credentials: Credentials, *first: bytes) -> tuple[Made, bytes]:
    """Return what an acceptor makes of a dialler that says this and no more, and what it answered."""
    (reader, writer), streams = await ends()
    task = asyncio.create_task(accept(streams, credentials))
    for data in first:
        writer.write(data)
    with suppress(ConnectionError):
        writer.write_eof()
    made = await task
    answer = b""
    with suppress(ConnectionError):
        answer = await reader.read()
    writer.close()
    return made, answer


async def vouched(opening: Opening, credentials: Credentials) -> Opening:
    credential, _ = await credentials.offer(opening.context())
    return msgspec.structs.replace(opening, credential=credential)


def test_an_opening_that_was_listened_to(loop: asyncio.Runner) -> None:
    """Played again to the same node it is refused by munged, to another one for want of the proof."""

    async def scenario() -> None:
        cell = Cell()
        here, there = (MungeCredentials(FakeMunge(cell)) for _ in range(2))
        heard = frame(await vouched(handshake.opening(JOB, 0), MungeCredentials(FakeMunge(cell))))
        made, answer = await say(here, heard)
        assert isinstance(made, PeerError)
        assert answer  # it was a sound opening; there was no more
        made, answer = await say(here, heard)
        assert isinstance(made, CredentialError)
        assert made.kind is CredentialKind.REPLAYED
        assert answer == b""
        for proof in (b"", b"x" * 32, msgspec.msgpack.decode(answer[4:]) if answer else b"y" * 32):
            fresh = MungeCredentials(FakeMunge(cell))
            made, _ = await say(fresh, heard, frame(Proof(proof)))
            assert isinstance(made, PeerError)
            assert "does not hold the key" in str(made)
        made, answer = await say(there, heard)
        assert isinstance(made, PeerError)

    run(loop, scenario())


OPENING = Opening(PROTOCOL, JOB, 0, b"n" * 16)


@pytest.mark.parametrize(
    "used",
    [
        pytest.param(Opening(PROTOCOL, "4712", 0, b"n" * 16), id="another job"),
        pytest.param(Opening(PROTOCOL, JOB, 3, b"n" * 16), id="another node"),
        pytest.param(Opening(PROTOCOL, JOB, 0, b"m" * 16), id="another nonce"),
        pytest.param(Opening(PROTOCOL, JOB[:-1], 10, b"n" * 16), id="shifted"),
    ],
)
def test_a_credential_that_was_made_for_something_else(loop: asyncio.Runner, used: Opening) -> None:
    async def scenario() -> None:
        cell = Cell()
        credential = (await vouched(OPENING, MungeCredentials(FakeMunge(cell)))).credential
        claims = msgspec.structs.replace(used, credential=credential)
        made, answer = await say(MungeCredentials(FakeMunge(cell)), frame(claims))
        assert isinstance(made, PeerError)
        assert "made for another connection" in str(made)
        assert answer == b""

    run(loop, scenario())


@pytest.mark.parametrize("payload", [b"", b"x", b"x" * 63, b"x" * 64, b"x" * 65])
def test_a_credential_of_somebody_elses_protocol(loop: asyncio.Runner, payload: bytes) -> None:
    """Root on any node makes credentials for many purposes."""

    async def scenario() -> None:
        cell = Cell()
        credential = FakeMunge(cell).encode(payload, restrict_uid=None, ttl_s=60)
        claims = msgspec.structs.replace(OPENING, credential=credential)
        made, answer = await say(MungeCredentials(FakeMunge(cell)), frame(claims))
        assert isinstance(made, PeerError)
        assert answer == b""

    run(loop, scenario())


def test_a_credential_for_another_users_daemon(loop: asyncio.Runner) -> None:
    async def scenario() -> None:
        cell = Cell()
        credential = FakeMunge(cell).encode(b"x" * 64, restrict_uid=STRANGER, ttl_s=60)
        claims = msgspec.structs.replace(OPENING, credential=credential)
        made, _ = await say(MungeCredentials(FakeMunge(cell)), frame(claims))
        assert isinstance(made, CredentialError)
        assert made.kind is CredentialKind.UNAUTHORIZED

    run(loop, scenario())


def test_offers_are_made_for_our_uid_alone_and_never_twice_the_same() -> None:
    async def scenario() -> None:
        cell = Cell()
        credentials = MungeCredentials(FakeMunge(cell))
        offers = [await credentials.offer(b"context") for _ in range(50)]
        assert len({secret for _, secret in offers}) == 50
        assert all(restricted == os.getuid() for _, restricted in cell.made.values())
        assert all(secret not in credential for credential, secret in offers)

    asyncio.run(scenario())


def test_an_answer_that_was_given_to_another_dialler(loop: asyncio.Runner) -> None:
    """Somebody on the port plays a true daemon's answer, which it got by asking with a true opening."""

    async def scenario() -> None:
        cell = Cell()
        opening = await vouched(handshake.opening(JOB, 0), MungeCredentials(FakeMunge(cell)))
        _, answer = await say(MungeCredentials(FakeMunge(cell)), frame(opening))
        assert isinstance(msgspec.msgpack.decode(answer[4:], type=Answer), Answer)
        made = await answered(MungeCredentials(FakeMunge(cell)), answer)
        assert isinstance(made, PeerError)
        assert "made for another connection" in str(made)

    run(loop, scenario())


async def answered(credentials: Credentials, answer: bytes) -> Made:
    """Return what a dialler makes of an acceptor that says this, whatever it was asked."""

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.create_task(answering(reader, writer)))

    async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):
            await read_frame(reader)
            writer.write(answer)
            writer.write_eof()
            await reader.read()
        writer.close()

    tasks: list[asyncio.Task[None]] = []
    server, port = await serve("127.0.0.1", 0, connected)
    made: Made
    try:
        made = await Link.dial(("127.0.0.1", port), (JOB, 0), credentials, p.DaemonMessage, DIAL_S)
    except Exception as error:  # noqa: BLE001  # which one it was is what the tests are about
        made = error
    finally:
        server.close()
    await asyncio.gather(*tasks)
    return made


def test_an_answer_of_another_jobs_daemon(loop: asyncio.Runner) -> None:
    async def scenario() -> None:
        made = await answered(KeyCredentials(KEY), frame(Answer(handshake.opening("4712", 1), b"p" * 32)))
        assert isinstance(made, ProtocolError)
        assert "'4712'" in str(made)

    run(loop, scenario())


# ----------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("both", [keys, mungeds])
def test_a_masked_key_is_read_at_the_other_end_only(loop: asyncio.Runner, both: Both) -> None:
    async def scenario() -> None:
        vouches = both()
        dialled, accepted = await links(*vouches)
        again, _ = other = await links(*both())
        secret = os.urandom(32)
        for sender, receiver in ((dialled, accepted), (accepted, dialled)):
            masked = sender.mask(b"salt", secret)
            assert masked != secret
            assert receiver.unmask(b"salt", masked) == secret
            assert receiver.unmask(b"pepper", masked) != secret
            assert sender.unmask(b"salt", masked) != secret  # each direction has its own
            assert again.unmask(b"salt", masked) != secret  # and each connection
            assert sender.mask(b"pepper", secret) != masked
        with pytest.raises(ProtocolError):
            dialled.mask(b"salt", b"x" * 33)
        with pytest.raises(ProtocolError):
            dialled.unmask(b"salt", b"x" * 33)
        # Masking takes no frame's place.
        dialled.send(Beat())
        assert await accepted.receive() == Beat()
        close(dialled, accepted, *other)

    run(loop, scenario())


@settings(max_examples=2000, deadline=None)
@given(
    key=st.binary(min_size=32, max_size=32),
    salts=st.lists(st.binary(min_size=16, max_size=16), min_size=2, max_size=2, unique=True),
    data=st.binary(max_size=32),
)
def test_masks(key: bytes, salts: list[bytes], data: bytes) -> None:
    openings = (Opening(PROTOCOL, JOB, 0, b"a" * 16), Opening(PROTOCOL, JOB, 1, b"b" * 16))
    one, other = (Sealer(key, b"dialler", openings) for _ in range(2))
    masked = one.mask(salts[0], data)
    assert len(masked) == len(data)
    assert other.mask(salts[0], masked) == data
    if len(data) >= 16:  # or chance could make them equal
        assert masked != data
        assert one.mask(salts[1], data) != masked
        assert Sealer(key, b"acceptor", openings).mask(salts[0], data) != masked


# ------------------------------------------------------------------------------------------------ noise


ALLOWED = CkptlessError | OSError | TimeoutError


def _sound(vouch_bytes: bytes = b"") -> bytes:
    return frame(msgspec.structs.replace(OPENING, credential=vouch_bytes))


flips = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 255)), min_size=1, max_size=4)


def _flipped(data: bytes, where: list[tuple[int, int]]) -> bytes:
    noisy = bytearray(data)
    for at, bits in where:
        noisy[at % len(noisy)] ^= bits
    return bytes(noisy)


scraps: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=20)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
fields = st.fixed_dictionaries(
    {},
    optional={
        name: scraps for name in ("protocol", "job", "node", "nonce", "credential", "opening", "proof")
    },
)
noise = st.one_of(
    st.binary(max_size=300),
    st.binary(max_size=100).map(frame),
    flips.map(lambda where: _flipped(_sound(), where)),
    st.integers(0, len(_sound())).map(lambda length: _sound()[:length]),
    st.integers(GREETING_LIMIT + 1, 2**32 - 1).map(lambda length: length.to_bytes(4, "little") + b"x" * 50),
    fields.map(frame),
    fields.map(lambda found: frame({**msgspec.to_builtins(OPENING), "nonce": b"n" * 16, **found})),
)


@settings(max_examples=800, deadline=None, derandomize=True)
@given(first=noise, munge=st.booleans())
def test_noise_is_only_refused_by_who_is_dialled(loop: asyncio.Runner, first: bytes, munge: bool) -> None:
    async def scenario() -> None:
        credentials: Credentials = MungeCredentials(FakeMunge(Cell())) if munge else KeyCredentials(KEY)
        made, _ = await say(credentials, first)
        assert isinstance(made, ALLOWED), repr(made)

    run(loop, scenario())


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    answer=st.one_of(
        noise,
        fields.map(lambda found: frame({"opening": found, "proof": b"p" * 32})),
        st.binary(max_size=80).map(lambda proof: frame(Answer(OPENING, proof))),
    ),
    munge=st.booleans(),
)
def test_noise_is_only_refused_by_who_dials(loop: asyncio.Runner, answer: bytes, munge: bool) -> None:
    async def scenario() -> None:
        credentials: Credentials = MungeCredentials(FakeMunge(Cell())) if munge else KeyCredentials(KEY)
        made = await answered(credentials, answer)
        assert isinstance(made, ALLOWED), repr(made)

    run(loop, scenario())


NO_TEXT = _sound().replace(b"4711", b"\xff711")


def test_a_name_that_is_no_text_is_only_refused_by_who_is_dialled(loop: asyncio.Runner) -> None:
    async def scenario() -> None:
        made, _ = await say(KeyCredentials(KEY), NO_TEXT)
        assert isinstance(made, ALLOWED), repr(made)

    run(loop, scenario())


def test_a_name_that_is_no_text_is_only_refused_by_who_dials(loop: asyncio.Runner) -> None:
    """Any user of a node can listen on the daemon's port while the daemon is away; dialling must go on."""

    async def scenario() -> None:
        answer = frame(Answer(OPENING, b"p" * 32)).replace(b"4711", b"\xff711")
        made = await answered(KeyCredentials(KEY), answer)
        assert isinstance(made, ALLOWED), repr(made)

    run(loop, scenario())


def test_very_deep_nesting_is_only_refused(loop: asyncio.Runner) -> None:
    async def scenario() -> None:
        deep = frame(b"\x81\xa3job" + b"\x91" * (GREETING_LIMIT - 10))
        made, _ = await say(KeyCredentials(KEY), deep)
        assert isinstance(made, ALLOWED), repr(made)

    run(loop, scenario())


@pytest.mark.parametrize("first", [b"", _sound()[:9], _sound()])
def test_who_says_nothing_more_is_not_waited_for(
    loop: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    monkeypatch.setattr(link, "HANDSHAKE_DEADLINE_S", 0.2)

    async def scenario() -> None:
        (_, writer), streams = await ends()
        writer.write(first)
        assert isinstance(await accept(streams, KeyCredentials(KEY)), TimeoutError)
        assert streams[1].is_closing()
        writer.close()

    run(loop, scenario())


def test_a_vouch_that_hangs_does_not_keep_the_other_end(
    loop: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """munged may hang for ten seconds."""
    monkeypatch.setattr(link, "HANDSHAKE_DEADLINE_S", 0.2)

    class Hangs(KeyCredentials):
        async def accept(self, credential: bytes, context: bytes) -> bytes:
            await asyncio.sleep(60)
            raise AssertionError

    async def scenario() -> None:
        dialled, accepted = await pair(KeyCredentials(KEY), Hangs(KEY))
        assert isinstance(accepted, TimeoutError)
        assert isinstance(dialled, PeerError | ConnectionError)

    run(loop, scenario())


def test_nothing_of_a_refused_connection_stays_open(loop: asyncio.Runner) -> None:
    async def scenario() -> None:
        (_, writer), streams = await ends()
        sock: socket.socket = streams[1].get_extra_info("socket")
        writer.write(b"\xff" * 10)
        assert isinstance(await accept(streams, KeyCredentials(KEY)), ProtocolError)
        writer.close()
        with suppress(ConnectionError):
            await streams[1].wait_closed()
        assert sock.fileno() == -1

    run(loop, scenario())
