"""The memory that is left: the least of the node's and each cgroup's; cached files count as free."""

from pathlib import Path

import pytest

from ckptless.daemon.agent.free_memory import free_memory

MIB = 1 << 20


def tree(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root / "proc", root / "cgroup"


MEMINFO = {"proc/meminfo": "MemTotal:  4000 kB\nMemAvailable:  2000 kB\n"}


def test_of_the_node(tmp_path: Path) -> None:
    found = free_memory(*tree(tmp_path, MEMINFO))
    assert found == (2000 * 1024, "the node's memory")


@pytest.mark.parametrize("where", ["cgroup/job/step", "cgroup/job", "cgroup"])
def test_of_a_cgroup_and_those_above_it(tmp_path: Path, where: str) -> None:
    files = {
        **MEMINFO,
        "proc/self/cgroup": "0::/job/step\n",
        "cgroup/job/step/memory.max": "max\n",
        "cgroup/job/step/memory.current": "7\n",
        f"{where}/memory.max": "9000\n",
        f"{where}/memory.current": "8000\n",
        f"{where}/memory.stat": "anon 100\ninactive_file 300\nactive_file 200\nshmem 50\n",
    }
    assert free_memory(*tree(tmp_path, files)) == (1500, f"the cgroup {tmp_path / where}")


def test_of_a_cgroup_of_the_first_version(tmp_path: Path) -> None:
    files = {
        **MEMINFO,
        "proc/self/cgroup": "9:cpu:/job\n4:memory:/job\n1:name=systemd:/job\n",
        "cgroup/memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n",
        "cgroup/memory/memory.usage_in_bytes": "1\n",
        "cgroup/memory/job/memory.limit_in_bytes": "5000\n",
        "cgroup/memory/job/memory.usage_in_bytes": "6000\n",
        "cgroup/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 1100\n",
    }
    assert free_memory(*tree(tmp_path, files)) == (100, f"the cgroup {tmp_path}/cgroup/memory/job")


@pytest.mark.parametrize(
    ("mode", "used", "left"), [("0", 900, 2000), ("1", 900, 2000), ("2", 900, 100), ("2", 1100, 0)]
)
def test_where_the_kernel_counts_every_page(tmp_path: Path, mode: str, used: int, left: int) -> None:
    counted = f"CommitLimit:  1000 kB\nCommitted_AS:  {used} kB\n"
    files = {
        "proc/meminfo": MEMINFO["proc/meminfo"] + counted,
        "proc/sys/vm/overcommit_memory": f"{mode}\n",
    }
    found = free_memory(*tree(tmp_path, files))
    assert found is not None
    assert found.nbytes == left * 1024
    assert ("CommitLimit" in found.whose) == (mode == "2")


def test_where_nothing_tells(tmp_path: Path) -> None:
    assert free_memory(*tree(tmp_path, {})) is None


def test_here() -> None:
    found = free_memory()
    assert found is not None
    assert found.nbytes > MIB
