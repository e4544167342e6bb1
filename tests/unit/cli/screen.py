"""A terminal for a command that runs in this process: what it shows there, line by line.

``python -m tests.unit.cli.screen 60 schedule --num-microbatches 12`` prints what a terminal of 60 columns shows.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator, Sequence

from neuron_accel.cli.main import main


def capture(words: Sequence[str], columns: int) -> tuple[int, list[str]]:
    """Runs a command of ``neuron-accel`` in a pseudo-terminal.

    Args:
        words: the command and its arguments.
        columns: the width of the terminal.

    Returns:
        the exit code, and the lines on the screen: output and errors in their order, and of lines that are written
        again, such as progress, every state.
    """
    with terminal(columns) as written:
        try:
            code = main(list(words))
        except SystemExit as end:
            code = int(end.code or 0)
    text = re.sub(r"\x1b\[K", "", b"".join(written).decode().replace("\r\n", "\n"))
    return code, [state for line in text.split("\n") for state in line.split("\r")]


@contextlib.contextmanager
def terminal(columns: int) -> Iterator[list[bytes]]:
    """A context in which standard output and errors are a terminal. Gives what was written, when it has ended."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    written: list[bytes] = []
    reader = threading.Thread(target=_read, args=(master, written))
    saved, before = [os.dup(1), os.dup(2)], os.environ.pop("COLUMNS", None)
    reader.start()
    try:
        os.dup2(slave, 1)
        os.dup2(slave, 2)
        with (
            open(os.dup(1), "w") as output,
            open(os.dup(2), "w") as errors,
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
        ):
            yield written
    finally:
        for number, original in enumerate(saved, start=1):
            os.dup2(original, number)
            os.close(original)
        os.close(slave)
        reader.join()
        os.close(master)
        if before is not None:
            os.environ["COLUMNS"] = before


def _read(master: int, written: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # EIO: the terminal is closed
        while data := os.read(master, 65536):
            written.append(data)


if __name__ == "__main__":
    print("\n".join(capture(sys.argv[2:], int(sys.argv[1]))[1]))
