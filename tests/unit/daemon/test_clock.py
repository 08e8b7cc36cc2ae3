"""The daemon's clock goes on evenly, whatever somebody or NTP does to the system's."""

import time

import pytest

from ckptless.daemon.ckptlessd.clock import Clock


@pytest.mark.parametrize("jump_s", [-1e6, -3600.0, 0.5, 3600.0, 1e6])
def test_it_does_not_jump_with_the_system(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    clock, real = Clock(), time.time
    before, began = clock.now(), time.monotonic()
    assert abs(before - real()) < 60.0
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    went, took = clock.now() - before, time.monotonic() - began
    assert 0.0 <= went <= took + 1e-3


def test_the_next_life_begins_with_the_systems_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600.0)
    assert Clock().now() == pytest.approx(real() - 3600.0, abs=60.0)
