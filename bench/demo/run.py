"""The demo from start to end: stacks up, arms run, tables out, stacks down.

Whatever happens, the processes that were started are stopped by their pids: an interrupt that comes
while they are being stopped waits until they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import msgspec
import uvloop

from bench.demo import report
from bench.demo.arms import Runner, Settled, engine_names, settle, without_ext_proc
from bench.demo.decisions import Decided, read_decisions
from bench.demo.figures import Arm, by_engine, figures
from bench.demo.options import Options
from bench.demo.progress import Progress
from bench.demo.promises import Promise, judge
from bench.demo.scene import ENGINES, Scene, set_scene
from bench.demo.workload import Plan
from bench.stack import Child, NotReadyError, Stack
from epp.envoy.command import render

WATCH_PERIOD_S = 0.5
ROBIN, PICKED = "round robin", "EPP"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
METHOD = (
    "round robin is the same Envoy bootstrap without the ext_proc filter: its requests make no hop "
    "to the EPP, so the EPP's times below include what asking it costs. "
)
FRESH = "Both runs start with new engines and empty caches."
FRESH_OWN = (
    "Your engines are not restarted: each run's prompts begin differently, so none is cached. "
    "Nothing is overloaded or killed, and figures are shown, not judged: they depend on what else "
    "your engines do. "
)


class Run(msgspec.Struct, kw_only=True):
    """What came of the workload."""

    plan: Plan
    picked: Arm
    robin: Arm | None
    settled: Settled
    decided: list[Decided]
    promises: list[Promise]


class Demo:
    """One demo. `main` returns the exit status."""

    def __init__(self, options: Options, *, colour: bool) -> None:
        self._options = options
        self._paint = report.Paint(colour)
        self._progress = Progress()

    def main(self) -> int:
        """Raises: NotReadyError when a process fails, KeyboardInterrupt when interrupted before
        the tables."""
        options = self._options
        scene = set_scene(options)
        self._introduce(scene)
        robin = None
        if options.workload and options.round_robin:
            with self._stack(ROBIN) as stack:
                robin, _ = self._arm(ROBIN, stack, scene)
        with self._stack(PICKED) as stack:
            if not options.workload:
                self._keep(stack, scene)
                return 0
            run = self._run(stack, scene, robin)
            self._report(stack, run)
            if options.json_file:
                write_json(options.json_file, run, engine_names(stack))
            if not options.once:
                self._keep(stack, scene)
            return 0 if all(promise.kept for promise in run.promises) else 1

    # -- stacks and arms -------------------------------------------------------------------

    @contextlib.contextmanager
    def _stack(self, name: str) -> Iterator[Stack]:
        options = self._options
        fault = ["--fault", options.engine_fault] if options.engine_fault else []
        stack = Stack(
            engines=() if options.endpoints else [fault, *[()] * (ENGINES - 1)],
            endpoints=options.endpoints,
            epp_flags=("--v=4",),
            bootstrap=without_ext_proc if name == ROBIN else render,
            folder=self._folder(name),
        )
        engines = "" if options.endpoints else f"{ENGINES} engines, "
        self._progress.show(f"  {name:<12} starting {engines}EPP, Envoy ...", always=True)
        try:
            stack.start()
            yield stack
        finally:
            with uninterrupted():
                stack.stop()

    def _folder(self, name: str) -> Path | None:
        """Where the processes of an arm write; `None`: a folder that is deleted afterwards."""
        if not self._options.logs:
            return None
        folder = Path(self._options.logs) / name.replace(" ", "-").lower()
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _arm(self, name: str, stack: Stack, scene: Scene) -> tuple[Arm, Plan]:
        plan = scene.plan(self._options.seed)
        runner = Runner(
            name,
            stack,
            plan,
            self._progress,
            model=scene.model,
            seed=self._options.seed,
            overload=scene.overload,
            outage=scene.outage,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            arm = loop.run(runner.run())
        self._progress.clear()
        return arm, plan

    def _run(self, stack: Stack, scene: Scene, robin: Arm | None) -> Run:
        picked, plan = self._arm(PICKED, stack, scene)
        settled = settle(stack)
        decided = read_decisions(stack.epp.text().splitlines())
        if self._options.endpoints:
            # Other engines do not sign their answers.
            address = {one.request_id: one.address for one in decided}
            for outcome in picked.outcomes:
                outcome.engine = address.get(outcome.id, "")
        promises = judge(
            picked,
            robin,
            engines=engine_names(stack),
            roles=scene.roles,
            inflight_left=settled.inflight_requests,
        )
        return Run(
            plan=plan,
            picked=picked,
            robin=robin,
            settled=settled,
            decided=decided,
            promises=promises,
        )

    def _keep(self, stack: Stack, scene: Scene) -> None:
        """Show what to try and wait for an interrupt.

        Raises: NotReadyError when a process ends by itself.
        """
        self._print(
            report.try_it(
                envoy_url=stack.envoy.url,
                admin_url=f"http://127.0.0.1:{stack.epp.ports['metrics']}",
                epp=stack.epp.address,
                addresses=stack.addresses,
                model=scene.model,
                command=epp_command(),
                paint=self._paint,
            )
        )
        self._progress.say("\nRunning until Ctrl-C.")
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(WATCH_PERIOD_S)
                for child in (stack.envoy, stack.epp, *stack.engines):
                    _check(child)

    # -- what is printed -------------------------------------------------------------------

    def _introduce(self, scene: Scene) -> None:
        options = self._options
        if options.endpoints:
            what = f"{len(options.endpoints)} engines of yours serving {scene.model}"
        else:
            what = f"{ENGINES} simulated vLLM engines (timing of Qwen3-32B on two H100)"
        lines = [self._paint.bold(f"Endpoint Picker demo: {what}, the EPP, a real Envoy")]
        if options.workload:
            plan = scene.plan(options.seed)
            lines += report.wrap(f"{report.describe_plan(plan, options.seed)}.")
            text = METHOD if options.round_robin else ""
            text += FRESH_OWN if options.endpoints else FRESH if options.round_robin else ""
            lines += report.wrap(text[:1].upper() + text[1:])
        self._print([*lines, ""])

    def _report(self, stack: Stack, run: Run) -> None:
        engines, paint = engine_names(stack), self._paint
        addresses = dict(zip(engines, stack.addresses, strict=True))
        lines = report.where_and_why(run.picked, run.decided, addresses, paint)
        if run.settled.served_elsewhere:
            lines += report.wrap(
                f"{run.settled.served_elsewhere} requests went on to another engine than the "
                "picked one: Envoy sends again what could not be sent"
            )
        if len(run.plan.phases) > 1:
            lines += report.per_phase(run.plan, run.picked, run.robin, engines, paint)
        if run.robin is not None:
            lines += report.against(run.plan, run.picked, run.robin, paint)
        lines += report.promises(run.promises, paint)
        arms = [run.picked] if run.robin is None else [run.robin, run.picked]
        lines += report.lateness(arms, paint)
        lines += report.explained(run.decided, paint)
        self._print(lines)

    def _print(self, lines: Sequence[str]) -> None:
        self._progress.say("\n".join(lines))


def _check(child: Child) -> None:
    process = child.process
    if process is not None and process.poll() is not None:
        raise NotReadyError(
            f"{child.name} ended by itself (status {process.returncode}); its last output:\n"
            f"{child.text()[-2000:]}"
        )


def write_json(path: str, run: Run, engines: Sequence[str]) -> None:
    """Every number of a run.

    Raises: NotReadyError when the file cannot be written.
    """
    arms = [arm for arm in (run.robin, run.picked) if arm is not None]
    document = {
        "phases": run.plan.phases,
        "arms": {
            arm.name: {
                "all": figures(arm),
                "phases": [
                    {
                        "figures": figures(arm, some),
                        "requests_by_engine": by_engine(some, engines),
                    }
                    for some in (
                        [o for o in arm.outcomes if o.phase == i]
                        for i in range(len(run.plan.phases))
                    )
                ],
                "requests_by_engine": by_engine(arm.outcomes, engines),
                "kill": arm.kill,
                "engine_late_s": arm.engine_late_s,
                "outcomes": arm.outcomes,
            }
            for arm in arms
        },
        "epp": run.settled,
        "decisions": run.decided,
        "promises": run.promises,
    }
    text = json.dumps(msgspec.to_builtins(document), indent=1)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise NotReadyError(f"--json {path}: {error.strerror}") from error


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt like Ctrl-C; a signal that is ignored on purpose stays so."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    # A shell starts background jobs with SIGINT ignored; SIGTERM must end them all the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in SIGNALS[1:]:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Put interrupts off until the end of the block.

    Raises: KeyboardInterrupt at the end if one came.
    """
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in before:
        signal.signal(number, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            raise KeyboardInterrupt


def epp_command() -> str:
    """The `epp` of this environment, as it can be called from here."""
    command = Path(sys.executable).with_name("epp")
    here = Path.cwd()
    return str(command.relative_to(here) if command.is_relative_to(here) else command)


def colour_wanted(environment: dict[str, str]) -> bool:
    """Colours on a terminal that can show them, unless NO_COLOR is set."""
    plain = environment.get("NO_COLOR") or environment.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain
