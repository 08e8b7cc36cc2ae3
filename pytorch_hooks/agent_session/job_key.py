"""The key that this process's job encrypts with: all its processes have it, and nobody outside of them.

It comes from the agent with the assignment, never by a command line or the environment. Without an agent a
process has one of its own.
"""

import secrets

KEY_NBYTES = 32

_key = b""


def learn(key: bytes) -> None:
    """The agent's; an empty one says that it has none yet."""
    global _key
    _key = key or _key


def get() -> bytes:
    """The key."""
    if not _key:
        learn(secrets.token_bytes(KEY_NBYTES))
    return _key
