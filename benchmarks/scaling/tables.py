"""The tables of docs/clusters.md and its picture, from result files of scaling.py and training/divided_memory.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import markdown

SHOWN_CARDS = 64
SHOWN_SHARE = 4
SHOWN_RANKS = (1, 8, 64, 512, 4096)


def tables(result: dict[str, Any]) -> str:
    """Format the tables of runs on many cards."""
    picture = f"![bytes and memory by cards](../benchmarks/results/{result['name']}.png)\n"
    return "\n".join([zero_table(result), picture, divided_table(result)])


def zero_table(result: dict[str, Any]) -> str:
    """Format megabytes sent, collectives and memory, by run and stage."""
    lines = []
    for run in result["runs"]:
        cells = [_title(run)]
        for row in sorted((row for row in run["cards"] if row["cards"] == SHOWN_CARDS), key=lambda row: row["stage"]):
            sent = sum(row["sent"].values()) / 1e6
            cells.append(f"{sent:,.0f} / {row['calls']:,} / {row['peak_bytes'] / 2**30:,.1f}")
        lines.append(cells)
    title = f"On {SHOWN_CARDS} cards, MB that a rank sends in a step / calls / GiB of a card:\n\n"
    return title + markdown(["run", *(f"ZeRO {stage}" for stage in range(4))], lines)


def _title(run: dict[str, Any]) -> str:
    count = run["parameters"]
    return f"{run['name']}, " + (f"{count / 1e9:.1f} G" if count >= 1e9 else f"{count / 1e6:.0f} M")


def divided_table(result: dict[str, Any]) -> str:
    """Format what sharing a context costs in bytes and saves in activations."""
    lines = []
    for run in result["runs"]:
        alone, shared = (next(row for row in run["divided"] if row["ranks"] == ranks) for ranks in (1, SHOWN_SHARE))
        cells = [
            _title(run),
            *(f"{shared[name] / 1e6:,.0f}" for name in ("heads_sent", "sent")),
            f"{shared['calls']:,}",
        ]
        lines.append([*cells, *(f"{row['activations']['peak'] / 2**30:.2f}" for row in (alone, shared))])
    title = f"If {SHOWN_SHARE} cards share each context: MB that a rank sends in a step, GiB of its activations:\n\n"
    titles = ["run", "MB by heads", "MB by what sends least", "calls", "GiB alone", "GiB shared"]
    return title + markdown(titles, lines)


def memory_table(result: dict[str, Any]) -> str:
    """Format the memory of processes that share a context, with the planned memory."""

    def most(row: dict[str, Any]) -> int:
        return max(process["tensors"] for process in row["found"])

    (single,) = (row for row in result["rows"] if row["processes"] == 1)
    title = (
        f"{result['device']}, torch {result['torch']}, {result['date']}: {result['layers']} layers of "
        f"{result['width']}, {result['context']:,} positions, fp32, every activation kept. Tensors of the "
        "largest process, MiB:\n"
    )
    titles = ["processes", "exchange", "planned", "measured", "measured × processes / measured of one"]
    lines = []
    for row in result["rows"]:
        cells = [f"{row['processes']}", row["exchange"], f"{row['planned']['peak'] / 2**20:,.1f}"]
        share = most(row) * row["processes"] / most(single)
        lines.append([*cells, f"{most(row) / 2**20:,.1f}", f"{share:.3f}"])
    return f"{title}\n{markdown(titles, lines)}"


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw a column for each run: bytes that a rank sends, and memory of a GPU, over GPUs; a line for each stage."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = result["runs"]
    figure, panels = plt.subplots(2, len(runs), figsize=(3.6 * len(runs), 6.4), layout="constrained", squeeze=False)
    styles = ("-", "-", "--", "-")  # stages 1 and 2 send the same where there is one micro-batch
    for column, run in enumerate(runs):
        for stage in range(4):
            rows = [row for row in run["cards"] if row["stage"] == stage]
            cards = [row["cards"] for row in rows]
            values = [sum(row["sent"].values()) / 1e6 for row in rows], [row["peak_bytes"] / 2**30 for row in rows]
            for axes, line in zip(panels[:, column], values, strict=True):
                axes.plot(cards, line, styles[stage], label=f"ZeRO {stage}", linewidth=2, alpha=0.8)
        panels[0][column].set_title(_title(run), fontsize=10)
        panels[1][column].set_xlabel("cards")
        for axes in panels[:, column]:
            axes.set_xscale("log", base=2)
            axes.set_xticks(SHOWN_RANKS, [f"{cards:,}" for cards in SHOWN_RANKS])
            axes.set_ylim(bottom=0)
            axes.grid(True, alpha=0.3)
    panels[0][0].set_ylabel("MB that a rank sends in a step")
    panels[1][0].set_ylabel("GiB of a card at most, as planned")
    panels[0][0].legend(frameon=False, fontsize=9, loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)
