"""`make slurm-shell` tells people what is so on the cluster that they get."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from . import shell
from .cluster.plan import Plan


@pytest.mark.parametrize("nodes", [3, 5, 20])
def test_its_hints_are_for_the_nodes_that_there_are(nodes: int) -> None:
    text = shell.welcome(nodes, "cluster --dir /x")
    assert text.strip().startswith(f"{nodes} nodes ")
    assert f"--nodes={nodes} " in text
    assert set(re.findall(r"node\d+", text)) <= set(Plan(nodes=nodes).node_names)
    # The one that is to lose its power trains, and the last one is the spare.
    assert "power-off node02" in text


def test_too_few_nodes_to_show_anything_are_refused() -> None:
    result = CliRunner().invoke(shell.main, ["--nodes", "2"])
    assert result.exit_code == 2
    assert "3<=x<=20" in result.output
