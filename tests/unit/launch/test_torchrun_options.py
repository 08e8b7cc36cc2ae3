"""Every option of torchrun's own parser does the same, is said to do nothing, or is refused in a sentence."""

from __future__ import annotations

import os
import re
from argparse import Action
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.run import determine_local_world_size, get_args_parser, parse_min_max_nnodes

from ckptless.daemon.launch import main
from ckptless.daemon.launch import options as launch_options
from ckptless.daemon.launch.torchrun import (
    DEFAULTS,
    MEETING,
    NOT_NEEDED,
    NOT_OF_THE_ENVIRONMENT,
    REFUSED,
    count_nodes,
    count_ranks,
    shown,
)
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.settings.agent_config import SharedConfig
from ckptless.daemon.settings.options import RunOptions

# What does the same here, and a value for it.
SAME = {
    **{"nnodes": "2", "nproc_per_node": "2", "max_restarts": "1", "module": "", "tee": "3", "redirects": "3"},
    **{"local_ranks_filter": "0", "shutdown_timeout": "5", "log_dir": "logs"},
}
# What says nothing to nodes that are made here.
IDLE = (*NOT_NEEDED, *MEETING)
# Of those that are not, one that torchrun takes.
VALUES = {
    **{"start_method": "spawn", "numa_binding": "node", "node_rank": "0", "master_port": "29500"},
    **{"monitor_interval": "0.5", "signals_to_handle": "SIGTERM,SIGUSR1"},
}


class FakeRun:
    """Takes the checked options, and runs nothing."""

    seen: SharedConfig | None = None

    def __init__(self, config: SharedConfig, **_more: object) -> None:
        type(self).seen = config

    async def run(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(launch_options, "LocalRun", FakeRun)
    monkeypatch.setattr(FakeRun, "seen", None)
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()


def call(*words: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(
        main.command, ["--local", *words, "train.py"], prog_name="ckptless-run", env=env
    )


def options() -> Iterator[Action]:
    for action in get_args_parser()._actions:
        if action.option_strings and action.dest != "help":
            yield action


def test_there_is_no_option_of_which_nobody_has_thought() -> None:
    theirs = {action.dest for action in options()}
    assert theirs == {*SAME, *IDLE, *REFUSED}
    assert len(theirs) == len(SAME) + len(IDLE) + len(REFUSED)


def test_the_page_has_each_of_them_in_the_order_of_torchrun_s_help() -> None:
    page = (Path(__file__).parents[3] / "docs/torchrun.md").read_text()
    rows = re.findall(r"^\| `--([a-z-]+)` \| ([a-z ]+) \|", page, re.MULTILINE)
    words = {**dict.fromkeys(SAME, "the same"), **dict.fromkeys(IDLE, "no effect")}
    words |= dict.fromkeys(REFUSED, "refused")
    assert rows == [(one.dest.replace("_", "-"), words[one.dest]) for one in options()]


@pytest.mark.parametrize(
    ("action", "word"), [pytest.param(a, w, id=w) for a in options() for w in a.option_strings]
)
def test_each_of_them(action: Action, word: str) -> None:
    name = action.dest
    value = [] if action.nargs == 0 else [SAME.get(name) or VALUES.get(name, "x")]
    _check(name, call(word, *value))
    if value and word.startswith("--"):
        _check(name, call(f"{word}={value[0]}"))


@pytest.mark.parametrize("action", [pytest.param(a, id=a.dest) for a in options()])
def test_the_environment_speaks_for_what_is_not_given(action: Action) -> None:
    name = action.dest
    value = "1" if action.nargs == 0 else SAME.get(name) or VALUES.get(name, "x")
    assert isinstance(action, env | check_env) is (name not in NOT_OF_THE_ENVIRONMENT)
    result = call(env={f"PET_{name.upper()}": value})
    if name in NOT_OF_THE_ENVIRONMENT:
        assert result.exit_code == 0
    else:
        _check(name, result)


def _check(name: str, result: Result) -> None:
    dashed = f"--{name.replace('_', '-')}"
    if name in REFUSED:
        assert result.exit_code == 2
        assert result.stderr.startswith(f"ckptless-run: error: {dashed}")
        assert result.stderr.count("\n") == 1
        assert FakeRun.seen is None
        return
    assert result.exit_code == 0, result.output
    assert FakeRun.seen is not None
    said = f"ckptless-run: {dashed} is not needed and has no effect\n"
    assert result.stderr == (said if name in IDLE else "")


def test_a_default_that_is_said_is_no_wish() -> None:
    for name, value in DEFAULTS.items():
        assert get_args_parser().get_default(name) == value
        assert call(f"--{name}", value).exit_code == 0


def test_a_signal_that_would_not_reach_the_ranks() -> None:
    result = call("--signals-to-handle", "SIGTERM,SIGWINCH")
    assert result.exit_code == 2
    assert "--signals-to-handle SIGWINCH" in result.stderr
    default = get_args_parser().get_default("signals_to_handle")
    assert call("--signals-to-handle", default).exit_code == 0


# -------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("text", ["1", "4", "2:2", "1:4"])
def test_nodes(text: str) -> None:
    assert count_nodes(text) == parse_min_max_nnodes(text)


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "1:2:3", "4:1", "0:2", "1.5"])
def test_nodes_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError, match="--nnodes"):
        count_nodes(text)


@pytest.mark.parametrize("word", ["cpu", "auto"])
def test_words_for_a_number_of_ranks_mean_what_they_mean_to_torchrun(word: str) -> None:
    assert count_ranks(word) == determine_local_world_size(word)


def test_words_that_mean_nothing_here() -> None:
    with pytest.raises(UsageError, match=r"^--nproc-per-node many: Unsupported nproc_per_node value: many$"):
        count_ranks("many")
    try:
        count = determine_local_world_size("gpu")
    except ValueError as error:
        with pytest.raises(UsageError, match=f"^--nproc-per-node gpu: {error}$"):
            count_ranks("gpu")
    else:
        assert count_ranks("gpu") == count
    for wrong in ("0", "-1"):
        with pytest.raises(UsageError, match="at least one rank"):
            count_ranks(wrong)


# -------------------------------------------------------------------------------------- the console

SLOTS = 4
STREAMS = st.one_of(
    st.sampled_from(("0", "3")),
    st.dictionaries(st.integers(0, SLOTS - 1), st.sampled_from((0, 3)), min_size=1).map(
        lambda found: ",".join(f"{rank}:{std}" for rank, std in found.items())
    ),
)
FILTERS = st.one_of(st.none(), st.sets(st.integers(0, SLOTS - 1), min_size=1))


def theirs(tee: str, redirects: str, wanted: set[int] | None, folder: Path) -> set[int]:
    """Local ranks whose stdout comes to torchrun's console."""
    specs = DefaultLogsSpecs(str(folder), Std.from_str(redirects), Std.from_str(tee), wanted)
    found = specs.reify({rank: {} for rank in range(SLOTS)})
    return {rank for rank in range(SLOTS) if not found.stdouts[rank] or rank in found.tee_stdouts}


@settings(deadline=None, max_examples=60)
@given(STREAMS, STREAMS, FILTERS)
def test_what_torchrun_shows_is_shown(
    tmp_path_factory: pytest.TempPathFactory, tee: str, redirects: str, wanted: set[int] | None
) -> None:
    names = None if wanted is None else ",".join(map(str, sorted(wanted)))
    asked: dict[str, Any] = {"tee": tee, "redirects": redirects, "local_ranks_filter": names}
    ours = shown(RunOptions(**asked), nodes=3, slots=SLOTS)
    if wanted is None and "3" not in _values(tee) and "3" not in _values(redirects):
        assert ours == (0,)  # nothing was asked for
        return
    expected = theirs(tee, redirects, wanted, tmp_path_factory.mktemp("logs"))
    ranks = {rank for rank in range(3 * SLOTS) if rank % SLOTS in expected}
    assert (set(range(3 * SLOTS)) if ours is None else set(ours)) == ranks


def _values(text: str) -> list[str]:
    return [part.rpartition(":")[2] for part in text.split(",")]


@pytest.mark.parametrize(
    ("tee", "redirects", "wanted", "ranks"),
    [
        (None, None, None, (0,)),
        ("0", "0", None, (0,)),
        ("3", None, None, None),
        (None, "3", None, ()),
        ("0:3", "3", None, (0, 2)),
        ("3", None, "1", (1, 3)),
        (None, None, "0", (0, 2)),
        ("all", "3", "0", None),
        ("none", None, None, ()),
        ("0,3", None, None, (0, 3)),
    ],
)
def test_whose_output_is_shown(
    tee: str | None, redirects: str | None, wanted: str | None, ranks: tuple[int, ...] | None
) -> None:
    asked: dict[str, Any] = {"tee": tee, "redirects": redirects, "local_ranks_filter": wanted}
    assert shown(RunOptions(**asked), nodes=2, slots=2) == ranks


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        *((name, text, "one stream here") for name in ("tee", "redirects") for text in ("1", "2", "0:3,1:1")),
        *((name, text, "give 3 for all") for name in ("tee", "redirects") for text in ("4", "x", "0:4", "")),
        ("redirects", "all", "give 3 for all ranks, 0:3,1:3 for local ranks"),
        ("local_ranks_filter", "0:1", "give local ranks"),
    ],
)
def test_what_cannot_be_shown(name: str, text: str, says: str) -> None:
    asked: dict[str, Any] = {name: text}
    with pytest.raises(UsageError, match=says):
        shown(RunOptions(**asked), nodes=1, slots=2)
