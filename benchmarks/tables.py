"""Write the tables and pictures of all documents from the result files: ``python -m benchmarks.tables [NAME …]``.

Each table stands between two marks of its page, of which the first has its name. A test checks that pages and result
files agree.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import encoders, lessons, photographs, probes, reach, recipe
from benchmarks.attention import tables as attention
from benchmarks.feed_forwards import experts, product_keys
from benchmarks.memories import lanes, recall, recurrences
from benchmarks.paper import tables as paper
from benchmarks.report import RESULTS, ROOT
from benchmarks.scaling import tables as scaling

END = "<!-- end -->"
Result = dict[str, Any]


class Table(NamedTuple):
    """A table of a page, between two marks."""

    page: str
    name: str
    make: Callable[[], str]

    def replaced(self, text: str) -> str:
        """Return the page's text with this table made anew."""
        begin = f"<!-- {self.name}: made by benchmarks/tables.py -->"
        before, tail = text.split(begin)
        return f"{before}{begin}\n{self.make()}{END}{tail.split(END, 1)[1]}"


def results(*stems: str) -> list[Result]:
    """Return the result files whose names begin with these stems, each with its own ``name``."""
    paths = [path for stem in stems for path in sorted(RESULTS.glob(f"{stem}-*.json"))]
    return [json.loads(path.read_text()) | {"name": path.stem} for path in paths]


def by_device(stem: str, table: Callable[[Result], str], kinds: tuple[str, ...] = ("cpu", "cuda")) -> Callable[[], str]:
    """Return a function that makes the tables of all result files of such devices, one after another."""
    return lambda: "\n".join(table(result) for result in results(stem) if result["device_type"] in kinds)


TABLES = (
    Table("README.md", "attention", lambda: attention.summary(results("bars", "attention"))),
    Table("docs/kernels.md", "attention", lambda: attention.details(results("bars", "attention", "selections"))),
    Table("docs/clusters.md", "memory", by_device("divided-memory", scaling.memory_table)),
    Table("docs/clusters.md", "scaling", by_device("scaling", scaling.tables)),
    Table("docs/recipes.md", "lessons", by_device("lessons", lessons.table)),
    Table("docs/recipes.md", "recipe", by_device("recipe", recipe.table)),
    Table("docs/results.md", "paper", by_device("paper", paper.section)),
    Table("docs/results.md", "photographs", by_device("photographs", photographs.table)),
    Table("docs/results.md", "reach", by_device("reach", reach.tables)),
    Table("docs/systems.md", "encoders", by_device("encoders", encoders.tables)),
    Table("docs/systems.md", "experts", by_device("experts", experts.table)),
    Table("docs/systems.md", "probes", by_device("probes", probes.table)),
    Table("docs/systems.md", "product-keys", by_device("product-keys", product_keys.table)),
    Table("docs/systems.md", "recall", by_device("recall", recall.table)),
    Table("docs/systems.md", "recurrences", by_device("recurrences", recurrences.table, ("cpu",))),
    Table("docs/training/carry-state.md", "lanes", by_device("lanes", lanes.tables)),
)
REACH_PICTURE = ROOT / "docs" / "pictures" / "reach.svg"


def main(arguments: list[str] | None = None) -> int:
    """Rewrite the pages and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = sorted({table.name for table in TABLES})
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"these alone: {', '.join(every)}")
    names = parser.parse_args(arguments).names or every
    if unknown := set(names) - set(every):
        parser.error(f"{unknown.pop()}: must be one of {', '.join(every)}")
    for table in TABLES:
        if table.name in names:
            page = ROOT / table.page
            page.write_text(table.replaced(page.read_text()))
    for stem, plot in (("paper", paper.plot), ("scaling", scaling.plot)):
        for result in results(stem) if stem in names else ():
            plot(result, RESULTS / f"{result['name']}.png")
    if "reach" in names:
        REACH_PICTURE.write_text(reach.drawing(results("reach")[-1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
