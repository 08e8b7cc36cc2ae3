"""The packages on a clean Debian with its Slurm: installed, upgraded, removed, purged; also under a job."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptless import __version__

from . import chroot, packaged
from .cluster.api import Cluster
from .cluster.plan import Plan, Service
from .conftest import require_slurm
from .packaged import LINE, YAML, dpkg, rpm
from .training import YAML as SETTINGS
from .training import Training

STEPS, LONG_S = 1500, 240.0
NEXT = f"{__version__}.1"
NAMES = ("ckptless", "ckptless-slurm", "ckptless-slurm-job-submit")
# The nodes of the job but for the one that is lost.
LIVING = ("node01", "node03", "node04", "node05")
PLUGIN = "usr/lib/*/slurm-wlm/ckptless_spank.so"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Debian:
    """A clean system with Slurm, and the packages that are made for it, of this version and of the next."""

    clean: Path
    now: list[Path]
    later: list[Path]


@pytest.fixture(scope="module", params=sorted(chroot.SUITES, reverse=True))
def debian(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Debian:
    require_slurm()
    if shutil.which("debootstrap", path="/usr/sbin:/usr/bin") is None:
        pytest.skip("debootstrap is not installed")
    clean = chroot.make(chroot.SUITES[request.param], packaged.ROOT / ".roots")
    work = tmp_path_factory.mktemp("packages")
    sources = packaged.version(packaged.ROOT, work / "sources", NEXT)
    return Debian(clean, packaged.build(clean, work / "now"), packaged.build(clean, work / "later", sources))


@pytest.fixture
def root(debian: Debian) -> Iterator[Path]:
    """A copy of the clean system; not in pytest's folder, which keeps some."""
    with tempfile.TemporaryDirectory(prefix="ckptless-root-") as folder:
        Path(folder).chmod(0o755)
        yield packaged.copy(debian.clean, Path(folder) / "root")


def says(root: Path, command: str) -> str:
    done = subprocess.run(
        ["chroot", root, command, "--version"],
        env={"PATH": "/usr/sbin:/usr/bin", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=False,
    )
    return (done.stdout + done.stderr).strip()


def left_of(root: Path) -> list[str]:
    """All that has our name, but for what dpkg keeps of packages."""
    places = [root / name for name in ("etc", "usr", "var/lib", "var/cache", "run")]
    found = [p for place in places for p in place.rglob("*ckptless*") if "var/lib/dpkg" not in str(p)]
    return sorted(str(path.relative_to(root)) for path in found)


# --- the system alone


def test_install_upgrade_remove_install_and_purge(debian: Debian, root: Path) -> None:
    before = left_of(root)
    # Debian's plugstack.conf includes plugstack.conf.d.
    assert "plugstack.conf" not in dpkg(root, "-i", *debian.now)
    assert says(root, "ckptlessd") == f"ckptlessd {__version__}"
    assert says(root, "ckptctl") == f"ckptctl {__version__}"
    assert not list((root / "etc/systemd").rglob("*ckptless*"))
    yaml, line, aside = root / YAML[1:], root / LINE[1:], root / f"{LINE[1:]}.removed"
    yaml.write_text(yaml.read_text() + "# mine\n")
    line.write_text(line.read_text().rstrip() + " elastic=no\n")
    edited = yaml.read_text(), line.read_text()
    ledger = root / "var/lib/ckptless/ledger.db"
    ledger.parent.mkdir()
    ledger.touch()

    dpkg(root, "-i", *debian.later)
    assert says(root, "ckptlessd") == f"ckptlessd {NEXT}"
    assert (yaml.read_text(), line.read_text()) == edited

    dpkg(root, "-r", *NAMES)
    assert not (root / "usr/lib/ckptless").exists()
    assert not list(root.glob(PLUGIN))
    assert not line.exists()
    assert (yaml.read_text(), aside.read_text()) == edited
    assert ledger.exists()

    dpkg(root, "-i", *debian.later)
    assert (yaml.read_text(), line.read_text()) == edited
    assert not aside.exists()

    dpkg(root, "-P", *NAMES)
    assert left_of(root) == before


def test_an_rpm_there_does_the_same(debian: Debian, root: Path, tmp_path: Path) -> None:
    """With the scripts of rpm, whatever that system has otherwise."""
    if shutil.which("rpmbuild") is None:
        pytest.skip("rpmbuild is not installed (Debian: rpm)")
    before = left_of(root)
    rpm(root, "-i", *packaged.build(debian.clean, tmp_path / "now", kind="rpm"))
    assert says(root, "ckptlessd") == f"ckptlessd {__version__}"
    yaml, line = root / YAML[1:], root / LINE[1:]
    for file in (yaml, line):
        file.write_text("# mine\n")
    sources = packaged.version(packaged.ROOT, tmp_path / "sources", NEXT)
    rpm(root, "-U", *packaged.build(debian.clean, tmp_path / "later", sources, "rpm"))
    assert says(root, "ckptctl") == f"ckptctl {NEXT}"
    assert yaml.read_text() == line.read_text() == "# mine\n"
    rpm(root, "-e", *NAMES)
    saved = [f"{path[1:]}.rpmsave" for path in (YAML, LINE)]
    assert left_of(root) == sorted([*before, "etc/ckptless", *saved])


# --- under a job


@pytest.fixture
def site(debian: Debian, root: Path, tmp_path: Path) -> Iterator[Cluster]:
    """Five nodes of it, with daemon and plugins from where the packages have put them."""
    dpkg(root, "-i", *debian.now)
    # Whoever administers it has changed something: an upgrade keeps it.
    (root / YAML[1:]).write_text(SETTINGS)
    files = {path: (root / path[1:]).read_text() for path in (YAML, LINE)}
    daemon = Service(name="ckptlessd", argv=("/usr/bin/ckptlessd", "--verbose"))
    conf = {"PrologFlags": "Alloc", "JobSubmitPlugins": "ckptless"}
    plan = Plan(nodes=5, services=(daemon,), conf=conf, rootfs=str(root))
    with Cluster(tmp_path / "cluster", plan, ckptless=True, files=files) as up:
        yield up


def test_upgraded_and_removed_while_a_job_runs(debian: Debian, root: Path, site: Cluster) -> None:
    job = Training(site, steps=STEPS).submit()
    job.trains()
    command = ("/usr/bin/ckptctl", "--version")
    assert site.run("node01", *command).stdout.split()[1] == __version__

    dpkg(root, "-i", *debian.later, etc=site.etc)
    assert site.run("node01", *command).stdout.split()[1] == NEXT
    assert (site.etc / "ckptless/ckptless.yaml").read_text() == SETTINGS
    job.trains()  # with the daemons of before, whose files are others now
    for node in site.plan.node_names:
        # What the script does where systemd is.
        site.service_stop(node, "ckptlessd")
        site.service_start(node, "ckptlessd")
        job.trains()
    assert job.newest(2) == 0, job.story()

    site.power_off("node02")  # the new daemons know the job
    job.trains(2)
    # Slurm has taken it out of the job: its step would wait for it.
    marked = lambda: any(e.text == "mark down node02" for e in job.ledger().events)  # noqa: E731
    job.wait(marked, "node02 is marked down")

    remove(root, site)
    plain = site.run("ctl", "srun", "--overlap", "-N1", "-w", "node01", "hostname", user=job.user)
    assert (plain.stdout, plain.stderr) == ("node01\n", "")
    job.hurry()
    job.wait(lambda: job.newest(2) >= job.steps, "the last step", LONG_S)
    assert job.outcome() is None  # that it is over is the daemons' word, which it waits for

    dpkg(root, "-i", *debian.later, etc=site.etc)
    assert (site.etc / "ckptless/ckptless.yaml").read_text() == SETTINGS
    for node in LIVING:
        site.service_start(node, "ckptlessd")
    job.ended()
    job.same_bits()

    remove(root, site)
    words = ("sbatch", "--ckptless", "--wrap", "true")
    refused = site.run("ctl", *words, user=job.user, cwd="/shared", check=False)
    assert refused.stderr.startswith("sbatch: unrecognized option '--ckptless'\n")


def remove(root: Path, site: Cluster) -> None:
    """Daemon and plugin, with what their scripts do where systemd is."""
    for node in LIVING:
        site.service_stop(node, "ckptlessd")
    dpkg(root, "-r", "ckptless", "ckptless-slurm", etc=site.etc)
    assert not (site.etc / "slurm/plugstack.conf.d/ckptless.conf").exists()
