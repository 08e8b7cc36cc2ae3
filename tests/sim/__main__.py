"""`python -m tests.sim SEED`: the story of one seed; if it fails, with as few of its faults as that takes.

`--count N`: so many seeds from SEED on, or `--until N`: as many as it takes to inject N faults, on all cores.
`--nodes` and `--faults` of each job, where they are not left to the seed; `--components`: so many faults of
components more, which are what N counts. `--guest`: another job in the same daemons. `--elastic`:
jobs that change their size. `--elections`: no jobs, but elections beside bad disks.
"""

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult

from .agreeing import quarrel
from .components import COMPONENTS
from .electing import election
from .faults import Shape
from .story import Violation
from .world import World, shrink, simulate

BATCH = 20
SAY_EVERY_S = 10.0


@dataclass(frozen=True)
class Found:
    """The results of a batch of seeds."""

    seeds: int
    injected: Counter[str]
    violations: tuple[str, ...]


def batch(first: int, count: int, shape: Shape) -> Found:
    """Whole jobs, and as many quarrels about decrees."""
    logging.disable(logging.CRITICAL)
    injected: Counter[str] = Counter()
    quarrels = 0
    violations: list[str] = []
    for seed in range(first, first + count):
        try:
            world = simulate(seed, shape)
            injected += world.injected
        except Violation as violation:
            violations.append(str(violation).splitlines()[0])
        try:
            quarrels += quarrel(seed).injected.total()
        except Violation as violation:
            violations.append(f"quarrel {seed}: {violation}")
    injected["quarrels"] += quarrels
    return Found(count, injected, tuple(violations))


def elections(first: int, count: int, _shape: Shape) -> Found:
    """Elections alone, one a seed."""
    logging.disable(logging.CRITICAL)
    injected: Counter[str] = Counter()
    violations: list[str] = []
    for seed in range(first, first + count):
        try:
            injected += election(seed).injected
        except Violation as violation:
            violations.append(str(violation))
    return Found(count, injected, tuple(violations))


def of_components(injected: Counter[str]) -> int:
    """Return what counts: not what ranks do, messages that were perturbed, nor what happens in a quarrel."""
    return sum(count for kind, count in injected.items() if kind in COMPONENTS)


def many(args: argparse.Namespace, shape: Shape) -> int:
    """Batches on all cores; the exit code."""
    begun = said = time.monotonic()
    play = elections if args.elections else batch
    injected: Counter[str] = Counter()
    seeds, failed, following = 0, 0, int(args.seed)
    until, end = int(args.until), int(args.seed) + int(args.count)
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        waiting: list[AsyncResult[Found]] = []

        def more() -> bool:
            return of_components(injected) < until if until else following < end

        while waiting or more():
            while more() and len(waiting) < 2 * (os.cpu_count() or 1):
                size = BATCH if args.until else min(BATCH, args.seed + args.count - following)
                waiting.append(pool.apply_async(play, (following, size, shape)))
                following += size
            found = waiting.pop(0).get()
            injected += found.injected
            seeds, failed = seeds + found.seeds, failed + len(found.violations)
            for violation in found.violations:
                print(violation, flush=True)
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                print(f"{said - begun:.0f} s: {seeds} seeds, {of_components(injected)} faults", flush=True)
    kinds = ", ".join(f"{kind} {count}" for kind, count in injected.most_common())
    count, took_s = of_components(injected), time.monotonic() - begun
    print(f"{seeds} seeds, {count} faults of components in {took_s:.0f} s; all: {kinds}")
    print(f"{failed} violations")
    return 1 if failed else 0


def one(seed: int, shape: Shape) -> int:
    """The story of a seed; the exit code."""
    world = World(seed, shape)
    try:
        world.run()
    except Violation as violation:
        world.story.tell("CHECK", str(violation))
        print(world.story.render(last=0))
        smallest = shrink(seed, shape)
        world = World(seed, smallest)
        try:
            world.run()
        except Violation as again:
            world.story.tell("CHECK", str(again))
        print(f"\nWith {len(world.job.faults)} of its faults, without {sorted(smallest.without)}:\n")
        print(world.story.render(last=0))
        return 1
    print(world.story.render(last=0))
    return 0


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--until", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=0)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--components", type=int, default=0)
    parser.add_argument("--cost-ms", type=float, default=0.0, help="CPU time of a daemon for each message")
    parser.add_argument("--guest", action="store_true", help="another job on the same nodes")
    parser.add_argument("--elastic", action="store_true", help="jobs that change their size")
    parser.add_argument("--elections", action="store_true", help="elections alone")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    shape = Shape(
        nodes=args.nodes,
        faults=args.faults,
        components=args.components,
        guest=args.guest,
        elastic=args.elastic,
        cost_s=args.cost_ms / 1000,
    )
    several = args.count > 1 or args.until or args.elections
    sys.exit(many(args, shape) if several else one(args.seed, shape))


if __name__ == "__main__":
    main()
