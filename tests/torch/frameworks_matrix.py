"""The adapters' tests with other releases of their frameworks: `frameworks_matrix.py [RELEASE...]`.

A release is NAME==VERSION, or several of them with commas in between: the tests are those of the first one's
adapter. Each gets a virtual environment over this one, with that release and what it asks for where it is
another one than here; torch is this one's. Without a release: the oldest and the newest of each framework.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

from .matrix import ROOT, SETUP_DEADLINE_S, Version, main

# The oldest that setup.cfg lets in, and the newest that was tried. DeepSpeed is there to be refused,
# TRL for its subclasses of the Trainer.
RELEASES = (
    "accelerate==1.12.0",
    "accelerate==1.15.0",
    "deepspeed==0.19.8",
    "lightning==2.5.0",
    "lightning==2.6.6",
    "torchtitan==0.2.2",
    "torchtitan==0.3.0",
    "transformers==5.17.0,accelerate==1.12.0",
    "transformers==5.24.0",
    "trl==1.16.0",
)


class Release(Version):
    """One release of a framework, its environment and its log."""

    what = "framework"

    def _set_up(self) -> None:
        if not self._python.exists():
            self._call(SETUP_DEADLINE_S, sys.executable, "-m", "venv", self._venv)
            inside = {"base": str(self._venv), "platbase": str(self._venv)}
            here, there = (sysconfig.get_path("purelib", vars=words) for words in ({}, inside))
            # What torchtitan needs, and only its runs find: see the Makefile.
            (self._venv / "triton").symlink_to(Path(sys.prefix, "triton"))
            # Found behind its own, with what is editable there.
            Path(there, "over.pth").write_text(f"import site; site.addsitedir({here!r})\n")
        pip = (self._python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--progress-bar", "off")
        # DeepSpeed's setup imports torch, and so cannot be built apart from it.
        self._call(SETUP_DEADLINE_S, *pip, "wheel")
        releases = self.line.version.split(",")
        # With torch: nothing that they ask for may bring another one.
        self._call(SETUP_DEADLINE_S, *pip, "--no-build-isolation", f"torch=={version('torch')}", *releases)
        for name, asked in (release.split("==") for release in releases):
            found = f"import importlib.metadata as here; assert here.version({name!r}) == {asked!r}"
            self._call(SETUP_DEADLINE_S, self._python, "-c", found)

    def _test_all(self) -> None:
        name = self.line.version.partition("==")[0]
        files = (str(file) for file in sorted(ROOT.glob(f"tests/torch/test_{name}*.py")))
        self._test("-m", "not slow and not soak", *files, f"tests/local/test_{name}.py")


if __name__ == "__main__":
    sys.exit(main(Release, RELEASES))
