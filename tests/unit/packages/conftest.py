"""What `make dist` makes, once for all tests here; without the modules of others, so without a network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.spank import native

TOOLS = ("dpkg-deb", "dpkg-shlibdeps", "lintian", "rpmbuild")


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder; without the tools the test is skipped, or fails where all of it is wanted."""
    lacks = [f"{name} is not installed" for name in TOOLS if not shutil.which(name)]
    if reason := ", ".join([*lacks, *filter(None, [native.lacking()])]):
        if os.environ.get("CKPTLESS_REQUIRE_SLURM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    into, build = tmp_path_factory.mktemp("dist") / "dist", tmp_path_factory.mktemp("build")
    program = native.REPOSITORY / "etc/packages/dist.py"
    command = [sys.executable, str(program), "--into", str(into), "--no-dependencies"]
    # An outer make's flags are not for this one.
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        command, env={**env, "BUILD": str(build)}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return into


@pytest.fixture
def bin_folder() -> Path:
    """Where this environment's commands are."""
    return Path(sys.prefix) / "bin"
