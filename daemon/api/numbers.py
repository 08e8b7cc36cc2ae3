"""Numbers in words."""

from collections.abc import Iterable


def runs(numbers: Iterable[int]) -> str:
    """Ascending numbers, with runs of three and more as a range: "0-3, 7"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    parts = [f"{s[0]}-{s[-1]}" if len(s) > 2 else ", ".join(map(str, s)) for s in spans]
    return ", ".join(parts)
