"""`ckptctl drill`: what it asks, what it says, and with which exit code it ends."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import click.testing
import msgspec
import pytest

from ckptless.daemon.ckptctl.main import ckptctl
from ckptless.daemon.ckptctl.shared import options as options_module
from ckptless.daemon.protocol.codec import CONTROL_LIMIT, Decoder, encode
from ckptless.daemon.protocol.requests import Drilled, DrillJob

DONE = Drilled(verdict="accepted", text="a drill of job 7: rank 3's process is killed, now")
KILL = ("--kill-rank", "3")


def ask(path: Path, answer: Drilled, *words: str, **more: Any) -> tuple[click.testing.Result, list[DrillJob]]:
    """The command, beside a daemon that answers once with this, if it is asked."""
    heard: list[DrillJob] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            sock, _ = server.accept()
            decoder: Decoder[DrillJob] = Decoder(DrillJob, CONTROL_LIMIT)
            with sock:
                while not heard and (data := sock.recv(4096)):
                    heard.extend(decoder.feed(data))
                if heard:
                    sock.sendall(encode(answer))

        thread = threading.Thread(target=serve)
        thread.start()
        words = ("drill", "7", "--socket", str(path), *words)
        result = click.testing.CliRunner().invoke(ckptctl, words, **more)
        # Who has asked nobody is to leave no thread behind.
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        thread.join(10)
        assert not thread.is_alive()
    return result, heard


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (KILL, {"kind": "kill-rank", "target": "3"}),
        (("--kill-rank", "0"), {"kind": "kill-rank", "target": "0"}),
        (("--pause", "0", "--for", "2.5"), {"kind": "pause-rank", "target": "0", "for_s": 2.5}),
        (("--kill-agent", "n02"), {"kind": "kill-agent", "target": "n02"}),
        (("--cut", "n02", "--for", "30"), {"kind": "cut-node", "target": "n02", "for_s": 30.0}),
        (
            (*KILL, "--when", "step=2000", "--deadline", "30", "--force"),
            {"kind": "kill-rank", "target": "3", "step": 2000, "deadline_s": 30.0, "force": True},
        ),
    ],
)
def test_what_is_asked(tmp_path: Path, words: tuple[str, ...], fields: dict[str, Any]) -> None:
    result, heard = ask(tmp_path / "a", DONE, "--yes", *words)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{DONE.text}\n", "")
    assert heard == [DrillJob(protocol=1, job="7", **fields)]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (DONE, 0),
        (Drilled(verdict="refused", text="no drill of job 7: there is no rank 3, only 0 to 2"), 1),
        (Drilled(verdict="elsewhere", text="this node is out of the job itself"), 1),
        (Drilled(verdict="unknown", text="no job '7' that uid 5 may touch runs here"), 4),
    ],
)
def test_exit_codes_and_json(tmp_path: Path, answer: Drilled, code: int) -> None:
    for name, words in (("a", ()), ("b", ("--json",))):
        done, _ = ask(tmp_path / name, answer, "--yes", *KILL, *words)
        assert done.exit_code == code
        assert done.stderr == (f"ckptctl: error: {answer.text}\n" if code else "")
    assert json.loads(done.stdout) == {
        "meta": {"schema": 1},
        "job": "7",
        "kind": "kill-rank",
        "target": "3",
        "socket": str(tmp_path / "b"),
        "drilled": msgspec.to_builtins(answer),
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "say one of --kill-rank, --pause, --kill-agent and --cut"),
        ((*KILL, "--kill-agent", "n02"), "say one of --kill-rank, --pause, --kill-agent and --cut"),
        (("--pause", "0"), "--pause and --cut need --for SECONDS"),
        (("--cut", "n02"), "--pause and --cut need --for SECONDS"),
        ((*KILL, "--for", "2"), "--pause and --cut need --for SECONDS, and nothing else takes it"),
        (("--pause", "0", "--for", "0"), "--for"),
        (("--pause", "0", "--for", "3601"), "--for"),
        (("--pause", "0", "--for", "nan"), "--for"),
        (("--kill-rank", "-1"), "--kill-rank"),
        (("--kill-rank", "any"), "--kill-rank"),
        (("--kill-rank", "262144"), "--kill-rank"),
        (("--kill-agent", ""), "NODE is a name: give it"),
        (("--kill-agent", "a\nb"), "NODE is a name: give it"),
        ((*KILL, "--deadline", "0"), "--deadline"),
        *(
            ((*KILL, "--when", text), f"--when is '{text}': it must be step=N, as step=2000")
            for text in (
                "2000",
                "step=",
                "step=-1",
                "step=1.5",
                "step=٤",
                "step=1 ",
                "loss=1",
                "step=" + "9" * 19,
            )
        ),
    ],
)
def test_usage(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    done, heard = ask(tmp_path / "a", DONE, "--yes", *words)
    assert (done.exit_code, heard) == (2, [])
    assert says in done.stderr


def test_nobody_is_asked_without_a_terminal(tmp_path: Path) -> None:
    done, heard = ask(tmp_path / "a", DONE, *KILL)
    assert (done.exit_code, heard) == (2, [])
    assert "say --yes" in done.stderr


@pytest.mark.parametrize(("said", "code"), [("y\n", 0), ("n\n", 1), ("", 1)])
def test_at_a_terminal_it_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, code: int) -> None:
    monkeypatch.setattr(options_module, "at_a_terminal", lambda: True)
    done, heard = ask(tmp_path / "a", DONE, *KILL, input=said)
    assert done.exit_code == code
    assert "Have this happen to job 7: kill-rank 3?" in done.stderr
    assert len(heard) == (code == 0)
