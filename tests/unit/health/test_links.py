"""Network links, by made-up trees of sysfs in the kernel's formats."""

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from ckptless.daemon.ckptlessd.health.links import MOST_ERRORS, LinkProbe
from ckptless.daemon.ckptlessd.health.probe import Finding, Probe

ERRORS = ("symbol_error", "link_error_recovery", "local_link_integrity_errors", "port_rcv_errors")
IB, ETHERNET = "mlx5_0 port 1", "ens1f0"


class Tree:
    """What is in /sys/class, of one node."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: Path, **texts: object) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            if text is not None:
                (path / name).write_text(f"{text}\n")

    def infiniband(
        self,
        *,
        device: str = "mlx5_0",
        port: int = 1,
        state: str = "4: ACTIVE",
        rate: str = "400 Gb/sec (4X NDR)",
        downs: int | None = 0,
        errors: Mapping[str, int] | None = None,
    ) -> None:
        phys = "5: LinkUp" if state[0] == "4" else "2: Polling"
        path = self.root / f"class/infiniband/{device}/ports/{port}"
        self.write(path, state=state, phys_state=phys, rate=rate, link_layer="InfiniBand")
        self.write(path / "counters", link_downed=downs, **(dict.fromkeys(ERRORS, 0) | dict(errors or {})))

    def ethernet(
        self,
        *,
        name: str = ETHERNET,
        state: str = "up",
        speed: int | None = 100000,
        downs: int | None = 1,
        crc: int = 0,
        bus: str = "pci",
    ) -> None:
        link = self.root / f"class/net/{name}"
        self.write(link, operstate=state, speed=speed, carrier_down_count=downs, type=1)
        self.write(link / "statistics", rx_crc_errors=crc)
        if bus:
            (self.root / "bus" / bus).mkdir(parents=True, exist_ok=True)
            (link / "device").mkdir(exist_ok=True)
            if not (link / "device/subsystem").is_symlink():
                (link / "device/subsystem").symlink_to(self.root / "bus" / bus)

    def probe(self) -> LinkProbe:
        return LinkProbe(self.root)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = Tree(tmp_path)
    made.ethernet(name="lo", state="unknown", speed=None, bus="")
    return made


def finding(code: str, where: str, evidence: str) -> Finding:
    return Finding(code=code, where=where, evidence=evidence)


def test_it_is_a_probe(tree: Tree) -> None:
    probe: Probe = tree.probe()
    assert (probe.interval_s, probe.deadline_s) == (15.0, 10.0)
    probe.close()


def test_links_that_are_well(tree: Tree) -> None:
    tree.infiniband()
    tree.infiniband(device="mlx5_1", rate="200 Gb/sec (4X HDR)")
    tree.ethernet()
    probe = tree.probe()
    assert probe.missing() == ""
    assert [probe.look(), probe.look()] == [[], []]


def test_a_node_without_a_link_is_missing(tree: Tree, tmp_path: Path) -> None:
    words = "there is no network port but virtual ones"
    assert tree.probe().missing() == words  # only lo
    assert LinkProbe(tmp_path / "no-sysfs").missing() == words
    assert LinkProbe(tmp_path / "no-sysfs").look() == []
    tree.ethernet()
    assert tree.probe().missing() == ""
    shutil.rmtree(tree.root / "class/net")
    tree.infiniband()
    assert tree.probe().missing() == ""


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT", "3: ARMED", "5: ACTIVE_DEFER", ""])
def test_an_infiniband_port_that_was_up(tree: Tree, state: str) -> None:
    tree.infiniband()
    probe = tree.probe()
    assert probe.look() == []
    tree.infiniband(state=state or " ", rate="10 Gb/sec (4X SDR)")
    found = [finding("link-down", IB, f"its state is {state}, 2: Polling")]
    assert [probe.look(), probe.look()] == [found, found]
    tree.infiniband()
    assert probe.look() == []


@pytest.mark.parametrize("state", ["down", "lowerlayerdown", "dormant", "notpresent", "testing"])
def test_an_ethernet_link_that_was_up(tree: Tree, state: str) -> None:
    tree.ethernet()
    probe = tree.probe()
    assert probe.look() == []
    tree.ethernet(state=state, speed=-1)
    found = [finding("link-down", ETHERNET, f"its state is {state}")]
    assert [probe.look(), probe.look()] == [found, found]
    tree.ethernet()
    assert probe.look() == []


def test_a_link_that_was_never_up_is_not_used(tree: Tree) -> None:
    tree.infiniband(state="1: DOWN", rate="10 Gb/sec (4X SDR)")
    tree.ethernet(state="down", speed=-1)
    probe = tree.probe()
    assert [probe.look(), probe.look()] == [[], []]
    shutil.rmtree(tree.root / "class/infiniband/mlx5_0")
    assert probe.look() == []


@pytest.mark.parametrize("bus", ["", "usb"])
def test_what_is_no_link_of_a_job(tree: Tree, bus: str) -> None:
    """Bridges and tunnels have no device, and the adapter of the BMC is one of USB."""
    tree.ethernet(name="other", bus=bus)
    probe = tree.probe()
    assert probe.missing() != ""
    assert probe.look() == []
    tree.ethernet(name="other", state="down", bus=bus, downs=9, crc=9999)
    assert probe.look() == []


def test_a_link_that_became_slower(tree: Tree) -> None:
    tree.infiniband()
    tree.ethernet()
    probe = tree.probe()
    assert probe.look() == []
    tree.infiniband(rate="100 Gb/sec (1X NDR)")
    tree.ethernet(speed=25000)
    found = [
        finding("link-slow", IB, "100 Gb/s, and was 400 Gb/s"),
        finding("link-slow", ETHERNET, "25 Gb/s, and was 100 Gb/s"),
    ]
    assert [probe.look(), probe.look()] == [found, found]
    tree.infiniband(rate="2.5 Gb/sec (1X SDR)")
    tree.ethernet(speed=-1)  # not known
    assert probe.look() == [finding("link-slow", IB, "2.5 Gb/s, and was 400 Gb/s")]
    tree.infiniband()
    assert probe.look() == []


def test_the_rate_of_a_link_that_is_down_is_not_what_it_was(tree: Tree) -> None:
    tree.infiniband(state="1: DOWN", rate="800 Gb/sec (8X NDR)")
    probe = tree.probe()
    probe.look()
    tree.infiniband()
    assert probe.look() == []
    tree.infiniband(state="2: INIT", rate="10 Gb/sec (4X SDR)")
    assert [one.code for one in probe.look()] == ["link-down"]


def test_a_link_that_went_down_and_came_back(tree: Tree) -> None:
    tree.infiniband(downs=3)
    tree.ethernet(downs=7)
    probe = tree.probe()
    assert probe.look() == []  # since the boot
    tree.infiniband(downs=4)
    tree.ethernet(downs=9)
    assert probe.look() == [
        finding("link-flap", IB, "down 4 times since the boot, 1 since the last look"),
        finding("link-flap", ETHERNET, "down 9 times since the boot, 2 since the last look"),
    ]
    assert probe.look() == []
    tree.infiniband(downs=0)  # somebody has reset the counters
    assert probe.look() == []
    tree.infiniband(downs=1)
    assert [one.code for one in probe.look()] == ["link-flap"]


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_a_port(tree: Tree, name: str) -> None:
    tree.infiniband(errors={name: 5000})
    probe = tree.probe()
    assert probe.look() == []
    tree.infiniband(errors={name: 5000 + MOST_ERRORS})
    assert probe.look() == []
    tree.infiniband(errors={name: 5001 + 2 * MOST_ERRORS})
    assert probe.look() == [finding("link-errors", IB, f"{name} +{MOST_ERRORS + 1}")]
    assert probe.look() == []
    tree.infiniband(errors={name: 0})
    assert probe.look() == []


def test_errors_of_many_kinds_are_one_finding(tree: Tree) -> None:
    tree.infiniband()
    probe = tree.probe()
    probe.look()
    tree.infiniband(errors={"symbol_error": 101, "port_rcv_errors": 65535, "link_error_recovery": 100})
    assert probe.look() == [finding("link-errors", IB, "symbol_error +101, port_rcv_errors +65535")]


def test_errors_of_an_ethernet_link(tree: Tree) -> None:
    tree.ethernet(crc=12)
    probe = tree.probe()
    assert probe.look() == []
    tree.ethernet(crc=13 + MOST_ERRORS)
    assert probe.look() == [finding("link-errors", ETHERNET, "rx_crc_errors +101")]


def test_a_port_that_vanishes(tree: Tree) -> None:
    tree.infiniband()
    tree.infiniband(port=2, state="1: DOWN")
    tree.ethernet()
    probe = tree.probe()
    assert probe.look() == []
    shutil.rmtree(tree.root / "class/infiniband")
    shutil.rmtree(tree.root / f"class/net/{ETHERNET}")
    found = [finding("link-down", where, "the port is not there any more") for where in (IB, ETHERNET)]
    assert [probe.look(), probe.look()] == [found, found]
    tree.infiniband()
    tree.ethernet()
    assert probe.look() == []


def test_a_port_without_counters(tree: Tree) -> None:
    tree.infiniband(downs=None)
    shutil.rmtree(tree.root / "class/infiniband/mlx5_0/ports/1/counters")
    tree.ethernet(downs=None, speed=None)
    shutil.rmtree(tree.root / f"class/net/{ETHERNET}/statistics")
    probe = tree.probe()
    assert [probe.look(), probe.look()] == [[], []]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT])
def test_a_link_that_is_down_has_no_speed(tree: Tree, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    tree.ethernet()
    probe = tree.probe()
    assert probe.look() == []
    read = Path.read_text

    def fail(path: Path) -> str:
        if path.name == "speed":
            raise OSError(number, os.strerror(number))
        return read(path)

    monkeypatch.setattr(Path, "read_text", fail)
    tree.ethernet(state="down", speed=None)
    assert [one.code for one in probe.look()] == ["link-down"]
    monkeypatch.undo()
    tree.ethernet(speed=100000)
    assert probe.look() == []


def test_another_error_is_told(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    tree.ethernet()
    monkeypatch.setattr(Path, "read_text", fail)
    with pytest.raises(OSError, match="Input/output error"):
        tree.probe().look()


def test_this_machine_can_be_looked_at() -> None:
    probe = LinkProbe()
    assert probe.missing() in ("", "there is no network port but virtual ones")
    assert probe.look() == []
