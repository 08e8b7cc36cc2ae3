"""Writes docs/events.md from the table of kinds of events; a test compares. `make events` runs it."""

from pathlib import Path

from ckptless.daemon.ledger.event_kinds import GROUPS

PAGE = Path(__file__).parent / "events.md"
HEAD = """# Events

Each line of a job's story (`ckptctl events`, and its daemons' logs) is of one of these kinds. The text behind
the kind says who it was, and why; with `--json`, `about` has node, slot, rank and process. `ckptctl explain
4711` tells the story in sentences, with what is to be done; `ckptctl explain --kind hung` says of one kind
what stands here. Sentences that refuse something, and trouble without a word:
[troubleshooting](troubleshooting.md).
"""


def page() -> str:
    """Return all of the page."""
    parts = [HEAD]
    for group, kinds in GROUPS.items():
        rows = [f"| `{kind}` | {one.means} | {one.to_do} |" for kind, one in kinds.items()]
        parts.append(
            "\n".join(
                (
                    f"## {group}\n",
                    "| kind | what has happened | what to do |",
                    "| --- | --- | --- |",
                    *rows,
                    "",
                )
            )
        )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
