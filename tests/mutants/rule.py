"""A mistake that has a name, and the test that has to find it."""

from __future__ import annotations

from dataclasses import dataclass

from .trial import Trial
from .warm import ROOT

CONSENSUS, MEMBERSHIP = "daemon/ckptlessd/consensus", "daemon/ckptlessd/membership"
RECOVERY = "daemon/ckptlessd/recovery"


@dataclass(frozen=True)
class Named:
    """`test`: as pytest names it, below tests/; of a test with parameters any that fails is enough."""

    name: str
    path: str
    right: str
    wrong: str
    test: str

    @property
    def id(self) -> str:
        return f"tests/{self.test}"

    def trial(self) -> Trial:
        """Raises SystemExit where the source has changed."""
        source = (ROOT / self.path).read_text()
        if source.count(self.right) != 1:
            raise SystemExit(f"{self.name}: {self.right!r} is not in {self.path} once: mend this mutant")
        line = source[: source.index(self.right)].count("\n") + 1
        return Trial(self.path, line, source.replace(self.right, self.wrong))


def of(path: str, tests: str, *mutants: tuple[str, str, str, str]) -> tuple[Named, ...]:
    return tuple(Named(name, path, right, wrong, f"{tests}::{test}") for name, right, wrong, test in mutants)
