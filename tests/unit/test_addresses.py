"""Addresses: every spelling people and gateways use, compared in one normal form."""

from __future__ import annotations

import pytest

from epp.core.addresses import (
    ADDRESS_CHARS_MAX,
    Address,
    AddressError,
    endpoint_spec,
    keep_subset,
    matches,
    normal_host,
    parse_address,
)
from epp.core.model import Endpoint, EndpointSpec


def endpoint(host: str, port: int = 8000) -> Endpoint:
    return Endpoint(EndpointSpec(host, port))


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:8000", "10.0.0.1", 8000),
        ("10.0.0.1", "10.0.0.1", None),
        ("[fd00::10]:8000", "fd00::10", 8000),
        ("[fd00::10]", "fd00::10", None),
        ("fd00::10", "fd00::10", None),
        ("[FD00:0:0:0::0010]:1", "fd00::10", 1),
        ("::ffff:10.0.0.1", "10.0.0.1", None),
        ("fe80::1%eth0", "fe80::1%eth0", None),
        ("localhost:65535", "localhost", 65535),
        ("VLLM-0.vLLM.default.svc.:80", "vllm-0.vllm.default.svc", 80),
        ("pod_1:80", "pod_1", 80),
        ("10.0.0.1.nip.io:80", "10.0.0.1.nip.io", 80),
        (" 10.0.0.1:8000\t", "10.0.0.1", 8000),
    ],
)
def test_E19_every_spelling_of_an_address_is_read(text: str, host: str, port: int | None) -> None:
    assert parse_address(text) == Address(host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":8000",
        "a:",
        "a:b",
        "a:0",
        "a:65536",
        "a:+80",
        "a:8_0",
        "a:\u0663",
        "a:000080",
        "10.0.0.256:8000",
        "10.0.1:8000",
        "010.0.0.1",
        "[::1",
        "[::1]8000",
        "[::1]18000",
        "[::1]:",
        "[]:8000",
        "[10.0.0.1]:8000",
        "::1:zz",
        "a b:1",
        "-a:1",
        "a..b:1",
        "http://a:1",
        "a:1,b:2",
        "\u00e4:1",
    ],
)
def test_a_text_that_is_no_address_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(AddressError) as refusal:
        parse_address(text)
    assert f"'{text}'" in str(refusal.value)


def test_a_text_too_long_for_an_address_is_refused_without_being_quoted_whole() -> None:
    with pytest.raises(AddressError) as refusal:
        parse_address("a" * (ADDRESS_CHARS_MAX + 1))
    assert len(str(refusal.value)) < 120


def test_a_host_name_may_have_253_characters_and_not_one_more() -> None:
    longest = ".".join(["a" * 49] * 5 + ["a" * 3])
    assert len(longest) == 253
    assert parse_address(f"{longest}:1").host == longest
    with pytest.raises(AddressError):
        parse_address(f"{longest}a:1")


def test_E19_an_endpoint_given_as_host_and_port_gets_the_address_gateways_want() -> None:
    assert endpoint_spec("[FD00::0:10]:8000").address == "[fd00::10]:8000"
    assert endpoint_spec("10.0.0.1:8000").address == "10.0.0.1:8000"
    assert endpoint_spec("Vllm-0.vllm.:80").address == "vllm-0.vllm:80"


def test_an_endpoint_keeps_the_name_and_labels_it_was_given() -> None:
    spec = endpoint_spec("a:1", name="n", namespace="ns", labels={"k": "v"})
    assert spec == EndpointSpec("a", 1, name="n", namespace="ns", labels={"k": "v"})


@pytest.mark.parametrize("entry", ["10.0.0.1", "fd00::10", "[fd00::10]", "vllm"])
def test_an_endpoint_without_a_port_is_refused_by_its_name(entry: str) -> None:
    with pytest.raises(AddressError, match="no port") as refusal:
        endpoint_spec(entry)
    assert f"'{entry}'" in str(refusal.value)


@pytest.mark.parametrize(
    ("entry", "host", "port", "is_meant"),
    [
        ("10.0.0.1:8000", "10.0.0.1", 8000, True),
        ("10.0.0.1:8000", "10.0.0.1", 8001, False),
        ("10.0.0.1", "10.0.0.1", 8001, True),
        ("10.0.0.1", "10.0.0.11", 8000, False),
        ("[fd00::10]:8000", "fd00::10", 8000, True),
        ("[FD00:0::10]:8000", "fd00::10", 8000, True),
        ("[fd00::10]:8000", "FD00:0::10", 8000, True),
        ("[fd00::10]:8000", "fd00::10", 8001, False),
        ("[fd00::10]", "fd00::10", 1, True),
        ("fd00::10", "fd00::10", 1, True),
        ("fd00::1", "fd00::10", 1, False),
        ("::ffff:10.0.0.1", "10.0.0.1", 1, True),
        ("VLLM-0.", "vllm-0", 1, True),
        ("vllm-0:2", "vllm-0", 1, False),
        ("", "10.0.0.1", 1, False),
        ("nonsense:", "nonsense", 1, False),
    ],
)
def test_E19_a_subset_entry_means_its_host_and_its_port_if_it_has_one(
    entry: str, host: str, port: int, is_meant: bool
) -> None:
    assert matches(entry, endpoint(host, port)) is is_meant


def test_K05_a_subset_keeps_the_order_of_the_pool_and_skips_what_it_does_not_know() -> None:
    a, b, c = endpoint("10.0.0.1"), endpoint("10.0.0.2"), endpoint("fd00::3")
    assert keep_subset(("[fd00::3]:8000", "10.0.0.9:8000", "?", "10.0.0.1"), (a, b, c)) == [a, c]
    assert keep_subset((), (a, b, c)) == []
    assert keep_subset(("10.0.0.9",), (a, b, c)) == []


@pytest.mark.parametrize("entries", [("h", "h:1"), ("h:1", "h")])
def test_an_entry_without_a_port_wins_over_one_with_a_port(entries: tuple[str, ...]) -> None:
    ranks = [endpoint("h", 1), endpoint("h", 2)]
    assert keep_subset(entries, ranks) == ranks


def test_several_ports_of_one_host_can_be_meant() -> None:
    ranks = [endpoint("h", port) for port in (1, 2, 3)]
    assert keep_subset(("h:3", "h:1"), ranks) == [ranks[0], ranks[2]]


def test_a_host_that_is_none_equals_only_itself() -> None:
    assert normal_host("not a host") == "not a host"
    assert not matches("10.0.0.1", endpoint("not a host"))
