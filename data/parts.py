"""Rows → parts of a dataset on disk, by as many processes as there are, each part whole or not at all.

    part-000012.arrow    the sequences of the 12th chunk of rows; missing when none was kept
    part-000012.json     what became of its rows; written last, so that the part is done when this file is there

The parts and their order do not depend on how many processes write them, or on how often the run was stopped.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]

from data.conversation import read_conversation
from data.files import parse
from data.render import Renderer, sequences
from data.report import PrepareReport
from data.turns import Refusal

SCHEMA = pyarrow.schema(
    {
        "id": pyarrow.string(),
        "input_ids": pyarrow.list_(pyarrow.int32()),
        "loss_mask": pyarrow.list_(pyarrow.bool_()),
        "finished": pyarrow.bool_(),
    }
)
_PARALLELISM = "TOKENIZERS_PARALLELISM"
Chunk = Sequence[tuple[str, Any]]
"""Rows, each with its ``file:number``, as :func:`data.files.scan` yields them."""


@dataclass(frozen=True)
class Part:
    """A part that is done: its sequences (None when there are none), and what became of its rows.

    Attributes:
        prompts: what the user says in each conversation kept, when that was asked for.
        sizes: sequences of each conversation kept.
    """

    arrow: Path | None
    report: PrepareReport
    prompts: list[str]
    sizes: list[int]


@dataclass
class PartWriter:
    """Everything a chunk of rows is prepared with; goes to the worker processes.

    Attributes:
        tokenizer: the target's.
        roles: names of roles, for :func:`data.conversation.read_conversation`.
        max_length: most tokens a sequence.
        prompts: whether the users' prompts are needed, to hold some out.
    """

    folder: Path
    tokenizer: Any
    roles: Mapping[str, str]
    max_length: int
    prompts: bool

    def __post_init__(self) -> None:
        self._renderer = Renderer(self.tokenizer) if self.tokenizer.chat_template else None

    def __reduce__(self) -> tuple[type[PartWriter], tuple[Any, ...]]:
        return type(self), (self.folder, self.tokenizer, self.roles, self.max_length, self.prompts)

    def _place(self, index: int, suffix: str) -> Path:
        return self.folder / f"part-{index:06d}.{suffix}"

    def done(self, index: int) -> bool:
        """Whether the part was written, by this run or an earlier one."""
        return self._place(index, "json").is_file()

    def read(self, index: int) -> Part:
        """A part that is done."""
        told = json.loads(self._place(index, "json").read_text(encoding="utf-8"))
        arrow = self._place(index, "arrow")
        return Part(arrow if told["sizes"] else None, PrepareReport(**told["report"]), told["prompts"], told["sizes"])

    def write(self, index: int, chunk: Chunk) -> int:
        """Prepare one chunk; returns its number of rows."""
        report = PrepareReport()
        rows: list[dict[str, Any]] = []
        prompts, sizes = [], []
        for where, raw in chunk:
            try:
                prompt, made = self._prepared(where, raw, report)
            except Refusal as refusal:
                report.drop(where, refusal)
                continue
            rows += made
            sizes.append(len(made))
            if self.prompts:
                prompts.append(prompt)
        if rows:
            arrow = self._place(index, "arrow")
            partial = arrow.with_name(f"{arrow.name}.tmp")
            with pyarrow.OSFile(str(partial), "wb") as file, pyarrow.ipc.new_stream(file, SCHEMA) as stream:
                stream.write_batch(pyarrow.RecordBatch.from_pylist(rows, schema=SCHEMA))
            os.replace(partial, arrow)
        report.kept = {"train": len(sizes)}
        told = {"report": asdict(report), "prompts": prompts, "sizes": sizes}
        partial = self._place(index, "json.tmp")
        partial.write_text(json.dumps(told, ensure_ascii=False), encoding="utf-8")
        os.replace(partial, self._place(index, "json"))
        return report.rows

    def _prepared(self, where: str, raw: Any, report: PrepareReport) -> tuple[str, list[dict[str, Any]]]:
        """The prompt and the dataset's rows of one row of a source; counted in ``report``."""
        row = parse(raw)
        if not where.endswith(":0"):  # a file without rows is refused as row 0
            report.rows += 1
        conversation = read_conversation(row, where, self.roles)
        made = sequences(conversation, self.tokenizer, self._renderer, self.max_length)
        report.orphans += conversation.orphans
        report.unanswered += made[-1].left_out
        report.mended += conversation.mended
        report.cut += any(one.cut for one in made)
        report.unfinished += not made[-1].finished
        report.sequences += len(made)
        report.tokens += sum(len(one.ids) for one in made)
        report.supervised += sum(sum(one.mask) for one in made)
        rows = [
            {
                "id": conversation.id if one is made[-1] else f"{conversation.id}#{one.last}",
                "input_ids": one.ids,
                "loss_mask": one.mask,
                "finished": one.finished,
            }
            for one in made
        ]
        return conversation.prompt, rows


_writer: PartWriter | None = None


def _begin(writer: PartWriter) -> None:
    """In a worker: take the settings, leave Ctrl-C to the parent, and end when the parent is gone."""
    global _writer
    _writer = writer
    os.environ[_PARALLELISM] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


@contextmanager
def _one_thread() -> Iterator[None]:
    """A row is a handful of texts, for which the tokenizers' own threads cost more than they bring."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


def _work(index: int, chunk: Chunk) -> int:
    assert _writer is not None
    return _writer.write(index, chunk)


def write_parts(writer: PartWriter, chunks: Iterable[tuple[int, Chunk]], processes: int) -> Iterator[int]:
    """Write a part for each numbered chunk; yields the rows of each as it is done.

    Raises:
        OSError: a worker process was ended by someone else.
    """
    if processes == 1:
        for index, chunk in chunks:
            with _one_thread():
                rows = writer.write(index, chunk)
            yield rows
        return
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    pool = ProcessPoolExecutor(processes, context, _begin, (writer,))
    running: set[Future[int]] = set()
    try:
        for index, chunk in chunks:
            running.add(pool.submit(_work, index, chunk))
            if len(running) > 2 * processes:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        yield from (future.result() for future in running)
    except BrokenExecutor as error:
        raise OSError(f"a worker process was ended (out of memory?): run again to go on ({error})") from error
    finally:
        pool.shutdown(cancel_futures=True)
