"""The counts of `GET /metrics`, in Prometheus' text format."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds


class Histogram:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(_BOUNDS) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect.bisect_left(_BOUNDS, value)] += 1
        self.sum += value

    def samples(self, name: str) -> Iterator[tuple[str, float]]:
        """Yield the samples of the format, whose counts are cumulative."""
        total = 0
        for bound, count in zip((*_BOUNDS, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}}', total
        yield f"{name}_sum", self.sum
        yield f"{name}_count", total


class Metrics:
    """All counts. Only one thread writes each, the loop's or the sampler's."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by route and status
        self.request_seconds = Histogram()
        self.first_byte_seconds = Histogram()  # since a context's submission
        self.sampled_bytes = 0
        self.prompt_bytes = 0
        self.sampling_seconds = 0.0

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Return the page. ``gauges`` has the meaning and the current value of each gauge by name."""
        routes = ((f'route="{route}",status="{status}"', n) for (route, status), n in sorted(self.requests.items()))
        lines: list[str] = []

        def add(name: str, kind: str, meaning: str, samples: Iterable[tuple[str, float]]) -> None:
            lines.extend((f"# HELP longstride_{name} {meaning}", f"# TYPE longstride_{name} {kind}"))
            lines.extend(f"longstride_{sample} {value:.17g}" for sample, value in samples)

        name = "requests_total"
        add(name, "counter", "Requests that were answered.", ((f"{name}{{{labels}}}", n) for labels, n in routes))
        for name, meaning, value in (
            ("sampled_bytes_total", "Bytes that were sampled.", self.sampled_bytes),
            ("prompt_bytes_total", "Bytes of prompts that were read.", self.prompt_bytes),
            ("sampling_seconds_total", "Seconds that the model computed.", self.sampling_seconds),
        ):
            add(name, "counter", meaning, [(name, value)])
        for name, (meaning, value) in gauges.items():
            add(name, "gauge", meaning, [(name, value)])
        for name, meaning, histogram in (
            ("request_seconds", "From a request to the end of its answer.", self.request_seconds),
            ("first_byte_seconds", "From a request to a context's first sampled byte.", self.first_byte_seconds),
        ):
            add(name, "histogram", meaning, histogram.samples(name))
        return "\n".join(lines) + "\n"
