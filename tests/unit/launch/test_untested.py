"""A torch that nobody has tested is tried before a run, once, and refused in one sentence."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from ckptless.daemon.launch import preload as untested
from ckptless.daemon.protocol.errors import UsageError
from ckptless.torch_versions import is_tested


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("2.13.0", True),
        ("2.15.0+cu132", True),
        ("2.8.0+cpu", True),
        ("2.9.1+rocm6.4", True),
        ("2.7.1", False),
        ("2.99.0", False),
        ("2.14.0a0+git1234567", False),
        ("2.14.0.dev20260901+cpu", False),
        ("2.13.0+nv25.11", False),
    ],
)
def test_which_torches_are_known(version: str, known: bool) -> None:
    assert is_tested(version) is known


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a self-test in the place of the real one says; each of its runs adds a line to `runs` beside."""
    said = tmp_path / "said"
    said.write_text("")
    (tmp_path / "tried_here.py").write_text(
        f"open({str(tmp_path / 'runs')!r}, 'a').write('run\\n')\n"
        f"text = open({str(said)!r}).read()\nprint(text, end='')\nraise SystemExit(1 if text else 0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(untested, "SELF_TEST", "tried_here")
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "2.99.0")
    return said


def runs(said: Path) -> int:
    file = said.with_name("runs")
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_a_good_one_is_tried_once(said: Path) -> None:
    untested.try_untested()
    untested.try_untested()
    assert runs(said) == 1


def test_a_bad_one_is_refused_each_time_and_another_installation_is_tried_anew(
    said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said.write_text("torch 2.99.0 was tried, and FSDP2 did not come back.\n")
    for _ in range(2):
        with pytest.raises(UsageError, match=r"FSDP2 did not come back; .* take torch 2\.8 to .*--tier 1$"):
            untested.try_untested()
    said.write_text("")
    untested.try_untested()
    assert runs(said) == 3
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "2.99.1")
    untested.try_untested()
    assert runs(said) == 4


def test_one_that_was_tested_is_not_tried(said: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "2.13.0+cpu")
    untested.try_untested()
    assert runs(said) == 0


def test_where_nothing_can_be_kept_it_is_tried_again(said: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    untested.try_untested()
    untested.try_untested()
    assert runs(said) == 2
