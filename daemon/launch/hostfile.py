"""Pure: a hostfile, `NAME [slots=N] [address=A]` in each line: the hosts of a site without Slurm."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.limits import MOST_NODES

# Also what ssh takes for a name; an option it cannot be.
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252}[A-Za-z0-9_])?")
_ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}|::[0-9a-fA-F:.]{0,43}")
_SLOTS = re.compile(r"[1-9]\d{0,4}", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A line: the name for ssh, ranks on it, and where the other hosts reach it; None: not said."""

    name: str
    slots: int | None = None
    address: str | None = None


def read_hosts(text: str, where: str) -> tuple[Host, ...]:
    """Return the hosts of a file's text. Raises UsageError with `where` and the line."""
    found: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _host(words)
        except ValueError as error:
            raise UsageError(f"{where}, line {number}: {error}") from error
        if host.name in found:
            raise UsageError(f"{where}, line {number}: {host.name} is there twice: name each host once")
        found[host.name] = host
    if not found or len(found) > MOST_NODES:
        raise UsageError(f"{where} has {len(found)} hosts: name from 1 to {MOST_NODES}, each in a line")
    return tuple(found.values())


def _host(words: Sequence[str]) -> Host:
    name, said = words[0], dict[str, str]()
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:60]!r} is no host's name")
    for word in words[1:]:
        key, _, value = word.partition("=")
        good = {"slots": _SLOTS, "address": _ADDRESS}.get(key)
        if good is None or not good.fullmatch(value) or key in said:
            raise ValueError(f"{word[:60]!r} is not understood: give slots=N or address=A, each once")
        said[key] = value
    slots = said.get("slots")
    return Host(name, None if slots is None else int(slots), said.get("address"))


def choose(hosts: Sequence[Host], nodes: int | None, spares: int, where: str) -> tuple[Host, ...]:
    """Return the hosts of a job: the first `nodes` train, the file's last `spares` wait. Raises UsageError.

    Without `nodes`, all that are no spares train.
    """
    wanted = len(hosts) - spares if nodes is None else nodes
    if wanted < 1 or wanted + spares > len(hosts):
        train = max(wanted, 1)
        raise UsageError(
            f"--nodes {train} and --spares {spares} take {train + spares} hosts, and {where} has "
            f"{len(hosts)}: name more, or give smaller numbers"
        )
    return (*hosts[:wanted], *hosts[len(hosts) - spares :])


def slots_of(hosts: Sequence[Host], where: str) -> int | None:
    """Return the ranks on each host, where the file says it. Raises UsageError where hosts differ."""
    found = {host.slots: host for host in hosts}
    if len(found) > 1:
        one, other = list(found.values())[:2]
        said = [f"{host.name} {host.slots or 'none'}" for host in (one, other)]
        raise UsageError(
            f"{where}: slots differ ({', '.join(said)}): give all hosts of a job the same, or none"
        )
    return next(iter(found))
