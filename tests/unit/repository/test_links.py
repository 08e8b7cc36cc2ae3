"""No page links to a file or a heading that is not there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def words(page: Path) -> str:
    """The page without its code, in which brackets are no links."""
    return CODE.sub(lambda code: "x" * (code.group().count("\n") == 0), page.read_text())


@cache
def anchors(page: Path) -> frozenset[str]:
    """The headings as links name them: small letters, no marks, hyphens for spaces; counted where twice."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    for heading in HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        found[slug] = found.get(slug, 0) + 1
    return frozenset(
        slug if number == 0 else f"{slug}-{number}"
        for slug, count in found.items()
        for number in range(count)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page: Path) -> None:
    missing = []
    for link in LINK.findall(words(page)):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            missing.append(link)
    assert missing == []


def test_every_page_can_be_found_from_the_first() -> None:
    """From the README or docs/index.md, over links between pages."""
    seen: set[Path] = set()
    left = [ROOT / "README.md", ROOT / "docs" / "index.md"]
    while left:
        page = left.pop()
        if page in seen:
            continue
        seen.add(page)
        for link in LINK.findall(words(page)):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.exists():
                left.append(target)
            elif target.is_dir():
                left += target.glob("*.md")
    assert {str(page.relative_to(ROOT)) for page in {*PAGES} - seen} == set()
