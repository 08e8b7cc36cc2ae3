"""The units in etc/systemd: systemd finds no fault with them, and they agree with the code's defaults."""

import configparser
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ckptless.daemon.settings import DEFAULT_FILE, DaemonSettings

ROOT = Path(__file__).parents[3]
UNITS = ROOT / "etc" / "systemd"
WORST_EXPOSURE = 30  # of 100, as systemd-analyze security counts; slurmd has 96


def require(reason: str) -> None:
    """Skip for `reason`; where the whole suite is wanted, fail."""
    if os.environ.get("CKPTLESS_REQUIRE_SLURM") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


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
    # The agents' folder: open to users, and there while the daemon is not.
    assert service["RuntimeDirectoryMode"] == "0755"
    assert service["RuntimeDirectoryPreserve"] == "yes"


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
