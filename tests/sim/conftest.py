"""The simulated daemons' log lines are in the story; pytest need not keep them."""

import pytest

from ckptless.daemon import jobs


@pytest.fixture(autouse=True)
def _no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.logger, "disabled", True)
