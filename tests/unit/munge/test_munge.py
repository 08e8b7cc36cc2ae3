"""Credentials of a real munged: what is believed, and what is refused."""

import base64
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes.util import find_library
from pathlib import Path

import pytest

from ckptless.daemon.protocol.errors import PeerError, UsageError
from ckptless.daemon.transport import munge as module
from ckptless.daemon.transport.munge import (
    CREDENTIAL_LIMIT,
    PAYLOAD_LIMIT,
    CredentialError,
    CredentialKind,
    Munge,
)

from .munged import STRANGER, Munged, as_uid, running

ME = os.getuid()


@pytest.fixture(scope="module")
def munged() -> Iterator[Munged]:
    with running() as found:
        yield found


@pytest.fixture
def munge(munged: Munged) -> Munge:
    return Munge(munged.socket)


def refused(munge: Munge, credential: bytes) -> CredentialKind:
    with pytest.raises(CredentialError) as caught:
        munge.decode(credential)
    return caught.value.kind


@pytest.mark.parametrize(
    "payload", [b"", b"\0", b"key\0with zeros\0", bytes(range(256)), b"x" * PAYLOAD_LIMIT]
)
def test_a_payload_comes_back(munge: Munge, payload: bytes) -> None:
    found = munge.decode(munge.encode(payload, restrict_uid=ME, ttl_s=60))
    assert found.payload == payload
    assert found.uid == ME


def test_a_payload_does_not_travel_in_the_clear(munge: Munge) -> None:
    payload = b"a secret that repeats " * 8
    head, body, tail = munge.encode(payload, restrict_uid=ME, ttl_s=60).split(b":")
    assert (head, tail) == (b"MUNGE", b"")
    assert b"secret" not in base64.b64decode(body)


def test_a_credential_is_decoded_once(munge: Munge) -> None:
    credential = munge.encode(b"once", restrict_uid=None, ttl_s=60)
    assert munge.decode(credential).payload == b"once"
    assert refused(munge, credential) is CredentialKind.REPLAYED
    assert refused(munge, credential) is CredentialKind.REPLAYED


def test_the_uid_is_that_of_the_maker(munge: Munge) -> None:
    credential = as_uid(STRANGER, lambda: munge.encode(b"I am root", restrict_uid=ME, ttl_s=60))
    found = munge.decode(credential)
    assert (found.uid, found.payload) == (STRANGER, b"I am root")


def test_a_credential_for_another_user(munge: Munge) -> None:
    credential = munge.encode(b"for nobody", restrict_uid=STRANGER, ttl_s=60)
    assert refused(munge, credential) is CredentialKind.UNAUTHORIZED
    # The attempt has not used it up.
    assert as_uid(STRANGER, lambda: munge.decode(credential).payload) == b"for nobody"


def test_another_user_learns_nothing(munge: Munge) -> None:
    credential = munge.encode(b"for us", restrict_uid=ME, ttl_s=60)
    assert as_uid(STRANGER, lambda: refused(munge, credential).encode()) == b"unauthorized"
    assert munge.decode(credential).payload == b"for us"


def test_a_credential_grows_old(munge: Munge) -> None:
    credential = munge.encode(b"old", restrict_uid=ME, ttl_s=1)
    # munged counts whole seconds: it is expired once more than one second boundary has passed.
    time.sleep(2.1)
    assert refused(munge, credential) is CredentialKind.EXPIRED


def test_a_munged_with_another_key(munge: Munge) -> None:
    with running() as other:
        credential = Munge(other.socket).encode(b"foreign", restrict_uid=ME, ttl_s=60)
    assert refused(munge, credential) is CredentialKind.BOGUS


@pytest.mark.parametrize("nbytes", [140, 139, 5])
def test_a_changed_byte_anywhere(munge: Munge, nbytes: int) -> None:
    source = random.Random(7)
    good = munge.encode(b"p" * nbytes, restrict_uid=ME, ttl_s=60)
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << source.randrange(8)
        assert refused(munge, bytes(bad)) is CredentialKind.BOGUS, position
    # Bits of the last letter that base64 does not use.
    for bit in range(8):
        bad = bytearray(good)
        bad[len(good.rstrip(b"=:")) - 1] ^= 1 << bit
        assert refused(munge, bytes(bad)) is CredentialKind.BOGUS, bit
    assert munge.decode(good).payload == b"p" * nbytes


def test_cut_short_or_with_more_behind_it(munge: Munge) -> None:
    good = munge.encode(b"payload", restrict_uid=ME, ttl_s=60)
    bad = [good[:end] for end in range(len(good))]
    bad += [good + b"\n", good + b"\0", good + b"\0:", b" " + good, good + good, good[:-1] + b"A:"]
    for credential in bad:
        assert refused(munge, credential) is CredentialKind.BOGUS, credential
    assert munge.decode(good).payload == b"payload"


def test_noise(munge: Munge) -> None:
    source = random.Random(11)
    for _ in range(500):
        body = source.randbytes(source.randrange(300))
        assert refused(munge, body) is CredentialKind.BOGUS
        assert refused(munge, b"MUNGE:" + body.replace(b"\0", b"0") + b":") is CredentialKind.BOGUS
    assert refused(munge, b"MUNGE:" + b"A" * CREDENTIAL_LIMIT + b":") is CredentialKind.BOGUS


def test_limits(munge: Munge) -> None:
    with pytest.raises(ValueError, match=str(PAYLOAD_LIMIT)):
        munge.encode(b"x" * (PAYLOAD_LIMIT + 1), restrict_uid=ME, ttl_s=60)
    # 0 and -1 have meanings of their own to munge: its default, and its longest.
    for ttl_s in (-1, 0, 3601):
        with pytest.raises(ValueError, match="holds for"):
            munge.encode(b"", restrict_uid=ME, ttl_s=ttl_s)
    # -1 is munge's "any user".
    for uid in (-1, 2**32 - 1, 2**32):
        with pytest.raises(ValueError, match="no uid"):
            munge.encode(b"", restrict_uid=uid, ttl_s=60)


def test_a_payload_over_the_limit_of_another_encoder(munge: Munge, monkeypatch: pytest.MonkeyPatch) -> None:
    credential = munge.encode(b"x" * 2000, restrict_uid=ME, ttl_s=60)
    monkeypatch.setattr(module, "PAYLOAD_LIMIT", 1999)
    assert refused(munge, credential) is CredentialKind.BOGUS


def test_an_unencrypted_payload(munge: Munge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CIPHER_AES128", 0)
    credential = munge.encode(b"in the clear", restrict_uid=ME, ttl_s=60)
    assert refused(munge, credential) is CredentialKind.BOGUS


def test_threads(munge: Munge) -> None:
    def work(worker: int) -> None:
        for turn in range(200):
            payload = f"{worker}/{turn}".encode()
            assert munge.decode(munge.encode(payload, restrict_uid=ME, ttl_s=60)).payload == payload

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_one_credential_many_threads(munge: Munge) -> None:
    credential = munge.encode(b"once", restrict_uid=ME, ttl_s=60)

    def work(_: int) -> str:
        try:
            return munge.decode(credential).payload.decode()
        except CredentialError as error:
            return error.kind

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(work, range(32))) == ["once"] + ["replayed"] * 31


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_no_leak(munge: Munge) -> None:
    payload = os.urandom(4096)

    def pairs(count: int) -> None:
        for turn in range(count):
            credential = munge.encode(payload, restrict_uid=ME, ttl_s=1)
            assert munge.decode(credential).payload == payload
            if turn % 4 == 0:
                assert refused(munge, credential) in (CredentialKind.REPLAYED, CredentialKind.EXPIRED)

    pairs(2000)
    before = resident_nbytes()
    pairs(20_000)
    # One buffer of each pair, forgotten, would be 80 MB.
    assert resident_nbytes() - before < 4 << 20


@pytest.mark.skipif(find_library("munge") is None, reason="libmunge is not installed (Debian: libmunge2)")
def test_no_munged(tmp_path: Path) -> None:
    munge = Munge(tmp_path / "no.sock")
    for call in (lambda: munge.encode(b"", restrict_uid=None, ttl_s=1), lambda: munge.decode(b"MUNGE:AAAA:")):
        with pytest.raises(PeerError, match=r"munge\.service") as caught:
            call()
        assert not isinstance(caught.value, CredentialError)
        assert str(tmp_path / "no.sock") in str(caught.value)


def test_a_munged_that_went_away_and_came_back() -> None:
    with running() as first:
        munge = Munge(first.socket)
        munge.decode(munge.encode(b"", restrict_uid=ME, ttl_s=9))
        first.end()
        with pytest.raises(PeerError):
            munge.encode(b"", restrict_uid=ME, ttl_s=9)
        again = Munged(first.socket.parent)
        try:
            again.wait_ready()
            munge.decode(munge.encode(b"", restrict_uid=ME, ttl_s=9))
        finally:
            again.end()


def test_a_munged_that_hangs_is_given_up(munged: Munged, munge: Munge) -> None:
    start_s = time.monotonic()
    with munged.stopped(), pytest.raises(PeerError) as caught:
        munge.encode(b"", restrict_uid=ME, ttl_s=9)
    assert not isinstance(caught.value, CredentialError)
    assert time.monotonic() - start_s < 30
    assert munge.decode(munge.encode(b"on", restrict_uid=ME, ttl_s=9)).payload == b"on"


def test_no_libmunge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIBRARY", "libmunge-is-not-here.so.2")
    module._library.cache_clear()
    try:
        with pytest.raises(UsageError, match="install"):
            Munge().encode(b"", restrict_uid=None, ttl_s=1)
    finally:
        module._library.cache_clear()
