"""The page of messages is that of the code, and has those of every module that defines some."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from ckptless import doctor
from ckptless.daemon import launch, protocol

from . import writer_of

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_is_that_of_the_code() -> None:
    assert writer_of("messages").page() == (DOCS / "messages.md").read_text(), "run: make messages"


def test_every_module_with_messages_is_on_it() -> None:
    messages = writer_of("messages")
    shown = {messages.module_of(name).__name__ for names in messages.EDGES.values() for name in names}
    found = {
        one.name
        for room in (protocol, launch, doctor)
        for one in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
        if messages.structs(importlib.import_module(one.name))
    }
    assert found == shown
