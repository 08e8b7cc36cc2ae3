"""One mutant against what may notice it, in a fork."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .reached import Check
from .transplant import at_next_import, into_living, is_in_function, keeps_cells
from .warm import FOUND, PASSED, ROOT, Fork, Say, allow, load_and_run

# To load all tests anew.
LOADING_S = 10.0


@dataclass(frozen=True)
class Trial:
    """The module at `path` (from the root of the repository) with another source, which differs in `line`."""

    path: str
    line: int
    source: str

    def start(self, checks: Mapping[str, Check], seconds: Mapping[str, float]) -> Fork:
        """Run those that `seconds` has until one fails: how long each takes without a mistake, in order."""
        living = is_in_function((ROOT / self.path).read_text(), self.line)
        living = living and keeps_cells(self.path, self.source)
        work = self._in_place if living else self._anew
        return Fork.of(lambda say: work(checks, seconds, say))

    def _in_place(self, checks: Mapping[str, Check], seconds: Mapping[str, float], say: Say) -> int:
        into_living(self.path, self.source)
        for name in seconds:
            allow(seconds[name])
            if not checks[name]():
                say(name)
                return FOUND
        return PASSED

    def _anew(self, checks: Mapping[str, Check], seconds: Mapping[str, float], say: Say) -> int:
        """Try a mutant of what an import makes: constants and classes are in too many places to replace."""
        at_next_import(self.path, self.source)
        tests = [name for name in seconds if "::" in name]
        allow(LOADING_S + sum(seconds[name] for name in tests))
        # Without their parameters, of which some cannot be said in an argument.
        functions = list(dict.fromkeys(name.partition("[")[0] for name in tests))
        if functions and (found := load_and_run(functions)) is not None:
            say(found)
            return FOUND
        try:
            from .reached import simulated
        except Exception as error:  # noqa: BLE001  # whatever the mistake has made of an import
            say(f"import of {self.path}: {error}")
            return FOUND
        for name, check in simulated().items():
            if name in seconds:
                allow(seconds[name])
                if not check():
                    say(name)
                    return FOUND
        return PASSED
