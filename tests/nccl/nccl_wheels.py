"""Stock libnccl of PyPI's wheels, downloaded when a test wants one, and kept under build/."""

import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
CACHE = PROJECT / "build/nccl"
RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())
# Hundreds of megabytes.
DOWNLOAD_DEADLINE_S = 600
MEMBER = "nvidia/nccl/lib/libnccl.so.2"


@functools.cache
def library(version: str) -> Path:
    """Skips the test where it cannot be had; with CKPTLESS_REQUIRE_NCCL=1 it fails instead."""
    path = CACHE / version / "libnccl.so.2"
    if platform.machine() != "x86_64":
        lacking("the recorded libraries are for x86-64")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            _download(version, Path(folder)).rename(path)
    return path


def _download(version: str, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command = [*pip, "--disable-pip-version-check", "--dest", str(folder), f"nvidia-nccl-cu12=={version}"]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=DOWNLOAD_DEADLINE_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        last = str(error.stderr or error).strip().splitlines()[-1]
        lacking(f"no nvidia-nccl-cu12 {version} from a package index: {last}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(MEMBER, folder))
    wheel.unlink()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == RECORDED[version]["sha256"], f"another libnccl {version} than was recorded"
    return path


def lacking(why: str) -> None:
    if os.environ.get("CKPTLESS_REQUIRE_NCCL") == "1":
        pytest.fail(why)
    pytest.skip(why)
