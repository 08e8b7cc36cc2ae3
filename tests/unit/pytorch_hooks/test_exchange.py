"""Whose fault it is that a backend does not begin a collective."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptless.pytorch_hooks.errors import CollectiveFailed, GenerationEnded
from ckptless.pytorch_hooks.process_groups import device_backends
from ckptless.pytorch_hooks.process_groups.device_backends import Devices
from ckptless.pytorch_hooks.process_groups.exchange import Exchange, forward
from ckptless.pytorch_hooks.process_groups.work import Scope

# As torch's C10D_NCCL_CHECK words it.
GONE = (
    "NCCL error in: ProcessGroupNCCL.cpp:3780, remote process exited or there was a network error, "
    "NCCL version 2.28.9\nncclRemoteError: A call failed possibly due to a network error."
)
MISUSED = (
    "NCCL error in: NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details)\nncclInvalidUsage"
)


class Backend:
    """A device's, whose every call raises."""

    def __init__(self, error: Exception, before: Callable[[], object] = lambda: None) -> None:
        self._error, self._before = error, before

    def allreduce(self, _tensors: list[torch.Tensor]) -> None:
        self._before()
        raise self._error

    def _end_coalescing(self) -> None:
        self._before()
        raise self._error


class Through(Exchange):
    """To a device that is connected."""

    allreduce: Callable[..., Any]

    def _connect(self, device: torch.device) -> None:
        assert device.type == "meta"

    def end(self) -> None:
        """End a batch."""
        self._end_batch()


forward(Through, Backend)


def attached(backend: Backend, told: list[str]) -> tuple[Through, Scope]:
    scope = Scope(1, lambda _scope, text: told.append(text))
    through = Through()
    devices: Any = Devices(backend, lambda _device, _call: None)  # type: ignore[arg-type]
    through.attach(backend, scope, devices, fake=False)
    return through, scope


CALLS: list[Callable[[Through], object]] = [
    lambda through: through.allreduce([torch.ones(2, device="meta")]),
    Through.end,
]


@pytest.mark.parametrize("call", CALLS, ids=["collective", "batch"])
@pytest.mark.parametrize(
    ("error", "raised", "broken"),
    [
        (dist.DistBackendError(GONE), CollectiveFailed, True),
        (dist.DistBackendError(MISUSED), dist.DistBackendError, False),
        (RuntimeError(GONE), RuntimeError, False),
        (ValueError("a tensor that is not contiguous"), ValueError, False),
    ],
)
def test_a_peer_that_is_gone_is_no_error_of_the_script(
    call: Callable[[Through], object], error: Exception, raised: type[Exception], broken: bool
) -> None:
    told: list[str] = []
    through, scope = attached(Backend(error), told)
    with pytest.raises(raised) as found:
        call(through)
    assert type(found.value) is raised
    assert (scope.broken is not None, bool(told)) == (broken, broken)


@pytest.mark.parametrize("call", CALLS, ids=["collective", "batch"])
def test_the_verdict_may_come_in_the_middle(call: Callable[[Through], object]) -> None:
    through, scope = attached(Backend(dist.DistBackendError(GONE), lambda: scope.end()), [])
    with pytest.raises(GenerationEnded):
        call(through)
    assert scope.broken is None


class Held:
    """A device's, of which a call stays inside until it is let go; it notes what is done in which order."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.done: list[str] = []

    def allreduce(self, _tensors: list[torch.Tensor]) -> None:
        self.entered.set()
        self.go.wait(10)
        self.done.append("call")

    def abort(self) -> None:
        self.done.append("abort")

    def _start_coalescing(self) -> None:
        pass


@pytest.mark.parametrize("stuck", [False, True])
def test_nothing_is_freed_under_a_call(monkeypatch: pytest.MonkeyPatch, stuck: bool) -> None:
    """NCCL's abort frees what a call in another thread works on. One that is stuck costs the process."""
    monkeypatch.setattr(device_backends, "CALL_DEADLINE_S", 0.05 if stuck else 10.0)
    held: Any = Held()
    through, scope = attached(held, [])
    devices: Any = through._devices
    scope.aborts.append(devices.abort)
    calling = threading.Thread(target=CALLS[0], args=(through,))
    calling.start()
    assert held.entered.wait(10)
    scope.end()
    if not stuck:
        assert not scope.wait_aborted(0.1)
        held.go.set()
    assert scope.wait_aborted(10)
    held.go.set()
    calling.join(10)
    assert held.done == (["abort", "call"] if stuck else ["call", "abort"])
    assert ("freed under it" in through.unsound) is stuck
    # Nobody comes in any more, and a batch that was open is known to be.
    devices.begin_batch()
    with pytest.raises(GenerationEnded):
        devices.queue(held.abort)
    with pytest.raises(GenerationEnded):
        devices.end_batch()
    assert "batch" in through.unsound
