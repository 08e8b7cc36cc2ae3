"""`ckptctl resize`: what it asks, what it says, and with which exit code it ends."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import click.testing
import msgspec
import pytest

from ckptless.daemon.ckptctl.main import ckptctl
from ckptless.daemon.protocol.codec import CONTROL_LIMIT, Decoder, encode
from ckptless.daemon.protocol.requests import Resized, ResizeJob

DONE = Resized(verdict="accepted", text="job 7 is to train on 4 nodes from now on")


def ask(path: Path, answer: Resized, *words: str) -> tuple[click.testing.Result, ResizeJob]:
    """The command, beside a daemon that answers once with this."""
    heard: list[ResizeJob] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            sock, _ = server.accept()
            decoder: Decoder[ResizeJob] = Decoder(ResizeJob, CONTROL_LIMIT)
            with sock:
                while not heard:
                    heard.extend(decoder.feed(sock.recv(4096)))
                sock.sendall(encode(answer))

        thread = threading.Thread(target=serve)
        thread.start()
        result = click.testing.CliRunner().invoke(ckptctl, ["resize", "7", "--socket", str(path), *words])
        thread.join(10)
    return result, heard[0]


@pytest.mark.parametrize(("text", "nodes"), [("4", 4), ("65536", 65536), ("max", None)])
def test_how_many_nodes_are_to_train(tmp_path: Path, text: str, nodes: int | None) -> None:
    result, asked = ask(tmp_path / "a", DONE, "--nodes", text)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{DONE.text}\n", "")
    assert asked == ResizeJob(protocol=1, job="7", nodes=nodes)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (DONE, 0),
        (Resized(verdict="already", text="job 7 is wanted to train on 4 nodes already"), 0),
        (Resized(verdict="refused", text="job 7 stays as large as it is: it is not elastic"), 1),
        (Resized(verdict="elsewhere", text="this node is out of the job itself"), 1),
        (Resized(verdict="unknown", text="no job '7' that uid 5 may touch runs here"), 4),
    ],
)
def test_exit_codes_and_json(tmp_path: Path, answer: Resized, code: int) -> None:
    for name, words in (("a", ()), ("b", ("--json",))):
        done, _ = ask(tmp_path / name, answer, "--nodes", "4", *words)
        assert done.exit_code == code
        assert done.stderr == (f"ckptctl: error: {answer.text}\n" if code else "")
    assert json.loads(done.stdout) == {
        "meta": {"schema": 1},
        "job": "7",
        "nodes": 4,
        "socket": str(tmp_path / "b"),
        "resized": msgspec.to_builtins(answer),
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("resize", "7"), "--nodes"),
        (("resize", "--nodes", "4"), "JOB"),
        *(
            (
                ("resize", "7", "--nodes", text),
                f"--nodes is '{text}': it must be a number from 1 to 65536, or",
            )
            for text in ("0", "-1", "65537", "all", "4.0", "", "MAX", "٤")
        ),
    ],
)
def test_usage(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    done = click.testing.CliRunner().invoke(ckptctl, [*words, "--socket", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert says in done.stderr


def test_without_a_daemon(tmp_path: Path) -> None:
    words = ["resize", "7", "--nodes", "max", "--socket", str(tmp_path / "none")]
    done = click.testing.CliRunner().invoke(ckptctl, words)
    assert done.exit_code == 3
    assert done.stderr.startswith("ckptctl: error: no ckptlessd answers at ")
