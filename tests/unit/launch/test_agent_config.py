"""What an agent in a Slurm step makes of its environment."""

from __future__ import annotations

import base64
import ipaddress
import socket
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.daemon.protocol.errors import StartError, UsageError
from ckptless.daemon.protocol.messages import JobSpec, Limits
from ckptless.daemon.settings import agent_config as config
from ckptless.daemon.settings.agent_config import (
    AGENT_CONFIG,
    SharedConfig,
    of_this_node,
    thread_env,
)
from ckptless.daemon.settings.bind import Interface
from ckptless.daemon.settings.options import ReplicationSettings

SHARED = SharedConfig(
    spec=JobSpec(
        job="4711.s3",
        command=("/t.py",),
        nodes=1,
        spares=1,
        slots_per_node=2,
        limits=Limits.from_max_stall(60),
        names=("localhost", "node02"),
    ),
    argv=("/t.py", "ä b"),
    module=False,
    cwd="/home",
    daemon_socket="/s",
    log_dir="/l",
    preload=("torch",),
    tee=None,
    outcome_dir="/l",
)


def carried(data: bytes) -> dict[str, str]:
    return {AGENT_CONFIG: base64.b64encode(data).decode(), "SLURMD_NODENAME": "localhost", "MY": "own"}


GOOD = carried(msgspec.json.encode(SHARED))


def test_all_of_the_run_and_this_nodes_own() -> None:
    found = of_this_node(GOOD, cores=8)
    for name in SharedConfig.__struct_fields__:
        assert getattr(found, name) == getattr(SHARED, name)
    assert (found.node, found.name, found.address) == (0, "localhost", "127.0.0.1")
    assert found.env == {"SLURMD_NODENAME": "localhost", "MY": "own", "OMP_NUM_THREADS": "1"}
    assert found.rank_socket == "", "in a folder that the agent makes"


def test_without_slurms_name_the_hosts_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost.cluster.example")
    env = {name: value for name, value in GOOD.items() if name != "SLURMD_NODENAME"}
    assert of_this_node(env, cores=1).name == "localhost"


def on_network(interface: str) -> dict[str, str]:
    chosen = msgspec.structs.replace(SHARED, replication=ReplicationSettings(interface=interface))
    return carried(msgspec.json.encode(chosen))


def test_copies_go_over_the_chosen_network(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuple(
        Interface(name, ipaddress.ip_address(address))
        for name, address in [("lo", "127.0.0.1"), ("eth0", "192.0.2.7"), ("ib0", "10.1.2.7")]
    )
    monkeypatch.setattr(config, "interfaces", lambda: found)
    assert of_this_node(GOOD, cores=1).copies_addresses == ()
    both = of_this_node(on_network("10.1.0.0/16+eth0"), cores=1)
    assert both.copies_addresses == ("10.1.2.7", "192.0.2.7")
    with pytest.raises(StartError, match=r"ib0 and 10\.1\.0\.0/16, which are both 10\.1\.2\.7"):
        of_this_node(on_network("eth0+ib0+10.1.0.0/16"), cores=1)
    for interface in ("ib0", "10.1.0.0/16"):
        agent = of_this_node(on_network(interface), cores=1)
        # All the rest stays where it was.
        assert (agent.copies_addresses, agent.address) == (("10.1.2.7",), "127.0.0.1")


def test_ranks_talk_over_the_chosen_network_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = tuple(
        Interface(name, ipaddress.ip_address(address))
        for name, address in [("lo", "127.0.0.1"), ("eth0", "192.0.2.7"), ("ib0", "10.1.2.7")]
    )
    monkeypatch.setattr(config, "interfaces", lambda: found)
    assert of_this_node(GOOD, cores=1).comm_address is None
    assert "GLOO_SOCKET_IFNAME" not in of_this_node(GOOD, cores=1).env
    for interface in ("ib0", "10.1.0.0/16"):
        chosen = carried(msgspec.json.encode(msgspec.structs.replace(SHARED, comm_interface=interface)))
        agent = of_this_node(chosen, cores=1)
        assert (agent.comm_address, agent.address) == ("10.1.2.7", "127.0.0.1")
        assert agent.env["GLOO_SOCKET_IFNAME"] == "ib0"
        assert agent.env["NCCL_SOCKET_IFNAME"] == "=ib0"
        users = of_this_node({**chosen, "GLOO_SOCKET_IFNAME": "eth0,ib0", "NCCL_SOCKET_IFNAME": "e"}, cores=1)
        assert users.comm_address == "192.0.2.7"
        assert (users.env["GLOO_SOCKET_IFNAME"], users.env["NCCL_SOCKET_IFNAME"]) == ("eth0,ib0", "e")
    wrong = carried(msgspec.json.encode(msgspec.structs.replace(SHARED, comm_interface="ib7")))
    with pytest.raises(StartError, match=r"training \(comm.interface\) is ib7, and this node has no such"):
        of_this_node(wrong, cores=1)
    with pytest.raises(StartError, match="GLOO_SOCKET_IFNAME is eth9, and this node has no such address"):
        of_this_node({**GOOD, "GLOO_SOCKET_IFNAME": "eth9"}, cores=1)


@pytest.mark.parametrize("interface", ["ib7", "172.16.0.0/12", "lo", "127.0.0.0/8"])
def test_a_node_that_is_not_on_the_chosen_network(interface: str) -> None:
    """The launcher shows it, with the node's name, and ends the job: exit code 3."""
    with pytest.raises(StartError) as caught:
        of_this_node(on_network(interface), cores=1)
    assert str(caught.value).startswith(
        f"the interface or network for copies (replication.interface) is {interface}, and this node has "
        "no such address; it has "
    )
    assert "\n" not in str(caught.value)


def refused(env: dict[str, str]) -> str:
    with pytest.raises(UsageError) as caught:
        of_this_node(env, cores=1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_who_starts_it_by_hand_is_told() -> None:
    assert "agents are started by ckptless-run" in refused({})


def test_a_node_that_is_not_of_the_run() -> None:
    said = refused({**GOOD, "SLURMD_NODENAME": "node77"})
    assert "node77" in said
    assert "localhost, node02" in said


def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> None:
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", nothing)
    assert "has no address" in refused(GOOD)


WHOLE = GOOD[AGENT_CONFIG]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "!" + WHOLE,
        WHOLE[:-5],
        WHOLE[: len(WHOLE) // 2 // 4 * 4],
        WHOLE + "\n",
        base64.b64encode(b"null").decode(),
        base64.b64encode(b"{}").decode(),
        base64.b64encode(b"[" * 50).decode(),
        base64.b64encode(msgspec.json.encode(SHARED)[:-1] + b',"more":1}').decode(),
        base64.b64encode(msgspec.json.encode(SHARED).replace(b'"nodes":1', b'"nodes":"1"')).decode(),
    ],
)
def test_damage_is_one_sentence(text: str) -> None:
    assert f"{AGENT_CONFIG} is damaged" in refused({**GOOD, AGENT_CONFIG: text})


def test_letters_outside_of_ascii_are_one_sentence() -> None:
    assert "is damaged" in refused({**GOOD, AGENT_CONFIG: "ä" + WHOLE[1:]})


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b'{"spec":"\xff"}', id="no UTF-8"),
        pytest.param(msgspec.json.encode(SHARED).replace(b"/home", b"/\xff"), id="no UTF-8 within"),
        pytest.param(
            b'{"no_such":' + b"[" * 5 * sys.getrecursionlimit(),
            id="very deep",
        ),
    ],
)
def test_bytes_that_are_no_json_are_one_sentence(data: bytes) -> None:
    assert "is damaged" in refused(carried(data))


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_changed_bytes_are_read_or_refused(data: st.DataObject) -> None:
    whole = bytearray(msgspec.json.encode(msgspec.structs.replace(SHARED, argv=("/t.py",))))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 127))
    try:
        found = of_this_node(carried(bytes(whole)), cores=2)
    except UsageError:
        return
    assert found.name == "localhost"


@pytest.mark.parametrize(
    ("env", "ranks", "threads"),
    [
        ({}, 1, None),
        ({}, 2, "1"),
        ({}, 16, "1"),
        ({"OMP_NUM_THREADS": "7"}, 4, None),
        ({"OMP_NUM_THREADS": ""}, 4, None),
    ],
)
def test_threads_of_a_rank(env: dict[str, str], ranks: int, threads: str | None) -> None:
    assert thread_env(env, ranks) == ({} if threads is None else {"OMP_NUM_THREADS": threads})
