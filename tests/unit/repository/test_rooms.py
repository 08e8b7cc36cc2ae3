"""A room, a folder of the product, has few files, each of which says in its first line what it is about."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MOST_FILES = 20
ROOMS = {"daemon", "docs", "etc", "pytorch_hooks", "slurm_ext", "src", "tests", ".ci"}


def modules() -> list[Path]:
    found = [path for room in ("daemon", "pytorch_hooks") for path in (ROOT / room).rglob("*.py")]
    assert len(found) > 200
    return found


def test_a_room_has_few_files() -> None:
    rooms = Counter(path.parent for path in modules() if path.name != "__init__.py")
    crowded = {str(room.relative_to(ROOT)): count for room, count in rooms.items() if count > MOST_FILES}
    assert not crowded


def test_every_file_says_what_it_is_about() -> None:
    silent = [path for path in modules() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent


def test_a_folder_at_the_top_is_one_that_is_meant() -> None:
    """Not a checkpoint, say, that a script has left where it was started."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no git repository that may be asked: {done.stderr.strip()}")
    assert {line.partition("/")[0] for line in done.stdout.splitlines() if "/" in line} == ROOMS
