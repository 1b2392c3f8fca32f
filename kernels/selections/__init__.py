"""Selections: which keys each query reads, if the data decide and not a pattern.

``selected_attention`` attends over them. To add a way to select, write a function that returns a ``Selection``.
"""

from longstride.kernels.selections.base import Part, Selection, inverse_order, selection_mask
from longstride.kernels.selections.content import (
    chosen_blocks,
    hash_rounds,
    listed_positions,
    recent_matches,
    recent_members,
)
from longstride.kernels.selections.documents import within_documents
from longstride.kernels.selections.queries import pattern_parts, queries_behind
from longstride.kernels.selections.sections import SectionReads, rows_sent, section_reads

__all__ = [
    "Part",
    "SectionReads",
    "Selection",
    "chosen_blocks",
    "hash_rounds",
    "inverse_order",
    "listed_positions",
    "pattern_parts",
    "queries_behind",
    "recent_matches",
    "recent_members",
    "rows_sent",
    "section_reads",
    "selection_mask",
    "within_documents",
]
