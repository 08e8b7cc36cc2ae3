"""MUNGE credentials through libmunge: who made a message, said by the munged of this node.

A credential is text that travels in the clear. Only who it is restricted to gets the payload out of it, every
munged decodes it once, and it grows old. The calls block: tens of microseconds as a rule, but seconds where
munged hangs (libmunge tries again by itself and gives up after ten), so an event loop makes them in a thread.
"""

import base64
import binascii
import ctypes
import functools
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

from msgspec import Struct

from ckptless.daemon.protocol.errors import PeerError, UsageError

LIBRARY = "libmunge.so.2"
DEFAULT_SOCKET = Path("/run/munge/munge.socket.2")

# A credential carries keys and digests, never data.
PAYLOAD_LIMIT = 16 * 1024
CREDENTIAL_LIMIT = 2 * PAYLOAD_LIMIT  # base64, and munged's own head of some hundred bytes
MAX_TTL_S = 3600  # munged shortens what is longer (--max-ttl), without a word

# munge.h: munge_opt_t, munge_cipher_t, munge_err_t
_OPT_CIPHER = 0
_OPT_TTL = 4
_OPT_SOCKET = 8
_OPT_UID_RESTRICTION = 9
_CIPHER_NONE = 0
_CIPHER_AES128 = 4
_BOGUS_CODES = range(8, 15)  # its format, version, cipher, MAC, compression, realm; or it is damaged

_MAX_UID = 2**32 - 2  # the last one means "any" to munge


class CredentialKind(StrEnum):
    """The reason for which a credential is refused."""

    BOGUS = "bogus"
    EXPIRED = "expired"
    REWOUND = "rewound"
    REPLAYED = "replayed"
    UNAUTHORIZED = "unauthorized"


_KINDS = {
    **dict.fromkeys(_BOGUS_CODES, CredentialKind.BOGUS),
    15: CredentialKind.EXPIRED,
    16: CredentialKind.REWOUND,
    17: CredentialKind.REPLAYED,
    18: CredentialKind.UNAUTHORIZED,
}

_TEXTS = {
    CredentialKind.BOGUS: "it was not made by a munged with this cluster's key, or was damaged",
    CredentialKind.EXPIRED: "it is too old; do the clocks of the nodes agree?",
    CredentialKind.REWOUND: "it is from the future; do the clocks of the nodes agree?",
    CredentialKind.REPLAYED: "it was decoded on this node before",
    CredentialKind.UNAUTHORIZED: "it is meant for another user",
}


class CredentialError(PeerError):
    """A credential that munged refuses; `kind` says why. Nothing of it may be believed."""

    def __init__(self, kind: CredentialKind, detail: str = "") -> None:
        super().__init__(f"a MUNGE credential is {kind}: {detail or _TEXTS[kind]}")
        self.kind = kind


class Decoded(Struct, frozen=True):
    """The content of a credential, vouched for by munged; `uid` is that of the process that made it."""

    payload: bytes
    uid: int


class Munge:
    """Makes and opens credentials. May be used by several threads at once; holds no connection.

    `socket` is where munged listens; None is libmunge's own default. The library is loaded at the first call.
    """

    def __init__(self, socket: Path | None = None) -> None:
        self._socket = socket

    def encode(self, payload: bytes, *, restrict_uid: int | None, ttl_s: int) -> bytes:
        """A credential with `payload`, which only `restrict_uid` (None: any local user) can decode.

        It holds for `ttl_s` whole seconds from now. Raises ValueError over the limits, PeerError where munged
        does not answer, UsageError without libmunge.
        """
        if len(payload) > PAYLOAD_LIMIT:
            raise ValueError(f"a payload of {len(payload)} bytes; the limit is {PAYLOAD_LIMIT}")
        if not 1 <= ttl_s <= MAX_TTL_S:
            raise ValueError(f"a credential holds for 1 to {MAX_TTL_S} s, not {ttl_s}")
        if restrict_uid is not None and not 0 <= restrict_uid <= _MAX_UID:
            raise ValueError(f"{restrict_uid} is no uid")
        with _Context(self._socket) as context:
            context.set(_OPT_CIPHER, ctypes.c_int(_CIPHER_AES128))
            context.set(_OPT_TTL, ctypes.c_int(ttl_s))
            if restrict_uid is not None:
                context.set(_OPT_UID_RESTRICTION, ctypes.c_uint32(restrict_uid))
            return context.encode(payload)

    def decode(self, credential: bytes) -> Decoded:
        """Return the content of a credential; this munged decodes each only once.

        Raises CredentialError where it is refused, PeerError where munged does not answer, UsageError without
        libmunge.
        """
        if len(credential) > CREDENTIAL_LIMIT:
            raise CredentialError(CredentialKind.BOGUS, f"it has {len(credential)} bytes")
        if not _is_form(credential):
            raise CredentialError(CredentialKind.BOGUS, "it does not look like one")
        with _Context(self._socket) as context:
            return context.decode(credential)


def _is_form(credential: bytes) -> bool:
    """Whether it is "MUNGE:", base64 written as an encoder writes it, and ":"."""
    head, body, tail = credential[:6], credential[6:-1], credential[-1:]
    try:
        exact = base64.b64encode(base64.b64decode(body, validate=True)) == body
    except binascii.Error:
        return False
    return exact and head == b"MUNGE:" and tail == b":"


class _Context:
    """One munge_ctx_t: the options of a single call, and what it answers."""

    def __init__(self, socket: Path | None) -> None:
        self._munge, self._free = _library()
        self._where = socket or DEFAULT_SOCKET
        self._context = ctypes.c_void_p(self._munge.munge_ctx_create())
        if not self._context:
            raise MemoryError("munge_ctx_create")
        if socket is not None:
            self.set(_OPT_SOCKET, ctypes.c_char_p(bytes(socket)))

    def __enter__(self) -> "_Context":
        return self

    def __exit__(self, *_: object) -> None:
        self._munge.munge_ctx_destroy(self._context)

    def set(self, option: int, value: object) -> None:
        self._check(self._munge.munge_ctx_set(self._context, ctypes.c_int(option), value))

    def encode(self, payload: bytes) -> bytes:
        out = ctypes.c_void_p()
        try:
            self._check(
                self._munge.munge_encode(
                    ctypes.byref(out), self._context, payload, ctypes.c_int(len(payload))
                )
            )
            return ctypes.string_at(out)
        finally:
            self._free(out)

    def decode(self, credential: bytes) -> Decoded:
        out, nbytes = ctypes.c_void_p(), ctypes.c_int()
        uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
        try:
            # An expired or replayed credential gives a payload too, which is freed like any other.
            self._check(
                self._munge.munge_decode(
                    credential,
                    self._context,
                    ctypes.byref(out),
                    ctypes.byref(nbytes),
                    ctypes.byref(uid),
                    ctypes.byref(gid),
                )
            )
            if nbytes.value > PAYLOAD_LIMIT:
                raise CredentialError(CredentialKind.BOGUS, f"it holds {nbytes.value} bytes")
            payload = ctypes.string_at(out, nbytes.value) if nbytes.value else b""
        finally:
            self._free(out)
        cipher = ctypes.c_int()
        self._check(self._munge.munge_ctx_get(self._context, _OPT_CIPHER, ctypes.byref(cipher)))
        if cipher.value == _CIPHER_NONE:
            raise CredentialError(CredentialKind.BOGUS, "its payload is not encrypted")
        return Decoded(payload=payload, uid=uid.value)

    def _check(self, code: int) -> None:
        if code:
            self._fail(code)

    def _fail(self, code: int) -> NoReturn:
        if code in _KINDS:
            raise CredentialError(_KINDS[code])
        text = self._munge.munge_ctx_strerror(self._context) or self._munge.munge_strerror(code)
        raise PeerError(
            f"munged on {self._where} does not do it ({(text or b'?').decode(errors='replace')}): "
            "see that munge.service runs on this node"
        )


@functools.cache
def _library() -> tuple[ctypes.CDLL, "ctypes._NamedFuncPointer"]:
    """libmunge, and the free(3) that its buffers go back to. Raises UsageError where it is missing."""
    try:
        munge = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise UsageError(f"{LIBRARY} cannot be loaded ({error}): install the munge package") from error
    munge.munge_ctx_create.restype = ctypes.c_void_p
    munge.munge_ctx_destroy.argtypes = [ctypes.c_void_p]
    munge.munge_ctx_destroy.restype = None
    munge.munge_ctx_strerror.argtypes = [ctypes.c_void_p]
    munge.munge_ctx_strerror.restype = ctypes.c_char_p
    munge.munge_strerror.argtypes = [ctypes.c_int]
    munge.munge_strerror.restype = ctypes.c_char_p
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free.restype = None
    return munge, free
