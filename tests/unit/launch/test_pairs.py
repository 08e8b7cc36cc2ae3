"""Pairs of nodes: who tries whom in which round, what follows from what they measured, and who may ask."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckptless.daemon.protocol.errors import StartError, UsageError
from ckptless.doctor.__main__ import command
from ckptless.doctor.findings import Finding
from ckptless.doctor.pairing import TOKEN, Asked, pairs
from ckptless.doctor.pairs import Pair, Tried, Way, schedule, slow, verdict

SIZES = [2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 100]


def way(mib_s: float) -> Way:
    return Way(mib_s=mib_s, rtt_ms=0.1)


USUAL = (way(100), way(104))
SLOW, SLOW_BACK = (way(40), way(100)), (way(100), way(40))
FAILS, DEAF = (Way(error="no answer in 3.0 s"),) * 2, (way(100), Way(error="refused"))


# --------------------------------------------------------------------------------------- the rounds


@pytest.mark.parametrize("nodes", SIZES)
def test_each_pair_is_tried_once(nodes: int) -> None:
    rounds = schedule(nodes, every=True)
    tried = [pair for each in rounds for pair in each]
    assert sorted(tried) == list(itertools.combinations(range(nodes), 2))
    assert len(rounds) == nodes - 1 + nodes % 2


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("nodes", SIZES)
def test_a_node_has_one_partner_at_a_time(nodes: int, every: bool) -> None:
    for each in schedule(nodes, every=every):
        busy = [node for pair in each for node in pair]
        assert len(busy) == len(set(busy)) == nodes - nodes % 2


@pytest.mark.parametrize("nodes", SIZES)
def test_each_node_has_log_n_partners(nodes: int) -> None:
    rounds = schedule(nodes)
    assert len(rounds) <= (nodes - 1).bit_length() + nodes % 2
    tried = [pair for each in rounds for pair in each]
    assert len(tried) == len(set(tried))
    for node in range(nodes):
        assert sum(node in pair for pair in tried) >= min(nodes - 1, (nodes - 1).bit_length())


# -------------------------------------------------------------------------------------- the verdict


def test_where_all_are_cut_there_was_too_little_time() -> None:
    cut = Way(mib_s=90, rtt_ms=0.1, cut=True)
    found = verdict(["a", "b", "c"], {(0, 1): (cut, cut), (0, 2): (cut, way(100)), (1, 2): USUAL}, {}, 3)
    assert [(one.about, one.grade) for one in found] == [("pairs", "fine"), ("time", "limited")]
    assert found[0].text.startswith("1 of 3 are in order")
    assert found[1].text == "1 of 3 pairs were tried to their end in the time that there was"


def test_one_that_is_cut_where_others_are_not_is_slow() -> None:
    cut = Way(mib_s=9, rtt_ms=0.1, cut=True)
    found = verdict(["a", "b", "c"], {(0, 1): (way(100), cut), (0, 2): USUAL, (1, 2): USUAL}, {}, 3)
    assert [(one.about, one.grade) for one in found] == [("pairs", "fine"), ("link a - b", "limited")]
    assert "a to b 100 MiB/s, 0.10 ms; back under 9 MiB/s, 0.10 ms" in found[1].text


def judged(
    nodes: int,
    odd: Mapping[Pair, Tried],
    missing: Mapping[int, str] | None = None,
    *,
    every: bool = False,
    left: int = 0,
) -> dict[str, str]:
    """Return grades by what they are about, where pairs are as usual but for `odd` ones; `left`: untried."""
    missing = missing or {}
    planned = [
        pair for each in schedule(nodes, every=every) for pair in each if missing.keys().isdisjoint(pair)
    ]
    assert odd.keys() <= set(planned)
    tried = {pair: odd.get(pair, USUAL) for pair in planned[: len(planned) - left]}
    names = [f"n{node}" for node in range(nodes)]
    return {one.about: one.grade for one in verdict(names, tried, missing, len(planned))}


def of_node(nodes: int, node: int, what: Tried, *, every: bool = False) -> dict[Pair, Tried]:
    return {pair: what for each in schedule(nodes, every=every) for pair in each if node in pair}


@pytest.mark.parametrize("nodes", SIZES)
def test_a_sound_network(nodes: int) -> None:
    assert judged(nodes, {}) == {"pairs": "fine"}


@pytest.mark.parametrize(
    ("what", "grade"), [(SLOW, "limited"), (SLOW_BACK, "limited"), (FAILS, "broken"), (DEAF, "broken")]
)
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("nodes", [5, 6, 7, 8, 9, 17])
def test_each_single_node_is_named_alone(nodes: int, every: bool, what: Tried, grade: str) -> None:
    for node in range(nodes):
        odd = of_node(nodes, node, what, every=every)
        assert judged(nodes, odd, every=every) == {"pairs": "fine", f"n{node}": grade}


@pytest.mark.parametrize(("what", "grade"), [(SLOW, "limited"), (FAILS, "broken")])
@pytest.mark.parametrize("nodes", [3, 4, 5, 8, 9, 17])
def test_each_single_link_is_named_alone(nodes: int, what: Tried, grade: str) -> None:
    for pair in [pair for each in schedule(nodes) for pair in each]:
        link = f"link n{pair[0]} - n{pair[1]}"
        assert judged(nodes, {pair: what}) == {"pairs": "fine", link: grade}


@pytest.mark.parametrize("nodes", [3, 4])
def test_a_node_of_few_that_fails(nodes: int) -> None:
    for node in range(nodes):
        assert judged(nodes, of_node(nodes, node, FAILS)) == {"pairs": "fine", f"n{node}": "broken"}


def test_two_nodes_and_a_link_of_others() -> None:
    odd = {**of_node(16, 3, SLOW), **of_node(16, 9, FAILS)}
    link = next(pair for each in schedule(16) for pair in each if not {3, 9}.intersection(pair))
    found = judged(16, {**odd, link: FAILS})
    assert found == {
        "pairs": "fine",
        "n3": "limited",
        "n9": "broken",
        f"link n{link[0]} - n{link[1]}": "broken",
    }


def test_what_fails_and_is_slow_is_broken() -> None:
    odd = of_node(8, 5, SLOW)
    odd[next(iter(odd))] = FAILS
    assert judged(8, odd) == {"pairs": "fine", "n5": "broken"}


def test_two_nodes_are_one_link() -> None:
    assert judged(2, {(0, 1): FAILS}) == {"pairs": "broken", "link n0 - n1": "broken"}
    assert judged(2, {(0, 1): (way(10), way(100))}) == {"pairs": "fine", "link n0 - n1": "limited"}


def test_who_has_not_come_is_named_and_its_pairs_are_not_counted() -> None:
    assert judged(8, {}, {6: "it has not come"}) == {"pairs": "fine", "n6": "broken"}
    assert judged(2, {}, {1: "it has not come"}) == {"pairs": "broken", "n1": "broken"}


def test_pairs_for_which_there_was_no_time() -> None:
    assert judged(8, {}, left=4) == {"pairs": "fine", "time": "limited"}


@pytest.mark.parametrize(
    ("there", "back", "is_slow"),
    [
        (100, 100, False),
        (51, 51, False),
        (50, 50, False),
        (49, 100, True),
        (100, 49, True),
        (900, 900, False),
    ],
)
def test_slow_is_under_half_of_the_median(there: float, back: float, is_slow: bool) -> None:
    others = dict.fromkeys([(0, 1), (2, 3), (4, 5)], (way(100), way(100)))
    assert slow({**others, (6, 7): (way(there), way(back))}) == ({(6, 7)} if is_slow else set())
    assert slow({**others, (6, 7): FAILS, (8, 9): DEAF}) == set()


def test_the_words() -> None:
    names = [f"n{node}" for node in range(5)]
    tried = {pair: USUAL for each in schedule(5) for pair in each}
    summary, one, link = verdict(names, {**tried, **of_node(5, 2, SLOW), (0, 3): FAILS}, {}, len(tried))
    assert summary.text == "3 of 8 are in order; medians 100 MiB/s, round trip 0.10 ms"
    assert one.text.startswith("4 of its 4 pairs are slow or fail (the median is 100 MiB/s): n")
    assert "40 MiB/s, 0.10 ms; back 100 MiB/s, 0.10 ms" in one.text
    assert one.advice.startswith("leave it out (--exclude=n2)")
    assert link.text == "n0 to n3 no answer in 3.0 s; back no answer in 3.0 s (the median is 100 MiB/s)"


# ------------------------------------------------------------------------------------- who may ask


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]"}
STEP = {
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, "run it in sbatch or salloc"),
        ({**STEP, "SLURM_JOB_NODELIST": "n1"}, "two nodes or more"),
        (STEP, f"{TOKEN} is not set"),
        ({**STEP, TOKEN: "short"}, f"{TOKEN} is not set"),
        ({**STEP, "SLURM_LOCALID": "1"}, "one task on each node"),
        ({**STEP, TOKEN: "x" * 16}, "--interface is no-such, and this node has no such address"),
    ],
)
def test_a_mistake_is_said(env: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        pairs(Asked("no-such", 1, every=False, limit_s=5), env)


@pytest.mark.parametrize(
    ("words", "said"), [(["--pairs"], "run it in sbatch or salloc"), (["--pairs", "--node"], "two questions")]
)
def test_a_mistake_ends_with_2(monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 2
    assert said in done.stderr


# -------------------------------------------------------------------------------- srun, as Slurm's may be


@pytest.mark.parametrize(
    ("srun", "text"),
    [
        ("exit 7", "its step ended with 7 before it could say how it went"),
        ("echo killed", "its step ended with 0 before it could say how it went"),
        ("exec sleep 60", "no end in 0.9 s"),
    ],
)
def test_a_step_that_says_nothing_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, srun: str, text: str
) -> None:
    program = tmp_path / "srun"
    program.write_text(f"#!/bin/sh\n{srun}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (found,) = pairs(Asked(None, 1, every=False, limit_s=1), {**JOB, "PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert (found.about, found.grade, found.text) == ("n1", "broken", text)


def test_steps_are_given_their_nodes_a_token_and_what_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "srun"
    program.write_text(
        "#!/bin/sh\n"
        f'echo "$@" "among=$CKPTLESS_PAIRS_AMONG" "token=${{#CKPTLESS_PAIRS_TOKEN}}" >> {tmp_path}/said\n'
        'echo \'{"findings": [{"about": "pairs", "grade": "fine", "text": "x", "advice": ""}]}\'\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    env = {**JOB, "PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CPUS_PER_TASK": "2"}
    assert pairs(Asked("10.0.0.0/8", 3, every=True, limit_s=40), env) == [Finding("pairs", "fine", "x")]
    lines = sorted((tmp_path / "said").read_text().splitlines(), key=lambda line: line.partition("among=")[2])
    assert len(lines) == 4
    for node, line in enumerate(lines):
        assert f"--nodelist=n{node + 1} " in line
        assert line.endswith(f"--time-limit=30 among={node} n[1-4] token=64")
        assert "--pairs --json --mib=3 --interface=10.0.0.0/8 --all" in line


def test_there_is_no_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartError, match="no srun in PATH"):
        pairs(Asked(None, 1, every=False, limit_s=1), {**JOB, "PATH": str(tmp_path)})
