"""Sequence parallelism: a context divided over several processes, and what these exchange.

Letters: U processes of a group, B batch, H heads, N positions of a context, n = N / U of a section, C width.

Process u of the group holds section u: positions u · n to (u + 1) · n - 1. A part that computes each row independently
needs nothing else. A part that combines positions uses its ``Division``, which ``Part.divide`` sets. Attention
exchanges heads for positions: every process gets H / U heads of whole contexts and attends as usual (Jacobs et al.
2023, DeepSpeed Ulysses). Every exchange is differentiable: its gradient is the exchange back.

A layer whose heads all read within the query's column, every l-th position, needs no exchange if its rows are divided
by columns: process u then holds columns u · l / U to (u + 1) · l / U - 1 of every l positions. The residual stream is
redistributed before and after such layers, which sends one row where heads send four.

All processes of a group must call the same exchanges in the same order, also in the backward pass: a parameter that
only some of them use must get a gradient of zeros, not None.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from longstride.kernels.patterns import Pattern
from longstride.kernels.selections import SectionReads, rows_sent

WORDS = 1 << 16  # of random bits at a time: on a CPU they stay in the cache; a GPU needs more work
WORDS_ON_CARDS = 1 << 22
_STEP, _MIXERS = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))

Exchange = Literal["heads", "keys"]  # what attention sends
Exchanger = Callable[..., tuple[Tensor, ...]]


class Traffic(NamedTuple):
    """Numbers that one attention sends in a forward pass over one context. The backward pass sends as many."""

    exchange: Exchange
    calls: int
    sent: tuple[int, ...]  # numbers sent by each process, for one context


class Division:
    """This process's place among the U that share contexts. With one process, every exchange does nothing."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: ProcessGroup | None = None,
        exchange: Literal["heads", "keys", "auto"] = "auto",
    ) -> None:
        """Describe process ``rank`` of ``size``.

        Args:
            rank: in the group.
            size: U.
            group: these processes alone, in order.
            exchange: what attention over patterns exchanges, see ``traffic``.
        """
        self.rank, self.size, self.group, self.exchange = rank, size, group, exchange

    def section(self, context: int) -> slice:
        """Return this process's positions in a context.

        Raises:
            ValueError: the context does not divide evenly.
        """
        if context % self.size:
            raise ValueError(f"{context} positions must divide by the {self.size} processes that share a context")
        return self.positions(context // self.size)

    def positions(self, rows: int) -> slice:
        """Return this process's positions if a section has n = ``rows``."""
        return slice(self.rank * rows, (self.rank + 1) * rows)

    def positions_of(self, rows: int, stride: int, device: torch.device) -> Tensor:
        """Return the ascending positions (n,) int64 of n = ``rows`` divided by columns of a stride; 0: by sections."""
        row = torch.arange(rows, device=device)  # made on the device: a copy would synchronise
        if not stride:
            return row + self.rank * rows
        width = stride // self.size
        return row // width * stride + self.rank * width + row % width

    def divides(self, context: int, stride: int) -> bool:
        """Whether several processes can divide rows by columns of a stride, and sections evenly into them."""
        return self.size > 1 and stride > 0 and stride % self.size == 0 and context % (self.size * stride) == 0

    def redistribute(self, rows: Tensor, before: int, after: int) -> Tensor:
        """Exchange rows (B, n, ·) in columns of stride ``before`` for rows in columns of stride ``after``.

        A stride of 0 means sections.
        """
        if before == after:
            return rows
        for stride, there, back in ((before, _section, _columns), (after, _columns, _section)):
            if stride:
                ways = functools.partial(there, stride=stride), functools.partial(back, stride=stride)
                (rows,) = self._exchanged(*ways, rows)
        return rows

    def heads(self, count: int) -> slice:
        """Return which of ``count`` heads this process computes."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def to_heads(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Exchange tensors (B, H, n, ·) for (B, H / U, N, ·), all at once.

        Each tensor may have another H, which U divides.
        """
        return self._exchanged(_heads, _sections, *tensors)

    def to_sections(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Exchange tensors (B, H / U, N, ·) back to (B, H, n, ·)."""
        return self._exchanged(_sections, _heads, *tensors)

    def traffic(
        self, context: int, heads: int, key_heads: int, widths: tuple[int, int], patterns: tuple[Pattern, ...] | None
    ) -> Traffic:
        """Count what an attention sends and choose its exchange, without communication.

        The result is the same on each process.

        "auto" takes the exchange that sends fewer numbers over all processes. If U does not divide the heads, it takes
        keys. If the data decide who reads whom, it takes heads.

        Args:
            context: N, which U divides.
            heads, key_heads: H and K.
            widths: channels of a key and of a value.
            patterns: of each head, resolved; None: they do not describe what is read.
        """
        return _traffic(self.size, self.exchange, context, heads, key_heads, widths, patterns)

    def fetch(self, k: Tensor, v: Tensor, reads: SectionReads) -> tuple[Tensor, Tensor, Tensor]:
        """Send rows of k (B, K, n, D) and v (B, K, n, Dv) to the sections that read them.

        Returns:
            k and v again, whose gradients include those of the rows that were sent, and the received rows (R, B, D +
            Dv).
        """
        ways = functools.partial(_send_rows, reads=reads), functools.partial(_add_sent_rows, reads=reads)
        k, v, rows = self._exchanged(*ways, k, v)
        return k, v, rows

    def before(self, rows: Tensor, count: int) -> Tensor:
        """Return the ``count`` rows before those of this process, (B, count, C) of (B, n, C); 0 before the first.

        Raises:
            ValueError: a section has fewer rows.
        """
        if count > rows.shape[1]:
            raise ValueError(f"{count} rows before a section of {rows.shape[1]} lie in several other sections")
        if self.size == 1:
            return rows.new_zeros(len(rows), count, *rows.shape[2:])
        back = functools.partial(_to_earlier, length=rows.shape[1])
        (earlier,) = self._exchanged(functools.partial(_earlier, count=count), back, rows)
        return earlier

    def sum(self, values: Tensor) -> Tensor:
        """Sum the values of all processes, on each of them."""
        (total,) = self._exchanged(_sum, _sum, values)
        return total

    def alike(self, values: Tensor) -> Tensor:
        """Return ``values``, which are equal on all processes. Each gets an equal part of the summed gradients.

        Needed if the operations that made ``values`` are not linear in their gradient.
        """
        (same,) = self._exchanged(lambda _, values: (values,), _mean_of_sum, values)
        return same

    def sum_before(self, values: Tensor) -> Tensor:
        """Sum the values of the processes before this one, without a gradient."""
        if self.size == 1:
            return torch.zeros_like(values)
        everyone = self.swap(values.detach().expand(self.size, *values.shape).contiguous())
        return everyone[: self.rank].sum(0, dtype=values.dtype)

    def drop(self, rows: Tensor, share: float, columns: int = 0) -> Tensor:
        """Apply dropout to rows (B, n, C) with a mask that depends on positions and not on how the context is divided.

        ``columns``: the stride of the columns by which the rows are divided; 0: by sections.
        """
        remaining = 1 - _of_bits(share) / (1 << 16)
        return (rows * (1 / remaining)).masked_fill_(self.dropped(rows, share, columns), 0.0)

    def dropped(self, rows: Tensor, share: float, columns: int = 0) -> Tensor:
        """Return the mask (B, n, C) bool of what ``drop`` removes from rows, with probability ``share`` to 16 bits.

        A call draws one number from torch's CPU generator, which is in the same state on all processes of a group. This
        number and the index of position, context and four channels are hashed to 64 bits (Steele et al. 2014,
        SplitMix64), with the same result on every device.
        """
        batch, count, width = rows.shape
        words = batch * -(-width // 4)
        number = self.positions_of(count, columns, rows.device) * signed(_STEP * words)
        number += torch.randint(1 << 62, ())
        channels = torch.arange(words, device=rows.device) * signed(_STEP)
        together = max(1, (WORDS if rows.device.type == "cpu" else WORDS_ON_CARDS) // words)
        memory = torch.empty(2, min(together, count), words, dtype=torch.int64, device=rows.device)
        mask = torch.empty(count, batch, width, dtype=torch.bool, device=rows.device)
        for some, out in zip(number.split(together), mask.split(together), strict=True):
            bits, shifted = memory[:, : len(some)]
            torch.add(some[:, None], channels, out=bits)
            for shift, factor in _MIXERS:
                torch.bitwise_right_shift(bits, shift, out=shifted)
                bits.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))  # clear the copies of the sign
                if factor > 1:
                    bits.mul_(signed(factor))
            drawn = bits.view(torch.int16).view(len(some), batch, -1)[..., :width]
            torch.lt(drawn, _of_bits(share) - (1 << 15), out=out)
        return mask.transpose(0, 1)

    def _exchanged(self, there: Exchanger, back: Exchanger, *tensors: Tensor) -> Sequence[Tensor]:
        """Apply the exchange ``there``, whose gradient is the exchange ``back``; with one process neither."""
        exchanged: Sequence[Tensor] = tensors if self.size == 1 else _Exchanged.apply(self, there, back, *tensors)
        return exchanged

    def swap(self, values: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
        """Send row u of ``values`` to process u, and return the rows for this process in process order.

        All traffic uses this.

        Without counts every process gets one of U rows. With them process u gets the next ``sent[u]`` rows and returns
        ``received[u]``.
        """
        counts = sent or [1] * self.size, received or [1] * self.size
        # As bytes, which every backend supports.
        width = math.prod(values.shape[1:]) * values.element_size()
        out = values.new_empty(sum(counts[1]), *values.shape[1:])
        splits = [[count * width for count in side] for side in counts]
        torch.distributed.all_to_all_single(
            out.view(-1).view(torch.uint8),
            values.contiguous().view(-1).view(torch.uint8),
            splits[1],
            splits[0],
            self.group,
        )
        return out

    def swap_counts(self, counts: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """Send row u of counts (U, n) int64 to process u; return what was sent and received, on the host."""
        received = counts if self.size == 1 else self.swap(counts)
        sent, arriving = torch.stack([counts, received]).tolist()
        return sent, arriving

    def swap_rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send the next ``sent[u]`` rows to process u, as ``swap`` does, with a gradient."""
        there = functools.partial(_swap_rows, sent=sent, received=received)
        back = functools.partial(_swap_rows, sent=received, received=sent)
        (out,) = self._exchanged(there, back, rows)
        return out

    def swap_parts(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send row u of each of several tensors (U, …) of one dtype to process u, in one exchange."""
        widths = [part[0].numel() for part in parts]

        def by_part(values: Tensor) -> Iterator[Tensor]:
            return (x.view(part.shape) for x, part in zip(values.split(widths, 1), parts, strict=True))

        sent = parts[0].new_empty(self.size, sum(widths))
        for there, part in zip(by_part(sent), parts, strict=True):
            there.copy_(part)  # a single copy; flattening would make another
        return list(by_part(self.swap(sent)))


@functools.lru_cache(maxsize=1 << 12)
def _traffic(
    size: int,
    exchange: str,
    context: int,
    heads: int,
    key_heads: int,
    widths: tuple[int, int],
    patterns: tuple[Pattern, ...] | None,
) -> Traffic:
    elsewhere = (size - 1) * context // size
    # If U does not divide the heads of keys, they are copied until it does.
    there = heads * widths[0] + math.lcm(key_heads, size) * sum(widths)
    by_heads = Traffic("heads", 2 * (size > 1), (elsewhere * (there + heads * widths[1]) // size,) * size)
    if patterns is None or exchange == "heads" or size == 1:
        return by_heads
    rows = rows_sent(patterns, key_heads, context, size).sum(1)
    by_keys = Traffic("keys", int(rows.any()), tuple((rows * sum(widths)).tolist()))
    if exchange == "keys" or heads % size:
        return by_keys
    return min(by_heads, by_keys, key=lambda traffic: sum(traffic.sent))


def _heads(division: Division, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Exchange (B, H, n, ·) for (B, H / U, N, ·)."""
    swapped = division.swap_parts([x.unflatten(1, (division.size, -1)).movedim(1, 0) for x in tensors])
    return tuple(x.movedim(0, 2).flatten(2, 3) for x in swapped)  # (U, B, H / U, n, ·) by the section they come from


def _sections(division: Division, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Exchange (B, H / U, N, ·) for (B, H, n, ·)."""
    swapped = division.swap_parts([x.unflatten(2, (division.size, -1)).movedim(2, 0) for x in tensors])
    return tuple(x.movedim(0, 1).flatten(1, 2) for x in swapped)  # (U, B, H / U, n, ·) by who had the heads


def _of_bits(share: float) -> int:
    """Count the 16-bit values that are below this share of them; never all."""
    return min(round(share * (1 << 16)), (1 << 16) - 1)


def signed(number: int) -> int:
    """Return the int64 with the bits of a number mod 2⁶⁴."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _columns(division: Division, rows: Tensor, stride: int) -> tuple[Tensor]:
    """Exchange rows (B, n, ·) of a section for those of columns."""
    swapped = division.swap(rows.unflatten(1, (-1, division.size, stride // division.size)).movedim(2, 0))
    return (swapped.movedim(0, 1).flatten(1, 3),)  # (B, U, n / l, l / U, ·), by section


def _section(division: Division, rows: Tensor, stride: int) -> tuple[Tensor]:
    """Exchange rows (B, n, ·) of columns for those of a section."""
    swapped = division.swap(rows.unflatten(1, (division.size, -1, stride // division.size)).movedim(1, 0))
    return (swapped.movedim(0, 2).flatten(1, 3),)  # (B, n / l, U, l / U, ·), by column


def _sum(division: Division, values: Tensor) -> tuple[Tensor]:
    """Sum in process order, so that each process has the same bits."""
    return (division.swap(values.expand(division.size, *values.shape).contiguous()).sum(0, dtype=values.dtype),)


class _Exchanged(torch.autograd.Function):
    """Apply the exchange ``there`` to tensors, and ``back`` to their gradients."""

    @staticmethod
    def forward(
        ctx: Any, division: Division, there: Exchanger, back: Exchanger, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.division, ctx.back = division, back
        return there(division, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.back(ctx.division, *grads)


def _earlier(division: Division, rows: Tensor, count: int) -> tuple[Tensor]:
    """Send the last ``count`` rows of each process to the next one: (B, n, ·) to (B, count, ·)."""
    last = rows[:, rows.shape[1] - count :].movedim(1, 0)
    received = division.swap(last[: count * (division.rank < division.size - 1)], *_to_next(division, count))
    return (received.movedim(0, 1) if len(received) else rows.new_zeros(len(rows), count, *rows.shape[2:]),)


def _to_earlier(division: Division, grad: Tensor, length: int) -> tuple[Tensor]:
    """Return the gradient of ``_earlier`` for ``length`` rows."""
    count = grad.shape[1]
    there, back = _to_next(division, count)
    received = division.swap(grad.movedim(1, 0)[: count * (division.rank > 0)], back, there)
    grad_rows = grad.new_zeros(len(grad), length, *grad.shape[2:])
    if len(received):
        grad_rows[:, length - count :] = received.movedim(0, 1)
    return (grad_rows,)


def _to_next(division: Division, count: int) -> tuple[list[int], list[int]]:
    """Return how many rows this process sends to each, and receives from each, if all send to the next."""
    sent = [count * (place == division.rank + 1) for place in range(division.size)]
    return sent, [count * (place == division.rank - 1) for place in range(division.size)]


def _send_rows(division: Division, k: Tensor, v: Tensor, reads: SectionReads) -> tuple[Tensor, Tensor, Tensor]:
    # Returns k and v too, so that every process runs the backward pass, even one that receives nothing.
    rows = torch.cat([x[:, reads.sent_heads, reads.sent_rows] for x in (k, v)], -1).transpose(0, 1)
    return k, v, division.swap(rows, list(reads.sent), list(reads.received))


def _add_sent_rows(
    division: Division, grad_k: Tensor, grad_v: Tensor, grad_rows: Tensor, reads: SectionReads
) -> tuple[Tensor, ...]:
    """Return the gradients of k and v, to which those of the sent rows are added."""
    back = division.swap(grad_rows, list(reads.received), list(reads.sent)).transpose(0, 1)
    totals = grad_k.clone(), grad_v.clone()
    for total, rows in zip(totals, back.split([grad_k.shape[-1], grad_v.shape[-1]], -1), strict=True):
        places = zip(reads.sent_heads.split(reads.sent), reads.sent_rows.split(reads.sent), strict=True)
        # One section at a time: none reads a row twice, so the order of additions is fixed.
        for (heads, places_in), added in zip(places, rows.split(reads.sent, 1), strict=True):
            total[:, heads, places_in] += added
    return totals


def _swap_rows(division: Division, rows: Tensor, sent: list[int], received: list[int]) -> tuple[Tensor]:
    return (division.swap(rows, sent, received),)


def _mean_of_sum(division: Division, values: Tensor) -> tuple[Tensor]:
    return (_sum(division, values)[0] / division.size,)
