"""Runs what a page of documentation shows: its commands, in order, in one folder, and compares what they print.

A fenced block is run by its language: ``console`` has commands behind ``$ `` and what they print, ``sh`` has one
command a line, ``python`` is a script, ``json`` is parsed. Other languages are not code. A comment in front of a block
says more: ``<!-- file: NAME -->``, it is put there under that name; ``<!-- ends: Ctrl-C -->``, its command goes on
until it is stopped; ``<!-- needs: a cluster -->``, it is not run here, for that reason.

What is printed is compared line by line. ``…`` stands for any text in a line, and alone for any lines. Numbers are
those of the machine that wrote the page, so any number goes where one stands; bits per byte are held to a share. Lines
of progress, which a faster machine does not print, are left out.
Where a page shows none, its runs take a tenth of the steps that it names.
"""

import itertools
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?:<!-- (?P<key>file|needs|ends): (?P<value>.*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
_PROGRESS = re.compile(r"longstride: .*(, about .* left| …)")  # of work that takes a slow machine some seconds
_BITS = re.compile(r"(\d+\.\d+) bits per byte|bits_per_byte\D{1,4}(\d+\.\d+)")
BITS_SHARE = 0.1  # machines round otherwise, and a short training magnifies that


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int  # of the page, where its text begins
    file: str | None = None
    needs: str | None = None
    ends: str | None = None

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each command of the block, with the output lines below it."""
        command = ""
        printed: list[str] = []
        for line in self.text.splitlines():
            if line.startswith("$ ") or (self.language == "sh" and not command.endswith("\\")):
                if command:
                    yield command, printed
                command, printed = line.removeprefix("$ "), []
            elif command.endswith("\\"):
                command = f"{command[:-1]}{line.strip()}"
            else:
                printed.append(line)
        if command:
            yield command, printed


def blocks(text: str) -> list[Block]:
    """Return every fenced block of a page."""
    result = []
    for match in _BLOCK.finditer(text):
        options = {match["key"]: match["value"]} if match["key"] else {}
        result.append(Block(match["language"], match["text"], text.count("\n", 0, match.start("text")) + 1, **options))
    return result


def run_page(page: Path, folder: Path, environment: dict[str, str], *, seconds: float = 900) -> None:
    """Run a page's blocks in a folder; AssertionError, with the line of the page, if a result differs."""
    content = page.read_text()
    if not _BITS.search(content):
        content = re.sub(r"(train\.steps=\d+)0\b", r"\1", content)
    for block in blocks(content):
        where = f"{page.name}:{block.line}"
        if block.needs is not None:
            continue
        if block.language == "json":
            json.loads(block.text)
        if block.file is not None:
            (folder / block.file).write_text(block.text)
        elif block.language == "python":
            execute("python -", folder, environment, where, seconds, given=block.text)
        elif block.language in ("console", "sh"):
            for command, expected in block.commands():
                if block.ends is not None:
                    execute_until_stopped(command, folder, environment, where)
                    continue
                printed = execute(command, folder, environment, where, seconds)
                difference = first_difference(expected, printed.splitlines())
                assert difference is None, f"{where}: $ {command}\n{difference}\n--- printed:\n{printed}"


def execute(
    command: str, folder: Path, environment: dict[str, str], where: str, seconds: float, given: str | None = None
) -> str:
    """Run a command and return its output with standard error; AssertionError if it fails."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        input=given,
        stdin=subprocess.DEVNULL if given is None else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=seconds,
    )
    assert done.returncode == 0, f"{where}: $ {command}\nexit code {done.returncode}\n{done.stdout}"
    return done.stdout


def execute_until_stopped(command: str, folder: Path, environment: dict[str, str], where: str) -> None:
    """Stop a command by Ctrl-C once it has printed a line; AssertionError if it ends in another way."""
    words = {"cwd": folder, "env": environment, "text": True}
    with subprocess.Popen(
        ["bash", "-c", f"exec {command}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **words
    ) as running:
        assert running.stdout is not None
        first_line = running.stdout.readline()
        running.send_signal(signal.SIGINT)
        remaining = running.communicate(timeout=60)[0]
    assert first_line and running.returncode in (0, 130), (
        f"{where}: $ {command}\nexit code {running.returncode}\n{first_line}{remaining}"
    )


def first_difference(expected: list[str], printed: list[str]) -> str | None:
    """Describe the first difference between a command's output and the page; None if there is none."""
    expected, printed = [line.rstrip() for line in expected], [line.rstrip() for line in printed]
    while expected and not expected[-1]:
        expected.pop()
    if not expected:  # a page need not show what a command prints
        return None
    pieces: list[list[str]] = [[]]  # lines that follow on each other
    for line in expected:
        if line.strip() == "…":
            pieces.append([])
        else:
            pieces[-1].append(line)
    printed = [line for line in printed if not _PROGRESS.fullmatch(line)]
    while printed and not printed[-1]:
        printed.pop()
    place = 0
    for number, piece in enumerate(pieces):
        starts = range(place, len(printed) + 1) if number else range(1)
        if number and number == len(pieces) - 1 and piece:  # nothing may follow
            starts = range(max(place, len(printed) - len(piece)), len(printed) + 1)
        # How many of the lines agree from each start: all of them from one, or the page is wrong where most do.
        agreeing = {start: _num_agreeing(piece, printed[start:]) for start in starts}
        start = max(agreeing, key=agreeing.__getitem__)
        place = start + agreeing[start]
        if agreeing[start] < len(piece):
            actual = printed[place] if place < len(printed) and (agreeing[start] or not number) else "no such line"
            return f"the page shows   {piece[agreeing[start]]}\nthe command says {actual}"
    return f"the page does not show {printed[place]}" if pieces[-1] and place < len(printed) else None


def _num_agreeing(shown: list[str], printed: list[str]) -> int:
    """Count the first lines that agree."""
    pairs = itertools.zip_longest(shown, printed[: len(shown)])
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[1] is not None and agree(*pair), pairs))


def agree(shown: str, printed: str) -> bool:
    """Whether a printed line matches the line that the page shows."""
    pattern = ".*".join(
        _NUMBER.pattern.join(re.escape(part) for part in _NUMBER.split(piece)) for piece in shown.split("…")
    )
    if not re.fullmatch(pattern, printed):
        return False
    if "…" in shown:
        return True
    pairs = zip(_BITS.findall(shown), _BITS.findall(printed), strict=True)
    return all(abs(float("".join(a)) - float("".join(b))) <= BITS_SHARE * float("".join(a)) for a, b in pairs)
