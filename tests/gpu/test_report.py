"""The report of what ckptless costs runs; on the simulated device its figures say nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import kind, report

pytestmark = pytest.mark.skipif(kind.missing() is not None, reason=str(kind.missing()))


def test_tables_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gb", "0.1", "--step-s", "0.05", "--ranks", "2", "--rounds", "1", "--kills", "2"]
    assert report.main([*words, "--json", str(tmp_path / "report.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("| 0.1 GB |")]
    assert not [line for line in lines if "overlap" in line]
    told = json.loads((tmp_path / "report.json").read_text())
    (size,) = told["sizes"]
    assert size["nbytes"] == 100_000_000
    assert size["step_s"] > 0.05
    assert {"in_order", "beside", "frozen"} <= set(size)
    (joined,) = told["joining"]
    assert joined["ranks"] == 2
    assert joined["rootless_s"] > 0
    assert told["recoveries"]["recoveries"] == 2
    assert told["recoveries"]["whole"] > told["recoveries"]["join"] > 0
