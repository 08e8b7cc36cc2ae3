"""The three prctl(2) calls that tie the agent, its zygote and its ranks together."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

# Bound once, at import: a freshly forked child must not be the first to look up a symbol.
_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl
_prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
_prctl.restype = ctypes.c_int


def _call(option: int, argument: int) -> None:
    if _prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def set_pdeathsig(sig: signal.Signals) -> None:
    """Have the kernel send `sig` to the caller when its parent dies.

    It counts from now on: a parent that died before is not noticed, so compare os.getppid() afterwards.
    "Parent" is the thread that forked the caller or, for an adopted orphan, the adopter's main thread. The
    setting is not inherited by children.
    """
    _call(PR_SET_PDEATHSIG, int(sig))


def set_child_subreaper(on: bool = True) -> None:
    """Make the caller the parent of every orphan below it; it must reap them. Harmless when repeated."""
    _call(PR_SET_CHILD_SUBREAPER, on)


def set_process_name(name: str) -> None:
    """Set what ps and top show for the calling thread; the kernel keeps the first 15 bytes."""
    buffer = ctypes.create_string_buffer(os.fsencode(name))
    _call(PR_SET_NAME, ctypes.addressof(buffer))
