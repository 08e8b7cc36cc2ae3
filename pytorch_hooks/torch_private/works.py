"""Works written in Python, as torch sees them: one that is done, and which one is behind one of torch's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from datetime import timedelta

import torch

from ckptless.pytorch_hooks.torch_private import calls

NO_TIMEOUT = timedelta(0)


class _Asked(threading.local):
    """The works that were asked for a future in this thread, while somebody looks."""

    works: list[calls.Work] | None = None


_asked = _Asked()


def behind(work: calls.Work) -> calls.Work | None:
    """The work of ours for which torch has handed out another that passes little on, or None.

    It passes the question for a future on.
    """
    _asked.works = []
    try:
        with contextlib.suppress(RuntimeError):  # Gloo's have none for messages
            work.get_future()
        return _asked.works[0] if _asked.works else None
    finally:
        _asked.works = None


def shows(work: calls.Work) -> None:
    """Say that this work was asked for a future."""
    if _asked.works is not None:
        _asked.works.append(work)


class FinishedWork(calls.Work):
    """A work that was done before anybody asked, with tensors in its future where C++ looks for them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Nothing."""

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def get_future(self) -> torch.futures.Future[object]:
        """A completed future."""
        shows(self)
        devices = {tensor.device for tensor in self._tensors if tensor.device.type != "cpu"}
        # One that knows no device would let a `then` run beside the streams.
        future: torch.futures.Future[object] = torch.futures.Future(devices=[*devices] or None)
        future.set_result(self._tensors)
        return future

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._tensors
