"""Backends of ended generations, kept until taking them down cannot freeze the process."""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass
from typing import Any

from ckptless.pytorch_hooks.process_groups.work import Scope

# A Gloo worker needs the GIL once more, for a moment, after the last thing that we see of it.
_GRACE_S = 1.0
_LAST_S = 0.05  # the same at the end of the process, when nobody else wants the GIL


@dataclass
class _Grave:
    since: float
    scope: Scope
    backend: Any


class Graveyard:
    """Gloo's destructor joins its workers while it holds the GIL: a stuck one would stop everything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graves: list[_Grave] = []

    def __len__(self) -> int:
        return len(self._graves)

    def bury(self, scope: Scope, backend: Any) -> None:
        """Keep this backend, or the group that it is in, for now."""
        with self._lock:
            self._graves.append(_Grave(time.monotonic(), scope, backend))

    def sweep(self) -> int:
        """Take down those with no operation left in them; how many stay."""
        with self._lock:
            now = time.monotonic()
            done = [g for g in self._graves if now - g.since >= _GRACE_S and not g.scope.unsettled]
            self._graves = [g for g in self._graves if g not in done]
            stay = len(self._graves)
        del done  # the destructors run here, outside the lock: milliseconds each
        return stay

    def seal(self, seconds: float) -> None:
        """The process ends: wait a little for stuck operations, then make what is left outlive Python."""
        with self._lock:
            graves, self._graves = self._graves, []
        if not graves:
            return
        deadline = time.monotonic() + seconds
        while any(grave.scope.unsettled for grave in graves) and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(_LAST_S)
        for grave in graves:
            if grave.scope.unsettled:
                # One reference too many, on purpose: Python's own clean-up must not join a stuck thread.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(grave.backend))
