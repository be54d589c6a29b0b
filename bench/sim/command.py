"""What `python -m bench.sim` does: choose cells and policies, make the runs, write the report."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from bench.measure import machine
from bench.sim.experiments import PLAIN, SITUATIONS, Cell, Setup, fleet_of, select
from bench.sim.figures import GOOD_ITL_S, GOOD_TTFT_S
from bench.sim.markdown import markdown
from bench.sim.options import Options
from bench.sim.records import Record, Task
from bench.sim.report import (
    Kind,
    Report,
    contests_of,
    encode,
    entries_of,
    summary_of,
)
from bench.sim.runner import Journal, made_before, run_all
from bench.sim.runs import Bench, MakePolicy, code_digest
from epp.core.errors import ConfigError

TEXT_BYTES_MAX = 1 << 20
"""Of a configuration file."""
VERSIONS = ("envoy-endpoint-picker", "msgspec", "matplotlib")


class CommandError(Exception):
    """The command line asks for what there is not; the text names it and what there is."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be run."""

    cells: list[Cell]
    policies: dict[str, MakePolicy]
    kinds: dict[str, Kind]
    baseline: str
    setup: Setup


def run_command(options: Options, choice: Choice | None = None) -> int:
    """Do it; returns the exit status.

    Args:
        choice: instead of what the options choose; for policies of one's own.
    Raises: CommandError, WorkloadError, ConfigError, OSError; KeyboardInterrupt after the report
        of what was done so far is written.
    """
    choice = choice or (replay_choice(options) if options.trace_file else grid_choice(options))
    if options.only_list:
        print(list_text(choice))
        return 0
    tasks = [
        Task(cell, policy, seed)
        for cell in choice.cells
        for seed in options.seeds
        for policy in choice.policies
    ]
    bench = Bench(choice.setup, choice.policies)
    notes = _check_workloads(bench, choice, options)
    for line in notes:
        print(line, file=sys.stderr)
    records: list[Record] = []
    try:
        _make_runs(bench, tasks, options, records)
    finally:
        # What is done is told even when the rest was interrupted.
        if records:
            report = _report(choice, options, tasks, records)
            report.notes = notes
            _write(report, choice, options)
    return 1 if any(record.error for record in records) else 0


def _make_runs(
    bench: Bench, tasks: Sequence[Task], options: Options, records: list[Record]
) -> None:
    journal = Journal(options.folder / "out" / options.name / "runs.jsonl")
    there = journal.read() if options.resume else []
    kept = made_before(bench, tasks, there)
    if options.resume:
        print(
            f"{len(kept)} runs of the journal are kept; {len(there) - len(kept)} failed, or are of"
            " other cells, settings or code",
            file=sys.stderr,
        )
    journal.start(kept)
    records += kept
    made = {record.key for record in kept}

    def done(record: Record) -> None:
        journal.add(record)
        records.append(record)

    todo = [task for task in tasks if task.key not in made]
    if todo:
        run_all(bench, todo, options.jobs, done)


def _check_workloads(bench: Bench, choice: Choice, options: Options) -> list[str]:
    """Fail now, not in every run, and tell now what every run would. Raises: WorkloadError."""
    cells = {cell.workload: cell for cell in choice.cells}.values()
    return [line for cell in cells for line in bench.check_source(cell, options.seeds[0])]


# -- choosing ------------------------------------------------------------------------------


def grid_choice(options: Options) -> Choice:
    """Cells of a grid, policies of the tables. Raises: CommandError."""
    try:
        cells = select(options.grid, options.cells)
    except ValueError as error:
        raise CommandError(str(error)) from None
    table, kinds = known_policies()
    names = chosen(options.policies, kinds)
    return Choice(
        cells=cells,
        policies={name: table[name] for name in names},
        kinds={name: kinds[name] for name in names},
        baseline=_baseline(options.baseline, names, kinds),
        setup=Setup(
            traces=options.traces,
            requests_max=options.requests_max,
            regret_every=options.regret_every,
        ),
    )


def replay_choice(options: Options) -> Choice:
    """One cell, the log; a policy per configuration, and the peers that are asked for.

    Raises: CommandError, OSError.
    """
    from bench.sim.ours import from_config

    texts = {_stem(path, options.configs): _text(path) for path in options.configs}
    policies: dict[str, MakePolicy] = {}
    for name, text in texts.items():
        try:
            policies[name] = from_config(text)
        except ConfigError as error:
            raise CommandError(f"configuration {name}: {error}") from None
    kinds: dict[str, Kind] = dict.fromkeys(policies, "ours")
    if options.policies:
        table, known = known_policies()
        for name in chosen(options.policies, known):
            policies[name], kinds[name] = table[name], known[name]
    log = Path(options.trace_file)
    cell = Cell(
        workload=log.name.partition(".")[0],
        speed=options.speed,
        kv_blocks=None,
        endpoints=options.endpoints,
        hardware=options.hardware,
    )
    setup = Setup(
        requests_max=options.requests_max,
        regret_every=options.regret_every,
        trace_file=options.trace_file,
        trace_digest=_digest(log),
        configs=tuple(texts.items()),
    )
    baseline = options.baseline or next(iter(policies))
    return Choice(
        cells=[cell],
        policies=policies,
        kinds=kinds,
        baseline=_baseline(baseline, list(policies), kinds),
        setup=setup,
    )


def _stem(path: str, paths: Sequence[str]) -> str:
    """A short name that the others do not have."""
    stem = Path(path).stem
    return path if sum(Path(each).stem == stem for each in paths) > 1 else stem


def _text(path: str) -> str:
    with Path(path).open(encoding="utf-8") as file:
        text = file.read(TEXT_BYTES_MAX + 1)
    if len(text) > TEXT_BYTES_MAX:
        raise CommandError(f"{path} is longer than {TEXT_BYTES_MAX} bytes: no configuration")
    return text


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def known_policies() -> tuple[dict[str, MakePolicy], dict[str, Kind]]:
    """Every policy there is by name, and what each counts as; ours first."""
    from bench.sim.ours import OURS
    from bench.sim.policies import POLICIES
    from bench.sim.policies.table import HOLD

    kinds: dict[str, Kind] = {}
    for name in OURS:
        kinds[name] = "peer" if name.startswith("reference EPP") else "ours"
    for name in POLICIES:
        kinds[name] = "control" if name.endswith(HOLD) else "oracle" if name == "oracle" else "peer"
    return {**OURS, **POLICIES}, kinds


def chosen(patterns: Sequence[str], kinds: Mapping[str, Kind]) -> list[str]:
    """Names that fit any of the patterns, in the order of the table; without patterns all but the
    controls. Raises: CommandError when a pattern fits nothing."""
    if not patterns:
        return [name for name, kind in kinds.items() if kind != "control"]
    for pattern in patterns:
        if not any(_fits(name, pattern) for name in kinds):
            raise CommandError(f"no policy is called {pattern!r}; there are {', '.join(kinds)}")
    return [name for name in kinds if any(_fits(name, pattern) for pattern in patterns)]


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _baseline(wanted: str, names: Sequence[str], kinds: Mapping[str, Kind]) -> str:
    if wanted and wanted not in names:
        raise CommandError(f"--baseline {wanted!r} is not among {', '.join(names)}")
    ours = [name for name in names if kinds[name] == "ours"]
    return wanted or (ours or list(names))[0]


def list_text(choice: Choice) -> str:
    """What would be run."""
    policies = [
        f"  {name} ({choice.kinds[name]}{', the baseline' * (name == choice.baseline)})"
        for name in choice.policies
    ]
    cells = [f"  {cell.name}" for cell in choice.cells]
    return "\n".join([f"{len(cells)} cells", *cells, f"{len(policies)} policies", *policies])


# -- writing -------------------------------------------------------------------------------


def _report(
    choice: Choice, options: Options, tasks: Sequence[Task], records: Sequence[Record]
) -> Report:
    place = {task.key: at for at, task in enumerate(tasks)}
    ordered = sorted(records, key=lambda record: place[record.key])
    entries = entries_of(
        ordered, [cell.name for cell in choice.cells], list(choice.policies), choice.baseline
    )
    contests = contests_of(entries, choice.kinds, choice.baseline)
    return Report(
        name=options.name,
        command=command_text(options.arguments),
        machine=machine(),
        versions={**_versions(), "code": code_digest()},
        constants=_constants(choice, options),
        seeds=list(options.seeds),
        policies=dict(choice.kinds),
        baseline=choice.baseline,
        summary=summary_of(contests),
        contests=contests,
        entries=entries,
        runs=[record for record in ordered if not record.error],
        failed=[f"{r.cell} {r.policy} {r.seed}: {r.error}" for r in ordered if r.error],
        missing=len(tasks) - len(records),
    )


def command_text(arguments: Sequence[str]) -> str:
    """The command, without the folders of one machine: of absolute paths the last part stays."""

    def short(text: str) -> str:
        flag, equals, value = text.partition("=") if text.startswith("--") else ("", "", text)
        return flag + equals + (Path(value).name if Path(value).is_absolute() else value)

    return shlex.join(["python", "-m", "bench.sim", *map(short, arguments)])


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _constants(choice: Choice, options: Options) -> dict[str, Any]:
    kinds = {cell.hardware: fleet_of(cell).kinds[0] for cell in choice.cells}
    situations = {cell.situation: SITUATIONS[cell.situation] for cell in choice.cells}
    return {
        "good_ttft_s": GOOD_TTFT_S,
        "good_itl_s": GOOD_ITL_S,
        "requests_max": options.requests_max,
        "regret_every": options.regret_every,
        "hardware": msgspec.to_builtins(kinds),
        "plain": msgspec.to_builtins(SITUATIONS[PLAIN].conditions),
        "situations": {
            name: msgspec.to_builtins(situation.conditions)
            for name, situation in situations.items()
            if name != PLAIN
        },
    }


def _write(report: Report, choice: Choice, options: Options) -> None:
    """JSON, Markdown and plots; then the tables once more, to be read at once."""
    out = options.folder / "out" / options.name
    results = options.folder / "results" / f"{options.name}.json"
    _replace(results, encode(report))
    text = markdown(report)
    _replace(out / "report.md", text.encode())
    print(text)
    print(f"wrote {results}, {out / 'report.md'}", file=sys.stderr)
    if options.plots and report.entries:
        from bench.sim.drawing import PlotsMissingError
        from bench.sim.plots import write_plots

        try:
            written = write_plots(report, choice.cells, out)
        except PlotsMissingError as error:
            print(f"no plots: {error}", file=sys.stderr)
        else:
            print(f"wrote {', '.join(map(str, written))}", file=sys.stderr)


def _replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_bytes(data)
    os.replace(fresh, path)
