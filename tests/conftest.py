"""Options of the test run."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--transport",
        default="fast",
        choices=("fast", "grpcio"),
        help="ext_proc transport of the EPPs that end-to-end tests start",
    )
