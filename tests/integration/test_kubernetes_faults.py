"""A reflector and an API server that misbehaves: the copy stays, comes right again, and nothing
runs hot. One test for each way in which a list or a watch can end."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import msgspec
import pytest

from epp.edge.kubernetes.objects import INFERENCE_OBJECTIVES, INFERENCE_POOLS
from epp.edge.kubernetes.reflector import Changes, Reflector
from tests.integration.kubernetes_script import (
    QUICK,
    Heard,
    ScriptedApi,
    Step,
    bare_pod,
    event,
    listed,
    mute,
    reflecting,
    reply,
    served,
    status,
    streamed,
    until,
)

A, B, C = bare_pod("a"), bare_pod("b"), bare_pod("c", "9")
BOOKMARK = event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "8"}})


async def story(
    *,
    lists: list[Step],
    watches: list[Step],
    names: str = "c",
    **pace: Any,
) -> tuple[ScriptedApi, Heard, Reflector[Any]]:
    """What is asked and told until exactly the named pods are there."""
    heard = Heard()
    async with served(ScriptedApi(lists=lists, watches=watches)) as api:
        how = msgspec.structs.replace(QUICK, **pace)
        async with reflecting(api.url, on_change=heard, pace=how) as reflector:
            await until(lambda: sorted(heard.names) == sorted(names))
    assert sorted(key.removeprefix("ns/") for key in reflector.store) == sorted(names)
    assert all("None" not in request.query.values() for request in api.seen)
    assert all(request.query["resourceVersion"] for request in api.asked("watch"))
    return api, heard, reflector


def versions(api: ScriptedApi) -> list[str]:
    """That were watched from."""
    return [request.query["resourceVersion"] for request in api.asked("watch")]


# -- the version is too old, in every form -------------------------------------------------

GONE = {
    "as the HTTP status": reply(status(410, "Expired"), 410),
    "as an event": streamed(event("ERROR", status(410, "Expired"))),
    "as an event without a code": streamed(event("ERROR", status(0, "Expired"))),
    "as an event after a bookmark": streamed(BOOKMARK + event("ERROR", status(410, "Gone"))),
    "as a bare status": streamed(msgspec.json.encode(status(410, "Expired")) + b"\n"),
    "as a status of another shape": streamed(event("ERROR", {"kind": "Status"})),
    "as a page of a proxy": reply(b"<html>", 410),
}


@pytest.mark.parametrize("form", GONE)
async def test_a_version_that_is_too_old_leads_to_a_list(form: str) -> None:
    api, heard, _ = await story(
        lists=[listed(A, B, version="5"), listed(B, C, version="9")],
        watches=[GONE[form], streamed()],
        names="bc",
    )
    assert len(api.asked("list")) == 2
    assert versions(api) == ["5", "9"] or versions(api) == ["5"]
    assert heard.story == ["+a", "+b", "-a", "+c"], "never cleared, and b is not told again"


async def test_a_version_that_is_always_too_old_does_not_make_it_run_hot() -> None:
    async with (
        served(ScriptedApi(watches=[GONE["as an event"]])) as api,
        reflecting(api.url, pace=msgspec.structs.replace(QUICK, backoff_s=(0.01, 0.5))),
    ):
        await until(lambda: len(api.asked("watch")) >= 7)
    times_s = [request.at_s for request in api.asked("watch")]
    assert times_s[6] - times_s[0] > 0.6, "each wait is twice the one before"


async def test_a_failure_is_logged_when_it_begins_and_when_its_cause_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    busy, refused = reply(status(503), 503), reply(status(401), 401)
    api = ScriptedApi(lists=[busy, busy, busy, refused, refused, busy, listed(A)])
    heard = Heard()
    with caplog.at_level(logging.INFO):
        async with served(api), reflecting(api.url, on_change=heard):
            await until(lambda: heard.names)
    said = [r.getMessage() for r in caplog.records if " failed, " in r.getMessage()]
    assert [text.split(": ")[2].split(" ")[0] for text in said] == ["503", "401", "503"]


async def test_a_page_that_is_too_old_leads_to_a_list_in_one_page() -> None:
    heard = Heard()
    steps = [listed(A, version="5", more="token"), reply(status(410, "Expired"), 410)]
    api = ScriptedApi(lists=steps, others=[listed(A, B, C, version="6")])
    async with served(api), reflecting(api.url, on_change=heard) as reflector:
        await until(lambda: len(heard.names) == 3)
    assert [request.query.get("continue") for request in api.asked("list")] == [None, "token"]
    assert [request.query for request in api.asked("other")] == [{}], "the one without pages"
    assert len(heard.changes) == 1
    assert reflector.counts.errors == Counter({"410": 1})


# -- what goes on from where it was --------------------------------------------------------

RESUMED = {
    "429 as an event": streamed(BOOKMARK + event("ERROR", status(429, "TooManyRequests"))),
    "500 as an event": streamed(BOOKMARK + event("ERROR", status(500, "InternalError"))),
    "504 as an event": streamed(BOOKMARK + event("ERROR", status(504, "Timeout"))),
    "a clean end": streamed(BOOKMARK, end="close"),
    "a cut off line": streamed(BOOKMARK + b'{"type": "ADD', end="close"),
    "a reset": streamed(BOOKMARK, end="reset"),
    "a reset within a line": streamed(BOOKMARK, b'{"type": "ADD', end="reset"),
    "an unknown type": streamed(BOOKMARK, event("NEWS", {"metadata": {}}), end="close"),
    "an empty line": streamed(BOOKMARK + b"\n \n", end="close"),
}


@pytest.mark.parametrize("how", RESUMED)
async def test_a_watch_goes_on_from_the_last_version(how: str) -> None:
    api, heard, _ = await story(
        lists=[listed(A, version="5")],
        watches=[RESUMED[how], streamed(event("DELETED", A) + event("ADDED", C))],
    )
    assert versions(api) == ["5", "8"]
    assert len(api.asked("list")) == 1
    assert heard.story == ["+a", "-a", "+c"]


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
async def test_a_refused_watch_is_asked_for_again_at_the_same_version(code: int) -> None:
    api, _, reflector = await story(
        lists=[listed(A, version="5")],
        watches=[reply(status(code), code), streamed(event("DELETED", A) + event("ADDED", C))],
    )
    assert versions(api) == ["5", "5"]
    assert reflector.counts.errors == Counter({str(code): 1})


# -- what leads to a new list --------------------------------------------------------------

RELISTED = {
    "an undecodable line": streamed(event("MODIFIED", A) + b'{"type": \n'),
    "a proxy's page": streamed(b"<html>\n"),
    "invalid UTF-8": streamed(b'{"type": "ADDED", "object": {"metadata": {"name": "\xff"}}\n'),
    "a refusal": reply(status(400, "BadRequest"), 400),
    "a version of the future": reply(
        status(504, "Timeout", details={"causes": [{"reason": "ResourceVersionTooLarge"}]}), 504
    ),
}


@pytest.mark.parametrize("how", RELISTED)
async def test_nonsense_leads_to_a_list(how: str) -> None:
    api, heard, _ = await story(
        lists=[listed(A, version="5"), listed(C, version="9")],
        watches=[RELISTED[how], streamed()],
    )
    assert len(api.asked("list")) == 2
    assert heard.story == ["+a", "-a", "+c"]


async def test_silence_is_noticed_and_leads_to_a_list() -> None:
    """Half-open: the server is gone and nobody says so. A silent server that is there may also have
    forgotten everything, its versions too."""
    api, heard, reflector = await story(
        lists=[listed(A, version="5"), listed(C, version="9")],
        watches=[streamed()],
        idle_s=0.1,
    )
    assert reflector.counts.errors["Silent"] >= 1
    assert heard.story == ["+a", "-a", "+c"]
    assert len(api.asked("list")) >= 2


async def test_a_watch_that_is_not_even_answered_is_noticed() -> None:
    _, heard, _ = await story(
        lists=[listed(A, version="5"), listed(C, version="9")],
        watches=[mute, streamed()],
        idle_s=0.1,
    )
    assert heard.story == ["+a", "-a", "+c"]


async def test_objects_are_listed_from_time_to_time_all_the_same() -> None:
    api, heard, _ = await story(
        lists=[listed(A, version="5"), listed(C, version="9")],
        watches=[streamed(end="close")],
        relist_s=(0.05, 0.1),
        backoff_s=(0.01, 0.01),
    )
    assert len(api.asked("list")) >= 2
    assert heard.story == ["+a", "-a", "+c"]


# -- lists that fail -----------------------------------------------------------------------

NO_LIST = {
    "500": reply(status(500), 500),
    "410": reply(status(410), 410),
    "404": reply(status(404), 404),
    "a proxy's page": reply(b"<html>"),
    "nonsense": reply({"metadata": 7, "items": 7}),
    "no version": listed(A, version=""),
    "nothing": reply(b""),
    "half of it": streamed(b'{"metadata": {"resourceVersion": "7"}, "items": [', end="reset"),
}


@pytest.mark.parametrize("how", NO_LIST)
async def test_a_list_that_fails_changes_nothing(how: str) -> None:
    api, heard, _ = await story(
        lists=[NO_LIST[how], listed(A, version="5"), NO_LIST[how], NO_LIST[how], listed(C)],
        watches=[GONE["as an event"], streamed()],
    )
    if how != "410":  # which is followed by an attempt without pages
        assert len(api.asked("list")) == 5
    assert heard.story == ["+a", "-a", "+c"]


async def test_a_second_page_that_fails_changes_nothing() -> None:
    _, heard, _ = await story(
        lists=[
            listed(A, version="5"),
            listed(C, version="6", more="x"),
            reply(status(500), 500),
            listed(C, version="7"),
        ],
        watches=[GONE["as an event"], streamed()],
    )
    assert heard.story == ["+a", "-a", "+c"]


async def test_while_the_api_server_is_away_everything_stays() -> None:
    heard = Heard()
    async with served(ScriptedApi(lists=[listed(A, B)])) as api:
        access = api.url
        running = reflecting(access, on_change=heard)
        reflector = await running.__aenter__()
        await until(lambda: len(api.asked("watch")) == 1)
    await until(lambda: reflector.counts.errors["Connection"] >= 3)
    assert sorted(reflector.store) == ["ns/a", "ns/b"]
    assert heard.story == ["+a", "+b"]
    assert reflector.age_s(now_s=1e12) is not None
    await running.__aexit__(None, None, None)


async def test_the_age_is_unknown_until_the_api_server_has_spoken() -> None:
    async with (
        served(ScriptedApi(lists=[mute])) as api,
        reflecting(api.url) as reflector,
    ):
        await until(lambda: api.asked("list"))
        assert reflector.age_s(now_s=1e12) is None


# -- waits ---------------------------------------------------------------------------------


async def test_the_wait_the_api_server_asks_for_is_kept() -> None:
    api, _, _ = await story(
        lists=[listed(A)],
        watches=[
            reply(status(429), 429, Retry_After="1"),
            streamed(event("DELETED", A) + event("ADDED", C)),
        ],
    )
    first, second = api.asked("watch")
    assert second.at_s - first.at_s > 0.9


async def test_a_watch_that_ends_at_once_is_followed_by_a_wait() -> None:
    _, _, reflector = await story(
        lists=[listed(A)],
        watches=[
            streamed(end="close"),
            streamed(end="close"),
            streamed(event("DELETED", A) + event("ADDED", C)),
        ],
        short_s=60.0,
    )
    assert reflector.counts.errors == Counter({"Closed": 2})


async def test_a_good_event_makes_the_next_wait_short_again() -> None:
    failing, fine = reply(status(500), 500), streamed(BOOKMARK, end="reset")
    async with (
        served(ScriptedApi(lists=[listed(A)], watches=[failing] * 5 + [fine, streamed()])) as api,
        reflecting(api.url, pace=msgspec.structs.replace(QUICK, backoff_s=(0.01, 1.0))) as each,
    ):
        await until(lambda: each.counts.errors["500"] == 5)
        assert each.backoff.step_s > 0.1
        await until(lambda: len(api.asked("watch")) == 7)
        assert each.backoff.step_s < 0.1


# -- objects that cannot be decoded --------------------------------------------------------

BAD = [
    {"metadata": {"name": "bad", "namespace": "ns"}, "status": 7},
    {"metadata": {"namespace": "ns"}},
    {"metadata": {"name": 7}},
    {"metadata": None},
    {},
    [],
    None,
    "pod",
]


@pytest.mark.parametrize("bad", BAD, ids=str)
async def test_an_object_that_cannot_be_decoded_is_skipped_in_a_list(bad: Any) -> None:
    _, heard, reflector = await story(
        lists=[listed(A, bad, B)], watches=[streamed(event("ADDED", C))], names="abc"
    )
    assert heard.story == ["+a", "+b", "+c"]
    assert reflector.malformed == 1


@pytest.mark.parametrize("bad", BAD, ids=str)
async def test_an_object_that_cannot_be_decoded_is_skipped_in_a_watch(bad: Any) -> None:
    events = event("ADDED", bad) + event("MODIFIED", bad) + event("ADDED", C)
    api, heard, reflector = await story(lists=[listed(A)], watches=[streamed(events)], names="ac")
    assert heard.story == ["+a", "+c"]
    assert reflector.malformed == 2
    assert versions(api) == ["1"], "it goes on"


async def test_each_object_that_cannot_be_decoded_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = [{**A, "status": 7}, {**B, "status": 7}]
    events = b"".join(event("MODIFIED", each) for each in bad * 3)
    _, _, reflector = await story(
        lists=[listed(*bad)], watches=[streamed(events + event("ADDED", C))]
    )
    assert reflector.malformed == 8
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(" cannot")[0] for text in said] == ["Pod ns/a", "Pod ns/b"]
    assert "$.status" in said[0]


async def test_what_was_known_of_an_object_outlives_nonsense_about_it() -> None:
    nonsense = {**A, "status": 7}
    _, heard, _ = await story(
        lists=[listed(A), listed(nonsense)],
        watches=[
            streamed(event("MODIFIED", nonsense) + b"nonsense\n"),
            streamed(event("ADDED", C)),
        ],
        names="ac",
    )
    assert heard.story == ["+a", "+c"]


async def test_an_object_that_cannot_be_decoded_can_be_deleted() -> None:
    gone = {**A, "status": 7}
    _, heard, _ = await story(
        lists=[listed(A)], watches=[streamed(event("DELETED", gone) + event("ADDED", C))]
    )
    assert heard.story == ["+a", "-a", "+c"]


# -- a listener that fails -----------------------------------------------------------------


async def test_a_listener_that_fails_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    heard, failures = Heard(), iter([True, False, True, False])

    def fragile(changes: Changes[Any]) -> None:
        if next(failures, False):
            raise RuntimeError("a bug of ours")
        heard(changes)

    api = ScriptedApi(
        lists=[listed(A), listed(A), listed(C)],
        watches=[streamed(event("DELETED", A) + event("ADDED", C)), streamed()],
    )
    async with served(api), reflecting(api.url, on_change=fragile):
        await until(lambda: list(heard.names) == ["c"])
    assert heard.story == ["+a", "-a", "+c"]
    assert [r for r in caplog.records if r.levelno == logging.ERROR and r.exc_info]


# -- rights --------------------------------------------------------------------------------


async def test_what_is_forbidden_is_said_once_with_the_rule_to_add(
    caplog: pytest.LogCaptureFixture,
) -> None:
    forbidden = reply(status(403, "Forbidden"), 403)
    async with (
        served(ScriptedApi(lists=[forbidden])) as api,
        reflecting(api.url) as reflector,
    ):
        await until(lambda: reflector.counts.errors["403"] >= 3)
        assert not reflector.synced
    (said,) = [record.getMessage() for record in caplog.records]
    assert "list pods in namespace ns" in said
    assert '{apiGroups: [""], resources: [pods], verbs: [get, list, watch]}' in said


async def test_the_rule_to_add_names_the_group_that_serves_the_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = ScriptedApi(
        lists=[reply(status(403, "Forbidden"), 403)],
        others=[ABSENT, serving("inferenceobjectives"), ABSENT, serving("inferenceobjectives")],
    )
    async with served(api), reflecting(api.url, INFERENCE_OBJECTIVES) as reflector:
        await until(lambda: reflector.counts.errors["403"] >= 1)
    (said,) = [record.getMessage() for record in caplog.records]
    assert '{apiGroups: ["inference.networking.x-k8s.io"]' in said


async def test_a_right_that_is_given_later_is_used() -> None:
    forbidden = reply(status(403, "Forbidden"), 403)
    await story(
        lists=[forbidden, listed(A)], watches=[forbidden, streamed(event("ADDED", C))], names="ac"
    )


# -- kinds that are not installed ----------------------------------------------------------

ABSENT = reply(b"404 page not found\n", 404)


def serving(*plurals: str) -> Step:
    return reply({"kind": "APIResourceList", "resources": [{"name": each} for each in plurals]})


def objective(name: str) -> dict[str, Any]:
    return {**bare_pod(name), "spec": {"priority": 1, "poolRef": {"name": "p"}}}


async def test_a_kind_that_is_not_installed_is_absent_until_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard = Heard()
    pool = {**bare_pod("c"), "spec": {"selector": {}, "targetPorts": []}}
    api = ScriptedApi(
        lists=[listed(pool)], others=[ABSENT, serving("others"), serving("inferencepools")]
    )
    async with served(api), reflecting(api.url, INFERENCE_POOLS, on_change=heard) as reflector:
        await until(lambda: reflector.absent)
        assert not reflector.synced
        await until(lambda: heard.names)
        assert not reflector.absent
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 1
    assert "InferencePool is not installed" in said[0]


async def test_a_kind_that_is_removed_takes_its_objects_along() -> None:
    heard = Heard()
    api = ScriptedApi(
        lists=[listed(objective("a"))],
        watches=[reply(status(404), 404)],
        others=[serving("inferenceobjectives"), ABSENT],
    )
    async with served(api), reflecting(api.url, INFERENCE_OBJECTIVES, on_change=heard) as each:
        await until(lambda: each.absent)
        assert heard.story == ["+a", "-a"]


async def test_a_kind_that_nobody_serves_for_a_moment_keeps_its_objects() -> None:
    """As of an API server that starts: it does not know everything at once."""
    heard = Heard()
    api = ScriptedApi(
        lists=[listed(objective("a"))],
        watches=[reply(status(404), 404)],
        others=[serving("inferenceobjectives"), *[ABSENT] * 6, serving("inferenceobjectives")],
    )
    patient = msgspec.structs.replace(QUICK, gone_s=60.0)
    async with (
        served(api),
        reflecting(api.url, INFERENCE_OBJECTIVES, on_change=heard, pace=patient) as each,
    ):
        await until(lambda: each.counts.relists >= 1)
        assert not each.absent
        assert heard.story == ["+a"]


async def test_that_a_kind_is_gone_is_believed_only_when_its_objects_are_gone_too() -> None:
    heard = Heard()
    api = ScriptedApi(
        lists=[listed(objective("a"))],
        watches=[streamed(end="close")],
        others=[serving("inferenceobjectives"), ABSENT],
    )
    pace = msgspec.structs.replace(QUICK, relist_s=(0.01, 0.01))
    async with (
        served(api),
        reflecting(api.url, INFERENCE_OBJECTIVES, on_change=heard, pace=pace) as reflector,
    ):
        await until(lambda: reflector.counts.relists >= 3)
        assert not reflector.absent
    assert heard.story == ["+a"]


@pytest.mark.parametrize(
    ("others", "group"),
    [
        ([serving("inferenceobjectives")], "llm-d.ai"),
        ([ABSENT, serving("inferenceobjectives")], "inference.networking.x-k8s.io"),
        (
            [serving("inferencemodelrewrites"), serving("inferenceobjectives")],
            "inference.networking.x-k8s.io",
        ),
        ([reply(status(403), 403)], "llm-d.ai"),
    ],
    ids=["both", "the old one", "the new one without the kind", "discovery is forbidden"],
)
async def test_the_first_group_that_serves_a_kind_is_followed(
    others: list[Step], group: str
) -> None:
    api = ScriptedApi(lists=[listed(objective("a"))], others=others)
    async with served(api), reflecting(api.url, INFERENCE_OBJECTIVES) as reflector:
        await until(lambda: reflector.synced and api.asked("watch"))
        paths = {request.path for request in (*api.asked("list"), *api.asked("watch"))}
        assert paths == {f"/apis/{group}/v1alpha2/namespaces/ns/inferenceobjectives"}


async def test_discovery_that_fails_is_not_absence() -> None:
    api = ScriptedApi(
        lists=[listed(objective("a"))],
        others=[reply(status(503), 503), reply(b"<html>"), serving("inferenceobjectives")],
    )
    async with served(api), reflecting(api.url, INFERENCE_OBJECTIVES) as reflector:
        await until(lambda: reflector.synced)
        assert reflector.counts.errors == Counter({"503": 1, "Undecodable": 1})
        assert not reflector.absent


# -- one call per batch --------------------------------------------------------------------


async def test_events_that_come_together_are_told_together() -> None:
    events = [
        *(event("MODIFIED", bare_pod("a", str(n), ip=f"10.0.0.{n}")) for n in range(2, 20)),
        event("ADDED", bare_pod("b", "20")),
        event("DELETED", bare_pod("b", "21")),
        event("ADDED", bare_pod("c", "22")),
    ]
    _, heard, reflector = await story(
        lists=[listed(A)], watches=[streamed(b"".join(events))], names="ac"
    )
    assert heard.story == ["+a", "+a", "+c"]
    assert len(heard.changes) == 2
    assert heard.changes[1].upserted[0].status.pod_ip == "10.0.0.19"
    assert reflector.counts.events == Counter({"MODIFIED": 18, "ADDED": 2, "DELETED": 1})


async def test_a_pod_replaced_under_its_name_is_deleted_and_upserted() -> None:
    again = bare_pod("a", "7", uid="another")
    _, heard, _ = await story(
        lists=[listed(A, B), listed(A, bare_pod("b", "8", uid="another"))],
        watches=[
            streamed(event("DELETED", A) + event("ADDED", again) + b"nonsense\n"),
            streamed(event("ADDED", C)),
        ],
        names="abc",
    )
    assert heard.story == ["+a", "+b", "-a", "+a", "-a", "-b", "+a", "+b", "+c"]
    assert heard.names == {"a": "uid-a", "b": "another", "c": "uid-c"}
