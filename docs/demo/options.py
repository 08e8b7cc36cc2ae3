"""What both demos may be asked."""

import argparse
from pathlib import Path

from faults import KINDS, least_steps

NODES = 4


def parser(description: str, faults: str, seed: int) -> argparse.ArgumentParser:
    """The options that both have, with these defaults."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--seed", type=int, default=seed, help="of the training, and of where faults strike")
    made.add_argument("--faults", default=faults, help="in order: kill (a rank), node (all of a node)")
    made.add_argument("--steps", type=int, default=120)
    made.add_argument(
        "--out", type=Path, default=Path("out"), help="losses, ledgers, logs and the picture go here"
    )
    made.add_argument("--no-picture", action="store_true", help="draw nothing (needs no matplotlib)")
    return made


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Checked options, with `kinds` (of the faults) and `spares` (nodes that wait) added."""
    args = parser.parse_args()
    args.kinds = [kind for kind in args.faults.split(",") if kind]
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"--faults {unknown.pop()}: give kill or node, as in kill,node")
    lost = args.kinds.count("node")
    if lost >= NODES:
        parser.error(f"{lost} nodes to kill: {NODES - 1} is the most, one spare for each")
    if args.steps < least_steps(len(args.kinds)):
        parser.error(f"--steps {args.steps}: {least_steps(len(args.kinds))} is the least for these faults")
    args.spares = max(1, lost)
    args.out = args.out.absolute()
    return args
