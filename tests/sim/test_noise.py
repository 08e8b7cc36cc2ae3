"""A noisy network: what lives is not given up for what is short, and what is dark is found in time."""

from __future__ import annotations

import pytest

from ckptless.daemon.settings.config import Timers

from .noise import Found, Incident, Kind, Noisy

DARK_S = 1.5
SEEDS = range(5)


def suffer(kind: Kind, size: float, seed: int, dark_s: float = DARK_S) -> Found:
    return Noisy(Timers(beat_s=dark_s / 6, dark_s=dark_s)).suffer(Incident(kind, size, seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_without_power_is_found_and_replaced(seed: int) -> None:
    found = suffer("power", 0.0, seed)
    assert (found.lost, found.ended) == (1, False)
    assert found.found_s is not None
    assert found.trains_s is not None
    assert DARK_S - 0.5 < found.found_s < DARK_S + 0.5
    assert found.trains_s < found.found_s + 0.2


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["line", "still", "leaf"])
def test_nobody_is_given_up_for_less_than_half_of_it_and_all_are_for_twice_of_it(
    kind: Kind, seed: int
) -> None:
    assert suffer(kind, 0.45 * DARK_S, seed).lost == 0
    assert suffer(kind, 2 * DARK_S, seed).lost == (4 if kind == "leaf" else 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_machine_whose_kernel_answers_is_not_given_up(seed: int) -> None:
    assert suffer("starved", 4 * DARK_S, seed).lost == 0


def test_whoever_is_in_a_hurry_gives_up_nodes_that_lose_packets() -> None:
    lost = {
        dark_s: sum(suffer("loss", 0.35, seed, dark_s).lost for seed in range(6)) for dark_s in (0.5, 3.0)
    }
    assert lost[3.0] == 0 < lost[0.5]
