"""The decision bench, run small."""

from bench.pick import Cell, Report, report_text
from bench.pick_paths import MESSAGES, Exchanges, Stages, World
from bench.traffic.gateway import REQUEST_HEADERS
from epp.core.parse import parse_request


def test_every_stage_and_path_is_measured() -> None:
    cell = Cell(64, 1, 0.0)
    cell.warm_up(8)
    cell.measure(8)
    row = cell.row()
    assert row.figures.keys() == {
        *("parse", "match", "schedule", "rescore", "learn", "chunk"),
        *("events_request", "events_response", "bytes_request", "bytes_response"),
        *("counted_request", "counted_response"),
        *MESSAGES,
    }
    assert all(spread.min > 0 for spread in row.figures.values())
    assert 0 < row.decision_p50_us <= row.decision_p99_us
    assert (row.core_budget_us, row.total_budget_us) == (40, 110)
    text = report_text(Report({}, {}, [row]))
    assert "64" in text
    assert "Response chunk" in text


def test_budgets_are_for_64_endpoints_only() -> None:
    cell = Cell(8, 1, 0.0)
    cell.measure(8)
    assert (cell.row().core_budget_us, cell.row().total_budget_us) == (None, None)


def test_requests_in_flight_stay_few() -> None:
    world = World(8, 1)
    Stages(world, 0.0).run(100, {})
    assert world.inflight.requests == 32
    Exchanges(world, 0.0).run(20, {})
    assert world.inflight.requests == 64


def test_most_requests_find_their_prefix() -> None:
    world = World(8, 16)
    Stages(world, 0.0).run(300, {})
    requests = [parse_request(REQUEST_HEADERS, world.prompts.next()) for _ in range(200)]
    found = sum(bool(world.keeper.match(request).by_slot) for request in requests)
    assert 0.6 < found / 200 < 0.9
