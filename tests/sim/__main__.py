"""`python -m tests.sim SEED [COUNT]`: the story of one seed, or the first failure of many."""

import sys

from ckptless.daemon import jobs

from .story import Violation
from .world import World, simulate


def main() -> None:
    """Entry point."""
    jobs.logger.disabled = True
    first, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    failed = 0
    for seed in range(first, first + count):
        if count > 1:
            try:
                simulate(seed)
            except Violation as violation:
                failed += 1
                print(str(violation).splitlines()[0])
            continue
        world = World(seed)
        try:
            world.run()
        except Violation as violation:
            world.story.tell("CHECK", str(violation))
        print(world.story.render(last=0))
    if count > 1:
        print(f"{failed} of {count} seeds failed")


if __name__ == "__main__":
    main()
