"""What sections of a context read of each other, against masks."""

import itertools

import pytest
import torch
from torch import Tensor

from longstride.kernels.patterns import BigBird, Block, Column, Dense, Fixed, Local, Longformer, Pattern, Summary
from longstride.kernels.selections import rows_sent, section_reads, selection_mask
from tests.harness.oracles import all_patterns, mask_of

CPU = torch.device("cpu")
# Context and sections. The stride of 8 or 9 divides a section, or does not; sections are shorter than windows.
CUT = ((48, 2), (50, 5), (24, 6))
EIGHT = (
    Local(30), Fixed(8, 2), Column(8), BigBird(4, 2, 1, 2, index=2), Dense(), Longformer(5, 2, 3), Summary(8, 3),
    Block(7),
)  # fmt: skip


def heads_of(pattern: Pattern) -> tuple[Pattern, ...]:
    return tuple(pattern.for_head(head) for head in range(4))


def rebuilt(patterns: tuple[Pattern, ...], key_heads: int, context: int, sections: int) -> tuple[Tensor, Tensor]:
    """Masks (H, N, N) put together from what each section attends to; and how many rows each hands to each."""
    rows, group = context // sections, len(patterns) // key_heads
    every = [section_reads(patterns, key_heads, context, sections, each, CPU) for each in range(sections)]
    found = torch.zeros(len(patterns), context, context, dtype=torch.int64)
    for section, reads in enumerate(every):
        own = slice(section * rows, (section + 1) * rows)
        assert reads.own is not None or all(
            torch.equal(mask_of(pattern, context)[own, own], mask_of(pattern, rows)) for pattern in patterns
        )
        for head, pattern in enumerate(patterns):
            pairs = mask_of(pattern, rows) if reads.own is None else selection_mask(reads.own, rows)[0, head]
            found[head, own, own] += pairs
        received = torch.full((key_heads, sum(reads.received) + 1), -1)  # the position of each row that is received
        place = 0
        for other, given in enumerate(every):
            mine = slice(sum(given.sent[:section]), sum(given.sent[: section + 1]))
            assert given.sent[section] == reads.received[other]
            for head, row in zip(given.sent_heads[mine].tolist(), given.sent_rows[mine].tolist(), strict=True):
                received[head, place] = other * rows + row
                place += 1
        by_piece = reads.keys.split([key_heads * piece.count for piece in reads.pieces])
        for piece, numbers in zip(reads.pieces, by_piece, strict=True):
            assert piece.length <= rows
            by_head = numbers.view(key_heads, piece.count)
            piece.selection.check(piece.length)
            pairs = selection_mask(piece.selection, piece.length)[0]
            places = torch.arange(context)[own][piece.queries]
            for head in range(len(patterns)):
                keys = received[head // group, by_head[head // group]]
                of_run = pairs[head, : len(places), : len(keys)].long()
                # Nothing is read by or of what was filled up.
                assert pairs[head].sum() == of_run[:, keys >= 0].sum()
                found[head].index_put_((places[:, None], keys), of_run, accumulate=True)
    return found, torch.tensor([list(reads.sent) for reads in every])


@pytest.mark.parametrize(("context", "sections"), CUT)
def test_sections_read_together_what_patterns_allow(context: int, sections: int) -> None:
    """Each pair once, in every head; and nothing travels that nobody reads."""
    cases = [(heads_of(pattern), 4) for pattern in all_patterns()]
    cases += [(EIGHT, key_heads) for key_heads in (1, 2, 8)]
    rows = context // sections
    for patterns, key_heads in cases:
        found, sent = rebuilt(patterns, key_heads, context, sections)
        masks = torch.stack([mask_of(pattern, context) for pattern in patterns])
        assert torch.equal(found, masks.long()), patterns
        by_head = masks.view(key_heads, -1, sections, rows, context).any(3).any(1)  # (K, U of queries, N)
        wanted = by_head.unflatten(2, (sections, rows)).sum((0, 3)).T.fill_diagonal_(0)
        assert torch.equal(sent, wanted), patterns
        assert torch.equal(rows_sent(patterns, key_heads, context, sections), wanted), patterns


def test_patterns_of_distances_and_blocks_have_a_period() -> None:
    """What is drawn at random or read by all has none; the conformance suite checks periods against masks."""
    assert Column(8, "target").period() is Local(4, 8, "target").period() is None  # position 0 differs
    assert [pattern.period() is None for pattern in EIGHT] == [type(each) in (BigBird, Longformer) for each in EIGHT]


def test_summaries_are_less_than_heads_by_far() -> None:
    """Of a long context in four sections; a column reads all that is before it, so that it sends as much as heads."""
    context, sections = 65536, 4
    by_heads = sections * (sections - 1) * context // sections * 4 // sections  # rows of a head, as wide as a key
    shares = {
        pattern: by_heads / (2 * int(rows_sent((pattern,), 1, context, sections).sum()))
        for pattern in (Fixed(256, 8), Fixed(256, 32), Local(256), Column(256))
    }
    assert [round(share, 1) for share in itertools.islice(shares.values(), 4)] == [32.0, 8.0, 128.5, 1.0], shares
