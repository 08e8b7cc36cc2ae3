"""A .deb of a package's files: control, copyright and changelog, scripts; made by dpkg-deb."""

import email.utils
import gzip
import hashlib
import textwrap
from pathlib import Path

from release import Release
from stage import ROOT, binaries, run, take
from table import Moment, Package

# By script and its first argument, what is done in the order of this table.
SCRIPTS: tuple[tuple[str, str, Moment], ...] = (
    ("preinst", '"$1" = install', "configuration back"),
    ("postinst", '"$1" = configure', "unpacked"),
    ("postinst", '"$1" = configure ] && [ -n "$2"', "upgraded"),
    ("postinst", '"$1" = abort-remove', "configuration back"),
    ("prerm", '"$1" = remove', "configuration aside"),
    ("prerm", '"$1" = remove', "leaving"),
    ("postrm", '"$1" = remove', "left"),
    ("postrm", '"$1" = purge', "purged"),
)


def build(package: Package, tree: Path, release: Release, work: Path) -> Path:
    """Make the package of its files in `tree`; the file, in `work`."""
    root = work / "deb" / package.name
    take(package, tree, root)
    _documents(package, release, root)
    size = sum(path.lstat().st_size for path in root.rglob("*")) // 1024 + 1
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink()]
    sums = [f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(root)}\n" for path in files]
    control = root / "DEBIAN"
    control.mkdir()
    (control / "md5sums").write_text("".join(sums))
    (control / "control").write_text(_control(package, release, root, size))
    if package.config:
        (control / "conffiles").write_text("".join(f"/{path}\n" for path in package.config))
    for name, text in scripts(package, release.python).items():
        (control / name).write_text(text)
        (control / name).chmod(0o755)
    arch = run("dpkg", "--print-architecture").strip()
    product = work / f"{package.name}_{release.of(package)}_{arch}.deb"
    run("dpkg-deb", "--root-owner-group", "-Zxz", "--build", root, product)
    return product


def scripts(package: Package, python: str) -> dict[str, str]:
    """The maintainer scripts, by name."""
    found: dict[str, str] = {}
    for name, condition, moment in SCRIPTS:
        if body := package.scripts.get(moment, "").replace("PYTHON", python):
            text = found.get(name, "#!/bin/sh\nset -e\n")
            found[name] = f"{text}if [ {condition} ]; then\n{textwrap.indent(body, '    ')}fi\n"
    return found


def _control(package: Package, release: Release, root: Path, size: int) -> str:
    needs = [name.replace("PYTHON", release.python) for name in package.needs]
    depends = ", ".join([*_libraries(root), *needs])
    lines = [
        f"Package: {package.name}",
        f"Version: {release.of(package)}",
        f"Architecture: {run('dpkg', '--print-architecture').strip()}",
        f"Maintainer: {release.packager}",
        "Section: admin",
        "Priority: optional",
        f"Installed-Size: {size}",
        *([f"Depends: {depends}"] if depends else []),
        f"Description: {package.summary}",
        textwrap.fill(package.description, 75, initial_indent=" ", subsequent_indent=" "),
    ]
    return "\n".join(lines) + "\n"


def _libraries(root: Path) -> list[str]:
    """Return the packages of the libraries that its programs are linked with."""
    compiled = binaries(root)
    if not compiled:
        return []
    stub = root.parent / "shlibdeps"
    (stub / "debian").mkdir(parents=True, exist_ok=True)
    (stub / "debian/control").write_text("Source: ckptless\n\nPackage: ckptless\nArchitecture: any\n")
    told = run("dpkg-shlibdeps", "--warnings=0", "-O", *(f"-e{path}" for path in compiled), cwd=stub)
    return told.strip().removeprefix("shlibs:Depends=").split(", ")


def _documents(package: Package, release: Release, root: Path) -> None:
    folder = root / "usr/share/doc" / package.name
    folder.mkdir(parents=True)
    (folder / "copyright").write_text((ROOT / "LICENSE").read_text() + package.others)
    when = email.utils.formatdate(release.at_s)
    changes = (
        f"{package.name} ({release.of(package)}) stable; urgency=medium\n\n"
        f"  * Release {release.version}: see its CHANGELOG.md.\n\n -- {release.packager}  {when}\n"
    )
    (folder / "changelog.gz").write_bytes(gzip.compress(changes.encode(), mtime=0))
    if package.overrides:
        overrides = root / "usr/share/lintian/overrides" / package.name
        overrides.parent.mkdir(parents=True)
        overrides.write_text(
            "".join(f"# {why}\n{package.name}: {tag}\n" for tag, why in package.overrides.items())
        )
