"""munged of every node of a cluster, in memory: a credential is a name for what is kept here."""

from __future__ import annotations

import base64
import os
import secrets
from dataclasses import dataclass, field

from ckptless.daemon.transport.munge import CredentialError, CredentialKind, Decoded, Munge


@dataclass
class Cell:
    """The key that all munged of a cluster share: what was made with it."""

    made: dict[bytes, tuple[Decoded, int | None]] = field(default_factory=dict)


class FakeMunge(Munge):
    """The munged of one node, asked by a process of `uid`. It decodes a credential once, as a real one."""

    def __init__(self, cell: Cell, uid: int | None = None) -> None:
        self._cell = cell
        self.uid = os.getuid() if uid is None else uid
        self.decoded: set[bytes] = set()

    def encode(self, payload: bytes, *, restrict_uid: int | None, ttl_s: int) -> bytes:
        assert ttl_s > 0
        credential = b"MUNGE:" + base64.b64encode(secrets.token_bytes(24)) + b":"
        says = Decoded(payload=payload, uid=self.uid)
        self._cell.made[credential] = says, restrict_uid
        return credential

    def decode(self, credential: bytes) -> Decoded:
        found = self._cell.made.get(credential)
        if found is None:
            raise CredentialError(CredentialKind.BOGUS)
        says, restricted = found
        if restricted not in (None, os.getuid()):
            raise CredentialError(CredentialKind.UNAUTHORIZED)
        if credential in self.decoded:
            raise CredentialError(CredentialKind.REPLAYED)
        self.decoded.add(credential)
        return says
