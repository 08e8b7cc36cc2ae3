"""`python -m tests.mutants.named`: mistakes by name, and for each the test that has to find it.

Each breaks one rule of docs/agreement.md, docs/membership.md, docs/admin.md or docs/design/recovery.md. A
mutant is a quote that stands in its file once, and what stands there instead. First each test runs without
any mistake.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import pytest

from .reached import Check
from .rules_of_drills import DRILLS
from .rules_of_hangs import HANGS
from .rules_of_health import HEALTH
from .rules_of_orders import ORDERS
from .rules_of_votes import VOTES
from .warm import FOUND, PASSED, Fork, Say, allow, passes, waited, with_tests

# None of these tests takes as long.
EACH_S = 5.0


NAMED = ORDERS + VOTES + HEALTH + HANGS + DRILLS


def main() -> int:
    survivors: list[str] = []
    began = time.monotonic()

    def work(items: list[pytest.Item]) -> None:
        for mutant in NAMED:
            checks: dict[str, Check] = {
                item.nodeid: partial(passes, item)
                for item in items
                if item.nodeid.partition("[")[0] == mutant.id
            }
            if not checks:
                raise SystemExit(f"{mutant.name}: there is no {mutant.id}")
            found = waited(Fork.of(partial(_as_it_is, checks))).found
            if found is not None:
                raise SystemExit(f"{found} fails without any mutant")
            found = waited(mutant.trial().start(checks, dict.fromkeys(checks, EACH_S))).found
            print(f"{'survives' if found is None else 'found   '}  {mutant.name}", flush=True)
            if found is None:
                survivors.append(mutant.name)

    with_tests(sorted({mutant.id.partition("::")[0] for mutant in NAMED}), work)
    print(f"{len(NAMED) - len(survivors)} of {len(NAMED)} found, {time.monotonic() - began:.0f} s")
    return int(bool(survivors))


def _as_it_is(checks: dict[str, Check], say: Say) -> int:
    for name, check in checks.items():
        allow(EACH_S)
        if not check():
            say(name)
            return FOUND
    return PASSED


if __name__ == "__main__":
    sys.exit(main())
