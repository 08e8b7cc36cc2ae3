"""`ckptctl evict`: whom it asks, what it says, and with which exit code it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import click.testing
import msgspec
import pytest

from ckptless.daemon.ckptctl.main import ckptctl
from ckptless.daemon.ckptctl.shared import ask as ask_module
from ckptless.daemon.ckptctl.shared import options as options_module
from ckptless.daemon.protocol.codec import CONTROL_LIMIT, Decoder, encode
from ckptless.daemon.protocol.errors import PeerError
from ckptless.daemon.protocol.messages import Denied
from ckptless.daemon.protocol.requests import Evict, Evicted
from ckptless.daemon.settings.config import LocalConfig, Peer
from ckptless.daemon.settings.site import load_settings

DONE = Evicted(verdict="accepted", text="n02 is taken out of job 7", node=2)
UNKNOWN = Evicted(verdict="unknown", text="no job '7' that uid 5 may touch runs here")
ELSEWHERE = Evicted(verdict="elsewhere", text="this node is out of the job itself", node=2)
REFUSED = Evicted(verdict="refused", text="n02 stays in job 7: its rank has no spare to go to", node=2)


class Daemon:
    """Answers every question with the same, and keeps the questions."""

    def __init__(self, path: Path, answer: bytes) -> None:
        self.path, self.answer = str(path), answer
        self.heard: list[Evict] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._socket.accept()
                decoder: Decoder[Evict] = Decoder(Evict, CONTROL_LIMIT)
                with sock:
                    heard = decoder.feed(sock.recv(4096))
                    self.heard += heard
                    if heard:
                        sock.sendall(self.answer)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder without a local run, and no settings: the node's own daemon listens in it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("CKPTLESS_STATE_DIR", raising=False)
    daemon = dataclasses.replace(load_settings().daemon, socket=str(tmp_path / "system.sock"))
    settings = dataclasses.replace(load_settings(), daemon=daemon)
    monkeypatch.setattr(ask_module, "load_settings", lambda: settings)
    return tmp_path


class Daemons:
    def __init__(self, home: Path) -> None:
        self._home = home
        self.up: list[Daemon] = []

    def system(self, answer: object) -> Daemon:
        return self._start(self._home / "system.sock", answer)

    def local(self, *answers: object, run: str = "latest") -> list[Daemon]:
        """Of a local run; None for one that is gone."""
        found: list[Daemon] = []
        for number, answer in enumerate(answers):
            folder = self._home / "ckptless" / run / f"node-{number}"
            folder.mkdir(parents=True)
            path = self._home / f"{run}-{number}.sock"
            peer = Peer(node=number, name=f"node-{number}", address="127.0.0.1", port=1)
            config = LocalConfig(
                node=number, state_dir=str(folder), socket=str(path), key_file="key", peers=(peer,)
            )
            (folder / "daemon.json").write_bytes(msgspec.json.encode(config))
            if answer is not None:
                found.append(self._start(path, answer))
        return found

    def _start(self, path: Path, answer: object) -> Daemon:
        daemon = Daemon(path, answer if isinstance(answer, bytes) else encode(answer))
        self.up.append(daemon)
        return daemon


@pytest.fixture
def daemons(home: Path) -> Iterator[Daemons]:
    made = Daemons(home)
    yield made
    for daemon in made.up:
        daemon.close()


def evict(*words: str, yes: bool = True) -> click.testing.Result:
    words = ("evict", "7", "n02", *words, *(["--yes"] if yes else []))
    return click.testing.CliRunner().invoke(ckptctl, words)


def test_the_nodes_own_daemon_is_asked(daemons: Daemons) -> None:
    daemon = daemons.system(DONE)
    done = evict("--reason", "ECC errors", "--source", "health", "--force")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "n02 is taken out of job 7\n", "")
    assert daemon.heard == [
        Evict(protocol=1, job="7", node="n02", source="health", reason="ECC errors", force=True)
    ]


def test_ranks_can_move_first(daemons: Daemons) -> None:
    daemon = daemons.system(DONE)
    assert evict("--planned").exit_code == 0
    assert daemon.heard == [Evict(protocol=1, job="7", node="n02", source="operator", planned=True)]
    done = evict("--planned", "--force")
    assert done.exit_code == 2
    assert "--planned waits for a place for its ranks, and --force does without" in done.stderr
    assert len(daemon.heard) == 1


def test_by_default_it_is_an_operators_word(daemons: Daemons) -> None:
    daemon = daemons.system(DONE)
    evict()
    assert daemon.heard == [Evict(protocol=1, job="7", node="n02", source="operator")]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (DONE, 0),
        (Evicted(verdict="already", text="n02 is out already: x", node=2), 0),
        (REFUSED, 1),
        (ELSEWHERE, 1),
        (UNKNOWN, 4),
    ],
)
def test_exit_codes_and_json(daemons: Daemons, answer: Evicted, code: int) -> None:
    daemon = daemons.system(answer)
    for words in ((), ("--json",)):
        done = evict(*words)
        assert done.exit_code == code
        assert done.stderr == (f"ckptctl: error: {answer.text}\n" if code else "")
    assert json.loads(done.stdout) == {
        "meta": {"schema": 1},
        "job": "7",
        "node": "n02",
        "socket": daemon.path,
        "evicted": msgspec.to_builtins(answer),
    }


def test_a_local_run_is_asked_first_and_until_one_can_say(daemons: Daemons) -> None:
    system = daemons.system(DONE)
    first, second, third = daemons.local(None, ELSEWHERE, REFUSED, DONE)
    assert evict().exit_code == 1
    assert [len(one.heard) for one in (first, second, third, system)] == [1, 1, 0, 0]


def test_an_old_local_run_is_not_in_the_way(daemons: Daemons) -> None:
    daemons.local(None, UNKNOWN)
    system = daemons.system(DONE)
    assert evict().exit_code == 0
    assert len(system.heard) == 1


def test_a_state_dir_that_was_given_is_the_only_place(daemons: Daemons, home: Path) -> None:
    system = daemons.system(DONE)
    daemons.local(UNKNOWN, ELSEWHERE, UNKNOWN, run="mine")
    done = evict("--state-dir", str(home / "ckptless" / "mine"))
    # The best of what they say: the job is known, though nobody could answer.
    assert (done.exit_code, done.stderr) == (1, f"ckptctl: error: {ELSEWHERE.text}\n")
    assert system.heard == []


def test_a_socket_that_was_given_is_the_only_one(daemons: Daemons, home: Path) -> None:
    daemons.local(DONE)
    done = evict("--socket", str(home / "none.sock"))
    assert done.exit_code == 3
    assert done.stderr.startswith(f"ckptctl: error: no ckptlessd answers at {home / 'none.sock'} (")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Denied(reason="what is that"), "refuses: what is that"),
        (b"", "hung up without an answer"),
        (b"\x05\0\0\0nope!", "is of another version"),
        (encode(DONE)[:-3], "hung up without an answer"),
    ],
)
def test_what_is_no_answer(daemons: Daemons, answer: object, says: str) -> None:
    daemons.system(answer)
    done = evict()
    assert done.exit_code == 3
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_daemon_that_hangs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    question = Evict(protocol=1, job="7", node="n", source="operator")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(home / "hangs.sock"))
        sock.listen()
        with pytest.raises(PeerError, match="did not answer in 0 s"):
            ask_module.ask(str(home / "hangs.sock"), question, Evicted, deadline_s=0.1)


def test_what_the_daemon_says_does_not_drive_the_terminal(daemons: Daemons) -> None:
    daemons.system(Evicted(verdict="accepted", text="\x1b[2Jx"))
    assert evict().stdout == "\\x1b[2Jx\n"


# ------------------------------------------------------------------------------------------ the question


def test_nobody_is_asked_without_a_terminal(daemons: Daemons) -> None:
    daemon = daemons.system(DONE)
    done = evict(yes=False)
    assert (done.exit_code, daemon.heard) == (2, [])
    assert "say --yes" in done.stderr


@pytest.mark.parametrize(("said", "code"), [("y\n", 0), ("n\n", 1), ("", 1)])
def test_at_a_terminal_it_asks(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch, said: str, code: int
) -> None:
    daemon = daemons.system(DONE)
    monkeypatch.setattr(options_module, "at_a_terminal", lambda: True)
    done = click.testing.CliRunner().invoke(ckptctl, ["evict", "7", "n02"], input=said)
    assert done.exit_code == code
    assert "Take n02 out of job 7?" in done.stderr
    assert len(daemon.heard) == (code == 0)


@pytest.mark.parametrize(
    "words",
    [
        ("--reason", "x" * 201),
        ("--reason", "a\nb"),
        ("--source", "slurm"),
        ("-j", "8"),
    ],
)
def test_usage(daemons: Daemons, words: tuple[str, ...]) -> None:
    daemon = daemons.system(DONE)
    assert evict(*words).exit_code == 2
    assert daemon.heard == []
    assert evict("-j", "7").exit_code == 0


def test_release_gives_it_back_and_asks_nobody(daemons: Daemons) -> None:
    """At no terminal, too: where the job needs the node it is refused."""
    daemon = daemons.system(DONE)
    done = click.testing.CliRunner().invoke(ckptctl, ["release", "7", "n02", "--reason", "fan"])
    assert (done.exit_code, done.stdout) == (0, "n02 is taken out of job 7\n")
    assert daemon.heard == [
        Evict(protocol=1, job="7", node="n02", source="operator", reason="fan", give_back=True, planned=True)
    ]
    assert click.testing.CliRunner().invoke(ckptctl, ["release", "7"]).exit_code == 2
