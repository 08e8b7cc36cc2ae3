"""The self-test is content with this torch, and finds what a torch of tomorrow might have changed.

Every private name that renewing groups, DDP and FSDP2 stands on is taken away, and made to do nothing.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptless.pytorch_hooks import process_groups
from ckptless.pytorch_hooks.torch_private import calls as torch_private
from ckptless.pytorch_hooks.torch_private import ddp as torch_ddp
from ckptless.pytorch_hooks.torch_private import fsdp as torch_fsdp
from ckptless.pytorch_hooks.torch_private import names as torch_names

from . import planted

NAMES = planted.names()
# Gloo itself says something on their standard output; and no torch that is untested is as old as these.
CHATTY = torch_names.version() < (2, 11)
TELLS = pytest.mark.skipif(CHATTY, reason="Gloo of this torch says something in between")
# One of each list; the others take a second or more each.
QUICK = ("Backend", "_rebuild_buckets", "_all_gather_result", "_clear_DTensor_sharding_propagator_cache")

SETUP = """
import sys, time
import torch.distributed as dist
from ckptless.pytorch_hooks import self_test
from torch.nn.parallel import DistributedDataParallel as DDP
"""
# Each is as if torch had changed so much inside, with all names still there.
PLANTED = {
    "works end without their sums": (
        """
real = dist.ProcessGroup.allreduce
def lost(self, tensors, *words, **more):
    return real(self, [tensor.clone() for tensor in tensors], *words, **more)
dist.ProcessGroup.allreduce = lost
""",
        "a group that was just made gave a wrong sum",
    ),
    "a reducer is made otherwise": (
        """
real = DDP._ddp_init_helper
def once(self, parameters, expect_sparse_gradient, param_to_name_mapping, static_graph):
    if not hasattr(self, "made"):
        self.made = True
        real(self, parameters, expect_sparse_gradient, param_to_name_mapping, static_graph)
DDP._ddp_init_helper = once
""",
        "this was raised: ",
    ),
    "connecting takes for ever": (
        """
def create_device(hostname="", interface="", lazy_init=False):
    time.sleep(100)
self_test.DEADLINE_S = 2.0
dist.ProcessGroupGloo.create_device = create_device
""",
        "groups were not made, left and renewed within 2 s",
    ),
}


def self_test(planted: str = "") -> tuple[int, str]:
    """Exit code and what it has printed."""
    script = f"{SETUP}\n{planted}\nsys.exit(self_test.main())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    return done.returncode, done.stdout


def test_this_torch_does_all_that_recovery_needs() -> None:
    code, said = self_test()
    assert (code, "" if CHATTY else said) == (0, ""), said


@TELLS
@pytest.mark.parametrize(
    "name", [name if "works" in name else pytest.param(name, marks=pytest.mark.slow) for name in PLANTED]
)
def test_a_change_is_found_and_told_in_one_sentence(name: str) -> None:
    planted, words = PLANTED[name]
    code, said = self_test(planted)
    assert code == 1
    assert said.startswith("torch 2.")
    assert words in said
    assert len(said.splitlines()) == 1


@pytest.fixture(scope="module")
def planter() -> Iterator[subprocess.Popen[str]]:
    """A process that has loaded torch, and forks for each change."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", planted.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0


@TELLS
@pytest.mark.parametrize("kind", ["gone", "inert"])
@pytest.mark.parametrize(
    "where",
    [where if NAMES[where].last in QUICK else pytest.param(where, marks=pytest.mark.slow) for where in NAMES],
)
def test_a_change_of_every_private_name_is_found(
    planter: subprocess.Popen[str], where: str, kind: str
) -> None:
    assert planter.stdin is not None
    assert planter.stdout is not None
    print(where, kind, file=planter.stdin, flush=True)
    said = json.loads(planter.stdout.readline())
    assert said.startswith("torch 2.")
    assert len(said.splitlines()) == 1


# In each process of an environment whose torch says that nobody has tested it, and has changed.
UNTESTED = """
import importlib.metadata, sys
real = importlib.metadata.version
importlib.metadata.version = lambda name: "2.99.0" if name == "torch" else real(name)
if "ckptless.pytorch_hooks.self_test" in sys.orig_argv or "ckptless.doctor" in sys.orig_argv:
    from torch.nn.parallel import DistributedDataParallel
    DistributedDataParallel._set_static_graph = lambda self: None
"""


def test_launcher_and_doctor_tell_of_it_before_there_are_ranks(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(UNTESTED)
    script = tmp_path / "train.py"
    script.write_text("import ckptless\nprint('trained')\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def told(*words: str) -> list[str]:
        command = [sys.executable, "-m", *words]
        done = subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 2, done.stdout + done.stderr
        return [*done.stdout.splitlines(), *done.stderr.splitlines()]

    words = "was tried, and this was raised: RuntimeError: Expected to have finished reduction"
    state = str(tmp_path / "state")
    said = told("ckptless.daemon.launch.main", "--local", "--nodes", "1", "--state-dir", state, str(script))
    assert words in said[-1]
    assert said[-1].endswith("or --tier 1")
    assert "trained" not in said
    (line,) = (line for line in told("ckptless.doctor") if line.startswith("BAD recovery in place"))
    assert words in line


def private_names(file: Path) -> set[str]:
    """What a file asks of others by a name with an underscore in front, as an attribute or in a text."""
    asked: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in (
            "self",
            "cls",
            "super()",
            "ProcessGroups",
        ):
            asked.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            asked.add(node.value)
    return {name for name in asked if name.startswith("_") and not name.startswith("__") and name != "_"}


def test_no_private_name_is_used_that_is_not_in_the_list() -> None:
    """In all that stands between models and torch's groups, but for what older torches need."""
    groups = (*torch_names.GROUPS, *torch_names.RECORDERS, *torch_names.DEVICES)
    names = [*groups, *torch_names.DDP, *torch_names.FSDP, *torch_names.MESHES]
    known = {part for name in names for part in name.where.replace(":", ".").split(".")}
    files = [
        Path(torch_private.__file__),
        Path(torch_ddp.__file__),
        Path(torch_fsdp.__file__),
        *Path(process_groups.__path__[0]).glob("*.py"),
    ]
    found = {name for file in files for name in private_names(file)}
    assert found - known == OLDER
    assert all(name.why for name in names)


# Behind a look at the version; and two that torch calls on a backend, where we give them.
OLDER = {
    "_replace",
    "_set_sequence_number_for_group",
    "_allgather_base",
    "_reduce_scatter_base",
}
