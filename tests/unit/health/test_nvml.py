"""The probe of the GPUs, under the real nvidia-ml-py, over a libnvidia-ml.so.1 of our own (fake_nvml.c)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckptless.daemon.ckptlessd.health.meanings import TABLE
from ckptless.daemon.ckptlessd.health.nvml import MOST_XIDS, NvmlProbe
from ckptless.daemon.ckptlessd.health.probe import Finding, Probe

pytest.importorskip("pynvml")

SOURCE = Path(__file__).with_name("fake_nvml.c")
DEADLINE_S = 60
FIRST, SECOND = "GPU 0 (0000:4E:00.0)", "GPU 1 (0000:4F:00.0)"
NOT_SUPPORTED, FUNCTION_NOT_FOUND, GPU_IS_LOST, DEPRECATED, UNKNOWN = 3, 13, 15, 26, 999
NO_PERMISSION = 4
RESET_REQUIRED = 16
QUERIES = [
    "register",
    "links",
    "ecc",
    "ecc.ever",
    "sram",
    "remap",
    "counter.0",
    "counter.1",
    "counter.2",
    "throttle",
]
QUERIES += ["temperature", "threshold", "utilisation", "pcie.width", "pcie.generation", "process"]

# One look at each world. Only a process of its own loads the library that LD_LIBRARY_PATH names.
DRIVER = """
import json, os, pathlib, sys
from ckptless.daemon.ckptlessd.health.nvml import NvmlProbe

task = json.load(sys.stdin)
world = pathlib.Path(os.environ["FAKE_NVML"])
world.write_text(task["worlds"][0])
if task["hidden"]:
    sys.modules["pynvml"] = None
probe = NvmlProbe(lambda: task["jobs"])
missing = probe.missing()
looks = []
for text in [] if missing else task["worlds"]:
    world.write_text(text)
    try:
        looks.append([[one.code, one.where, one.evidence] for one in probe.look()])
    except Exception as error:
        looks.append([type(error).__module__, type(error).__name__, getattr(error, "value", None)])
probe.close()
json.dump({"missing": missing, "looks": looks}, sys.stdout)
"""


class Played(NamedTuple):
    missing: str
    looks: list[Any]
    log: list[str]


class Stage:
    """Shows worlds to a probe."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._library, self._world = library, folder / "world"

    def play(self, *worlds: str, jobs: bool = True, hidden: bool = False, count: int = 2) -> Played:
        """Each world is lines parted by ";", as of fake_nvml.c."""
        texts = [f"count {count}\n" + "\n".join(world.split(";")) for world in worlds]
        result = subprocess.run(
            [sys.executable, "-c", DRIVER],
            input=json.dumps({"worlds": texts, "jobs": jobs, "hidden": hidden}),
            env=os.environ | {"LD_LIBRARY_PATH": str(self._library.parent), "FAKE_NVML": str(self._world)},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert result.returncode == 0, result.stderr
        log = Path(f"{self._world}.log")
        said = json.loads(result.stdout)
        return Played(said["missing"], said["looks"], log.read_text().splitlines() if log.exists() else [])

    def looks(self, *worlds: str, jobs: bool = True, count: int = 2) -> list[list[Finding]]:
        """What is found in each world; none may raise."""
        played = self.play(*worlds, jobs=jobs, count=count)
        assert not played.missing
        assert len(played.looks) == len(worlds)
        return [
            [Finding(code=code, where=where, evidence=evidence) for code, where, evidence in look]
            for look in played.looks
        ]


def compiled(folder: Path, *options: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = folder / "libnvidia-ml.so.1"
    command = [compiler, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *options]
    command += ["-o", str(library), str(SOURCE)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.returncode == 0, result.stderr
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("old_nvml"), "-DOLD_DRIVER")


@pytest.fixture
def stage(library: Path, tmp_path: Path) -> Stage:
    return Stage(library, tmp_path)


@pytest.fixture
def old_stage(old_library: Path, tmp_path: Path) -> Stage:
    return Stage(old_library, tmp_path)


def test_it_is_a_probe() -> None:
    probe: Probe = NvmlProbe(lambda: False)
    assert (probe.interval_s, probe.deadline_s) == (30.0, 30.0)


def test_nothing_is_found_on_a_node_that_is_well(stage: Stage) -> None:
    played = stage.play("", "", "", count=8)
    assert played.missing == ""
    assert played.looks == [[], [], []]


# world before, world in which it shows, code, where, evidence
SHOWN = [
    ("", "1.xid 79", "xid-79", SECOND, "NVML reports Xid 79"),
    ("1.ecc 2", "1.ecc 5", "gpu-ecc-uncorrected", SECOND, "5 uncorrected ECC errors, 2 in the last look"),
    (
        "",
        "0.sram.exceeded 1",
        "gpu-sram-failed",
        FIRST,
        "NVIDIA's threshold is exceeded: 5 uncorrected errors in its life",
    ),
    (
        "",
        "0.remap.pending 1",
        "gpu-remap-pending",
        FIRST,
        "pending; rows remapped for corrected errors: 2, for uncorrected ones: 3",
    ),
    (
        "",
        "0.remap.failed 1",
        "gpu-remap-failed",
        FIRST,
        "failed; rows remapped for corrected errors: 2, for uncorrected ones: 3",
    ),
    ("", "0.link.3 0", "gpu-nvlink-down", f"{FIRST}, link 3", "state 0, and 1 in the first look"),
    (
        "1.link.2.error.0 1",
        "1.link.2.error.0 3;1.link.2.error.1 1",
        "gpu-nvlink-errors",
        f"{SECOND}, link 2",
        "3 replay errors, 1 in the last look; 1 recovery errors, 0 in the last look",
    ),
    (
        "",
        "0.link.0.error.2 7",
        "gpu-nvlink-errors",
        f"{FIRST}, link 0",
        "7 CRC errors of flits, 0 in the last look",
    ),
    ("", "0.throttle 0x8", "gpu-throttled", FIRST, "hardware slowdown (reasons 0x8)"),
    ("", "0.throttle 0x40", "gpu-throttled", FIRST, "hardware thermal slowdown (reasons 0x40)"),
    ("", "0.throttle 0x84", "gpu-throttled", FIRST, "hardware power brake (reasons 0x84)"),
    ("", "0.temperature 90", "gpu-hot", FIRST, "90 degrees Celsius, and it slows down from 90"),
    ("", "0.pcie.width 8", "gpu-pcie-slow", FIRST, "PCIe width 8 of 16, at 50 % utilisation"),
    (
        "",
        "1.pcie.width 4;1.pcie.generation 3;1.utilisation 1",
        "gpu-pcie-slow",
        SECOND,
        "PCIe width 4 of 16, generation 3 of 5, at 1 % utilisation",
    ),
    ("", "0.lost 1", "gpu-lost", FIRST, "NVML: GPU is lost"),
    ("", "1.gone 1", "gpu-lost", SECOND, "NVML: Not Found"),
]
EVENTS = ("xid-79", "gpu-ecc-uncorrected", "gpu-nvlink-errors")


@pytest.mark.parametrize(("before", "world", "code", "where", "evidence"), SHOWN)
def test_a_finding_and_nothing_else(
    stage: Stage, before: str, world: str, code: str, where: str, evidence: str
) -> None:
    looks = stage.looks(before, world, world, before)
    found = [Finding(code=code, where=where, evidence=evidence)]
    assert looks == [[], found, [] if code in EVENTS else found, []]


def test_every_gpu_code_is_shown() -> None:
    elsewhere = {"gpu-ecc-aggregate", "gpu-fewer", "gpu-left-over", "gpu-reset", "gpu-error"}
    codes = {code for _, _, code, _, _ in SHOWN} | elsewhere
    assert codes - {"xid-79"} == {code for code in TABLE if code.startswith("gpu-")}


@pytest.mark.parametrize(
    "world",
    [
        "0.throttle 0x4",  # the power cap
        "0.throttle 0x1;0.utilisation 0",  # idle
        "0.throttle 0x133",  # all others that are not the hardware's
        "0.temperature 89",
        "0.temperature 91;0.threshold 0",
        "0.pcie.width 1;0.pcie.generation 1;0.utilisation 0",
        "0.process 4711",  # of the job that is here
    ],
)
def test_what_is_well(stage: Stage, world: str) -> None:
    assert stage.looks("", world) == [[], []]


def test_what_the_first_look_sees_is_the_base(stage: Stage) -> None:
    # a link that was never up, and counters that stand, and then start again from nothing
    world = "0.ecc 5;0.link.1 0;0.link.2.error.0 9"
    looks = stage.looks(world, world, "0.link.1 0", "0.link.1 0;0.ecc 1")
    assert [[finding.code for finding in look] for look in looks] == [[], [], [], ["gpu-ecc-uncorrected"]]
    assert looks[3][0].evidence == "1 uncorrected ECC errors, 0 in the last look"


def test_errors_of_all_its_life_are_a_note_and_count_once_they_grow(stage: Stage) -> None:
    mig = f"1.error.ecc {NOT_SUPPORTED};1.ecc.ever"
    looks = stage.looks("0.ecc.ever 4", "0.ecc.ever 4", "0.ecc 2;0.ecc.ever 6", f"{mig} 1", f"{mig} 2")
    noted = [Finding(code="gpu-ecc-aggregate", where=FIRST, evidence="4 uncorrected ECC errors in its life")]
    assert looks[:2] == [noted, noted]
    shown = [[(one.code, one.where, one.evidence) for one in look] for look in looks[2:]]
    assert shown[0] == [  # the same two errors, in both counts
        ("gpu-ecc-uncorrected", FIRST, "2 uncorrected ECC errors, 0 in the last look"),
        ("gpu-ecc-aggregate", FIRST, "6 uncorrected ECC errors in its life"),
    ]
    assert shown[2] == [
        ("gpu-ecc-uncorrected", SECOND, "2 uncorrected ECC errors in its life, 1 in the last look"),
        ("gpu-ecc-aggregate", SECOND, "2 uncorrected ECC errors in its life"),
    ]
    assert TABLE["gpu-ecc-aggregate"].action == "note"


def test_who_may_not_ask_for_the_caches_is_told_nothing(stage: Stage) -> None:
    world = f"0.error.sram {NO_PERMISSION};0.sram.exceeded 1;0.temperature 95"
    assert [one.code for one in stage.looks(world)[0]] == ["gpu-hot"]


def test_xids_come_each_once_and_no_more_than_some_in_a_look(stage: Stage) -> None:
    many = ";".join(f"0.xid {number}" for number in range(1, MOST_XIDS + 4))
    looks = stage.looks("", f"{many};1.xid 13;1.xid 13", f"{many};1.xid 13;1.xid 13")
    of_first = [f"xid-{number}" for number in range(1, MOST_XIDS + 1)]
    assert [(one.code, one.where) for one in looks[1]] == [
        *((code, FIRST) for code in of_first),
        *[("xid-13", SECOND)] * 2,
    ]
    assert [one.code for one in looks[2]] == [f"xid-{MOST_XIDS + number}" for number in (1, 2, 3)]


def test_left_over_processes(stage: Stage) -> None:
    looks = stage.looks("", "1.process 4711;1.process 12", jobs=False)
    assert looks == [[], [Finding(code="gpu-left-over", where=SECOND, evidence="pid 4711, 12")]]


def test_fewer_gpus(stage: Stage) -> None:
    _, look, again = stage.looks("", "count 1", "")
    assert look == [
        Finding(code="gpu-fewer", evidence="NVML counts 1, and 2 in the first look"),
        Finding(code="gpu-lost", where=SECOND, evidence="NVML: Not Found"),
    ]
    assert again == []


@pytest.mark.parametrize("query", [*QUERIES, "handle"])
def test_a_gpu_is_lost_in_any_call_and_the_others_are_looked_at(stage: Stage, query: str) -> None:
    worse = f"0.error.{query} {GPU_IS_LOST};1.temperature 99"
    lost = Finding(code="gpu-lost", where=FIRST, evidence="NVML: GPU is lost")
    looks = stage.looks("", worse, jobs=False)
    # It is registered for its events only once.
    assert looks[1][:-1] == ([] if query == "register" else [lost])
    assert [(one.code, one.where) for one in looks[1][-1:]] == [("gpu-hot", SECOND)]


def test_a_lost_gpu_has_said_why(stage: Stage) -> None:
    _, look = stage.looks("", "0.lost 1;0.xid 79;1.xid 31")
    assert [(one.code, one.where) for one in look] == [
        ("xid-79", FIRST),
        ("gpu-lost", FIRST),
        ("xid-31", SECOND),
    ]


def test_a_gpu_that_is_lost_from_the_first_look_and_comes_back(stage: Stage) -> None:
    lost = [Finding(code="gpu-lost", where="GPU 1", evidence="NVML: GPU is lost")]
    gone = [
        Finding(code="gpu-fewer", evidence="NVML counts 1, and 2 in the first look"),
        Finding(code="gpu-lost", where="GPU 1", evidence="NVML: Invalid Argument"),
    ]
    looks = stage.looks("1.lost 1", "1.lost 1", "count 1", "1.ecc 4", "1.ecc 4;1.link.0 0;1.xid 63")
    assert looks[:4] == [lost, lost, gone, []]
    assert [(one.code, one.where) for one in looks[4]] == [
        ("xid-63", SECOND),
        ("gpu-nvlink-down", f"{SECOND}, link 0"),
    ]


# With it all that could be found of one GPU is there.
ALL = "ecc 1;ecc.ever 1;sram.exceeded 1;remap.pending 1;link.3 0;link.2.error.0 1;throttle 8;temperature 99"
ALL += ";pcie.width 1;process 7"
BAD = ";".join(f"{gpu}.{line}" for gpu in (0, 1) for line in ALL.split(";")) + ";0.xid 31;1.xid 31"
BAD_CODES = ["xid-31", "gpu-ecc-uncorrected", "gpu-ecc-aggregate", "gpu-sram-failed"]
BAD_CODES += ["gpu-remap-pending", "gpu-nvlink-down", "gpu-nvlink-errors"]
BAD_CODES += ["gpu-throttled", "gpu-hot", "gpu-pcie-slow", "gpu-left-over"]
WITHOUT = {
    "register": "xid-31",
    "ecc.ever": "gpu-ecc-aggregate",
    "sram": "gpu-sram-failed",
    "remap": "gpu-remap-pending",
    "counter.0": "gpu-nvlink-errors",
    "throttle": "gpu-throttled",
    "temperature": "gpu-hot",
    "threshold": "gpu-hot",
    "utilisation": "gpu-pcie-slow",
    "pcie.width": "gpu-pcie-slow",
    "process": "gpu-left-over",
}


def codes_of(look: list[Finding], gpu: str) -> list[str]:
    return [finding.code for finding in look if finding.where.startswith(gpu)]


def test_the_worst_is_all_seen(stage: Stage) -> None:
    _, look = stage.looks("", BAD, jobs=False)
    assert codes_of(look, FIRST) == codes_of(look, SECOND) == BAD_CODES


@pytest.mark.parametrize(
    ("query", "unseen", "code"),
    [
        *((query, unseen, NOT_SUPPORTED) for query, unseen in WITHOUT.items()),
        ("register", "xid-31", FUNCTION_NOT_FOUND),
        ("remap", "gpu-remap-pending", FUNCTION_NOT_FOUND),
        ("temperature", "gpu-hot", DEPRECATED),
    ],
)
def test_what_is_not_supported_is_left_out_alone(stage: Stage, query: str, unseen: str, code: int) -> None:
    without = f"0.error.{query} {code}"
    first, look = stage.looks(without, f"{BAD};{without}", jobs=False)
    assert first == []
    assert codes_of(look, FIRST) == [one for one in BAD_CODES if one != unseen]
    assert codes_of(look, SECOND) == BAD_CODES


def test_a_gpu_without_links(stage: Stage) -> None:
    without = f"0.error.links {NOT_SUPPORTED}"
    _, look = stage.looks(without, f"{BAD};{without}", jobs=False)
    assert codes_of(look, FIRST) == [one for one in BAD_CODES if "nvlink" not in one]
    assert codes_of(look, SECOND) == BAD_CODES


def test_links_that_are_no_longer_supported_are_not_down(stage: Stage) -> None:
    assert stage.looks("", f"0.error.links {NOT_SUPPORTED}") == [[], []]


def test_a_gpu_that_supports_nothing(stage: Stage) -> None:
    without = ";".join(f"0.error.{query} {NOT_SUPPORTED}" for query in QUERIES)
    _, look = stage.looks(without, f"{BAD};{without}", jobs=False)
    assert codes_of(look, FIRST) == []
    assert codes_of(look, SECOND) == BAD_CODES


def test_an_old_driver_is_asked_the_old_way(old_stage: Stage) -> None:
    _, look = old_stage.looks("", BAD, jobs=False)
    expected = [one for one in BAD_CODES if one not in ("gpu-remap-pending", "gpu-sram-failed")]
    assert codes_of(look, FIRST) == codes_of(look, SECOND) == expected


@pytest.mark.parametrize("query", [*QUERIES, "handle", "pci", "wait"])
def test_a_gpu_that_fails_otherwise_is_named_and_the_others_are_looked_at(stage: Stage, query: str) -> None:
    world = f"1.error.{query} {UNKNOWN};0.temperature 95"
    jobs = query in ("register", "pci")  # the first look alone asks for it, until it has it
    played = stage.play(*((world, world, "0.temperature 95") if jobs else ("", world, "")), jobs=jobs)
    codes = [[(code, where[:5]) for code, where, _ in look] for look in played.looks]
    failed = [("gpu-hot", "GPU 0"), ("gpu-error", "GPU 1")]
    assert codes == ([failed, failed, failed[:1]] if jobs else [[], failed, []])
    assert played.log[-1] == "shut down"


def test_a_gpu_that_asks_for_its_reset(stage: Stage) -> None:
    played = stage.play("", f"1.error.ecc {RESET_REQUIRED}")
    assert [(code, where[:5]) for code, where, _ in played.looks[1]] == [("gpu-reset", "GPU 1")]


def test_an_unknown_error_in_the_first_look_is_no_link_that_is_down(stage: Stage) -> None:
    played = stage.play(f"0.error.links {UNKNOWN}", "", "0.link.2 0")
    assert [code for code, _, _ in played.looks[0]] == ["gpu-error"]
    assert [code for code, _, _ in played.looks[2]] == ["gpu-nvlink-down"]


def test_not_found_is_lost_only_where_the_gpu_is_asked_for(stage: Stage) -> None:
    played = stage.play("", "0.error.ecc 6", "0.error.links 2", "0.error.handle 6")
    codes = [[code for code, _, _ in look] for look in played.looks]
    assert codes == [[], ["gpu-error"], ["gpu-error"], ["gpu-lost"]]


def test_close_frees_what_is_held(stage: Stage) -> None:
    world = f"1.error.register {NOT_SUPPORTED};0.error.free {GPU_IS_LOST}"
    played = stage.play(world, world, count=3)
    assert played.looks == [[], []]
    # At once that of the GPU that has none, at the end the others, also after one that cannot be freed.
    assert played.log == ["no events", "events", "events", "shut down"]


def test_nvml_without_a_gpu_is_missing(stage: Stage) -> None:
    played = stage.play("", count=0)
    assert played == ("NVML: there is no GPU", [], ["shut down"])


@pytest.mark.parametrize(("code", "words"), [(9, "Driver Not Loaded"), (18, "version mismatch")])
def test_a_driver_that_does_not_work_is_missing(stage: Stage, code: int, words: str) -> None:
    played = stage.play(f"init {code}")
    assert played.missing.startswith("NVML: ")
    assert words in played.missing
    assert (played.looks, played.log) == ([], [])


def test_a_library_that_is_not_there_is_missing(tmp_path: Path) -> None:
    # An empty file ends the search, so that a real one, where there is one, is not found.
    library = tmp_path / "lib" / "libnvidia-ml.so.1"
    library.parent.mkdir()
    library.touch()
    played = Stage(library, tmp_path).play("")
    assert played == ("NVML: NVML Shared Library Not Found", [], [])


def test_nvidia_ml_py_that_is_not_installed_is_missing(stage: Stage) -> None:
    played = stage.play("", hidden=True)
    assert played == ("nvidia-ml-py is not installed: pip install 'ckptless[gpu]'", [], [])
