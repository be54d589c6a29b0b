"""Numbers to text a person can read. Pure; no line is meant to be wider than 100 columns but the
quoted ones."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from bench.demo.decisions import Decided, examples
from bench.demo.figures import Arm, Figures, by_engine, figures
from bench.demo.promises import Promise
from bench.demo.workload import Kind, Plan
from epp.core.explain import Reason

WIDTH = 100
REASONS = {
    Reason.PREFIX: "no other engine held more of the prompt",
    Reason.LOAD: "no engine held any of it: the least busy",
    Reason.SPREAD: "another held more, other scores outweighed it",
    Reason.ONLY: "no other was left",
}
LATE_S_MAX = 0.5
"""Engine time lost over a run before it is worth a warning."""


class Paint:
    """ANSI colours, or none."""

    def __init__(self, on: bool) -> None:
        self._on = on

    def bold(self, text: str) -> str:
        return self._paint("1", text)

    def good(self, text: str) -> str:
        return self._paint("32", text)

    def bad(self, text: str) -> str:
        return self._paint("1;31", text)

    def faint(self, text: str) -> str:
        return self._paint("2", text)

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._on else text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Aligned columns, two blanks apart: the first to the left, the others to the right."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if not i else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def heading(text: str, paint: Paint) -> list[str]:
    """A blank line and a title."""
    return ["", paint.bold(text)]


def wrap(text: str, indent: str = "  ") -> list[str]:
    """A paragraph."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def ms(seconds: float | None) -> str:
    """Milliseconds, or a dash."""
    return "-" if seconds is None else f"{1e3 * seconds:.0f} ms"


def ratio(value: float | None) -> str:
    """Two digits, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def describe_plan(plan: Plan, seed: int) -> str:
    """What is going to be sent, in one sentence."""
    kinds = Counter(request.kind for request in plan.requests)
    chats = {request.id.partition("-turn-")[0] for request in plan.requests} - {
        request.id for request in plan.requests
    }
    systems = {r.messages[0][1] for r in plan.requests if r.messages[0][0] == "system"}
    return (
        f"{len(plan.requests)} requests in {plan.duration_s:.0f} s, once each way (seed {seed}): "
        f"{kinds[Kind.CHAT]} turns of {len(chats)} chats on {len(systems)} shared system prompts, "
        f"{kinds[Kind.UNRELATED]} unrelated prompts"
    )


def where_and_why(
    picked: Arm, decided: Sequence[Decided], addresses: Mapping[str, str], paint: Paint
) -> list[str]:
    """One row per engine: requests it answered, why it was picked for them, how it did.

    Args:
        addresses: of each engine, by name.
    """
    names = {address: name for name, address in addresses.items()}
    reasons = Counter((names.get(d.address, d.address), d.reason) for d in decided)
    shown = [r for r in Reason if r is not Reason.ONLY or any(k[1] is r for k in reasons)]
    # Engines that are not simulated have no other name than their address.
    named = any(name != address for name, address in addresses.items())
    head = ["engine", *["address"][: int(named)], "answered", *shown]
    head += ["hit ratio", "TTFT p50", "TTFT p95"]
    rows = []
    for name, address in addresses.items():
        own = figures(picked, [o for o in picked.outcomes if o.engine == name])
        why = [str(reasons[name, reason]) for reason in shown]
        rows.append(
            [name, *[address][: int(named)], str(own.requests), *why, *_quality(own)],
        )
    total = figures(picked)
    why = [str(sum(n for (_, r), n in reasons.items() if r is reason)) for reason in shown]
    answered = sum(bool(o.engine) for o in picked.outcomes)
    rows.append(["all", *[""][: int(named)], str(answered), *why, *_quality(total)])
    return [
        *heading("Where requests went, and why", paint),
        *_indented(table(head, rows), paint),
        *wrap("; ".join(f"{r}: {REASONS[r]}" for r in shown)),
    ]


def _quality(own: Figures) -> list[str]:
    return [ratio(own.hit_ratio), ms(own.ttft_p50_s), ms(own.ttft_p95_s)]


def per_phase(
    plan: Plan, picked: Arm, robin: Arm | None, engines: Sequence[str], paint: Paint
) -> list[str]:
    """One row per phase: requests per engine, with the EPP and with round robin."""
    arms = [picked] if robin is None else [picked, robin]
    rows = []
    for i, phase in enumerate(plan.phases):
        row = [f"{i + 1} {phase.name}", str(sum(r.phase == i for r in plan.requests))]
        for arm in arms:
            counts = by_engine([o for o in arm.outcomes if o.phase == i], engines)
            row.append(" / ".join(f"{count:>3}" for count in counts.values()))
        rows.append(row)
    return [
        *heading(f"Requests answered by {' / '.join(engines)}", paint),
        *_indented(table(["phase", "requests", *(arm.name for arm in arms)], rows), paint),
    ]


def against(plan: Plan, picked: Arm, robin: Arm, paint: Paint) -> list[str]:
    """EPP and round robin side by side, phase by phase and over all."""
    rows = []
    phases: list[int | None] = [*range(len(plan.phases)), None]
    for phase in phases:
        ours, theirs = (
            figures(a, [o for o in a.outcomes if phase in (None, o.phase)]) for a in (picked, robin)
        )
        rows.append(
            [
                "all" if phase is None else f"{phase + 1} {plan.phases[phase].name}",
                f"{ratio(ours.hit_ratio)} / {ratio(theirs.hit_ratio)}",
                f"{ms(ours.ttft_p50_s)} / {ms(theirs.ttft_p50_s):>7}",
                f"{ms(ours.ttft_p95_s)} / {ms(theirs.ttft_p95_s):>7}",
                f"{ours.errors} / {theirs.errors}",
                f"{ours.cut} / {theirs.cut}",
            ]
        )
    head = ["phase", "hit ratio", "TTFT p50", "TTFT p95", "errors", "cut"]
    text = []
    if picked.kill is not None:
        text = wrap("cut: streams begun on the engine that was killed; no router can finish those")
    return [
        *heading("EPP / round robin, the same workload", paint),
        *_indented(table(head, rows), paint),
        *text,
    ]


def promises(judged: Sequence[Promise], paint: Paint) -> list[str]:
    """One line per promise."""
    lines = heading("Promises", paint)
    width = max(len(p.text) for p in judged)
    for promise in judged:
        mark = paint.good("kept  ") if promise.kept else paint.bad("BROKEN")
        lines.append(f"  {mark}  {promise.text.ljust(width)}  {promise.seen}")
        lines += wrap(promise.detail, "          ")
    return lines


def lateness(arms: Sequence[Arm], paint: Paint) -> list[str]:
    """Whether the machine kept up, since otherwise the times measure the machine."""
    client_s = max((o.late_s for arm in arms for o in arm.outcomes), default=0.0)
    known_s = [arm.engine_late_s for arm in arms if arm.engine_late_s is not None]
    engine_s = max(known_s, default=0.0)
    text = f"requests left {client_s:.2f} s late at most"
    if known_s:
        text = f"engines ran {engine_s:.1f} s behind, {text}"
    if engine_s <= LATE_S_MAX and client_s <= LATE_S_MAX:
        return ["", *(paint.faint(line) for line in wrap(f"The machine kept up: {text}."))]
    warning = f"The machine did not keep up: {text}. Times are longer than they should be."
    return ["", *(paint.bad(line) for line in wrap(warning))]


def explained(decided: Sequence[Decided], paint: Paint) -> list[str]:
    """The latest decision of each kind, in the log's words."""
    found = examples(decided)
    if not found:
        return []
    lines = heading("Decisions explained (the EPP's log at --v 4)", paint)
    for one in found:
        lines += wrap(f"{one.reason}: {one.request_id}", "  ")
        for part in one.sentence.replace("; next ", ";\nnext ").splitlines():
            lines += wrap(part, "      ")
    return lines


def try_it(
    *,
    envoy_url: str,
    admin_url: str,
    epp: str,
    addresses: Sequence[str],
    model: str,
    command: str,
    paint: Paint,
) -> list[str]:
    """Commands to paste.

    Args:
        command: how `epp` is called here.
        epp: address of the EPP's ext_proc port.
        admin_url: of its metrics port.
    """
    body = f'{{"model":"{model}","messages":[{{"role":"user","content":"Hello?"}}],"max_tokens":8}}'
    joined = ",".join(addresses)
    return [
        *heading("Try it", paint),
        f"  curl -i {envoy_url}/v1/chat/completions -H 'content-type: application/json' \\",
        f"    -d '{body}'",
        f"  curl -s {admin_url}/debug/state",
        f"  curl -s {admin_url}/metrics | grep epp_picks_total",
        f"  {command} envoy-config --epp {epp} --endpoints {joined}",
    ]


def _indented(lines: Sequence[str], paint: Paint) -> list[str]:
    return [f"  {paint.faint(line) if not i else line}" for i, line in enumerate(lines)]
