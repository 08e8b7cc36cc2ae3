"""The units in etc/systemd: systemd finds no fault with them, and they agree with the code's defaults."""

import configparser
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ckptless.daemon.ckptlessd.service import LEDGER_FILE, NOT_AGAIN
from ckptless.daemon.ckptlessd.state_dir import FORMAT_FILE, open_state_dir
from ckptless.daemon.ledger.store import Ledger
from ckptless.daemon.settings.config import LocalConfig, Peer
from ckptless.daemon.settings.options import DaemonSettings
from ckptless.daemon.settings.site import DEFAULT_FILE
from ckptless.daemon.transport.handshake import new_key

ROOT = Path(__file__).parents[3]
UNITS = ROOT / "etc" / "systemd"
# Of 100, as systemd-analyze security counts; slurmd has 96. The kernel's log and the GPUs are 5 of it.
WORST_EXPOSURE = 35


def require(reason: str) -> None:
    """Skip for `reason`; where the whole suite is wanted, fail."""
    if os.environ.get("CKPTLESS_REQUIRE_SLURM") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


UNIT = (UNITS / "ckptlessd.service").read_text()


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string((UNITS / name).read_text())
    return parser


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units where systemd-analyze looks first, with a command that this machine has."""
    for path in UNITS.iterdir():
        text = path.read_text()
        (tmp_path / path.name).write_text(text.replace("/usr/bin/ckptlessd", "/bin/true"))
    return tmp_path


def analyze(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        require("systemd-analyze is not installed (Debian: systemd)")
    return subprocess.run(
        ["systemd-analyze", *arguments],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )


def about_ours(output: str) -> list[str]:
    """Lines about our units: a distribution's own may have faults of theirs."""
    return [line for line in output.splitlines() if "ckptless" in line]


def test_systemd_finds_no_fault(installed: Path) -> None:
    units = [str(path) for path in sorted(installed.iterdir())]
    done = analyze(installed, "verify", "--man=no", *units)
    assert (about_ours(done.stdout), done.returncode) == ([], 0), done.stdout


def test_systemd_would_find_a_fault(installed: Path) -> None:
    service = installed / "ckptlessd.service"
    service.write_text(service.read_text().replace("WatchdogSec=15", "WatchdogSec=often\nColour=blue"))
    done = analyze(installed, "verify", "--man=no", str(service))
    assert any("Colour" in line for line in about_ours(done.stdout)), done.stdout


def test_exposure(installed: Path) -> None:
    service = str(installed / "ckptlessd.service")
    done = analyze(installed, "security", "--offline=yes", f"--threshold={WORST_EXPOSURE}", service)
    assert done.returncode == 0, done.stdout


def test_what_the_daemon_relies_on() -> None:
    service = unit("ckptlessd.service")["Service"]
    assert service["Type"] == "notify"
    assert service["Restart"] == "always"
    assert service["KillMode"] == "process"
    assert float(service["WatchdogSec"]) > 0
    # Its probes: the kernel's log and the GPUs, and whether something holds the clock.
    allowed = [line for line in UNIT.splitlines() if line.startswith("DeviceAllow=")]
    assert allowed == ["DeviceAllow=/dev/kmsg r", "DeviceAllow=char-nvidia* rw"]
    assert "CAP_SYSLOG" in service["CapabilityBoundingSet"].split()
    assert {"adjtimex", "clock_adjtime"} <= set(service["SystemCallFilter"].split())
    hidden = ("PrivateDevices", "ProtectKernelLogs", "ProtectClock")
    assert not {name for name in hidden if name in service}
    # The agents' folder: open to users, and there while the daemon is not.
    assert service["RuntimeDirectoryMode"] == "0755"
    assert service["RuntimeDirectoryPreserve"] == "yes"


def test_it_comes_back_for_ever_but_where_that_is_no_use() -> None:
    whole = unit("ckptlessd.service")
    service, limits = whole["Service"], whole["Unit"]
    assert service["Restart"] == "always"
    assert service["RestartPreventExitStatus"] == str(NOT_AGAIN)
    # What Restart= does alone never reaches the limit.
    assert float(service["RestartSec"]) * int(limits["StartLimitBurst"]) >= float(
        limits["StartLimitIntervalSec"]
    )


def spoil_newer(state: Path) -> None:
    open_state_dir(state)
    Ledger.open(state / LEDGER_FILE).close()
    file = sqlite3.connect(state / LEDGER_FILE)
    file.execute("PRAGMA user_version = 99")
    file.close()


def spoil_format(state: Path) -> None:
    open_state_dir(state)
    (state / FORMAT_FILE).write_text("99\n")


def spoil_mode(state: Path) -> None:
    open_state_dir(state)
    state.chmod(0o777)


def spoil_not_ours(state: Path) -> None:
    state.mkdir()
    (state / "photo.jpg").touch()


@pytest.mark.parametrize("spoil", [spoil_newer, spoil_format, spoil_mode, spoil_not_ours])
def test_what_no_restart_mends_ends_the_daemon_once_with_one_sentence(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    state, key = tmp_path / "state", tmp_path / "key"
    spoil(state)
    before = sorted(path.name for path in state.iterdir())
    key.write_bytes(new_key())
    key.chmod(0o600)
    config = LocalConfig(
        node=0,
        state_dir=str(state),
        socket=str(tmp_path / "socket"),
        key_file=str(key),
        peers=(Peer(node=0, name="n0", address="127.0.0.1", port=0),),
    )
    (tmp_path / "daemon.json").write_bytes(msgspec.json.encode(config))
    command = [
        sys.executable,
        "-m",
        "ckptless.daemon.ckptlessd.main",
        "--local",
        str(tmp_path / "daemon.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == NOT_AGAIN, done.stderr
    (line,) = done.stderr.splitlines()
    assert str(state) in line
    assert line.endswith("; then start ckptlessd again")
    assert sorted(path.name for path in state.iterdir()) == before


def test_paths_are_the_defaults_of_the_settings() -> None:
    service, socket = unit("ckptlessd.service")["Service"], unit("ckptlessd.socket")["Socket"]
    defaults = DaemonSettings()
    assert socket["ListenStream"] == defaults.socket
    assert f"/run/{service['RuntimeDirectory']}" == str(Path(defaults.socket).parent)
    assert f"/var/lib/{service['StateDirectory']}" == defaults.state_dir
    assert f"/etc/{service['ConfigurationDirectory']}" == str(DEFAULT_FILE.parent)
    assert service["ExecStart"] == "/usr/bin/ckptlessd"  # which reads DEFAULT_FILE unasked


def test_the_manual_pages_they_name_are_there() -> None:
    for name in ("ckptlessd.service", "ckptlessd.socket"):
        for page in unit(name)["Unit"]["Documentation"].split():
            title, section = page.removeprefix("man:").rstrip(")").split("(")
            assert (ROOT / "docs" / "man" / f"{title}.{section}").exists(), page
