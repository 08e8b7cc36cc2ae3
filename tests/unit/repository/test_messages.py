"""The page of messages is that of the code, and has those of every module that defines some."""

from __future__ import annotations

import importlib.util
import pkgutil
from pathlib import Path
from types import ModuleType

from ckptless.daemon import protocol

DOCS = Path(__file__).parents[3] / "docs"


def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("messages_page", DOCS / "messages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_code() -> None:
    assert writer().page() == (DOCS / "messages.md").read_text(), "run: make messages"


def test_every_module_with_messages_is_on_it() -> None:
    messages = writer()
    shown = {f"{protocol.__name__}.{name}" for names in messages.EDGES.values() for name in names}
    found = {
        one.name
        for one in pkgutil.walk_packages(protocol.__path__, f"{protocol.__name__}.")
        if messages.structs(importlib.import_module(one.name))
    }
    assert found == shown
