"""What the repository says of itself: pages that are made from code, commands in prose, rooms, links."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[3]


def writer_of(page: str) -> ModuleType:
    """Return docs/PAGE.py, which writes docs/PAGE.md."""
    spec = importlib.util.spec_from_file_location(f"{page}_page", ROOT / "docs" / f"{page}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
