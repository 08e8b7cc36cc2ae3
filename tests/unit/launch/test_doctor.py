"""The doctor: what follows from what it has read, its exit codes, and that it asks without harm."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import asdict

from ckptless import nccl_settings
from ckptless.daemon.agent.nccl.wire import LAYOUTS
from ckptless.doctor import __main__ as program
from ckptless.doctor import preflight
from ckptless.doctor.collect import collect, of_number
from ckptless.doctor.facts import Daemon, Facts, Nccl, ProcessLimits, Torch
from ckptless.doctor.findings import Finding, find, layout_of, worst
from ckptless.torch_versions import parse, shown

SOUND: dict[str, Any] = {
    "torch": Torch((2, 13, 0), {}),
    "nccl": Nccl((2, 29, 7), "torch's"),
    "interfaces": (("lo", "127.0.0.1"), ("eth0", "192.0.2.2")),
    "ephemeral": (32768, 60999),
    "daemon": Daemon("/run/ckptless/ckptlessd.sock", 6821),
    "limits": ProcessLimits(files=65536, available_nbytes=1 << 34),
}


def about(facts: Facts, name: str) -> list[Finding]:
    return [finding for finding in find(facts) if finding.about == name]


def sick(facts: Facts) -> list[Finding]:
    return [finding for finding in find(facts) if finding.grade != "fine"]


def test_a_sound_machine() -> None:
    facts = Facts(**SOUND)
    assert sick(facts) == []
    assert worst(find(facts)) == "fine"
    (nccl,) = about(facts, "NCCL")
    assert nccl.text == (
        "NCCL 2.29.7 (torch's): its check-in has 176 bytes (NCCL 2.29 to 2.32); "
        "ids are computed, and agents are the roots"
    )


@pytest.mark.parametrize(
    ("version", "nbytes"),
    [("2.12", 64), ("2.22.3", 64), ("2.23.4", 172), ("2.28.9", 172), ("2.29.7", 176), ("2.32.3", 176)],
)
def test_the_layouts_are_those_that_agents_read(version: str, nbytes: int) -> None:
    assert layout_of(parse(version)) is LAYOUTS[nbytes]


def test_every_layout_says_its_versions_in_a_way_that_can_be_read() -> None:
    for layout in LAYOUTS.values():
        for text in layout.versions.split(" to "):
            assert layout_of(parse(text)) is layout, asdict(layout)


@pytest.mark.parametrize(
    ("torch", "nccl", "grade", "words"),
    [
        ((2, 13), (2, 29, 7), "fine", "ids are computed"),
        ((2, 8), (2, 23, 4), "fine", "ids are computed"),
        ((2, 14), (2, 29, 7), "fine", "ids are computed"),
        ((2, 15), (2, 29, 7), "limited", "new NCCL groups (nccl2)"),
        ((2, 6), (2, 23, 4), "limited", "torch 2.6 hands it one id only"),
        ((2, 8), (2, 21, 5), "limited", "it takes one id only"),
        ((2, 13), (2, 33, 1), "limited", "is not known yet"),
        ((2, 13), (2, 11, 4), "limited", "too old"),
    ],
)
def test_a_pair(torch: tuple[int, ...], nccl: tuple[int, ...], grade: str, words: str) -> None:
    (found,) = about(Facts(**{**SOUND, "torch": Torch(torch), "nccl": Nccl(nccl, "asked for")}), "NCCL")
    assert found.grade == grade
    assert words in found.text


def test_the_old_nccl_groups_of_a_new_torch() -> None:
    more = {"torch": Torch((2, 15)), "env": {"TORCH_DIST_USE_NCCL2": "0"}}
    (found,) = about(Facts(**{**SOUND, **more}), "NCCL")
    assert found.grade == "fine"


@pytest.mark.parametrize(
    ("more", "name", "grade", "words"),
    [
        ({"torch": None}, "torch", "broken", "not installed"),
        ({"torch": Torch((2, 7, 1))}, "torch", "limited", "too old"),
        ({"torch": Torch((2, 16))}, "torch", "limited", "newer"),
        ({"torch": Torch((2, 16), {}, "x")}, "recovery in place", "broken", "x"),
        (
            {"torch": Torch((2, 13), {}, "")},
            "recovery in place",
            "fine",
            "groups were made, left and renewed",
        ),
        ({"torch": Torch((2, 13), {"FSDP2": "x is gone"})}, "FSDP2", "limited", "x is gone"),
        ({"torch": Torch((2, 13), {"recovery in place": "x"})}, "recovery in place", "broken", "x"),
        ({"env": {"NCCL_COMM_ID": "a:1"}}, "environment", "limited", "NCCL_COMM_ID is set"),
        ({"env": {"TORCH_GLOO_LAZY_INIT": "0"}}, "environment", "limited", "TORCH_GLOO_LAZY_INIT is 0"),
        ({"env": {"TORCH_NCCL_BCAST_UNIQUEID": "0"}}, "environment", "broken", "leaves NCCL's ids unset"),
        ({"env": {"GLOO_SOCKET_IFNAME": "ib0"}}, "GLOO_SOCKET_IFNAME", "broken", "names ib0; here are"),
        ({"env": {"NCCL_SOCKET_IFNAME": "=eth"}}, "NCCL_SOCKET_IFNAME", "broken", "names eth"),
        ({"ephemeral": (1024, 65535)}, "ports", "limited", "port 6821 lies within"),
        ({"guard": "none"}, "store", "limited", "takes any process"),
        ({"limits": ProcessLimits(memfd="Operation not permitted")}, "memory", "broken", "no memfd"),
        ({"limits": ProcessLimits(address_space_nbytes=1 << 30)}, "memory", "limited", "RLIMIT_AS is 1 GiB"),
        ({"limits": ProcessLimits(files=1024)}, "files", "limited", "RLIMIT_NOFILE is 1024"),
        ({"slurm": True}, "Slurm", "broken", "no srun"),
        ({"slurm": True, "daemon": Daemon("/x", 6821, "refused")}, "ckptlessd", "broken", "does not answer"),
        ({"settings_error": "line 3: no"}, "settings", "broken", "line 3"),
    ],
)
def test_what_is_wrong_is_said(more: Mapping[str, Any], name: str, grade: str, words: str) -> None:
    facts = Facts(**{**SOUND, **more})
    found = [one for one in about(facts, name) if one.grade == grade]
    assert found, find(facts)
    assert words in found[0].text
    assert worst(find(facts)) in (grade, "broken")


@pytest.mark.parametrize("text", ["eth", "=eth0", "^docker", "lo,eth0"])
def test_names_that_nccl_takes(text: str) -> None:
    assert sick(Facts(**{**SOUND, "env": {"NCCL_SOCKET_IFNAME": text}})) == []


def test_versions() -> None:
    assert parse("2.13.0+cpu") == (2, 13, 0)
    assert parse("2.9.0a0") == (2, 9, 0)
    assert shown(parse("2.8")) == "2.8"
    for text in ("", "x", "+cpu"):
        with pytest.raises(ValueError, match="is no version"):
            parse(text)
    assert [of_number(n) for n in (22907, 21805, 2708)] == [(2, 29, 7), (2, 18, 5), (2, 7, 8)]


def test_this_machine_can_be_asked_and_the_exit_code_is_the_worst() -> None:
    done = CliRunner().invoke(program.command, ["--torch", "2.6.0", "--nccl", "2.21.5", "--json"])
    told = json.loads(done.stdout)
    assert told["version"] == 1
    assert done.exit_code == {"fine": 0, "limited": 1, "broken": 2}[told["grade"]]
    assert told["grade"] != "fine"
    assert {"torch", "NCCL", "store"} <= {one["about"] for one in told["findings"]}
    wrong = CliRunner().invoke(program.command, ["--torch", "new"])
    assert wrong.exit_code == 2
    assert "is no version" in wrong.stderr
    # What is asked about is not mixed with what is here.
    assert collect({}, (2, 6)).nccl is None


def test_what_ckptless_run_tells_nccl_is_shown_with_its_reason() -> None:
    found = {one.name: about(Facts(**SOUND), one.name) for one in nccl_settings.SETTINGS}
    for one in nccl_settings.SETTINGS:
        (finding,) = found[one.name]
        assert finding.text.startswith(f"ckptless.run sets {one.value}: ")
    assert about(Facts(), "NCCL_NVLS_ENABLE") == []


@pytest.mark.parametrize("setting", nccl_settings.SETTINGS, ids=lambda setting: setting.name)
def test_a_value_of_the_user_s_is_kept_where_survivors_survive_with_it(
    setting: nccl_settings.Setting,
) -> None:
    wanted, replaced = nccl_settings.settle({setting.name: "3", "HOME": "/"})
    assert replaced == [setting] * setting.fixed
    assert (setting.name in wanted) is setting.fixed
    assert len(wanted) == len(nccl_settings.SETTINGS) - (not setting.fixed)
    assert "HOME" not in wanted
    (finding,) = about(Facts(**SOUND, env={setting.name: "3"}), setting.name)
    assert finding.grade == ("limited" if setting.fixed else "fine")
    assert ("it is 3, and ckptless.run sets 0" if setting.fixed else "3 is kept") in finding.text


def test_the_user_s_own_value_may_be_ours() -> None:
    same = {setting.name: setting.value for setting in nccl_settings.SETTINGS}
    assert nccl_settings.settle(same)[1] == []


@pytest.mark.parametrize(
    ("version", "broken"), [((2, 28, 2), False), ((2, 28, 3), True), ((2, 28, 8), True), ((2, 28, 9), False)]
)
def test_releases_of_nccl_that_crash_in_an_abort_are_named(version: tuple[int, ...], broken: bool) -> None:
    findings = about(Facts(**{**SOUND, "nccl": Nccl(version, "torch's")}), "NCCL abort")
    assert [one.grade for one in findings] == ["broken"] * broken
    assert all("install another one" in one.text for one in findings)


# ------------------------------------------------------------------------------------------ a node is tried


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a node that has little of everything."""
    for name in ("MEMORY_NBYTES", "DISK_NBYTES", "NETWORK_NBYTES"):
        monkeypatch.setattr(preflight, name, 2 << 20)


def tried(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = CliRunner().invoke(program.command, ["--node", "--json", *arguments])
    found = json.loads(result.stdout)["findings"]
    return result.exit_code, {one["about"]: one for one in found}


@pytest.mark.usefixtures("small")
def test_a_sound_node(tmp_path: Path) -> None:
    code, found = tried("--folder", str(tmp_path))
    assert code == 0, found
    assert [*found] == ["memory", "network", f"disk {tmp_path}", "processor"]
    assert found["memory"]["text"].startswith("4 MiB, ")
    assert "is right" in found["processor"]["text"]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("memory", "MiB 0 of 2 did not keep"),
        ("disk", "MiB 0 of a file was not read"),
        ("network", "is not what came"),
    ],
)
def test_what_is_not_kept_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    """Each time that a pattern is asked for it is another one."""
    numbers = iter(range(1 << 20))
    right = preflight._pattern
    monkeypatch.setattr(preflight, "_pattern", lambda _number: right(next(numbers)))
    code, found = tried("--folder", str(tmp_path))
    assert code == 2
    (one,) = [one for about, one in found.items() if about.startswith(name)]
    assert one["grade"] == "broken"
    assert says in one["text"]


@pytest.mark.usefixtures("small")
def test_a_product_that_is_not_what_it_is_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "PRODUCT", "0" * 16)
    code, found = tried("--folder", str(tmp_path))
    assert (code, found["processor"]["grade"]) == (2, "broken")
    monkeypatch.setitem(sys.modules, "torch", None)
    code, found = tried("--folder", str(tmp_path))
    assert (code, found["processor"]["grade"]) == (1, "limited")


@pytest.mark.usefixtures("small")
def test_what_hangs_or_cannot_be_written_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hangs() -> str:
        # no deadline: the test's own, which sets it
        over.wait()
        return ""

    def has_none() -> str:
        raise MemoryError

    def is_read_only(**_named: Any) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(preflight, "network", hangs)
    monkeypatch.setattr(preflight, "memory", has_none)
    monkeypatch.setattr(tempfile, "TemporaryFile", is_read_only)
    try:
        code, found = tried("--folder", str(tmp_path), "--time-limit", "20")
    finally:
        over.set()
    assert code == 2
    texts = {about: one["text"] for about, one in found.items() if one["grade"] == "broken"}
    assert texts == {
        "memory": "MemoryError",
        "network": "no answer in 20 s",
        f"disk {tmp_path}": "[Errno 30] Read-only file system",
    }


@pytest.mark.usefixtures("small")
def test_a_driver_that_cannot_say_which_devices_there_are_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> int:
        raise RuntimeError("no CUDA-capable device is detected")

    monkeypatch.setattr(torch.cuda, "device_count", fails)
    code, found = tried("--folder", str(tmp_path))
    assert (code, found["devices"]["text"]) == (2, "no CUDA-capable device is detected")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "devices" not in tried("--folder", str(tmp_path))[1]


def test_a_folder_that_is_not_there_is_a_mistake() -> None:
    assert CliRunner().invoke(program.command, ["--node", "--folder", "/no/such"]).exit_code == 2
