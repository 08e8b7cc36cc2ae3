"""`ckptctl plan`: the table, what to change, exit codes, and what scripts read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ckptless.daemon.ckptctl.main import ckptctl
from ckptless.daemon.replication.footprint import Shape


def plan(*arguments: object, before: tuple[str, ...] = ()) -> Result:
    words = [*before, "plan", "--gpus", 64, "--params", "70e9", *arguments]
    return CliRunner().invoke(ckptctl, [str(one) for one in words])


def test_a_job_that_fits() -> None:
    done = plan("--ram", "1024G", "--nic", 400, "--step-s", 10)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "on a node               shards    bytes  for each rank",
        "one version of a shard          13.1 GB",
        "versions of own ranks        8   315 GB        39.4 GB",
        "replicas for others         16   630 GB        78.8 GB",
        "memory                      24   945 GB         118 GB",
        "sent at a commit            16   210 GB        26.2 GB",
        "received at a commit        16   210 GB        26.2 GB",
        "a commit's copies take 4.2 s on the network",
        "It fits; the network keeps up with commit_every=1 and more.",
    ]


def test_what_failures_will_cost() -> None:
    done = plan("--nic", 400, "--step-s", 10, "--mtbf", 100, "--spares", 1, "--commit-s", 0.1)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-6:-1] == [
        "a node fails every 300 h, and costs 83.5 s, 5.0 s of it done again",
        "with 1 spare 7.69% of the failures find none; goodput 99.00%",
        "0 spares make the most of all nodes (goodput 98.93%)",
        "a commit holds training up for 100 ms; the best is commit_every=46",
        "all copies of a shard are lost in 30 days with probability 8e-11",
    ]
    asks = plan("--mtbf", 100)
    assert asks.exit_code == 2
    assert "--mtbf asks for --step-s" in asks.stderr


def test_what_the_page_shows_is_what_it_says() -> None:
    """A block may leave lines out."""
    page = (Path(__file__).parents[3] / "docs/admin.md").read_text()
    blocks = re.findall(r"\$ ckptctl (plan .*)\n([^`]*)```", page)
    assert len(blocks) == 2
    for command, shown in blocks:
        said = CliRunner().invoke(ckptctl, command.split()).stdout.splitlines()
        assert set(shown.splitlines()) <= set(said)


@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        (("--ram", "600GiB"), "Too much for 644 GB of memory: --replicas 1 or 16 nodes."),
        (("--ram", "512G"), "Too much for 550 GB of memory: 16 nodes."),
        (
            ("--ram", "512G", "--sharding", "ddp"),
            "Too much for 550 GB of memory: shard the state over more ranks ",
        ),
        (
            ("--nic", 100, "--step-s", 10),
            "Too much for the network: commits wait; take commit_every=2, or --replicas 1.",
        ),
        (("--nic", 100, "--step-s", 5), "Too much for the network: commits wait; take commit_every=4."),
    ],
)
def test_what_to_change(arguments: tuple[object, ...], last: str) -> None:
    done = plan(*arguments)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1].startswith(last)


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        (("--nic", 100, "--step-s", 10, "--commit-every", 2), True),
        (("--nic", 100, "--nics", 2, "--step-s", 10), True),
        (("--nic", 100), True),
        (("--step-s", 10), True),
        (("--sharding", "hsdp", "--nic", 1, "--step-s", 1), True),
        (("--sharding", "hsdp", "--shard-size", 32, "--nic", 1, "--step-s", 1), False),
    ],
)
def test_exit_codes(arguments: tuple[object, ...], fits: bool) -> None:
    assert plan(*arguments).exit_code == (0 if fits else 1)


@pytest.mark.parametrize("before", [(), ("--json",)])
def test_for_scripts(before: tuple[str, ...]) -> None:
    done = plan("--ram", "600G", "--nic", 400, *([] if before else ["--json"]), before=before)
    assert done.exit_code == 1
    found: dict[str, Any] = json.loads(done.stdout)
    shape = Shape(64, 8, 64, 2, 840 * 10**9)
    assert found.pop("meta") == {"schema": 1}
    assert found == {
        "plan": {
            "nodes": 8,
            "ranks": 64,
            "replicas": 2,
            "shard_nbytes": 13_125_000_000,
            "own_nbytes": shape.memory_nbytes(8),
            "replicas_nbytes": shape.memory_nbytes(16),
            "node_nbytes": shape.node_nbytes,
            "ram_nbytes": 600 << 30,
            "sent_nbytes": 210_000_000_000,
            "received_nbytes": 210_000_000_000,
            "commit_s": 4.2,
            "shortest_commit_every": None,
        },
        "failures": None,
        "fits": False,
        "advice": ["Too much for 644 GB of memory: --replicas 1 or 16 nodes."],
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpus-per-node", 7), "--gpus 64 is no multiple of --gpus-per-node 7"),
        (("--gpus", 100_000, "--gpus-per-node", 1), "100000 nodes; a job has 65536 at most"),
        (("--sharding", "hsdp", "--shard-size", 48), "hsdp has several replicas"),
        (("--sharding", "hsdp", "--shard-size", 64), "hsdp has several replicas"),
        (("--ram", "512GB"), "--ram is '512GB': it must be a size with its unit from 1B to 1024TiB, such as"),
        (("--ram", "0"), "--ram is '0': it must be a size"),
        (("--params", "0"), "--params"),
        (("--params", "nan"), "--params"),
        (("--params", "1e300"), "--params"),
        (("--replicas", 65), "--replicas"),
    ],
)
def test_mistakes(arguments: tuple[object, ...], words: str) -> None:
    done = plan(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr


def test_where_no_limit_is_given() -> None:
    done = plan()
    assert done.exit_code == 0
    assert done.stdout.endswith("Give --ram, or --nic and --step-s, to learn whether it fits.\n")


def test_one_node() -> None:
    """Nobody is there to hold a copy."""
    done = CliRunner().invoke(
        ckptctl, ["plan", "--gpus", "4", "--params", "1e9", "--nic", "10", "--step-s", "1"]
    )
    assert done.exit_code == 0
    assert ["replicas", "for", "others", "0", "0", "B", "0", "B"] in [
        line.split() for line in done.stdout.splitlines()
    ]
