"""What a recovery asks of the store when one node of many is replaced; run by hand.

N simulated ranks, 8 to a node, have come together. Then one node is lost: its agent is gone, the next
generation has its ranks on a spare at another address, and every rank asks what it asks in a recovery:

    lazy      an unchanged script with Gloo as ranks get it: its own key, and its neighbours' in a ring
    ckptless  ckptless.run's own groups, which are connected at once: its own key, and those of all; and
              whether the rank before was started alike

The figures are of the busiest survivor: what one of its ranks asks it, and how many requests it asks of the
home of the keys; of the home, how many requests it is asked and how many connections it has; and how long all
of it takes, in the first generation and in the next one.
"""

import argparse
import json
from typing import Any

from .bench_store import PER_NODE, Clients, Stores
from .store_requests import PREFIX

# It has neighbours in the ring of ranks.
LOST = 2
# By name: the pattern of requests, and what the keys of a generation begin with.
WAYS = {"lazy": ("lazy", PREFIX + "0"), "ckptless": ("ckptless", "ckptless/%d/0//0")}


def replaced(ranks: int, way: str, value: int = 170) -> dict[str, Any]:
    """Lose a node of so many ranks, and form the next generation; see the module for the figures."""
    pattern, where = WAYS[way]
    nodes = ranks // PER_NODE
    stores = Stores(nodes, PER_NODE, spares=1)

    def form(generation: int) -> float:
        stores.follow()
        clients = Clients(stores.ports, value)
        try:
            return clients.exchange(pattern, where % generation if "%" in where else where)
        finally:
            clients.close()

    try:
        first_s = form(1)
        before, _cpu = stores.counts()
        stores.replace(LOST, nodes)
        next_s = form(2)
        after, _cpu = stores.counts()
    finally:
        stores.close()
    survivors = [node for node in stores.with_ranks if node != nodes]
    asked_by_ranks = [after[node]["local"] - before[node]["local"] for node in survivors]
    return {
        "ranks": ranks,
        "way": way,
        "of_a_rank": -(-max(asked_by_ranks) // PER_NODE),
        "asks": max(after[node]["asks"] for node in survivors),
        "asked": max(count["asked"] for count in after.values()),
        "connected": max(count["connected"] for count in after.values()),
        "first_s": round(first_s, 4),
        "next_s": round(next_s, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--value", type=int, default=170, help="bytes of a value")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = [replaced(ranks, way, args.value) for way in args.ways for ranks in args.ranks]
    if args.json:
        print(json.dumps(found, indent=1))
        return
    print("way       ranks  a rank asks  agent asks  home is asked  connects    first s    next s")
    for one in found:
        print(
            f"{one['way']:8} {one['ranks']:6} {one['of_a_rank']:12} {one['asks']:11} {one['asked']:14} "
            f"{one['connected']:9} {one['first_s']:10.3f} {one['next_s']:9.3f}"
        )


if __name__ == "__main__":
    main()
