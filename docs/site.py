"""Puts the pages of the documentation site together in build/site/docs, for MkDocs; `make site` builds it.

The pages are those of docs/, as they read on a code host, too. The manual's are made of its mdoc sources by
mandoc, the changelog and its like are taken along, and what pages link to in the source is named instead.
"""

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "site" / "docs"
BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Make the folder anew."""
    shutil.rmtree(OUT, ignore_errors=True)
    for page in sorted((ROOT / "docs").rglob("*.md")):
        _write(page, page.relative_to(ROOT / "docs"))
    for name in BESIDE:
        _write(ROOT / name, Path(name))
    for image in (ROOT / "docs").rglob("*.png"):
        target = OUT / image.relative_to(ROOT / "docs")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, target)
    for manual in sorted((ROOT / "docs" / "man").iterdir()):
        text = subprocess.run(
            ["mandoc", "-T", "markdown", str(manual)], check=True, capture_output=True, text=True
        ).stdout
        _put(Path("man") / f"{manual.name}.md", f"# {manual.stem}({manual.suffix[1:]})\n\n{_body(text)}")
    for folder in ("design", "decisions"):
        pages = sorted((OUT / folder).glob("*.md"))
        lines = [f"- [{_title(page)}]({page.name})" for page in pages]
        _put(Path(folder) / "index.md", "\n".join((f"# {folder.capitalize()}", "", *lines, "")))


def _write(page: Path, to: Path) -> None:
    parts = FENCED.split(page.read_text())
    _put(to, "".join(part if part.startswith("```") else _links(part, page, to) for part in parts))


def _put(to: Path, text: str) -> None:
    (OUT / to).parent.mkdir(parents=True, exist_ok=True)
    (OUT / to).write_text(text)


def _links(text: str, page: Path, to: Path) -> str:
    """Return the text with links as they are within the site; what is not on it is named."""

    def there(link: re.Match[str]) -> str:
        mark, words, target = link.groups()
        path, hash_mark, anchor = target.partition("#")
        if "://" in target or not path:
            return link.group()
        found = (page.parent / path).resolve()
        at = _on_site(found)
        if at is None:
            return words
        up = "../" * (len(to.parts) - 1)
        return f"{mark}[{words}]({up}{at}{hash_mark}{anchor})"

    return LINK.sub(there, text)


def _on_site(found: Path) -> str | None:
    docs = ROOT / "docs"
    if found.parent == ROOT and found.name in BESIDE:
        return found.name
    if not found.is_relative_to(docs):
        return None
    at = found.relative_to(docs)
    if at.parts[:1] == ("man",):
        return f"{at}.md"
    if found.is_dir():
        return f"{at}/index.md" if at.parts[:1] in (("design",), ("decisions",)) else None
    return str(at) if found.suffix in (".md", ".png") else None


def _body(manual: str) -> str:
    """Return a manual page without its running head and foot; sections are one level down."""
    lines = manual.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("# "))
    end = max(number for number, line in enumerate(lines) if line.strip())
    return "\n".join(f"#{line}" if line.startswith("#") else line for line in lines[begin:end]) + "\n"


def _title(page: Path) -> str:
    return next(line[2:] for line in page.read_text().splitlines() if line.startswith("# "))


if __name__ == "__main__":
    main()
