"""Which probes look: those that come along, the site's, and those of installed packages."""

import asyncio
from collections.abc import Sequence
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from ckptless.daemon.ckptlessd.health import probes as module
from ckptless.daemon.ckptlessd.health.answers import ProbeError
from ckptless.daemon.ckptlessd.health.commands import CommandProbe, MountProbe
from ckptless.daemon.ckptlessd.health.host import DiskProbe
from ckptless.daemon.ckptlessd.health.installed import InstalledProbe
from ckptless.daemon.ckptlessd.health.installed_main import GROUP
from ckptless.daemon.ckptlessd.health.probe import Finding, Probe
from ckptless.daemon.ckptlessd.health.probes import probes
from ckptless.daemon.settings.options import HealthSettings
from ckptless.daemon.slurm.adapter import Node

ALONG = ["kernel-log", "disk", "host", "shared-memory", "link", "nvml", "slurm"]


class Good:
    interval_s = deadline_s = 5.0

    def missing(self) -> str:
        return ""

    def look(self) -> Sequence[Finding]:
        return [Finding(code="my-own")]

    def close(self) -> None:
        pass


class Nothing(Good):
    interval_s = 0.0


class Negative(Good):
    deadline_s = -1.0


class NotANumber(Good):
    deadline_s = float("nan")


class Words(Good):
    deadline_s = "soon"  # type: ignore[assignment]


class NoTimes:
    pass


def factory() -> Probe:
    return Good()


def failing() -> Probe:
    raise OSError(5, "Input/output error")


def ending() -> Probe:
    raise SystemExit("usage: my-check")


NO_PROBE = 7


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    # For the processes that they are loaded in.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    entries: list[EntryPoint] = []

    def entry_points(*, group: str) -> EntryPoints:
        assert group == "ckptless.health" == GROUP
        return EntryPoints(entries)

    monkeypatch.setattr(module, "entry_points", entry_points)
    return entries


def entry(name: str, what: str = "Good") -> EntryPoint:
    return EntryPoint(name, what if ":" in what else f"{__name__}:{what}", GROUP)


def found(**settings: Any) -> dict[str, Probe]:
    async def ask_slurm() -> Node:
        raise AssertionError("nobody looks")

    async def make() -> dict[str, Probe]:
        return probes(HealthSettings(**settings), "/var/lib/ckptless", lambda: False, ask_slurm)

    return asyncio.run(make())


def test_those_that_come_along() -> None:
    made = found()
    assert list(made) == ALONG
    assert all(probe.interval_s > 0 and probe.deadline_s > 0 for probe in made.values())


def test_what_needs_room(tmp_path: Any) -> None:
    disk = found(disks=("/local", "/tmp"))["disk"]
    assert isinstance(disk, DiskProbe)
    assert [str(path) for path in disk._paths] == ["/", "/tmp", "/var", "/var/lib/ckptless", "/local"]


def test_commands_and_mounts() -> None:
    made = found(commands={"nhc": "/usr/sbin/nhc -a 'b c'"}, mounts=("/home",))
    assert list(made) == [*ALONG, "mount", "command-nhc"]
    command, mount = made["command-nhc"], made["mount"]
    assert isinstance(command, CommandProbe)
    assert command._argv == ("/usr/sbin/nhc", "-a", "b c")
    assert isinstance(mount, MountProbe)
    assert mount._places == ("/home",)


def test_what_is_off(installed: list[EntryPoint]) -> None:
    installed += [entry("site"), entry("broken", "failing")]
    made = found(
        without=("nvml", "link", "mount", "command-nhc", "broken", "unknown"),
        mounts=("/home",),
        commands={"nhc": "/bin/true", "other": "/bin/true"},
    )
    assert list(made) == ["kernel-log", "disk", "host", "shared-memory", "slurm", "command-other", "site"]
    assert list(found()) == [*ALONG, "site", "broken"]


@pytest.mark.parametrize("what", ["Good", "factory"])
def test_an_installed_one(installed: list[EntryPoint], what: str) -> None:
    installed.append(entry("site-2", what))
    assert list(found()) == [*ALONG, "site-2"]
    probe = found()["site-2"]
    assert isinstance(probe, InstalledProbe)
    assert probe.missing() == ""
    assert probe.look() == [Finding(code="my-own")]
    probe.close()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("failing", "it cannot be loaded: OSError: [Errno 5] Input/output error"),
        ("ending", "it cannot be loaded: SystemExit: usage: my-check"),
        ("nowhere", "it cannot be loaded: AttributeError: module '"),
        ("no_such_module:x", "it cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("NO_PROBE", "it cannot be loaded: TypeError: 'int' object is not callable"),
        ("NoTimes", "it cannot be loaded: AttributeError: 'NoTimes' object has no attribute 'interval_s'"),
        ("Words", "it cannot be loaded: TypeError: '<' not supported between instances of 'int' and 'str'"),
        ("Nothing", "its interval_s and deadline_s must be more than 0"),
        ("Negative", "its interval_s and deadline_s must be more than 0"),
        ("NotANumber", "its interval_s and deadline_s must be more than 0"),
    ],
)
def test_an_installed_one_that_cannot_be_had_says_why(
    installed: list[EntryPoint], what: str, words: str
) -> None:
    installed += [entry("site", what), entry("other")]
    made = found()
    assert list(made) == [*ALONG, "site", "other"]
    site = made["site"]
    assert site.missing().startswith(words)
    assert site.interval_s > 0
    assert site.deadline_s > 0
    with pytest.raises(ProbeError, match="it"):
        site.look()
    site.close()


@pytest.mark.parametrize("name", ["Site", "a_b", "-a", "a b", "a\nb", "\u00e4", "x" * 33, "x" * 5000])
def test_a_bad_name_is_said(installed: list[EntryPoint], name: str) -> None:
    installed.append(entry(name))
    [shown] = [one for one in found() if one not in ALONG]
    assert shown.isprintable()
    assert len(shown) <= 64
    words = "its name must be of small letters, digits and hyphens, 32 at most"
    assert found()[shown].missing() == words


@pytest.mark.parametrize("name", ["a", "0", "x" * 32, "site-gpu-2"])
def test_a_good_name(installed: list[EntryPoint], name: str) -> None:
    installed.append(entry(name))
    probe = found()[name]
    assert probe.missing() == ""
    probe.close()


def test_none_takes_the_place_of_another(
    installed: list[EntryPoint], caplog: pytest.LogCaptureFixture
) -> None:
    installed += [entry("disk"), entry("site"), entry("site", "failing")]
    made = found()
    assert list(made) == [*ALONG, "site"]
    assert isinstance(made["disk"], DiskProbe)
    assert made["site"].missing() == ""
    made["site"].close()
    assert [one.getMessage() for one in caplog.records] == [
        f"health: {name}, of {__name__}:{what}, does not look: there is a probe of its name"
        for name, what in (("disk", "Good"), ("site", "failing"))
    ]
