"""Adapters are tried with the oldest and the newest release that pip takes, and name them."""

from __future__ import annotations

import configparser
import importlib
import sys

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from .frameworks_matrix import RELEASES
from .matrix import ROOT

# torchtitan needs triton, which the Makefile keeps apart.
sys.path.append(f"{sys.prefix}/triton")
# What the adapter says where a release is another one.
SAYS = {
    "accelerate": ("prepared", "ACCELERATE"),
    "lightning": ("lightning", "VERSIONS"),
    "torchtitan": ("torchtitan", "VERSIONS"),
    "transformers": ("transformers", "VERSIONS"),
}
TRIED = [Requirement(one) for release in RELEASES for one in release.split(",")]


def ends(name: str) -> tuple[Version, Version]:
    """Return the oldest and the newest release that is tried."""
    tried = [Version(next(iter(one.specifier)).version) for one in TRIED if one.name == name]
    return min(tried), max(tried)


@pytest.mark.parametrize("name", SAYS)
def test_the_oldest_and_the_newest_are_tried(name: str) -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    wanted = {
        str(found.specifier)
        for words in config["options.extras_require"].values()
        for found in map(Requirement, filter(None, words.splitlines()))
        if found.name == name
    }
    oldest, newest = ends(name)
    above = f"{newest.major}.{newest.minor + 1}"
    assert wanted == {f"<{above},>={lowest(oldest)}"}


def lowest(release: Version) -> str:
    """Return it as people write it: no third number that is zero."""
    return str(release).removesuffix(".0")


@pytest.mark.parametrize("name", SAYS)
def test_an_adapter_names_the_same(name: str) -> None:
    pytest.importorskip(name)
    oldest, newest = ends(name)
    module, constant = SAYS[name]
    said = getattr(importlib.import_module(f"ckptless.pytorch_hooks.adapters.{module}"), constant)
    assert said.lower() == f"use {name} {lowest(oldest)} to {newest.major}.{newest.minor}"
