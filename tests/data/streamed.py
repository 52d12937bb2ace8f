"""A long file of conversations, made, streamed and prepared; prints the rate and the memory that it took.

    python tests/data/streamed.py --rows 200000

Memory is that of this process and of its workers together, at the highest each of them ever had.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # run as a script, from wherever
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.prepare import prepare
from tests.data import toys

WORDS = [f"word{i:03d}" for i in range(400)]


@dataclass(frozen=True)
class Measured:
    """Rows, bytes of the file, seconds of preparing, and bytes of memory."""

    rows: int
    size: int
    seconds: float
    memory: int

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, {self.size / 1e6:.0f} MB: {self.rows / self.seconds:.0f} rows/s, "
            f"at most {self.memory / 1e9:.2f} GB of memory"
        )


def write_long_file(path: Path, rows: int, seed: int = 0) -> None:
    """Conversations of one to three questions with answers of 20 to 60 words, one a line."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            texts = [
                " ".join(rng.choices(WORDS, k=rng.randint(*((5, 15), (20, 60))[i % 2])))
                for i in range(2 * rng.randint(1, 3))
            ]
            file.write(json.dumps({"id": number, "messages": toys.chat(*texts)}) + "\n")


def peak(who: int) -> int:
    """Bytes; the system counts them in kilobytes, but on macOS."""
    return resource.getrusage(who).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(folder: Path, rows: int, processes: int, max_length: int = 1024) -> Measured:
    """Prepare a file of that many rows under ``folder``."""
    source = folder / "long.jsonl"
    write_long_file(source, rows)
    tokenizer = toys.tokenizer(merges=word_merges())
    begun = time.monotonic()
    report = prepare([source], tokenizer, folder / "out", max_length, processes=processes)
    seconds = time.monotonic() - begun
    if report.kept != {"train": rows}:
        raise ValueError(f"{rows} rows went in, {report.kept} came out")
    workers = peak(resource.RUSAGE_CHILDREN) * processes if processes > 1 else 0
    return Measured(rows, source.stat().st_size, seconds, peak(resource.RUSAGE_SELF) + workers)


def word_merges() -> list[tuple[str, str]]:
    """Some merges, so that a word is not eight tokens long."""
    return [("w", "o"), ("r", "d"), ("wo", "rd"), ("Ġ", "word")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1.5, help="gigabytes of memory that are allowed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), args.rows, args.processes)
    print(measured)
    if measured.memory > args.limit * 1e9:
        sys.exit(f"error: more than {args.limit} GB of memory")


if __name__ == "__main__":
    main()
