"""The programs under test, built with warnings as errors."""

from pathlib import Path

import pytest

from .native import HOOKS, SPANK, Parsers, lacking, make


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the products are; skips the test where none can be made."""
    if lacks := lacking():
        pytest.skip(lacks)
    return tmp_path_factory.mktemp("build")


@pytest.fixture(scope="session")
def parsers(build: Path) -> Parsers:
    make(SPANK, build, str(build / "parsers"))
    return Parsers(build / "parsers")


@pytest.fixture(scope="session")
def notify(build: Path) -> Path:
    """ckptless-notify."""
    make(HOOKS, build)
    return build / "ckptless-notify"
