"""Writes the tables of docs/metrics.md from `ckptless.daemon.ckptlessd.metrics.catalog`.

`make options` runs it; `tests/unit/metrics/test_documents.py` compares.
"""

from collections.abc import Sequence
from pathlib import Path

from ckptless.daemon.ckptlessd.metrics import catalog
from ckptless.daemon.ckptlessd.metrics.catalog import Metric

PAGE = Path(__file__).with_name("metrics.md")
# The tables are between these headings and the next ones.
TABLES: dict[str, Sequence[Metric]] = {
    "### Of the daemon": catalog.OF_DAEMON,
    "### Of the node's health": catalog.OF_HEALTH,
    "### Of the node": catalog.OF_NODE,
    "### Of jobs that are led from here": catalog.OF_LED,
    "### Of single jobs": catalog.OF_JOB,
}


def text() -> str:
    """Return the page as it must be."""
    page = PAGE.read_text()
    for heading, metrics in TABLES.items():
        before, _, after = page.partition(f"\n{heading}\n")
        words, _, rest = after.partition("\n| name |")
        _, _, rest = rest.partition("\n\n")
        page = f"{before}\n{heading}\n{words}\n{_table(metrics)}\n\n{rest}"
    return page


def _table(metrics: Sequence[Metric]) -> str:
    rows = ["| name | type | labels | |", "| --- | --- | --- | --- |"]
    for one in metrics:
        labels = ", ".join(f"`{label}`" for label in one.labels)
        rows.append(f"| `{one.series}` | {one.kind} | {labels} | {one.help} |")
    return "\n".join(rows)


if __name__ == "__main__":
    PAGE.write_text(text())
