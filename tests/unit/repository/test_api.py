"""The reference of what scripts may use is that of the code, and names all that there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ckptless
from ckptless.daemon.protocol import errors as protocol
from ckptless.pytorch_hooks import errors as hooks
from ckptless.pytorch_hooks.running.standalone import StandaloneRun

from . import writer_of

ROOT = Path(__file__).parents[3]
# What a docstring may name that is not of ours.
THEIRS = {"RuntimeError", "ValueError"}


PAGE = (ROOT / "docs" / "api.md").read_text()
HEADINGS = set(re.findall(r"^### (\S+)$", PAGE, re.MULTILINE))


def test_the_page_is_that_of_the_code() -> None:
    assert writer_of("api").page() == PAGE, "run `make api`"


def test_what_is_exported_is_there() -> None:
    assert {f"ckptless.{name}" for name in ckptless.__all__ if name not in ("Run", "__version__")} <= HEADINGS
    home = ROOT / "src" / "ckptless"
    files = [
        *home.glob("*.py"),
        *(path for path in home.glob("*/__init__.py") if not path.parent.is_symlink()),
    ]
    found = [path for path in files if "\n__all__" in path.read_text()]
    names = {path.parent.name if path.stem == "__init__" else path.stem for path in found}
    assert {f"ckptless.{name}" for name in names if name != "ckptless"} == writer_of("api").MODULES.keys() - {
        "ckptless"
    }


def test_what_run_has_without_an_agent_is_there_and_nothing_else() -> None:
    run = StandaloneRun()
    public = {name for name in dir(run) if not name.startswith("_")}
    shown = set(re.findall(r"^(?:### |\| `)run\.(\w+)(?=$|`)", PAGE, re.MULTILINE))
    assert shown == public


@pytest.mark.parametrize("name", sorted(set(re.findall(r"^### run\.(\w+)$", PAGE, re.MULTILINE))))
def test_a_call_takes_the_same_with_an_agent_and_without(name: str) -> None:
    module = writer_of("api")
    here = module.methods(module.class_at(module.ALONE))[name].args
    there = module.of_run()[name].args
    for kind in ("args", "kwonlyargs"):
        assert [one.arg for one in getattr(here, kind)] == [one.arg for one in getattr(there, kind)]
    assert [*map(ast.unparse, here.defaults)] == [*map(ast.unparse, there.defaults)]


def test_every_error_that_is_named_is_explained() -> None:
    known = {
        name for module in (protocol, hooks) for name in vars(module) if isinstance(vars(module)[name], type)
    }
    above, _, table = PAGE.partition("\n## Errors\n")
    named = {word for word in re.findall(r"\b[A-Z]\w+\b", above) if word in known or word.endswith("Error")}
    explained = set(re.findall(r"^\| `([A-Z]\w+)` \|", table, re.MULTILINE))
    assert len(named) >= 7
    assert named - THEIRS <= explained


def test_every_variable_is_one_of_the_code() -> None:
    code = "".join(
        path.read_text()
        for room in ("daemon", "pytorch_hooks", "src/ckptless")
        for path in (ROOT / room).rglob("*.py")
    )
    assert [
        name for name in writer_of("api").VARIABLES if f'"{name}' not in code and f"{name}=" not in code
    ] == []


def test_a_name_that_is_not_there_is_no_page() -> None:
    with pytest.raises(LookupError, match="has no nothing"):
        writer_of("api").found("ckptless", "nothing")
