"""`--hosts` and `--master-addr`: which run a command line asks for, what is refused, where nodes meet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from ckptless.daemon.launch import main, wire
from ckptless.daemon.launch.host import held_port
from ckptless.daemon.launch.hostfile import Host
from ckptless.daemon.launch.hosts import HostsRun, address_of, env_for_hosts
from ckptless.daemon.launch.local import LocalRun
from ckptless.daemon.launch.main import given
from ckptless.daemon.launch.meeting import DEFAULT_PORT, MeetingRun
from ckptless.daemon.launch.options import Run, meets, run_of
from ckptless.daemon.launch.torchrun import check
from ckptless.daemon.protocol.codec import PROTOCOL, Decoder, encode
from ckptless.daemon.protocol.errors import UsageError

NO_ENV: dict[str, str] = {}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PET_"))]:
        monkeypatch.delenv(name)
    Path("train.py").touch()
    Path("hosts").write_text("a slots=2\nb slots=2\nc slots=2\n")
    key = Path("key")
    key.touch(mode=0o400)
    key.chmod(0o600)
    key.write_bytes(b"k" * 32)


def run(*words: str, **env: str) -> Run:
    context = main.command.make_context("ckptless-run", [*words, "train.py", "--lr", "1"])
    said = {name: value for name, value in context.params.items() if not name.startswith("script")}
    return run_of("train.py", ("--lr", "1"), given(said), env)


def hosts(*words: str) -> HostsRun:
    found = run("--hosts", "hosts", *words)
    assert isinstance(found, HostsRun)
    return found


def meeting(*words: str, **env: str) -> MeetingRun:
    found = run(*words, CKPTLESS_JOB_KEY_FILE="key", **env)
    assert isinstance(found, MeetingRun)
    return found


def test_hosts_of_a_file() -> None:
    found = hosts("--spares", "1")
    spec = found.config.spec
    assert (spec.nodes, spec.spares, spec.slots_per_node, spec.names) == (2, 1, 2, ("a", "b", "c"))
    assert spec.job.startswith("hosts-")
    assert found.config.argv == (str(Path("train.py").absolute()), "--lr", "1")
    found = hosts("--nodes", "1", "--job", "mine", "--comm-interface", "ib0")
    assert (found.config.spec.names, found.config.spec.job) == (("a",), "mine")
    assert found.config.comm_interface == "ib0"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "3", "--spares", "1"], "take 4 hosts, and --hosts hosts has 3"),
        (["--nproc-per-node", "4"], "has slots=2, and --nproc-per-node is 4: give one of them"),
        (["--requeue", "1"], "--requeue is not for hosts without Slurm: there is no queue"),
        (["--draw-in", "1"], "nobody gives further nodes"),
        (["--log-dir", "x"], "the logs are below --state-dir"),
        (["--rehearse-steps", "4"], "leave it out"),
        (["--local"], "--local and --hosts are two ways to run"),
        (["--job", "../x"], "names a folder"),
        (["--domains", "x"], "--domains has 1 names for 3 nodes"),
        (["--tier", "1", "--spares", "1"], "--spares is for runs that recover"),
    ],
)
def test_what_hosts_cannot_have(words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as found:
        hosts(*words)
    assert said in str(found.value)


def test_a_hostfile_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"--hosts none cannot be read \(No such file"):
        run("--hosts", "none")


def test_which_way() -> None:
    assert isinstance(run("--local"), LocalRun)
    assert isinstance(run("--local", MASTER_ADDR="a"), LocalRun)
    assert isinstance(run("--hosts", "hosts", MASTER_ADDR="a"), HostsRun)
    assert isinstance(meeting("--nnodes", "2", "--node-rank", "1", MASTER_ADDR="a"), MeetingRun)
    with pytest.raises(UsageError, match="add --local to run on this machine, --hosts FILE"):
        run()
    assert not meets({"master_addr": "a"}, {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a"})
    assert check({"master_addr": "a", "node_rank": 0}) == ("--master-addr", "--node-rank")
    assert check({"master_addr": "a", "node_rank": 0}, meets=True) == ()


@pytest.mark.parametrize(
    ("words", "env", "found"),
    [
        (["--nnodes", "3", "--node-rank", "2"], {}, ("a", DEFAULT_PORT, 3, 2)),
        (["--nnodes", "3", "--node-rank", "0", "--master-port", "7"], {}, ("a", 7, 3, 0)),
        (["--nnodes", "1"], {}, ("a", DEFAULT_PORT, 1, 0)),
        (["--nnodes", "2:4", "--node-rank", "3"], {}, ("a", DEFAULT_PORT, 4, 3)),
        ([], {"NNODES": "4", "NODE_RANK": "1", "MASTER_PORT": "99"}, ("a", 99, 4, 1)),
        (
            [],
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            ("a", DEFAULT_PORT, 4, 3),
        ),
        ([], {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}, ("a", DEFAULT_PORT, 2, 0)),
    ],
)
def test_where_to_meet(words: list[str], env: Mapping[str, str], found: tuple[str, int, int, int]) -> None:
    place = meeting("--master-addr", "a", *words, **env).place
    assert (place.address, place.port, place.nodes, place.node) == found
    assert place.key == b"k" * 32


def test_all_nodes_are_counted_and_the_last_are_spares() -> None:
    spec = meeting("--nnodes", "5", "--spares", "2", "--node-rank", "4", MASTER_ADDR="a").config.spec
    assert (spec.nodes, spec.spares) == (3, 2)


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        ([], {}, "give --nnodes N: all nodes, spares among them"),
        (["--nnodes", "2"], {}, "give each node its --node-rank"),
        (
            ["--nnodes", "2", "--node-rank", "2"],
            {},
            "--node-rank 2: the 2 nodes of --nnodes, which counts spares",
        ),
        (
            ["--nnodes", "2", "--node-rank", "0", "--spares", "2"],
            {},
            "with 2 spares, a job of 2 nodes has none",
        ),
        (["--nnodes", "2"], {"NODE_RANK": "x"}, "NODE_RANK is 'x': it must be a number"),
        (["--nnodes", "2"], {"NODE_RANK": "²"}, "it must be a number"),
        (
            [],
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "mpirun has started 2 processes on this node: start one on each",
        ),
        ([], {"PMI_RANK": "3", "PMI_SIZE": "4"}, "an unknown number of processes"),
    ],
)
def test_where_nobody_can_meet(words: list[str], env: Mapping[str, str], said: str) -> None:
    with pytest.raises(UsageError) as found:
        meeting("--master-addr", "a", *words, **env)
    assert said in str(found.value)


def test_no_job_without_a_key() -> None:
    words = ("--master-addr", "a", "--nnodes", "2", "--node-rank", "0")
    with pytest.raises(UsageError, match="CKPTLESS_JOB_KEY_FILE is not set: put a secret"):
        run(*words)
    Path("key").chmod(0o644)
    with pytest.raises(UsageError, match="can be read by others: chmod 600"):
        meeting(*words)
    Path("key").chmod(0o600)
    Path("key").write_bytes(b"short")
    with pytest.raises(UsageError, match="holds 5 bytes; it needs at least 16"):
        meeting(*words)


def test_what_hosts_have_of_the_launchers_environment() -> None:
    kept = {"PATH": "/a", "PYTHONPATH": "/b", "HOMEWORK": "1", "WANDB_API_KEY": "x", "EMPTY": ""}
    own = {
        "HOME": "/r",
        "SSH_AUTH_SOCK": "/s",
        "XDG_RUNTIME_DIR": "/x",
        "SLURM_JOB_ID": "1",
        "TMPDIR": "/t",
        "_": "x",
    }
    assert env_for_hosts({**kept, **own, "BYTES": os.fsdecode(b"\xff")}) == kept


def test_addresses() -> None:
    assert address_of(Host("a", address="10.1.2.3"), 2) == "10.1.2.3"
    assert address_of(Host("localhost"), 1) in ("127.0.0.1", "::1")
    with pytest.raises(UsageError, match=r"localhost is .* here, where no other host reaches it"):
        address_of(Host("localhost"), 2)
    with pytest.raises(UsageError, match=r"a: no\.such\.invalid has no address"):
        address_of(Host("a", address="no.such.invalid"), 2)


def test_a_port_is_kept_until_a_daemon_has_it() -> None:
    with held_port("127.0.0.1") as held:
        address = held.getsockname()
        with pytest.raises(ConnectionRefusedError), socket.create_connection(address, 5.0):
            pass
        with socket.create_server(address), socket.create_connection(address, 5.0):
            port = address[1]
            with pytest.raises(
                UsageError, match=f"cannot listen on port {port} of 127.0.0.1: Address already"
            ):
                held_port("127.0.0.1", port)
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1: "):
        held_port("192.0.2.1")


# ------------------------------------------------------------------------------ the host's process


def host(said: bytes) -> tuple[int, bytes, str]:
    """What a host says to these bytes: the code that it ends with, its words, its errors."""
    words = [sys.executable, "-m", "ckptless.daemon.launch.host"]
    done = subprocess.run(words, input=said, capture_output=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr.decode()


def begin() -> wire.Begin:
    return wire.Begin(
        protocol=PROTOCOL,
        node=0,
        name="a",
        address="127.0.0.1",
        port=0,
        key=b"k" * 32,
        config=msgspec.json.encode(hosts().config),
        env={},
        state_dir=str(Path("state").absolute()),
    )


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"", "the launcher has gone before this node began"),
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of 542393671 bytes; the limit here is"),
        (encode(wire.Beat()) + encode(wire.Signal(number=15)), "the launcher says Signal where Begin is due"),
        (b"\x04\x00\x00\x00\xff\xff\xff\xff", "not a message of this edge"),
    ],
)
def test_a_host_understands_its_launcher_or_ends(said: bytes, words: str) -> None:
    code, out, errors = host(said)
    assert code in (1, 3)
    assert out == b""
    assert words in errors
    assert len(errors.splitlines()) == 1


def test_a_launcher_of_another_version() -> None:
    other = msgspec.to_builtins(begin()) | {"protocol": PROTOCOL + 1, "type": "Begin", "more": 1}
    code, _, errors = host(encode(other))
    assert code == 1
    assert f"speaks protocol {PROTOCOL + 1}, this end {PROTOCOL}" in errors


def test_a_launcher_that_goes_between_its_words() -> None:
    code, out, errors = host(encode(begin()))
    (here,) = Decoder[wire.FromHost](wire.FromHost, wire.HOST_LIMIT).feed(out)
    assert isinstance(here, wire.Here)
    assert here.port > 0
    assert (code, "the launcher has gone" in errors) == (3, True)
    assert not Path("state").exists()
