"""Where the failure domains of a run come from, and that not to know them is no failure."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from ckptless.daemon.launch.slurm import find_domains

NAMES = ("n1", "n2", "n3")
SITE = {"rack1": ("n1", "n9"), "rack2": ("n2",)}


@pytest.fixture(autouse=True)
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that is found as Slurm's."""
    path = tmp_path / "scontrol"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_TOPO_LEN", "10")
    return path


def write(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def find(site: dict[str, tuple[str, ...]] | None) -> tuple[str, ...]:
    return asyncio.run(find_domains(NAMES, site))


def test_from_the_settings(scontrol: Path, said: pytest.LogCaptureFixture) -> None:
    write(scontrol, "exit 1")
    assert find(SITE) == ("rack1", "rack2", "")
    assert said.messages == ["failure domains, from the settings: rack1 n1, rack2 n2"]
    # The site's word is the last one, also where it says nothing of these nodes.
    assert find({"rack7": ("n77",)}) == find({}) == ()
    assert said.messages[-1] == "failure domains are not known: every node counts as one of its own"


def test_from_slurms_topology(scontrol: Path, said: pytest.LogCaptureFixture) -> None:
    line = "SwitchName=s$i Level=0 LinkSpeed=1 Nodes=n$i"
    write(
        scontrol,
        f'test "$*" = "show topology" && test -z "$SLURM_TOPO_LEN" && for i in 1 2; do echo {line}; done',
    )
    assert find(None) == ("s1", "s2", "")
    assert said.messages == ["failure domains, from Slurm's topology: s1 n1, s2 n2"]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo No topology information available", "every node counts"),
        ("echo 'SwitchName=s Level=0 LinkSpeed=1 Nodes=n[1-3]'", "every node counts"),
        ("echo 'scontrol: error: it is broken' >&2; exit 1", "Slurm could not show its topology: "),
        ("echo 'SwitchName=s Level=0 LinkSpeed=1 Nodes=n[1-'", "brackets do not match"),
    ],
)
def test_where_nothing_is_known(
    scontrol: Path, said: pytest.LogCaptureFixture, script: str, why: str
) -> None:
    write(scontrol, script)
    assert find(None) == ()
    (line,) = said.messages
    assert line.startswith("failure domains are not known: ")
    assert why in line


def test_long_names_of_many_nodes_become_numbers() -> None:
    names = tuple(f"n{number}" for number in range(1000))
    site = {f"{'long' * 15}-{rack}": names[rack * 100 : rack * 100 + 100] for rack in range(9)}
    found = asyncio.run(find_domains(names, site))
    assert found == (*(str(number // 100) for number in range(900)), *[""] * 100)


def test_without_scontrol(monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert find(None) == ()
    assert "scontrol is not on" in said.messages[0]
