"""Shows the other end of a connection that this one may speak for a daemon, or for an agent of a job.

An offer is a credential that goes over the wire in the clear, and a secret that only whom it is meant for
gets out of it. The handshake binds both to the connection, and proves that both ends know both secrets.
"""

import asyncio
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from ckptless.daemon.protocol.errors import PeerError
from ckptless.daemon.transport.munge import Munge

R = TypeVar("R")

SECRET_BYTES = 32
# How old a credential may be; clocks of a cluster with MUNGE agree better than that.
CREDENTIAL_TTL_S = 60
# That talk to munged.
THREADS = 8


class Credentials(Protocol):
    """One way to vouch; `context` is what a credential is bound to."""

    async def offer(self, context: bytes) -> tuple[bytes, bytes]:
        """(credential, secret). Raises PeerError."""

    async def accept(self, credential: bytes, context: bytes) -> bytes:
        """The secret of the other end's offer. Raises PeerError where it may not speak."""


class KeyCredentials:
    """Both ends hold one key: the daemons of local mode, the agents of a job."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    async def offer(self, context: bytes) -> tuple[bytes, bytes]:
        """Offer no credential: what both ends know is bound to the context."""
        return b"", self.bind(context)

    async def accept(self, credential: bytes, context: bytes) -> bytes:
        """See `Credentials`; who holds another key fails the proof that follows."""
        if credential:
            raise PeerError("the other end came with a credential where a key is wanted")
        return self.bind(context)

    def bind(self, context: bytes) -> bytes:
        """The secret of whoever opens with that, for both ends."""
        return hmac.new(self._key, context, hashlib.sha256).digest()


class MungeCredentials:
    """Daemons of a cluster: a MUNGE credential that only our uid can decode, made by root or our uid.

    Its payload, which MUNGE encrypts, is a digest of the context and a fresh secret. munged refuses one that
    it has decoded before, so an opening that was listened to cannot be played again.
    """

    def __init__(self, munge: Munge) -> None:
        self._munge = munge
        self._uid = os.getuid()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="munge")

    async def _call(self, do: Callable[[], R]) -> R:
        """Call it in a thread, since munged may be slow; of its own, so that nothing else holds it up."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, do)

    async def offer(self, context: bytes) -> tuple[bytes, bytes]:
        """See `Credentials`."""
        secret = secrets.token_bytes(SECRET_BYTES)
        payload = hashlib.sha256(context).digest() + secret
        credential = await self._call(
            lambda: self._munge.encode(payload, restrict_uid=self._uid, ttl_s=CREDENTIAL_TTL_S)
        )
        return credential, secret

    async def accept(self, credential: bytes, context: bytes) -> bytes:
        """See `Credentials`."""
        found = await self._call(lambda: self._munge.decode(credential))
        if found.uid not in (0, self._uid):
            raise PeerError(f"uid {found.uid} may not speak for a daemon")
        digest = hashlib.sha256(context).digest()
        if len(found.payload) != len(digest) + SECRET_BYTES or found.payload[: len(digest)] != digest:
            raise PeerError("a credential that was made for another connection")
        return found.payload[len(digest) :]
