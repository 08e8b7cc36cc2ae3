"""What the ranks of an elastic job wrote of every step; and whether each sample was seen once."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """A rank's line about one step: the batch's loss, `at` in Unix time, and who it is."""

    step: int
    loss: float
    at: float
    generation: int
    ranks: int
    node: str
    pid: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """A step as it counts, `at`: when the last rank had done it."""

    number: int
    loss: float
    at: float
    lines: tuple[Line, ...]

    @property
    def ranks(self) -> int:
        return self.lines[0].ranks


@dataclass(frozen=True)
class Guest:
    """The life of a job that the elastic one gives way to, in Unix time."""

    submitted: float
    started: float
    ended: float


def newest(folder: Path) -> Line | None:
    """The first rank's newest line; one that is only half there waits for the next time."""
    try:
        text = (folder / "steps-0.txt").read_text()
    except FileNotFoundError:
        return None
    return next(map(_line, reversed(text.rpartition("\n")[0].splitlines())), None)


def _line(text: str) -> Line:
    step, loss, at, generation, ranks, node, pid, samples = json.loads(text)
    return Line(step, loss, at, generation, ranks, node, pid, tuple(samples))


class Steps:
    """All steps of a run that is over."""

    def __init__(self, folder: Path, batch: int, samples: int) -> None:
        self._batch, self._samples = batch, samples
        self._tries: dict[int, dict[int, list[Line]]] = {}
        for file in folder.glob("steps-*.txt"):
            for line in map(_line, file.read_text().splitlines()):
                self._tries.setdefault(line.step, {}).setdefault(line.generation, []).append(line)
        self.steps = [self._counts(step) for step in sorted(self._tries)]

    def _counts(self, number: int) -> Step:
        """A step that a resize cut off was not committed, and was done again: its last time counts."""
        lines = self._tries[number][max(self._tries[number])]
        return Step(number, lines[0].loss, max(line.at for line in lines), tuple(lines))

    @property
    def again(self) -> int:
        """Steps that were done again."""
        return sum(len(tries) > 1 for tries in self._tries.values())

    @property
    def sizes(self) -> list[int]:
        """The numbers of ranks that it had, one after the other."""
        return [size for size, _ in itertools.groupby(step.ranks for step in self.steps)]

    def resizes(self) -> Iterator[tuple[Step, Step]]:
        """The last step of a number of ranks, and the first one of the next."""
        return ((old, new) for old, new in itertools.pairwise(self.steps) if old.ranks != new.ranks)

    def longest_s(self) -> float:
        """The longest time from one step to the next."""
        return max(new.at - old.at for old, new in itertools.pairwise(self.steps))

    def processes(self, node: str) -> set[int]:
        """The processes that trained on a node."""
        lines = (line for tries in self._tries.values() for one in tries.values() for line in one)
        return {line.pid for line in lines if line.node == node}

    def epochs(self) -> int:
        return len(self.steps) * self._batch // self._samples

    def wrong(self) -> list[str]:
        """Return what is not as it should be, in sentences."""
        found = []
        if [step.number for step in self.steps] != list(range(1, len(self.steps) + 1)):
            found.append("steps are missing")
        for step in self.steps:
            if len(step.lines) != step.ranks or len({line.loss for line in step.lines}) != 1:
                found.append(
                    f"step {step.number}: {len(step.lines)} of {step.ranks} ranks have written of it"
                )
        seen = [sample for step in self.steps for line in step.lines for sample in line.samples]
        for first in range(0, len(seen), self._samples):
            if sorted(seen[first : first + self._samples]) != list(range(self._samples)):
                found.append(f"epoch {first // self._samples + 1}: not every sample was seen exactly once")
        return found
