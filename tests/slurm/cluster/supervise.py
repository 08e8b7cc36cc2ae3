"""Which services of a machine run: the decisions of a small init system. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .plan import ClusterError, Service

RESTART_PAUSE_S = 0.2


@dataclass
class Unit:
    """One service and what has become of it; `started_s` is the wall-clock time of its last start."""

    service: Service
    pid: int | None = None
    wanted: bool = True
    starts: int = 0
    started_s: float = 0.0
    last_exit: int | None = None
    restart_at_s: float | None = None


Spawn = Callable[[Service, tuple[str, ...]], int]


class Supervisor:
    """Starts services in order, and again when they end.

    `spawn` starts a command for a service and gives its pid; `wall_clock` is what starts are dated by.
    """

    def __init__(self, services: Iterable[Service], spawn: Spawn, wall_clock: Callable[[], float]) -> None:
        self.units = {service.name: Unit(service) for service in services}
        self._spawn = spawn
        self._wall_clock = wall_clock

    def start(self, name: str) -> int:
        """Start it unless it runs; its pid."""
        unit = self._unit(name)
        unit.wanted = True
        if unit.pid is None:
            self._run(unit)
        assert unit.pid is not None
        return unit.pid

    def stopping(self, name: str) -> int | None:
        """It is to be ended on purpose and stays down: the pid to signal, None if it is down already."""
        unit = self._unit(name)
        unit.wanted = False
        unit.restart_at_s = None
        return unit.pid

    def pid(self, name: str) -> int | None:
        """Its pid while it runs."""
        return self._unit(name).pid

    def ended(self, pid: int, exit_code: int, now_s: float) -> Unit | None:
        """A child has ended; the unit that it was, or None for an orphan of another."""
        for unit in self.units.values():
            if unit.pid == pid:
                unit.pid = None
                unit.last_exit = exit_code
                if unit.wanted and unit.service.restart:
                    unit.restart_at_s = now_s + RESTART_PAUSE_S
                return unit
        return None

    def run_due(self, now_s: float) -> float | None:
        """Start what is to be started again by now; seconds until the next one, None where there is none."""
        for unit in self.units.values():
            if unit.restart_at_s is not None and unit.restart_at_s <= now_s:
                self._run(unit)
        waits = [unit.restart_at_s - now_s for unit in self.units.values() if unit.restart_at_s is not None]
        return min(waits, default=None)

    def _run(self, unit: Unit) -> None:
        options = () if unit.starts else unit.service.boot_options
        unit.restart_at_s = None
        unit.started_s = self._wall_clock()
        unit.pid = self._spawn(unit.service, unit.service.argv + options)
        unit.starts += 1

    def _unit(self, name: str) -> Unit:
        unit = self.units.get(name)
        if unit is None:
            raise ClusterError(f"no service {name!r} here: there are {', '.join(self.units)}")
        return unit
