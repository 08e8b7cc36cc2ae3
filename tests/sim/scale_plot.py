"""The picture of docs/membership.md: what a recovery takes, by the number of nodes."""

from pathlib import Path

from matplotlib import pyplot

from .scale import Scale


def plot(found: list[Scale], path: Path) -> None:
    """Messages and seconds by the number of nodes."""
    nodes = [one.nodes for one in found]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    lines = (
        ("recovery, the leader", [one.agent_lost.leader for one in found], "C3o-"),
        ("recovery, the busiest other", [one.agent_lost.most for one in found], "C1s-"),
        ("recovery, half of them at most", [one.agent_lost.median for one in found], "C0^-"),
        ("peace, half of them at most, per second", [one.peace.median for one in found], "C7v--"),
    )
    for label, values, style in lines:
        left.plot(nodes, values, style, label=label)
    left.set(xscale="log", xlabel="nodes", ylabel="messages sent", title="What a daemon says")
    left.set_ylim(0, 240)
    right.plot(nodes, [one.agent_lost_s * 1000 for one in found], "C0^-", label="an agent is gone")
    right.plot(nodes, [one.dark_s * 1000 for one in found], "C3o-", label="a node is dark (1.5 s to be sure)")
    right.set(xscale="log", yscale="log", xlabel="nodes", ylabel="virtual ms until all train again")
    right.set_title("A recovery, 1 ms links")
    for axes in (left, right):
        axes.set_xticks(nodes, [str(count) for count in nodes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper left" if axes is left else "center left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
