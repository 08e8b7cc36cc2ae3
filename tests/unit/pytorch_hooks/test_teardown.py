"""When backends of ended generations are taken down, and by whom."""

from __future__ import annotations

import threading

import pytest

from ckptless.pytorch_hooks.process_groups import groups
from ckptless.pytorch_hooks.process_groups.work import Scope

DEADLINE_S = 10.0


class Backend:
    """Notes which thread takes it down; one that is slow waits for `go`."""

    def __init__(self, go: threading.Event) -> None:
        self.go, self.down, self.by = go, threading.Event(), [""]

    def __del__(self) -> None:
        self.go.wait(DEADLINE_S)
        self.by[0] = threading.current_thread().name
        self.down.set()


@pytest.mark.parametrize("on_device", [True, False])
def test_only_what_may_sleep_is_taken_down_elsewhere(
    monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    monkeypatch.setattr(groups, "_GRACE_S", 0.0)
    go = threading.Event()
    backend = Backend(go)
    by, down = backend.by, backend.down
    teardown = groups.DeferredTeardown()
    teardown.add(Scope(1, lambda _scope, _text: None), backend, on_device=on_device)
    del backend
    if not on_device:
        go.set()
    assert teardown.sweep() == 0
    assert down.is_set() is not on_device
    go.set()
    assert down.wait(DEADLINE_S)
    assert (by[0] == threading.current_thread().name) is not on_device
