"""The probe of network links: InfiniBand and RoCE ports, and Ethernet, by what sysfs has of them."""

import errno
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckptless.daemon.ckptlessd.health.probe import Finding, Probe

# Counters of a port that grow with errors of its cable or its partner, see Documentation/ABI/stable/
# sysfs-class-infiniband. Those of receivers that are too slow are no fault of a link.
_ERRORS = ("symbol_error", "link_error_recovery", "local_link_integrity_errors", "port_rcv_errors")
# They grow a little at good links, too: a bit error rate of 1e-12 is one error in 2.5 s at 400 Gb/s, which
# forward error correction hides; so many in a look are not hidden.
MOST_ERRORS = 100


@dataclass
class _Port:
    """What one port was like: whether it was ever up, its best rate, and its counters in the last look."""

    was_up: bool = False
    rate: float = 0.0
    downs: int | None = None
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What one port is like. `rate` is in Gb/s, 0 where it is not known; `downs` counts since the boot."""

    where: str
    up: bool
    state: str
    rate: float
    downs: int | None
    errors: dict[str, int]


class LinkProbe(Probe):
    """Compares each port with what it was: one that was never up is not used, and no finding."""

    interval_s = 15.0
    deadline_s = 10.0

    def __init__(self, sys: Path = Path("/sys")) -> None:
        self._sys = sys
        self._ports: dict[str, _Port] = {}

    def missing(self) -> str:
        """See `probe.Probe`."""
        return "" if any(self._seen()) else "there is no network port but virtual ones"

    def look(self) -> list[Finding]:
        """See `probe.Probe`. Raises OSError."""
        found: list[Finding] = []
        seen = {one.where: one for one in self._seen()}
        for where, one in seen.items():
            found += _compared(self._ports.setdefault(where, _Port()), one)
        found += [
            Finding(code="link-down", where=where, evidence="the port is not there any more")
            for where, port in self._ports.items()
            if port.was_up and where not in seen
        ]
        return found

    def _seen(self) -> Iterator[_Seen]:
        for port in sorted((self._sys / "class/infiniband").glob("*/ports/*")):
            state = _text(port / "state")  # `4: ACTIVE`
            yield _Seen(
                where=f"{port.parents[1].name} port {port.name}",
                up=state.startswith("4:"),
                state=f"{state}, {_text(port / 'phys_state')}",
                rate=float(_text(port / "rate").partition(" ")[0] or 0),  # `400 Gb/sec (4X NDR)`
                downs=_number(port / "counters/link_downed"),
                errors={name: _number(port / "counters" / name) or 0 for name in _ERRORS},
            )
        for link in sorted((self._sys / "class/net").glob("*")):
            if not (link / "device").exists():
                continue  # lo, bridges, tunnels
            if (link / "device/subsystem").resolve().name == "usb":
                continue  # the BMC's, no job's
            state = _text(link / "operstate")
            yield _Seen(
                where=link.name,
                up=state == "up",
                state=state,
                rate=max(_number(link / "speed") or 0, 0) / 1000,
                downs=_number(link / "carrier_down_count"),
                errors={"rx_crc_errors": _number(link / "statistics/rx_crc_errors") or 0},
            )


def _compared(port: _Port, now: _Seen) -> Iterator[Finding]:
    """Yield what is worse than it was, and note what is."""
    if port.was_up and not now.up:
        yield Finding(code="link-down", where=now.where, evidence=f"its state is {now.state}")
    if now.up and 0 < now.rate < port.rate:
        words = f"{now.rate:g} Gb/s, and was {port.rate:g} Gb/s"
        yield Finding(code="link-slow", where=now.where, evidence=words)
    if port.downs is not None and now.downs is not None and now.downs > port.downs:
        words = f"down {now.downs} times since the boot, {now.downs - port.downs} since the last look"
        yield Finding(code="link-flap", where=now.where, evidence=words)
    grown = {name: count - port.errors.get(name, count) for name, count in now.errors.items()}
    if words := ", ".join(f"{name} +{by}" for name, by in grown.items() if by > MOST_ERRORS):
        yield Finding(code="link-errors", where=now.where, evidence=words)
    port.was_up, port.rate = port.was_up or now.up, max(port.rate, now.rate if now.up else 0.0)
    port.downs, port.errors = now.downs, now.errors


def _text(path: Path) -> str:
    """Return what a file of sysfs says; "" where this kind of port has none. Raises OSError."""
    try:
        return path.read_text().strip()
    except OSError as error:
        # A link that is down has no speed: EINVAL.
        if error.errno in (errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP):
            return ""
        raise


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.removeprefix("-").isdecimal() else None
