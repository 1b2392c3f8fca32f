"""Output that nobody reads holds nobody for long, and loses nothing for a reader that reads."""

import contextlib
import errno
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longstride.launcher.output import lasting, nonblocking_output, say
from longstride.launcher.output.lasting import LastingOutput

PATIENCE_SECONDS = 0.2
MANY = 30_000  # lines, of more bytes than may wait
NOTE = re.compile(r"longstride: ([\d,]+) lines? (?:are|is) not shown: nothing read (?:them|it) in time\n")


class Pipe:
    """A pipe, the output that writes to it, and what was read from it so far."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        self.stream = os.fdopen(writer, "w", buffering=1)
        self.output = LastingOutput(self.stream)
        self.text = ""

    def fill(self) -> None:
        """Fills it to its brim; what fills it is no part of the text."""
        os.set_blocking(self.stream.fileno(), False)
        self.filled = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                self.filled += os.write(self.stream.fileno(), b"x" * 512)
        os.set_blocking(self.stream.fileno(), True)

    def read_until(self, holds: Callable[[str], object]) -> str:
        """Reads, also what fills it, until something holds for the text; returns the text."""
        while not holds(self.text):
            ready, _, _ = select.select([self.reader], [], [], 60.0)
            assert ready, self.text[-1000:]
            self.text += os.read(self.reader, 1 << 16).decode().lstrip("x")
        return self.text


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    """A pipe, of whose reader the output is patient for a moment."""
    monkeypatch.setattr(lasting, "_PATIENCE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(lasting, "_STALL_SECONDS", PATIENCE_SECONDS)
    pipe = Pipe()
    yield pipe
    with contextlib.suppress(OSError):
        os.close(pipe.reader)  # a thread that still writes ends by it
    monkeypatch.setattr(lasting, "_STALL_SECONDS", 60.0)
    pipe.output.settle()
    pipe.stream.close()


def test_line_is_there_when_print_returns(pipe: Pipe) -> None:
    for number in range(100):
        print("line", number, file=pipe.output)
        assert os.read(pipe.reader, 100) == f"line {number}\n".encode()
    print("half", end="", file=pipe.output)
    pipe.output.flush()
    assert os.read(pipe.reader, 100) == b"half"


def test_lines_that_are_written_together_wait_as_others(pipe: Pipe) -> None:
    pipe.fill()
    pipe.output.write("first\n")
    pipe.output.writelines(["second\n", "third\n"])
    assert pipe.read_until(lambda text: text.count("\n") == 3) == "first\nsecond\nthird\n"


def test_line_to_an_unbuffered_stream_is_whole(pipe: Pipe) -> None:
    """As the deepspeed launcher starts ranks."""
    pipe.stream.reconfigure(line_buffering=False, write_through=True)
    print("a", "line", file=pipe.output)
    assert os.read(pipe.reader, 100) == b"a line\n"


def test_lines_of_threads_stay_whole_and_in_order(pipe: Pipe) -> None:
    def write_lines(name: str) -> None:
        for number in range(1000):
            pipe.output.write(f"{name} {number} {'.' * 100}\n")

    threads = [threading.Thread(target=write_lines, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    lines = pipe.read_until(lambda text: text.count("\n") == 2000).splitlines()
    for thread in threads:
        thread.join(60)
    for name in "ab":
        assert [int(line.split()[1]) for line in lines if line.startswith(name)] == [*range(1000)]


def test_stalled_reader_costs_a_little_and_is_told_what_it_has_missed(pipe: Pipe) -> None:
    pipe.fill()
    begun = time.monotonic()
    for number in range(MANY):
        pipe.output.write(f"line {number} {'.' * 40}\n")
        pipe.output.flush()
    assert PATIENCE_SECONDS <= time.monotonic() - begun < 30 * PATIENCE_SECONDS
    begun = time.monotonic()
    pipe.output.settle()
    assert time.monotonic() - begun < 5 * PATIENCE_SECONDS
    text = pipe.read_until(NOTE.search)
    *lines, note = text.splitlines(keepends=True)
    assert [int(line.split()[1]) for line in lines] == [*range(len(lines))]
    found = NOTE.fullmatch(note)
    assert found and len(lines) + int(found[1].replace(",", "")) == MANY


def test_lines_behind_those_that_were_left_out_come_after_the_note(pipe: Pipe) -> None:
    pipe.fill()
    for letter, kept in (("a", 1), ("b", 0)):
        assert bool(pipe.output.write(f"{letter * 1000}\n" * 1000)) == kept
    pipe.read_until(lambda text: text.count("a\n") >= 600)
    pipe.output.write("c\n")
    text = pipe.read_until(lambda text: text.endswith("\nc\n"))
    assert text.count("a\n") == 1000 and "b" * 9 not in text
    assert NOTE.search(text)[1] == "1,000"  # type: ignore[index]


def test_forked_process_has_lines_of_its_own(pipe: Pipe) -> None:
    """A thread of this process writes when it forks, and half a line waits."""
    pipe.fill()
    pipe.output.write("of the parent\n")
    pipe.output.write("half a line")
    child = os.fork()
    if child == 0:
        lasting._STALL_SECONDS = 60.0
        pipe.output.write("of the child\n")
        pipe.output.settle()
        os._exit(0)
    text = pipe.read_until(lambda text: text.count("\n") == 2)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(text.splitlines()) == ["of the child", "of the parent"]


def test_handler_of_a_signal_may_print_while_its_thread_waits(pipe: Pipe) -> None:
    pipe.fill()
    handled: list[bool] = []

    def handle(*_: object) -> None:
        print("of the handler", file=pipe.output, flush=True)
        handled.append(True)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        threading.Timer(PATIENCE_SECONDS / 2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        print("of the thread", file=pipe.output, flush=True)
        while not handled:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert pipe.read_until(lambda text: text.count("\n") == 2).splitlines() == ["of the thread", "of the handler"]


def test_file_that_does_not_wait_is_waited_for(pipe: Pipe) -> None:
    """A terminal that another program has left so."""
    pipe.fill()
    os.set_blocking(pipe.stream.fileno(), False)
    pipe.output.write("late\n")
    assert pipe.read_until(lambda text: text) == "late\n"


def test_full_disk_is_an_error_of_standard_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as out, Path("/dev/full").open("w", buffering=1) as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with pytest.raises(OSError) as caught, nonblocking_output():
            say("lost")
            with pytest.raises(OSError):
                print("x", flush=True)
            print("x")
        assert caught.value.errno == errno.ENOSPC
        assert sys.stdout is out


def test_reader_that_has_gone_is_passed_over(pipe: Pipe) -> None:
    os.close(pipe.reader)
    print("lost", file=pipe.output, flush=True)
    pipe.output.settle()
