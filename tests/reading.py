"""Pages as a reader has them: code blocks by number, typed as they stand, and what they show compared.

Which test runs which block is in `tests/blocks.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from .blocks import TABLE, Typed

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
PROMPT = re.compile(r"^[$#] ", re.MULTILINE)
# Words that differ from run to run: numbers, paths, units; but for those of generations and ranks.
NUMBER = re.compile(r"\S*\d\S*|/\S+|(ms|s|min|h|[kMG]?B)[.,;)]*")
KEPT = ("generation", "[rank", "rank")
# What a job holds just now is one of several sentences; which phase takes longest is not always the same.
VARIES = re.compile(r"(?<=^held: step ).*|(?<=most of it )[a-z ]+")
# These look only: a reader types them again until the job is so far.
LOOKS = re.compile(r"ckptctl (\S+ try )?(status|replicas|timeline|explain|goodput|health)\b")
POLL_S = 0.2
DEADLINE_S = 100.0
NOTHING: Mapping[str, object] = {}

# Runs a command in a shell, to its end.
Say = Callable[[str], subprocess.CompletedProcess[str]]


def pages() -> list[Path]:
    """Every page that has blocks, or may."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(page: str) -> list[str]:
    """The text of each of a page's blocks, from the margin on."""
    return [textwrap.dedent(text) for _, _, text in BLOCK.findall((ROOT / page).read_text())]


def shape(line: str) -> re.Pattern[str]:
    """What a line must be like: the same words, any numbers; one that ends in dots may go on."""
    words = VARIES.sub("\0", line.removesuffix("...")).split()
    found = [
        r"\S+" if NUMBER.fullmatch(word) and was not in KEPT else re.escape(word).replace("\0", ".*")
        for was, word in zip(["", *words], words, strict=False)
    ]
    return re.compile(r"\s*" + r"\s+".join(found) + (r".*" if line.endswith("...") else r"\s*"))


def lacks(shown: str, said: str) -> list[str]:
    """Lines that a page shows, and that are not said, whatever their numbers."""
    lines = said.replace("[y/N]: ", "[y/N]: y\n").splitlines()
    return [
        line
        for line in shown.splitlines()
        if line.strip() not in ("", "...") and not any(map(shape(line).fullmatch, lines))
    ]


def commands(text: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with what is shown of its output."""
    found = []
    for part in PROMPT.split(text)[1:]:
        lines = part.splitlines()
        count = 1
        while count < len(lines) and _goes_on("\n".join(lines[:count])):
            count += 1
        found.append(("\n".join(lines[:count]), "\n".join(lines[count:])))
    return found


def _goes_on(command: str) -> bool:
    """Whether a shell waits for the rest of it."""
    done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False)
    return done.returncode != 0 or command.endswith("\\")


def holds(folder: Path, tree: str) -> None:
    """Fails where a folder has not what a page draws below its first line, whatever the numbers."""
    above: list[str] = []
    for line in tree.splitlines()[1:]:
        name = line.split()[0]
        above[(len(line) - len(line.lstrip())) // 2 - 1 :] = [re.sub(r"\d+", "*", name)]
        assert [*folder.glob("/".join(above))], f"no {name} in {folder}"


@dataclass
class Reading:
    """One page; a context manager that fails where this test has left out a block that is its own."""

    page: str
    _read: set[int] = field(default_factory=set)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            left = {number for number, how in self._rows().items() if _is_mine(how)} - self._read
            assert not left, f"{self.page}: blocks {sorted(left)} are not typed"

    def _rows(self) -> dict[int, object]:
        return dict(enumerate((how for _, how in TABLE[self.page]), 1))

    def block(self, number: int, more: Mapping[str, object] = NOTHING) -> str:
        """Return a block's text, with the values of the table, and `more`, for those of the page."""
        text, how = blocks(self.page)[number - 1], self._rows()[number]
        assert isinstance(how, Typed), f"{self.page}, block {number}: not this test's"
        self._read.add(number)
        for old, new in {**how.values, **more}.items():
            assert old in text, f"{self.page}, block {number}: no {old!r} in it"
            text = text.replace(old, str(new))
        return text

    def types(
        self, number: int, say: Say, more: Mapping[str, object] = NOTHING, *, code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """Type a block's commands, one after the other; return what the last one said.

        Fails where one has another exit code, or does not say what the page shows.
        """
        text = self.block(number, more)
        for command, shown in commands(text) or [(text, "")]:
            limit = time.monotonic() + DEADLINE_S
            while lacks(shown, said := _said(done := say(command))) and LOOKS.search(command):
                assert time.monotonic() < limit, f"{command}: {lacks(shown, said)} is not in\n{said}"
                time.sleep(POLL_S)
            assert done.returncode == code, f"{command}: {done.returncode}: {said}"
            assert not lacks(shown, said), f"{command}: {lacks(shown, said)} is not in\n{said}"
        return done

    def hears(self, number: int, said: Callable[[], str], more: Mapping[str, object] = NOTHING) -> None:
        """Wait until all that a block shows has been said."""
        shown, limit = self.block(number, more), time.monotonic() + DEADLINE_S
        # Of a block with commands what stands below them.
        shown = "\n".join(line for _, line in commands(shown)) or shown
        while wrong := lacks(shown, said()):
            assert time.monotonic() < limit, f"{wrong} is not in\n{said()}"
            time.sleep(POLL_S)


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


def _is_mine(how: object) -> bool:
    """Whether a row names the test that runs now."""
    running = os.environ["PYTEST_CURRENT_TEST"].split(" ")[0]
    return isinstance(how, Typed) and how.test == re.sub(r"\[.*", "", running)
