"""`make dist`: source archive, wheel, .deb and .rpm, and their checksums, all in one folder.

The .deb and .rpm are for the Slurm of the headers here, and for one Python; table.py says what each has.
"""

import argparse
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import deb
import rpm
import stage
from release import Release, release_of, set_date, system_python
from table import PACKAGES

SUMS = "SHA256SUMS"


def main(argv: Sequence[str]) -> int:
    """Make them, and print what was made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, required=True, metavar="FOLDER", help="made anew")
    parser.add_argument("--python", metavar="pythonX.Y", help="of the nodes; default: this system's")
    parser.add_argument("--formats", default="deb,rpm", help="beside the wheel (default: %(default)s)")
    parser.add_argument(
        "--no-dependencies",
        action="store_true",
        help="leave out what the daemon imports of others: for tests",
    )
    options = parser.parse_args(argv)
    set_date()
    into: Path = options.into.resolve()
    shutil.rmtree(into, ignore_errors=True)
    stage.run(sys.executable, "-m", "build", "--no-isolation", "--outdir", into, stage.ROOT)
    (wheel,) = into.glob("*.whl")
    release = release_of(wheel, options.python or system_python())
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "python"
        stage.install_python(python, wheel, release.python, dependencies=not options.no_dependencies)
        for name in options.formats.split(","):
            for product in _packages(name, release, python, Path(folder) / name):
                shutil.copy(product, into)
    products = sorted(into.iterdir())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in products]
    (into / SUMS).write_text("".join(sums))
    print("\n".join(str(path) for path in products))
    return 0


def _packages(kind: str, release: Release, python: Path, work: Path) -> list[Path]:
    """All packages of one kind."""
    tree = work / "tree"
    shutil.copytree(python, tree, symlinks=True)
    stage.install(tree, rpm=kind == "rpm")
    stage.strip(tree)
    build = {"deb": deb.build, "rpm": rpm.build}[kind]
    return [build(package, tree, release, work) for package in PACKAGES]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
