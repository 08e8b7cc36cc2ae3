"""What `make dist` makes: one version, what is in which package, what lintian says, what scripts do."""

import email.parser
import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import pytest

from ckptless import __version__
from ckptless.daemon.protocol.codec import PROTOCOL
from tests.reading import Reading, commands
from tests.unit.spank.native import REPOSITORY

NAMES = ("ckptless", "ckptless-slurm", "ckptless-slurm-job-submit")
COMMANDS = ("ckptless", "ckptless-run", "ckptless-doctor", "ckptctl", "ckptlessd")
YAML, LINE = "etc/ckptless/ckptless.yaml", "etc/slurm/plugstack.conf.d/ckptless.conf"
MODULES = "usr/lib/ckptless/lib/"
PAGES = sorted(f"usr/share/man/man{p.suffix[1]}/{p.name}.gz" for p in (REPOSITORY / "docs/man").iterdir())
SPANK_PAGE = "usr/share/man/man8/spank_ckptless.8.gz"
# But for the modules, the plugins and each format's own documents.
CONTENT = {
    "ckptless": [
        YAML,
        *(f"usr/bin/{name}" for name in ("ckptctl", "ckptlessd")),
        *(f"usr/lib/ckptless/bin/{name}" for name in ("ckptctl", "ckptlessd", "python3")),
        "usr/lib/ckptless/pyvenv.cfg",
        *(f"usr/lib/systemd/system/ckptlessd.{kind}" for kind in ("service", "socket")),
        *(f"usr/share/bash-completion/completions/{name}" for name in ("ckptctl", "ckptless-run")),
        *(page for page in PAGES if page != SPANK_PAGE),
    ],
    "ckptless-slurm": [LINE, "usr/libexec/ckptless/ckptless-notify", SPANK_PAGE],
    "ckptless-slurm-job-submit": [],
}
PLUGINS = {
    "ckptless-slurm": ["ckptless_spank.so"],
    "ckptless-slurm-job-submit": ["job_submit_ckptless.so"],
}
OWN = re.compile(r"usr/share/(doc|lintian|licenses)/")


def run(*argv: str | Path) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def say(folder: Path, command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Type a command there."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def deb(dist: Path, name: str) -> Path:
    (found,) = dist.glob(f"{name}_*.deb")
    return found


def rpm(dist: Path, name: str) -> Path:
    (found,) = dist.glob(f"{name}-[0-9]*.rpm")
    return found


def unpacked(dist: Path, name: str, into: Path) -> Path:
    """A .deb's files, and its control files in DEBIAN."""
    run("dpkg-deb", "--raw-extract", deb(dist, name), into)
    return into


def slurm_version() -> str:
    told = run("make", "-s", "-C", REPOSITORY / "slurm_ext/spank", "slurm-version")
    number = int(told.strip(), 16)
    return f"{number >> 16}.{number >> 8 & 0xFF:02}"


# --- one version


def test_one_version_of_all(dist: Path) -> None:
    plugins = f"{__version__}+slurm{slurm_version()}"
    said = {}
    for name in NAMES:
        said[f"{name}.deb"] = run("dpkg-deb", "-f", deb(dist, name), "Version").strip()
        said[f"{name}.rpm"] = run("rpm", "-qp", "--qf", "%{VERSION}", rpm(dist, name))
    assert said == {
        f"{name}.{kind}": plugins if "slurm" in name else __version__
        for name in NAMES
        for kind in ("deb", "rpm")
    }
    assert (dist / f"ckptless-{__version__}-py3-none-any.whl").exists()
    assert (dist / f"ckptless-{__version__}.tar.gz").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_says_it(name: str, bin_folder: Path) -> None:
    assert run(bin_folder / name, "--version").split()[-1] == __version__


def test_it_stands_in_one_place() -> None:
    """Nothing else has to be changed for a release, but the changelog."""
    pattern = rf"(?<![\d.]){re.escape(__version__)}(?![\d.])"
    listed = run("git", "-C", REPOSITORY, "grep", "-lP", pattern, "--", ":!CHANGELOG.md", ":!docs/*.md")
    assert listed.split() == ["src/ckptless/__init__.py"]


def test_the_page_says_which_protocol_this_one_speaks() -> None:
    page = (REPOSITORY / "docs/packages.md").read_text()
    assert f"**Versions fit that speak the same protocol**: it is {PROTOCOL} in this one" in page


# --- contents


def assert_content(name: str, found: list[str], plugindir: str) -> None:
    modules = [path for path in found if path.startswith(MODULES)]
    assert bool(modules) == (name == "ckptless")
    rest = sorted(path for path in found if path not in modules and not OWN.match(path))
    assert rest == sorted([*CONTENT[name], *(f"{plugindir}/{so}" for so in PLUGINS.get(name, ()))])
    assert not [path for path in found if path.endswith(".pyc")]


@pytest.mark.parametrize("name", NAMES)
def test_content_of_a_deb(dist: Path, tmp_path: Path, name: str) -> None:
    root = unpacked(dist, name, tmp_path / "root")
    found = [str(p.relative_to(root)) for p in root.rglob("*") if p.is_symlink() or p.is_file()]
    (plugindir,) = {str(p.parent.relative_to(root)) for p in root.rglob("*/slurm*/*.so")} or {""}
    assert_content(name, [path for path in found if not path.startswith("DEBIAN/")], plugindir)
    assert (root / "usr/share/doc" / name / "copyright").exists()
    config = (root / "DEBIAN/conffiles").read_text().split() if (root / "DEBIAN/conffiles").exists() else []
    assert config == [f"/{path}" for path in (YAML, LINE) if path in CONTENT[name]]


@pytest.mark.parametrize("name", NAMES)
def test_content_of_an_rpm(dist: Path, name: str) -> None:
    listed = run("rpm", "-qp", "--qf", "[%{FILEMODES:perms} %{FILENAMES}\n]", rpm(dist, name))
    found = [line.split(maxsplit=1) for line in listed.splitlines()]
    assert_content(name, [path[1:] for mode, path in found if mode[0] != "d"], "usr/lib64/slurm")
    config = run("rpm", "-qpc", rpm(dist, name)).split()
    assert config == [f"/{path}" for path in (YAML, LINE) if path in CONTENT[name]]


def test_the_plugins_line_names_the_plugin_that_lies_there(dist: Path, tmp_path: Path) -> None:
    root = unpacked(dist, "ckptless-slurm", tmp_path / "root")
    kind, path = (root / LINE).read_text().split()
    assert kind == "optional"
    assert (root / path.lstrip("/")).is_file()


def test_what_pip_carries(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    share = f"ckptless-{__version__}.data/data/share/"
    found = [name.removeprefix(share) for name in zipfile.ZipFile(wheel).namelist() if name.startswith(share)]
    pages = [page.removeprefix("usr/share/").removesuffix(".gz") for page in PAGES if page != SPANK_PAGE]
    shells = [f"bash-completion/completions/{name}" for name in ("ckptctl", "ckptless-run")]
    units = [f"ckptless/systemd/ckptlessd.{kind}" for kind in ("service", "socket")]
    assert sorted(found) == sorted(["ckptless/ckptless.yaml", *pages, *shells, *units])


def test_the_source_archive_has_what_is_compiled(dist: Path) -> None:
    """`make install` and `make dist` work in it."""
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        found = {name.partition("/")[2] for name in file.getnames()}
    tracked = run("git", "-C", REPOSITORY, "ls-files", "slurm_ext", "etc", "docs/man", "Makefile").split()
    assert not set(tracked) - found


def test_checksums(dist: Path) -> None:
    with Reading("docs/packages.md") as page:
        done = page.types(2, partial(say, dist))
    assert len(done.stdout.splitlines()) == len(list(dist.iterdir())) - 1 == 2 + 2 * len(NAMES)


def test_checksums_that_are_signed(dist: Path, tmp_path: Path) -> None:
    """With a key that the tests have made; and one package is then another."""
    if shutil.which("gpg") is None:
        pytest.skip("gpg is not installed (Debian: gpg, gpg-agent)")
    home, there = tmp_path / "keys", tmp_path / "dist"
    home.mkdir(mode=0o700)
    shutil.copytree(dist, there)
    gpg = partial(say, there, GNUPGHOME=str(home))
    made = gpg("gpg --batch --passphrase '' --quick-generate-key tests@example.org")
    assert made.returncode == 0, made.stderr
    try:
        with Reading("docs/packages.md") as page:
            page.types(3, gpg)
            (there / deb(there, NAMES[0]).name).write_bytes(b"another")
            _, (verify, _) = commands(page.block(3))
            assert gpg(verify).returncode == 1
    finally:
        gpg("gpgconf --kill all")


# --- what lintian says, and scripts


def test_lintian_finds_nothing_that_is_not_listed(dist: Path) -> None:
    options = ["--allow-root", "--no-cfg", "--fail-on", "error,warning"]
    assert run("lintian", *options, *(deb(dist, name) for name in NAMES)) == ""


def test_the_commands_are_for_the_python_that_is_needed(dist: Path, tmp_path: Path) -> None:
    root = unpacked(dist, "ckptless", tmp_path / "root")
    python = (root / "usr/lib/ckptless/bin/python3").readlink()
    assert re.fullmatch(r"\.\./\.\./\.\./bin/python3\.\d+", str(python))
    control = email.parser.Parser().parsestr((root / "DEBIAN/control").read_text())
    assert {python.name, "munge"} <= set(control["Depends"].split(", "))
    assert f"/usr/bin/{python.name}\n" in run("rpm", "-qpR", rpm(dist, "ckptless"))
    assert [path.name for path in (root / MODULES).iterdir()] == [python.name]


@pytest.mark.parametrize("name", NAMES)
def test_no_script_enables_or_starts_anything(dist: Path, tmp_path: Path, name: str) -> None:
    """An upgrade restarts a daemon that runs; the first start is its admin's."""
    root = unpacked(dist, name, tmp_path / "root")
    files = [p for p in (root / "DEBIAN").iterdir() if p.name in ("preinst", "postinst", "prerm", "postrm")]
    for file in files:
        run("sh", "-n", file)
    scripts = "".join(file.read_text() for file in files)
    for text in (scripts, run("rpm", "-qp", "--scripts", rpm(dist, name))):
        words = set(re.findall(r"systemctl(?: --\S+)* ([a-z-]+)", text))
        assert words == (
            {"daemon-reload", "try-restart", "disable", "status"} if name == "ckptless" else set()
        )


# --- rpm's own ways, in a folder as /


def test_rpm_keeps_what_was_changed_and_takes_the_plugins_line_away(dist: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    base = ("rpm", "--root", root, "--dbpath", "/var/lib/rpm")
    run(*base, "--initdb")
    files = [rpm(dist, name) for name in NAMES]
    run(*base, "-i", "--nodeps", "--noscripts", *files)
    (root / YAML).write_text("version: 1\nmax_stall: 1h\n")
    (root / LINE).write_text("optional /elsewhere.so\n")
    run(*base, "-U", "--force", "--nodeps", "--noscripts", *files)
    assert "1h" in (root / YAML).read_text()
    assert (root / LINE).read_text() == "optional /elsewhere.so\n"
    run(*base, "-e", "--nodeps", "--noscripts", *NAMES)
    left = [str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and "var/lib/rpm" not in str(p)]
    # Slurm includes *.conf only.
    assert sorted(left) == [f"{YAML}.rpmsave", f"{LINE}.rpmsave"]
