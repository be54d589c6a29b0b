"""Options and refusals of `epp envoy-config`; what Envoy makes of its output is tested in e2e."""

from __future__ import annotations

import argparse

import msgspec
import pytest

from epp.cli import main
from epp.core.errors import ConfigError
from epp.envoy import command
from epp.envoy.options import BodyProcessing, EnvoyOptions, Routing, check, split_address

GOOD = EnvoyOptions(endpoints=("10.0.0.1:8000",))


def printed_for(monkeypatch: pytest.MonkeyPatch, *flags: str) -> EnvoyOptions:
    """The options that the command line asks the bootstrap for."""
    asked: list[EnvoyOptions] = []
    forms: list[str] = []

    def render(options: EnvoyOptions, *, form: str) -> str:
        check(options)
        asked.append(options)
        forms.append(form)
        return ""

    monkeypatch.setattr(command, "render", render)
    assert main(["envoy-config", *flags]) == 0
    return asked[0]


def test_flags_left_out_mean_the_defaults_of_the_options(monkeypatch) -> None:
    asked = printed_for(monkeypatch, "--endpoints", "10.0.0.1:8000")
    assert asked == GOOD


@pytest.mark.parametrize(
    ("flag", "text", "field", "value"),
    [
        ("listen", "127.0.0.1:1", "listen", "127.0.0.1:1"),
        ("epp", "epp:9002", "epp", "epp:9002"),
        ("epp", "a:9002,b:9002", "epp", "a:9002,b:9002"),
        ("pool", "models/llama", "pool", "models/llama"),
        ("epp-tls", "false", "epp_tls", False),
        ("admin", "none", "admin", None),
        ("admin", "127.0.0.1:0", "admin", "127.0.0.1:0"),
        ("endpoints", "a:1, b:2 ,,[::1]:3,", "endpoints", ("a:1", "b:2", "[::1]:3")),
        ("routing", "original-dst", "routing", Routing.ORIGINAL_DST),
        ("request-body", "buffered", "request_body", BodyProcessing.BUFFERED),
        ("response-body", "none", "response_body", BodyProcessing.NONE),
        ("response-body", "streamed", "response_body", BodyProcessing.STREAMED),
        ("fail-open", "false", "fail_open", False),
        ("retries", "0", "retries", 0),
        ("buffer-bytes", "1000", "buffer_bytes", 1000),
        ("message-timeout", "0.5", "message_timeout_s", 0.5),
    ],
)
def test_each_flag_sets_its_option(monkeypatch, flag, text, field, value) -> None:
    asked = printed_for(monkeypatch, "--endpoints=10.0.0.1:8000", f"--{flag}={text}")
    assert asked == msgspec.structs.replace(GOOD, **{field: value})


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"listen": "8080"}, "--listen"),
        ({"listen": "0.0.0.0:70000"}, "--listen"),
        ({"epp": "127.0.0.1"}, "--epp"),
        ({"epp": "127.0.0.1:1,"}, "--epp"),
        ({"pool": "no name"}, "--pool"),
        ({"pool": "a/b/c"}, "--pool"),
        ({"epp": "127.0.0.1:0"}, "--epp"),
        ({"admin": "nowhere"}, "--admin"),
        ({"endpoints": ()}, "--endpoints"),
        ({"endpoints": ("10.0.0.1:8000", "10.0.0.2")}, "--endpoints"),
        ({"endpoints": ("10.0.0.1:0",)}, "--endpoints"),
        ({"endpoints": ("http://10.0.0.1:8000",)}, "--endpoints"),
        ({"endpoints": ("fd00::1:8000",)}, "--endpoints"),
        ({"request_body": BodyProcessing.NONE}, "--request-body"),
        ({"request_body": BodyProcessing.STREAMED}, "--request-body"),
        ({"retries": -1}, "--retries"),
        ({"retries": 1 << 31}, "--retries"),
        ({"buffer_bytes": -1}, "--buffer-bytes"),
        ({"message_timeout_s": 0.0}, "--message-timeout"),
        ({"message_timeout_s": float("nan")}, "--message-timeout"),
        ({"message_timeout_s": float("inf")}, "--message-timeout"),
    ],
)
def test_what_cannot_work_is_refused_by_its_flag(change, flag) -> None:
    with pytest.raises(ConfigError) as caught:
        check(msgspec.structs.replace(GOOD, **change))
    assert str(caught.value).startswith(flag)
    assert caught.value.path == flag


def test_original_dst_needs_no_endpoints() -> None:
    check(EnvoyOptions(routing=Routing.ORIGINAL_DST))


def test_the_missing_endpoints_error_names_both_remedies() -> None:
    with pytest.raises(ConfigError, match=r"epp serve.*--routing original-dst"):
        check(EnvoyOptions())


def test_a_refusal_is_one_line_and_status_2(capsys) -> None:
    assert main(["envoy-config"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("epp: --endpoints is needed")
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("flags", [["--routing=elsewhere"], ["--retries=many"], ["--nonsense"]])
def test_a_wrong_flag_is_one_line_and_status_2(capsys, flags) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["envoy-config", "--endpoints=a:1", *flags])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--help" in error


def test_every_option_but_the_tests_own_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    command.add_command(parser.add_subparsers())
    args = parser.parse_args(["envoy-config"])
    names = {"message_timeout_s": "message_timeout", "subset_header": None}
    for field in EnvoyOptions.__struct_fields__:
        name = names.get(field, field)
        assert name is None or hasattr(args, name)


@pytest.mark.parametrize(
    ("address", "flag", "expected"),
    [
        ("10.0.0.1:8000", "--endpoints", ("10.0.0.1", 8000)),
        ("[fd00::1]:8000", "--endpoints", ("fd00::1", 8000)),
        ("127.0.0.1:0", "--listen", ("127.0.0.1", 0)),
        ("[::1]:0", "--admin", ("::1", 0)),
        ("127.0.0.1:8080", "--listen", ("127.0.0.1", 8080)),
        ("vllm.example.com:80", "--epp", ("vllm.example.com", 80)),
    ],
)
def test_addresses_are_split_for_envoy(address, flag, expected) -> None:
    assert split_address(address, flag) == expected
