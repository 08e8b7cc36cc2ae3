"""The simulated daemons' log lines are in the story; pytest need not keep them."""

import pytest

from ckptless.daemon.ckptlessd import session

# Nothing here waits: what takes long has much to compute, and a machine may be busy with something else.
DEADLINE_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/sim/" in item.nodeid and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(DEADLINE_S))


@pytest.fixture(autouse=True)
def _no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session.logger, "disabled", True)
