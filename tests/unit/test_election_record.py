"""What a candidate may conclude from a Lease, and what it writes."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest

from epp.edge.kubernetes.election_record import (
    INT32_MAX,
    Candidate,
    Claim,
    Lease,
    RecordError,
    Step,
    Timing,
    micro_time,
    read_lease,
)

NOW = datetime(2026, 3, 1, 8, 13, 5, tzinfo=UTC)
CLAIM = Claim(name="epp-ns-pool.llm-d.ai", namespace="ns", identity="me", lease_s=15)
MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def lease_of(holder: str | None, renewed: int = 0, **spec: Any) -> Lease:
    return Lease(
        {
            "metadata": {"name": "x", "resourceVersion": "7", "labels": {"team": "a"}},
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": 15,
                "renewTime": micro_time(NOW + timedelta(seconds=renewed)),
                **spec,
            },
        }
    )


def candidate() -> Candidate:
    return Candidate("me", Timing())


def document(body: bytes) -> dict[str, Any]:
    return msgspec.json.decode(body, type=dict[str, Any])


# -- when it may take it -------------------------------------------------------------------


def test_a_lease_that_nobody_ever_saw_is_made_at_once() -> None:
    assert candidate().look(None, 100.0) is Step.CREATE


@pytest.mark.parametrize("holder", ["", None])
def test_a_released_lease_is_taken_at_once(holder: str | None) -> None:
    assert candidate().look(lease_of(holder), 100.0) is Step.REPLACE


def test_a_lease_runs_out_by_our_own_clock_since_it_last_changed_here() -> None:
    one = candidate()
    assert one.look(lease_of("other"), 100.0) is Step.WAIT
    assert one.look(lease_of("other", renewed=2), 103.0) is Step.WAIT
    assert one.look(lease_of("other", renewed=2), 117.9) is Step.WAIT
    assert one.look(lease_of("other", renewed=2), 118.0) is Step.REPLACE


@pytest.mark.parametrize("days", [-3_650, 3_650])
def test_the_time_in_a_record_does_not_matter(days: int) -> None:
    one = candidate()
    assert one.look(lease_of("other", renewed=days * 86_400), 100.0) is Step.WAIT
    assert one.look(lease_of("other", renewed=days * 86_400), 115.0) is Step.REPLACE


@pytest.mark.parametrize(("said", "waits_s"), [(40, 40), (3, 3), (0, 15), (-1, 15), ("4", 15)])
def test_the_holders_own_duration_counts_when_it_is_one(said: object, waits_s: int) -> None:
    one, lease = candidate(), lease_of("other", leaseDurationSeconds=said)
    assert one.look(lease, 0.0) is Step.WAIT
    assert one.look(lease, waits_s - 0.1) is Step.WAIT
    assert one.look(lease, waits_s) is Step.REPLACE


def test_a_lease_that_was_deleted_is_not_made_before_its_leader_must_have_ended() -> None:
    one = candidate()
    one.look(lease_of("other"), 100.0)
    assert one.look(None, 140.0) is Step.WAIT
    assert one.look(None, 154.9) is Step.WAIT
    assert one.look(None, 155.0) is Step.CREATE


def test_a_deleted_lease_that_is_back_with_the_same_content_is_a_new_one() -> None:
    one = candidate()
    one.look(lease_of("other"), 100.0)
    one.look(None, 110.0)
    assert one.look(lease_of("other"), 112.0) is Step.WAIT
    assert one.look(lease_of("other"), 126.9) is Step.WAIT
    assert one.look(lease_of("other"), 127.0) is Step.REPLACE


def test_the_leader_makes_a_deleted_lease_again_at_once() -> None:
    one = candidate()
    one.win(lease_of("me"), sent_s=100.0, now_s=100.1)
    assert one.look(None, 102.0) is Step.CREATE
    assert one.leads(102.0)


def test_who_led_and_finds_no_lease_waits_like_everyone_else() -> None:
    one = candidate()
    one.win(lease_of("me"), sent_s=100.0, now_s=100.1)
    assert one.look(None, 200.0) is Step.WAIT
    assert one.look(None, 215.0) is Step.CREATE


# -- how long it leads ---------------------------------------------------------------------


def test_it_leads_from_when_the_write_was_sent_and_not_from_when_it_was_answered() -> None:
    one = candidate()
    one.win(lease_of("me"), sent_s=100.0, now_s=104.0)
    assert one.leads(109.999)
    assert not one.leads(110.0)


def test_an_answer_that_comes_too_late_makes_no_leader() -> None:
    one = candidate()
    one.win(lease_of("me"), sent_s=100.0, now_s=111.0)
    assert not one.leads(111.0)


@pytest.mark.parametrize("holder", ["other", ""])
def test_a_leader_that_reads_another_name_leads_no_more(holder: str) -> None:
    one = candidate()
    one.win(lease_of("me"), sent_s=100.0, now_s=100.1)
    one.look(lease_of(holder, renewed=1), 102.0)
    assert not one.leads(102.0)


def test_an_answer_with_another_holder_is_no_win() -> None:
    one = candidate()
    with pytest.raises(RecordError, match="'other'"):
        one.win(lease_of("other"), sent_s=100.0, now_s=100.1)
    assert not one.leads(100.1)


def test_our_own_name_is_renewed_whatever_happened_to_the_answer() -> None:
    assert candidate().look(lease_of("me"), 100.0) is Step.REPLACE


# -- what it writes ------------------------------------------------------------------------


def test_a_new_lease_says_all_that_the_other_implementations_read() -> None:
    body = document(CLAIM.new(NOW))
    at = "2026-03-01T08:13:05.000000Z"
    assert body == {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "epp-ns-pool.llm-d.ai", "namespace": "ns"},
        "spec": {
            "holderIdentity": "me",
            "leaseDurationSeconds": 15,
            "acquireTime": at,
            "renewTime": at,
            "leaseTransitions": 0,
        },
    }


def test_a_renewal_changes_the_renewal_time_only() -> None:
    lease = lease_of("me", acquireTime="2026-01-01T00:00:00.000000Z", leaseTransitions=4)
    before, after = document(lease.written()), document(CLAIM.of(lease, NOW + timedelta(hours=1)))
    assert after["spec"].pop("renewTime") > before["spec"].pop("renewTime")
    assert after == before


def test_a_takeover_counts_a_transition_and_keeps_what_it_does_not_know() -> None:
    lease = lease_of("other", leaseTransitions=4, strategy="OldestEmulationVersion")
    body = document(CLAIM.of(lease, NOW))
    assert body["metadata"] == {"name": "x", "resourceVersion": "7", "labels": {"team": "a"}}
    assert body["spec"]["leaseTransitions"] == 5
    assert body["spec"]["acquireTime"] == body["spec"]["renewTime"] == micro_time(NOW)
    assert body["spec"]["strategy"] == "OldestEmulationVersion"


def test_a_released_lease_is_free_and_valid() -> None:
    body = document(CLAIM.released(lease_of("me", leaseTransitions=4), NOW))
    assert body["spec"]["holderIdentity"] == ""
    assert body["spec"]["leaseDurationSeconds"] == 1
    assert body["spec"]["leaseTransitions"] == 4


@pytest.mark.parametrize("micros", [0, 1, 999_999])
def test_times_are_utc_with_exactly_six_digits(micros: int) -> None:
    east = timezone(timedelta(hours=5, minutes=30))
    there = NOW.replace(microsecond=micros).astimezone(east)
    assert MICRO_TIME.fullmatch(micro_time(there))
    assert micro_time(there).startswith(f"2026-03-01T08:13:05.{micros:06d}")


# -- what others wrote ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        None,
        [],
        "text",
        {},
        {"holderIdentity": None, "leaseDurationSeconds": None, "renewTime": None},
        {"holderIdentity": "", "leaseTransitions": "many", "acquireTime": 5},
        {"holderIdentity": "", "leaseTransitions": True, "renewTime": {"seconds": 1}},
        {"holderIdentity": "", "leaseTransitions": INT32_MAX, "leaseDurationSeconds": 2**70},
    ],
)
def test_a_record_of_another_kind_is_taken_over_as_nobodys(spec: object) -> None:
    body = msgspec.json.encode({"metadata": {"resourceVersion": "1"}, "spec": spec})
    lease = read_lease(body)
    assert candidate().look(lease, 100.0) is Step.REPLACE
    written = document(CLAIM.of(lease, NOW))["spec"]
    assert written["holderIdentity"] == "me"
    assert MICRO_TIME.fullmatch(written["acquireTime"])
    assert 1 <= written["leaseTransitions"] <= INT32_MAX


def test_a_holder_that_is_no_text_is_still_somebody() -> None:
    assert candidate().look(lease_of(holder=5), 100.0) is Step.WAIT  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>gateway</html>",
        b"[]",
        b"{}",
        b'{"metadata": []}',
        b'{"metadata": {"resourceVersion": ""}}',
        b'{"metadata": {"resourceVersion": 7}}',
        b'{"kind": "Status", "metadata": {"resourceVersion": "7"}}',
        b'{"metadata": {"resourceVersion": "\xff"}}',
        b'{"metadata": ' + b"[" * 100_000,
    ],
)
def test_what_cannot_be_replaced_safely_is_no_lease(body: bytes) -> None:
    with pytest.raises(RecordError, match="not a Lease"):
        read_lease(body)


@pytest.mark.parametrize(
    ("lease_s", "renew_s", "retry_s"), [(0, 1, 0.1), (15, 14, 2), (15, 10, 9), (15, 10, 0)]
)
def test_times_that_would_give_two_leaders_are_refused(
    lease_s: int, renew_s: float, retry_s: float
) -> None:
    with pytest.raises(AssertionError):
        Timing(lease_s, renew_s, retry_s)
