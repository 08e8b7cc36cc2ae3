"""`ckptctl save`: what it asks, what it says, and with which exit code it ends."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import click.testing
import pytest

from ckptless.daemon.ckptctl.main import ckptctl
from ckptless.daemon.protocol.codec import CONTROL_LIMIT, Decoder, encode
from ckptless.daemon.protocol.saving import Save, Saved, SaveVerdict


def ask(path: Path, answer: Saved | None, *words: str) -> tuple[click.testing.Result, Save | None]:
    """The command, beside a daemon that answers once with this, or hangs up."""
    heard: list[Save] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            sock, _ = server.accept()
            decoder: Decoder[Save] = Decoder(Save, CONTROL_LIMIT)
            with sock:
                while not heard:
                    heard.extend(decoder.feed(sock.recv(4096)))
                if answer is not None:
                    sock.sendall(encode(answer))

        thread = threading.Thread(target=serve)
        thread.start()
        command = ["save", "4711", "--socket", str(path), *words]
        result = click.testing.CliRunner().invoke(ckptctl, command)
        thread.join(10)
    return result, heard[0] if heard else None


def test_it_says_which_step_and_where(tmp_path: Path) -> None:
    done = Saved(verdict="saved", text="step 7 is saved in /d/step-00000007", step=7, path="/d/step-00000007")
    result, asked = ask(tmp_path / "a", done, "--deadline", "60")
    assert result.exit_code == 0
    assert result.stdout == "step 7 is saved in /d/step-00000007\n"
    assert asked is not None
    assert (asked.job, asked.deadline_s) == ("4711", 60.0)
    result, _ = ask(tmp_path / "b", done, "--json")
    found = json.loads(result.stdout)
    assert found["meta"] == {"schema": 1}
    assert found["job"] == "4711"
    assert (found["saved"]["step"], found["saved"]["path"]) == (7, "/d/step-00000007")


@pytest.mark.parametrize(
    ("verdict", "code"), [("failed", 1), ("refused", 1), ("elsewhere", 1), ("unknown", 4)]
)
def test_what_was_not_saved_is_told(tmp_path: Path, verdict: SaveVerdict, code: int) -> None:
    result, _ = ask(tmp_path / "socket", Saved(verdict=verdict, text="not\x1b[31m today"))
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.startswith("ckptctl: error: not")
    assert "\x1b" not in result.stderr
    result, _ = ask(tmp_path / "json", Saved(verdict=verdict, text="not today"), "--json")
    assert result.exit_code == code
    assert json.loads(result.stdout)["saved"]["verdict"] == verdict


def test_without_a_daemon(tmp_path: Path) -> None:
    result, _ = ask(tmp_path / "socket", None)
    assert result.exit_code == 3
    assert "hung up without an answer" in result.stderr
    words = ["save", "4711", "--socket", str(tmp_path / "nobody")]
    result = click.testing.CliRunner().invoke(ckptctl, words)
    assert result.exit_code == 3
    result = click.testing.CliRunner().invoke(ckptctl, [*words, "--deadline", "0"])
    assert result.exit_code == 2
