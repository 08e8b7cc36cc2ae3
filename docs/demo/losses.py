"""What the ranks of a run wrote of every step, followed as it grows."""

import itertools
import statistics
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """What a rank wrote of one step; the loss is text, because equal means equal in every bit."""

    rank: int
    step: int
    loss: str
    at: float
    generation: int


@dataclass
class Losses:
    """The loss files of a run, followed as they grow."""

    folder: Path
    ranks: int
    lines: list[Line] = field(default_factory=list)
    _read: dict[int, int] = field(default_factory=dict)

    def poll(self) -> None:
        """Take what is new; a line that is only half there waits for the next time."""
        for rank in range(self.ranks):
            with suppress(FileNotFoundError), (self.folder / f"loss-{rank}.txt").open("rb") as file:
                file.seek(self._read.get(rank, 0))
                whole = file.read().rpartition(b"\n")[0]
                for words in map(bytes.split, whole.splitlines()):
                    step, loss, at, generation = (word.decode() for word in words)
                    self.lines.append(Line(rank, int(step), loss, float(at), int(generation)))
                self._read[rank] = self._read.get(rank, 0) + (len(whole) + 1 if whole else 0)

    @property
    def newest(self) -> Line | None:
        return max(self.lines, key=lambda line: (line.generation, line.step, -line.rank), default=None)

    @property
    def shown(self) -> Line | None:
        """Rank 0's newest: of two runs the same lines are shown, and they can be compared by eye."""
        own = [line for line in self.lines if line.rank == 0]
        return max(own, key=lambda line: (line.generation, line.step), default=None)

    def by_step(self) -> dict[tuple[int, int], list[str]]:
        """Every loss that a rank wrote for a step: one, or more where the step was done again."""
        found: dict[tuple[int, int], list[str]] = {}
        for line in self.lines:
            found.setdefault((line.rank, line.step), []).append(line.loss)
        return found

    def means(self) -> list[float]:
        """The mean loss of all ranks, step by step."""
        last = {(line.step, line.rank): float.fromhex(line.loss) for line in self.lines}
        steps = range(1, max(step for step, _ in last) + 1)
        return [statistics.fmean(last[step, rank] for rank in range(self.ranks)) for step in steps]

    def completed(self) -> dict[int, float]:
        """When the last rank had done each step."""
        ends: dict[int, float] = {}
        for line in self.lines:
            ends[line.step] = max(ends.get(line.step, 0.0), line.at)
        return ends

    def step_s(self) -> float:
        """How long a step takes, as a rule."""
        spans = self.spans()
        return statistics.median(end - begin for begin, end in spans) if spans else 0.0

    def spans(self) -> list[tuple[float, float]]:
        """Begin and end of every step but the first."""
        return list(itertools.pairwise(sorted(self.completed().values())))
