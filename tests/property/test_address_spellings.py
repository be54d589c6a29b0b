"""Addresses in any spelling: the same host is the same, and no text is worse than refused."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

from hypothesis import given, settings, strategies as st

from epp.core.addresses import AddressError, endpoint_spec, keep_subset, parse_address
from epp.core.model import Endpoint, EndpointSpec

V4 = st.ip_addresses(v=4)
V6 = st.ip_addresses(v=6).filter(lambda ip: ip.ipv4_mapped is None)
SMALL = st.integers(0, 3).map(lambda i: ip_address(f"10.0.0.{i}")) | st.integers(0, 3).map(
    lambda i: ip_address(f"fd00::{i}")
)
PORTS = st.integers(1, 65535)


@st.composite
def spelled(draw: st.DrawFn, ip: IPv4Address | IPv6Address, port: int | None) -> str:
    """One of the ways to write the address."""
    if isinstance(ip, IPv4Address):
        text = str(ip) if port is None else f"{ip}:{port}"
    else:
        host = draw(st.sampled_from([ip.compressed, ip.exploded, ip.compressed.upper()]))
        bracketed = port is not None or draw(st.booleans())
        text = f"[{host}]" if bracketed else host
        text += "" if port is None else f":{port}"
    return draw(st.sampled_from(["", " "])) + text + draw(st.sampled_from(["", "\t"]))


@given(data=st.data(), ip=V4 | V6, port=PORTS | st.none())
def test_E19_every_spelling_reads_to_one_normal_form(
    data: st.DataObject, ip: IPv4Address | IPv6Address, port: int | None
) -> None:
    address = parse_address(data.draw(spelled(ip, port)))
    assert (address.host, address.port) == (ip.compressed, port)


@given(ip=V4 | V6, port=PORTS)
def test_E19_the_address_of_a_spec_reads_back_to_the_same_spec(
    ip: IPv4Address | IPv6Address, port: int
) -> None:
    spec = EndpointSpec(ip.compressed, port)
    assert endpoint_spec(spec.address) == spec


@given(text=st.text(max_size=40) | st.text("[]:.%0aF ", max_size=20))
def test_any_text_is_an_address_that_reads_back_or_is_refused(text: str) -> None:
    try:
        address = parse_address(text)
    except AddressError:
        return
    assert address.host
    if address.port is not None:
        spec = endpoint_spec(text)
        assert endpoint_spec(spec.address) == spec


@settings(max_examples=100)
@given(
    data=st.data(),
    pool=st.lists(st.tuples(SMALL, st.integers(1, 3)), max_size=8),
    wanted=st.lists(st.tuples(SMALL, st.none() | st.integers(1, 3)), max_size=6),
)
def test_E19_a_subset_keeps_what_a_slow_comparison_keeps(
    data: st.DataObject,
    pool: list[tuple[IPv4Address | IPv6Address, int]],
    wanted: list[tuple[IPv4Address | IPv6Address, int | None]],
) -> None:
    endpoints = [Endpoint(EndpointSpec(ip.compressed, port)) for ip, port in pool]
    entries = tuple(data.draw(spelled(ip, port)) for ip, port in wanted)
    kept = keep_subset(entries, endpoints)
    assert kept == [
        endpoint
        for endpoint, (ip, port) in zip(endpoints, pool, strict=True)
        if any(ip == other and at in (None, port) for other, at in wanted)
    ]
