"""The generated page and the sample files."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.config import load_config, resolve
from epp.config.document import configuration_page
from epp.config.parameters import BUILT
from epp.config.plugins import PARAMETERS
from epp.config.schema import Limits

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "deploy" / "config"


def test_the_configuration_page_is_current() -> None:
    current = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert current == configuration_page(), "run `make docs`"


def test_the_page_names_every_type_and_key() -> None:
    page = configuration_page()
    for type_, cls in PARAMETERS.items():
        assert f"`{type_}`" in page
        for key in cls.__struct_encode_fields__:
            assert f"| `{key}` |" in page
    for key in Limits.__struct_encode_fields__:
        assert f"| `{key}` |" in page


def test_every_key_has_a_description() -> None:
    rows = [
        line
        for line in configuration_page().splitlines()
        if line.startswith("| `") and line.count("|") == 5
    ]
    assert len(rows) > 80
    assert [row for row in rows if row.endswith("|  |")] == []


@pytest.mark.parametrize("name", ["default", "prefix-heavy", "load-only", "file-discovery"])
def test_samples_resolve_without_notices(name: str) -> None:
    assert resolve(load_config((SAMPLES / f"{name}.yaml").read_text())).notices == ()


def test_the_default_sample_is_the_default() -> None:
    plan = resolve(load_config((SAMPLES / "default.yaml").read_text()))
    assert plan.profiles == resolve(None).profiles
    assert plan.config.limits == resolve(None).config.limits


def test_the_load_only_sample_hashes_nothing() -> None:
    assert resolve(load_config((SAMPLES / "load-only.yaml").read_text())).prefix is None


def test_other_plugins_have_kinds_of_their_own() -> None:
    assert not set(BUILT) & {t for t in PARAMETERS if t not in BUILT}
