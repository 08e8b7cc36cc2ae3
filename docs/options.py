"""Writes what the manual pages, etc/ckptless.yaml and the SPANK plugin have of the table of options.

`make options` runs it; `tests/unit/settings/test_man.py` compares. What is said about an option in words is
the page's own; its names, what is accepted, and its default come from `ckptless.daemon.settings.options`.
"""

import re
import textwrap
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

from ckptless.daemon.protocol.limits import MOST_SIZES
from ckptless.daemon.settings import elastic
from ckptless.daemon.settings.option_kinds import Option, rate_text
from ckptless.daemon.settings.options import KEYS, NO_HET, NONE_LEFT, RUN_ROWS, Row
from ckptless.daemon.settings.site import default_settings, shown

ROOT = Path(__file__).parents[1]
MAN = ROOT / "docs" / "man"
# How what this script writes begins, down to the end of an item.
OURS = re.compile(r"It must be |From \d|Default: ")
# What the plugins refuse, by the name that a sentence has there; and the fields in them that are no numbers.
SENTENCES = {
    "NONE_LEFT": NONE_LEFT,
    "NO_HET": NO_HET,
    **{name: said for name, said in vars(elastic).items() if name[:1].isupper() and isinstance(said, str)},
}
TEXTS = ("s", "n", "word", "than", "sizes", "partition", "allowed")


def texts() -> dict[Path, str]:
    """Every file with what it must hold."""
    defaults = {one.key: one.text for one in shown(default_settings())}
    return {
        MAN / "ckptless.yaml.5": _yaml_page((MAN / "ckptless.yaml.5").read_text(), defaults),
        MAN / "ckptless-run.1": _run_page((MAN / "ckptless-run.1").read_text()),
        MAN / "spank_ckptless.8": _spank_page((MAN / "spank_ckptless.8").read_text()),
        ROOT / "etc" / "ckptless.yaml": _shipped((ROOT / "etc" / "ckptless.yaml").read_text(), defaults),
        ROOT / "slurm_ext" / "spank" / "table.h": _header(),
    }


def _yaml_page(page: str, defaults: dict[str, str]) -> str:
    for key, row in KEYS.items():
        facts = [] if key == "version" else [f"It must be {row.wanted}.", f"Default: {defaults[key]}"]
        page = _item(page, rf"\.It Ic {re.escape(key)}", f".It Ic {key}", facts)
    return page


def _run_page(page: str) -> str:
    for row in RUN_ROWS:
        facts = [f"Default: {row.unsaid}."] if row.unsaid else []
        long = next(flag for flag in row.flags if flag.startswith("--"))
        page = _item(
            page, rf"\.It Fl [^\n]*{long[1:]}\b(?!-)[^\n]*", _head(row), [*_accepted(row.option), *facts]
        )
    return page


def _spank_page(page: str) -> str:
    for row in RUN_ROWS:
        if row.option.spec:
            head = rf"\.It Cm {row.option.spec} Ns = Ns Ar [^\n]*"
            page = _item(page, head, None, _accepted(row.option))
    return page


def _head(row: Row) -> str:
    """An option as an item of the list: `.It Fl t , -tee Ar RANKS`."""
    option = row.option
    value = f" Ar {option.metavar}" if option.metavar else ""
    if option.words and not option.metavar:
        value = f" Cm {' | '.join(option.words)}"
    names = [f"Fl {flag.removeprefix('-')}" for flag in row.flags]
    if option.short:
        names = [names[0], *(name.removeprefix("Fl ") for name in names[1:])]
        return f".It {' , '.join(names)}{value}"
    return f".It {' , '.join(f'{name}{value}' for name in names)}"


def _accepted(option: Option) -> list[str]:
    """Return what is accepted on the command line, as a sentence."""
    if option.plain is not None:
        return [] if option.high is None else [f"From {option.low:g} to {option.high:.0f}."]
    if option.words and option.metavar:
        return [f"It must be {option.wanted(option.cli_nothing)}."]
    return []


def _item(page: str, pattern: str, head: str | None, facts: Iterable[str]) -> str:
    """The page with the item that matches, its head and the facts at its end made anew."""
    found = re.search(rf"(?m)^({pattern})\n((?:(?!\.It |\.El|\.Ss |\.Sh ).*\n)*)", page)
    if found is None:
        raise SystemExit(f"a page has no item for {head or pattern}: write it, with some words")
    kept = takewhile(lambda line: not OURS.match(line), found[2].splitlines())
    text = "\n".join([head or found[1], *kept, *(line for fact in facts for line in _wrapped(fact))])
    return page[: found.start()] + text + "\n" + page[found.end() :]


def _wrapped(fact: str) -> list[str]:
    return textwrap.wrap(fact, 78, break_long_words=False, break_on_hyphens=False)


def _shipped(text: str, defaults: dict[str, str]) -> str:
    section, lines = "", []
    for line in text.splitlines():
        head = re.fullmatch(r"([a-z_]+):", line)
        value = re.fullmatch(r"(( *)(?:# )?([a-z_]+)): \S.*", line)
        section = head[1] if head else section
        key = (f"{section}.{value[3]}" if value[2] else value[3]) if value else ""
        lines.append(f"{value[1]}: {defaults[key]}" if value and key in defaults else line)
    return "\n".join(lines) + "\n"


def _header() -> str:
    """Return the header of what the SPANK and job_submit plugins refuse."""
    lines = [
        "/* Written by `make options` from daemon/settings/options.py, where it is changed. */",
        "#ifndef CKPTLESS_TABLE_H",
        "#define CKPTLESS_TABLE_H",
        "",
    ]
    for option in (row.option for row in RUN_ROWS):
        if not option.spec or option.high is None:
            continue
        name = option.variable
        unit = "s" if option.plain is float else ""
        span = [
            f"{bound:g}{unit}" if option.plain else rate_text(bound) for bound in (option.low, option.high)
        ]
        lines += [
            f"#define {name}_LOW {option.low:.0f}",
            f"#define {name}_HIGH {option.high:.0f}",
            f'#define {name}_RANGE "{span[0]} to {span[1]}"',
        ]
    (wanted,) = (row.option.wanted() for row in RUN_ROWS if row.option.spec == "sizes")
    lines += ["", f"#define CKPTLESS_MOST_SIZES {MOST_SIZES}", *_define("CKPTLESS_SIZES_WANTED", wanted), ""]
    for name, sentence in SENTENCES.items():
        lines += _define(f"CKPTLESS_{name}", re.sub(r"{(\w+)}", _conversion, sentence))
    lines += ["", "#endif"]
    return "\n".join(lines) + "\n"


def _conversion(found: re.Match[str]) -> str:
    return "%s" if found[1] in TEXTS else "%ld"


def _define(name: str, sentence: str) -> list[str]:
    parts = [f'\t"{part} "' for part in textwrap.wrap(sentence, 90, break_on_hyphens=False)]
    parts[-1] = parts[-1].removesuffix(' "') + '"'
    return [f"#define {name} \\", *(f"{part} \\" for part in parts[:-1]), parts[-1]]


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text)
