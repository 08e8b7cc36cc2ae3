"""What all tests run with."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# torch's TCPStore asks the name server for the name of each peer's address, loopback or not, and waits five
# seconds for an answer that is lost on the way.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# No test depends on the machine's speed: a case, and drawing its inputs, may take as long as they do.
settings.register_profile("ckptless", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ckptless")

SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().splitlines())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what slow.txt lists, before pytest chooses by markers."""
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker(pytest.mark.slow)
