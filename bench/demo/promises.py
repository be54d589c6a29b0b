"""What the demo promises, and whether a run kept it. Pure.

The margins were set from runs on two busy cores so that chance and a noisy machine stay well within
them, and that what they guard against does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.demo.figures import Arm, by_engine, errors_of, figures, return_s

HIT_RATIO_GAIN_MIN = 0.04
TTFT_P50_RATIO_MAX = 0.85
LOAD_RATIO_MAX = 2.5
"""Most to fewest requests of an engine while nothing is wrong."""
OVERLOADED_SHARE_MAX = 0.6
"""Of the fair share; what is sent before the first scrape that shows the overload counts, too."""
RETURN_S_MAX = 6.0


class Promise(msgspec.Struct, frozen=True):
    """One promise and what was seen."""

    text: str
    kept: bool
    seen: str
    detail: str = ""
    """More of what was seen when it was broken."""


class Roles(msgspec.Struct, frozen=True):
    """Which phase and engine is what; `None`: there is no such phase. Without a healthy phase the
    engines are not ours, so nothing is promised of their speed and load."""

    healthy_phase: int | None = None
    overload_phase: int | None = None
    overloaded_engine: str = ""
    outage: bool = False


def judge(
    picked: Arm,
    robin: Arm | None,
    *,
    engines: Sequence[str],
    roles: Roles,
    inflight_left: int,
) -> list[Promise]:
    """Every promise this run could keep or break.

    Args:
        picked: the arm with the EPP.
        robin: the round robin arm, if it ran.
        engines: names, as in `Outcome.engine`.
        inflight_left: requests the EPP still counts after the last answer.
    """
    promises = [_errors(picked)]
    if roles.healthy_phase is not None:
        if robin is not None:
            promises += _against(picked, robin)
        promises.append(_even(picked, engines, roles))
    if roles.overload_phase is not None:
        promises.append(_overloaded(picked, engines, roles))
    if roles.outage:
        promises.append(_returned(picked))
    promises.append(
        Promise(
            "nothing left in flight in the EPP's account",
            inflight_left == 0,
            f"{inflight_left} left",
        )
    )
    return promises


def _errors(picked: Arm) -> Promise:
    errors, cut = errors_of(picked), figures(picked).cut
    seen = f"{len(errors)} of {len(picked.outcomes)} failed"
    if cut:
        seen += f", {cut} cut by the kill"
    detail = f"first {errors[0].id}: {errors[0].error}" if errors else ""
    return Promise("no request fails", bool(picked.outcomes) and not errors, seen, detail)


def _against(picked: Arm, robin: Arm) -> list[Promise]:
    ours, theirs = figures(picked), figures(robin)
    promises = []
    if ours.hit_ratio is not None and theirs.hit_ratio is not None:
        promises.append(
            Promise(
                f"hit ratio at least {HIT_RATIO_GAIN_MIN:.2f} above round robin's",
                ours.hit_ratio >= theirs.hit_ratio + HIT_RATIO_GAIN_MIN,
                f"{ours.hit_ratio:.2f} against {theirs.hit_ratio:.2f}",
            )
        )
    text = f"median TTFT at most {TTFT_P50_RATIO_MAX:.2f} of round robin's"
    if ours.ttft_p50_s is None or theirs.ttft_p50_s is None:
        promises.append(Promise(text, False, "there was no answer to measure"))
    else:
        promises.append(
            Promise(
                text,
                ours.ttft_p50_s <= TTFT_P50_RATIO_MAX * theirs.ttft_p50_s,
                f"{1e3 * ours.ttft_p50_s:.0f} ms against {1e3 * theirs.ttft_p50_s:.0f} ms",
            )
        )
    return promises


def _even(picked: Arm, engines: Sequence[str], roles: Roles) -> Promise:
    some = [o for o in picked.outcomes if o.phase == roles.healthy_phase]
    counts = by_engine(some, engines).values()
    return Promise(
        f"nothing wrong: busiest engine at most {LOAD_RATIO_MAX:g} x the idlest",
        bool(some) and max(counts) <= LOAD_RATIO_MAX * min(counts),
        " / ".join(map(str, counts)) + " requests",
    )


def _overloaded(picked: Arm, engines: Sequence[str], roles: Roles) -> Promise:
    some = [o for o in picked.outcomes if o.phase == roles.overload_phase]
    got = by_engine(some, engines)[roles.overloaded_engine]
    fair = len(some) / len(engines)
    return Promise(
        f"overloaded engine: at most {OVERLOADED_SHARE_MAX:g} of its fair share",
        got <= OVERLOADED_SHARE_MAX * fair,
        f"{got} of {len(some)}, fair were {fair:.0f}",
    )


def _returned(picked: Arm) -> Promise:
    after_s = return_s(picked)
    return Promise(
        f"killed engine: requests again within {RETURN_S_MAX:g} s of its return",
        after_s is not None and after_s <= RETURN_S_MAX,
        "none came" if after_s is None else f"after {after_s:.1f} s",
    )
