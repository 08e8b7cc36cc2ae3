"""Every kind of event that is told has an entry in the one table, and no other; the page has them all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ckptless.daemon.ckptlessd.planning.plan import RUNGS
from ckptless.daemon.ledger.event_kinds import GROUPS, KINDS

from . import writer_of

ROOT = Path(__file__).parents[3]
# Who tells of something, by the name of the function; the kind is one of its first three arguments.
TELLERS = {
    *("note", "on_event", "_on_event", "_warn", "_tell", "Line", "NoteEvent", "AgentEvent", "Note", "event"),
    *("Finding", "Cause", "_refuse"),
}
LEVELS = {"info", "warning", "error"}
KIND = re.compile(r"[a-z]+(-[a-z]+)*")
# Folders in which these names are of something else.
OTHERS = ("daemon/ckptctl/", "daemon/slurm/", "daemon/launch/", "daemon/agent/kvstore/home.py")
# Causes that a rank has left for, and that are no fault of it; and other words, of Slurm's or of nodes.
NO_EVENTS = {"stop", "renewed", "comment", "dark", "back", "gone", "down", "drain"}
# In the table under another word: see event_lines.KINDS.
RENAMED = {"silent-corruption": "corrupt"}


def sources() -> Iterator[tuple[str, str]]:
    for folder in ("daemon", "pytorch_hooks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not name.startswith(OTHERS) and path.name != "event_kinds.py":
                yield name, path.read_text()


def kinds_told() -> dict[str, str]:
    """Every kind that a call names, with a place where it is."""
    found: dict[str, str] = {}
    for name, text in sources():
        for call in ast.walk(ast.parse(text)):
            if not isinstance(call, ast.Call):
                continue
            callee = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if callee not in TELLERS:
                continue
            named = [one.value for one in call.keywords if one.arg == "kind"]
            for argument in (*call.args[:3], *named):
                word = argument.value if isinstance(argument, ast.Constant) else None
                if isinstance(word, str) and KIND.fullmatch(word) and word not in LEVELS:
                    found.setdefault(RENAMED.get(word, word), f"{name}:{call.lineno}")
    return found


def test_every_kind_that_is_told_has_an_entry() -> None:
    told = kinds_told()
    assert len(told) > 80
    missing = {kind: place for kind, place in told.items() if kind not in KINDS and kind not in NO_EVENTS}
    assert missing == {}


def test_every_entry_is_of_a_kind_that_somebody_tells() -> None:
    words = set(RENAMED.values()) | set(RUNGS)
    for _, text in sources():
        words.update(re.findall(r'"([a-z]+(?:-[a-z]+)*)"', text))
    assert KINDS.keys() - words == set()


def test_no_kind_has_two_entries_and_all_are_sentences() -> None:
    assert sum(map(len, GROUPS.values())) == len(KINDS)
    for kind, one in KINDS.items():
        assert KIND.fullmatch(kind), kind
        for text in one:
            # A full stop, and the mark of a table's column, are put there by who shows it.
            assert not text.endswith("."), kind
            assert not {"|", "\n"} & {*text}, kind
        assert one.means[0].isupper(), kind


def test_the_page_has_the_table() -> None:
    assert (ROOT / "docs" / "events.md").read_text() == writer_of("events").page(), "run `make events`"
