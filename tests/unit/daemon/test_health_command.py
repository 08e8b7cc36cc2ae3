"""`ckptctl health`: what it shows, and with which exit code it ends."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import click.testing
import pytest

from ckptless.daemon.ckptctl.main import ckptctl
from ckptless.daemon.protocol.codec import CONTROL_LIMIT, Decoder, encode
from ckptless.daemon.protocol.health import Action, HealthReport, ProbeState, VerdictRecord, WhatIsWell

PROBES = (
    ProbeState(name="disk", state="looks", looks=7, age_s=3.0, cost_s=0.0021),
    ProbeState(name="nvml", state="off", text="nvidia-ml-py is not installed"),
)


def verdict(action: Action = "evict", **more: Any) -> VerdictRecord:
    fields: dict[str, Any] = {
        "probe": "kernel-log",
        "code": "xid-79",
        "where": "GPU 0",
        "text": "the GPU has fallen off the bus",
        "count": 2,
        "first_s": 1.0,
        "last_s": 2.0,
        "begun_s": 1.0,
    }
    return VerdictRecord(action=action, **{**fields, **more})


def health(path: Path, answer: HealthReport, *words: str) -> click.testing.Result:
    """The command, beside a daemon that answers once with this."""
    heard: list[WhatIsWell] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            sock, _ = server.accept()
            decoder: Decoder[WhatIsWell] = Decoder(WhatIsWell, CONTROL_LIMIT)
            with sock:
                while not heard:
                    heard.extend(decoder.feed(sock.recv(4096)))
                sock.sendall(encode(answer))

        thread = threading.Thread(target=serve)
        thread.start()
        result = click.testing.CliRunner().invoke(ckptctl, ["health", "--socket", str(path), *words])
        thread.join(10)
    assert heard == [WhatIsWell(protocol=1)]
    return result


def report(*verdicts: VerdictRecord, act: Action | None = "evict") -> HealthReport:
    return HealthReport(node="n1", act=act, probes=PROBES, verdicts=verdicts)


def test_a_node_that_is_well(tmp_path: Path) -> None:
    result = health(tmp_path / "a", report())
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "n1 is well; at most done for a finding: evict\n\n"
        "probe  state  looks    ago   ms  why\n"
        "disk   looks      7  3.0 s  2.1\n"
        "nvml   off                       nvidia-ml-py is not installed\n"
    )


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ((), 0),
        ((verdict("note"),), 0),
        ((verdict("drain"),), 1),
        ((verdict("note"), verdict("move")), 1),
        ((verdict("evict", ended_s=3.0),), 0),
    ],
)
def test_exit_codes(tmp_path: Path, verdicts: tuple[VerdictRecord, ...], code: int) -> None:
    assert health(tmp_path / "a", report(*verdicts)).exit_code == 0
    result = health(tmp_path / "b", report(*verdicts), "--exit-code", "--json")
    assert result.exit_code == code
    assert json.loads(result.stdout)["well"] is (code == 0)


def test_what_is_shown_of_what_is_over(tmp_path: Path) -> None:
    stands, over = verdict(done="drained"), verdict(code="disk-full", where="/", ended_s=3.0)
    text = health(tmp_path / "a", report(stands, over)).stdout
    assert "n1 is not well" in text
    assert ("xid-79" in text, "disk-full" in text) == (True, False)
    assert "disk-full" in health(tmp_path / "b", report(stands, over), "--all").stdout


def test_a_daemon_that_looks_at_nothing(tmp_path: Path) -> None:
    result = health(tmp_path / "a", report(act=None))
    assert result.exit_code == 3
    assert result.stderr.endswith("is a local run's, which looks at no node's health\n")


def test_words_of_others_drive_no_terminal(tmp_path: Path) -> None:
    text = health(tmp_path / "a", report(verdict(evidence="\x1b[31mred\n"))).stdout
    assert "\x1b" not in text
    assert "\\x1b[31mred\\n" in text
