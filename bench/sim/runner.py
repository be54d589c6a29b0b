"""Makes many runs on several cores, and loses none that is done.

Each record is appended to a journal, one line of JSON, as soon as it is there; a process that is
killed leaves at most half a line, which a reader skips. Processes are forked: policies are
functions and travel by inheritance, and a worker keeps the workload it made last. Records come in
the order in which runs end; reports sort them by cell, policy and seed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from ctypes import c_double
from functools import partial
from multiprocessing.connection import wait as wait_for
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any

import msgspec

from bench.sim.progress import ProgressBar
from bench.sim.records import Record, Task
from bench.sim.runs import Bench

TICK_S = 0.2


class Journal:
    """The records of a bench on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self, kept: Iterable[Record] = ()) -> None:
        """Begin with these records alone; what was there is moved to `.old` if it is not kept."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(b"".join(map(_line, kept)))
        if self._path.exists():
            os.replace(self._path, self._path.with_suffix(".old"))
        os.replace(fresh, self._path)

    def add(self, record: Record) -> None:
        """Append a record: in one write, so that it is there whole or not at all."""
        with self._path.open("ab", buffering=0) as file:
            file.write(_line(record))

    def read(self) -> list[Record]:
        """What is there; nothing when there is no journal. Lines that are no record are skipped."""
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return list(_records(lines))


def _line(record: Record) -> bytes:
    return msgspec.json.encode(record) + b"\n"


def _records(lines: Iterable[bytes]) -> Iterator[Record]:
    decoder = msgspec.json.Decoder(Record)
    for line in lines:
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError:
            continue


def made_before(bench: Bench, tasks: Sequence[Task], records: Iterable[Record]) -> list[Record]:
    """The records that spare a run: of these tasks, without error, and of the same basis."""
    wanted = {task.key: bench.basis(task) for task in tasks}
    found = {
        record.key: record
        for record in records
        if not record.error and wanted.get(record.key) == record.basis
    }
    return list(found.values())


def run_all(bench: Bench, tasks: Sequence[Task], jobs: int, done: Callable[[Record], None]) -> None:
    """Make the runs; `done` is called here, once per record, as they come.

    Args:
        jobs: processes at once; with 1 everything happens in this one.
    Raises: BrokenProcessPool when a worker was killed, as for want of memory.
    """
    bar = ProgressBar(len(tasks))
    made = 0

    def note(record: Record) -> None:
        nonlocal made
        made += 1
        done(record)

    try:
        if jobs == 1:
            _run_here(bench, tasks, note, bar)
        else:
            _run_forked(bench, tasks, min(jobs, len(tasks)), note, bar)
    finally:
        bar.end(made)


def _run_here(
    bench: Bench, tasks: Sequence[Task], note: Callable[[Record], None], bar: ProgressBar
) -> None:
    for number, task in enumerate(tasks):
        note(bench.attempt(task, partial(_show, bar, number, task)))


def _show(bar: ProgressBar, number: int, task: Task, share: float) -> None:
    bar.show(number + share, f"{task.cell.name} {task.policy}")


# -- several processes ---------------------------------------------------------------------


def _end_after(sentinel: int) -> None:
    """A worker whose parent was killed would wait for work for ever."""
    wait_for([sentinel])
    os._exit(1)


class _Worker:
    """A forked process: the bench it inherited, and its place in the memory all of them share."""

    bench: Bench
    shares: Any
    place: int

    @classmethod
    def start(cls, bench: Bench, shares: Any, places: Any) -> None:
        # Ctrl-C reaches the whole group: a worker ends without a word, the parent reports.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        parent = multiprocessing.parent_process()
        assert parent is not None
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()
        cls.bench, cls.shares = bench, shares
        with places.get_lock():
            cls.place = places.value
            places.value += 1

    @classmethod
    def run(cls, task: Task) -> Record:
        record = cls.bench.attempt(task, cls._progress)
        cls.shares[cls.place] = 0.0
        return record

    @classmethod
    def _progress(cls, share: float) -> None:
        cls.shares[cls.place] = share


def _run_forked(
    bench: Bench,
    tasks: Sequence[Task],
    jobs: int,
    note: Callable[[Record], None],
    bar: ProgressBar,
) -> None:
    context = multiprocessing.get_context("fork")
    shares = context.RawArray(c_double, jobs)
    start = partial(_Worker.start, bench, shares, context.Value("i", 0))
    with _pool(context, jobs, start) as pool:
        waiting: set[Future[Record]] = {pool.submit(_Worker.run, task) for task in tasks}
        last = ""
        while waiting:
            ended, waiting = wait(waiting, timeout=TICK_S, return_when=FIRST_COMPLETED)
            for future in ended:
                record = future.result()
                last = f"{record.cell} {record.policy}"
                note(record)
            bar.show(len(tasks) - len(waiting) + sum(shares), last)


@contextmanager
def _pool(
    context: ForkContext, jobs: int, start: Callable[[], None]
) -> Iterator[ProcessPoolExecutor]:
    """Processes that are ended, whatever they do, when the block is left by an exception."""
    before = set(multiprocessing.active_children())
    sys.stdout.flush()  # or every child would write what is still buffered here
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=start)
    try:
        yield pool
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    pool.shutdown()
