"""The report of what commits cost runs; on the simulated device its figures say nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import kind, report

pytestmark = pytest.mark.skipif(kind.missing() is not None, reason=str(kind.missing()))


def test_a_table_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--gb", "0.001", "--step-s", "0.05", "--json", str(tmp_path / "report.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[-1].startswith("| 0.001 GB |")
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["device"] == kind.name()
    (size,) = told["sizes"]
    assert size["nbytes"] == 1_000_000
    # The main thread goes on while the device is busy with the step.
    assert size["commit_call_s"] < size["step_s"]
