"""Every refusal in the code is on the page of troubles, in a group, with what to do; and nothing else is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from . import writer_of

ROOT = Path(__file__).parents[3]
# Raised, and no refusal that a user reads as such: of what comes over a wire or lies in memory (users see
# which node or folder it was of), of a call that is an error of ckptless, and what ends a generation.
NOT_SAID = {
    *("ProtocolError", "BadVersionError", "UnknownLayoutError", "StaleError", "GreetingCutError"),
    *("ValueError", "TypeError", "RuntimeError", "NotImplementedError", "AttributeError", "LookupError"),
    *("KeyError", "IndexError", "StopIteration", "MemoryError", "AssertionError"),
    *("OSError", "TimeoutError", "ConnectionResetError", "ProcessLookupError", "ChildProcessError"),
    *("GenerationEnded", "CollectiveFailed", "WorkerDied", "ZygoteGoneError", "CannotAskError"),
    *("MissingBaseError", "_ShortError", "ProbeError", "_Cut", "CancelledError", "Wrong"),
    # They hold an Outcome, an answer of pyslurm's, or another error, whose words are found there.
    *("NoPlanError", "_UnknownJobError", "from_message", "undecodable", "type(error)", "cast", "pop"),
}


REFUSALS = writer_of("refusals")
FOUND = REFUSALS.refusals()


def test_the_page_is_that_of_the_code() -> None:
    assert len(FOUND) > 500
    assert REFUSALS.page() == REFUSALS.PAGE.read_text(), "run `make refusals`"


def test_every_refusal_says_what_to_do_or_the_page_does() -> None:
    silent = [f"{one.place}: {one.sentence}" for one in FOUND if REFUSALS.group_of(one).hint(one) is None]
    assert silent == [], "say it in the sentence, or in docs/refusals.toml"


def test_one_that_nobody_explains_is_found() -> None:
    new = REFUSALS.Refusal("daemon/launch/new.py", "UsageError", "it is full")
    assert REFUSALS.group_of(new).hint(new) is None


def test_a_module_without_a_group_is_found() -> None:
    with pytest.raises(LookupError, match="is of no group"):
        REFUSALS.group_of(REFUSALS.Refusal("daemon/new/room.py", "UsageError", "it is full: make room"))


def test_every_hint_is_of_a_sentence_and_every_place_has_one() -> None:
    said = {group.title: [] for group in REFUSALS.GROUPS}  # type: dict[str, list[str]]
    for one in FOUND:
        said[REFUSALS.group_of(one).title].append(one.sentence)
    stale = [
        (group.title, words)
        for group in REFUSALS.GROUPS
        for words in group.hints
        if not any(words in sentence for sentence in said[group.title])
    ]
    assert stale == []
    empty = [
        place
        for group in REFUSALS.GROUPS
        for place in group.places
        if not any(group.has(one) and one.place.startswith(place) for one in FOUND)
    ]
    assert empty == []


def test_whatever_is_raised_is_a_refusal_or_known_to_be_none() -> None:
    unknown = {}
    for path in REFUSALS.modules():
        module = REFUSALS.source(path)
        helpers = {one.name for one in module.functions}
        for call in module.raised:
            if isinstance(call, ast.Call):
                name = REFUSALS.name_of(call)
                if not {name} & {*REFUSALS.TABLE["says"], *NOT_SAID, *helpers}:
                    unknown[name] = f"{path.relative_to(ROOT)}:{call.lineno}"
    assert unknown == {}


@pytest.mark.parametrize(
    ("code", "sentences"),
    [
        ('raise UsageError("give one")', ["give one"]),
        ('raise UsageError(f"{path} is {size:g} bytes")', ["… is … bytes"]),
        ('raise UsageError("one" " and two")', ["one and two"]),
        ('text = f"no {x}" if x else "nothing at all"; raise UsageError(text)', ["no …", "nothing at all"]),
        ("raise UsageError(MOST.format(n=3))", ["at most … of them"]),
        ('raise UsageError(f"{MOST_RANKS} ranks at most")', ["4 ranks at most"]),
        ("raise UsageError(why(x))", ["it is too small", "it is too large"]),
        ('raise UsageError(f"no: {why(x)}")', ["no: it is too small", "no: it is too large"]),
        ('raise ProtocolError("not said to users")', []),
        ('return Answer(verdict="refused", text="not here")', ["not here"]),
        ('raise source.mistake("key", f"{key} is missing")', ["… is missing"]),
        ("raise UsageError(str(error))", ["…"]),
    ],
)
def test_sentences_are_found(tmp_path: Path, code: str, sentences: list[str]) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        'MOST = "at most {n} of them"\nMOST_RANKS = 4\n'
        'def why(x):\n    return "it is too small" if x else "it is too large"\n'
        f"def f(x):\n    {code}\n"
    )
    assert [way for _by, way in REFUSALS.Source(file).refusals()] == sentences


@pytest.mark.parametrize(
    ("sentence", "says"),
    [
        ("--nodes 9 is too many: give fewer", True),
        ("give fewer", True),
        ("it must be a number", True),
        ("run.keep was called twice", False),
        ("this belongs inside the function that is given to ckptless.run", False),
        ("the makers of it", False),
    ],
)
def test_what_a_sentence_says_to_do(sentence: str, says: bool) -> None:
    assert bool(REFUSALS.SAYS.search(sentence)) is says
