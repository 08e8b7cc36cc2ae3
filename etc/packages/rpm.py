"""An .rpm of a package's files: a spec, built by rpmbuild."""

from pathlib import Path

from release import Release
from stage import ROOT, run, take
from table import Moment, Package

# By section of the spec and its argument, how many of the package there are then.
SECTIONS: tuple[tuple[str, str, Moment], ...] = (
    ("post", '"$1" -ge 1', "unpacked"),
    ("post", '"$1" -ge 2', "upgraded"),
    ("preun", '"$1" -eq 0', "leaving"),
    ("postun", '"$1" -eq 0', "left"),
)
SPEC = """\
%global debug_package %{{nil}}
%global __os_install_post %{{nil}}
%global _build_id_links none
Name: {name}
Version: {version}
Release: 1
Summary: {summary}
License: {license}
{needs}
%description
{description}
%install
cp -a {root}/. %{{buildroot}}/
{scripts}%files
{files}
"""


def build(package: Package, tree: Path, release: Release, work: Path) -> Path:
    """Make the package of its files in `tree`; the file, in `work`."""
    root = work / "rpm" / package.name
    take(package, tree, root)
    licence = root / "usr/share/licenses" / package.name / "LICENSE"
    licence.parent.mkdir(parents=True)
    licence.write_text((ROOT / "LICENSE").read_text() + package.others)
    spec = work / "rpm" / f"{package.name}.spec"
    spec.write_text(_spec(package, release, root))
    out = work / "rpm/out"
    places = (f"_topdir {work}/rpm/top", f"_rpmdir {out}", f"packager {release.packager}")
    dates = ("use_source_date_epoch_as_buildtime 1", "clamp_mtime_to_source_date_epoch 1")
    defines = [word for macro in (*places, *dates) for word in ("--define", macro)]
    run("rpmbuild", "-bb", "--quiet", *defines, spec)
    (product,) = out.rglob(f"{package.name}-{release.of(package)}-*.rpm")
    return product.rename(work / product.name)


def scripts(package: Package, python: str) -> str:
    """The sections of its scripts."""
    found: dict[str, str] = {}
    for section, condition, moment in SECTIONS:
        if body := package.scripts.get(moment, "").replace("PYTHON", python):
            found[section] = f"{found.get(section, '')}if [ {condition} ]; then\n{body}fi\n"
    return "".join(f"%{section}\n{text}\n" for section, text in found.items())


def _spec(package: Package, release: Release, root: Path) -> str:
    needs = [f"Requires: {name.replace('PYTHON', release.python)}" for name in package.needs.values()]
    # Modules of the daemon's own environment are nobody else's, and find each other.
    own = [] if package.slurm else ["AutoReqProv: no"]
    files = []
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        kind = "%config(noreplace) " if name in package.config else ""
        if not path.is_dir() or path.is_symlink():
            files.append(f'%attr(-, root, root) {kind}"/{name}"')
        elif any(part.startswith("ckptless") for part in path.relative_to(root).parts):
            files.append(f'%dir %attr(0755, root, root) "/{name}"')
    return SPEC.format(
        name=package.name,
        version=release.of(package),
        summary=package.summary,
        license=package.license,
        needs="\n".join([*own, *needs]),
        description=package.description,
        root=root,
        scripts=scripts(package, release.python),
        files="\n".join(files),
    )
