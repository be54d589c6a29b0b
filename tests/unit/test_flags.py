import pytest

from epp.core.errors import ConfigError
from epp.flags import FLAGS, Effect, parse_flags

SOME_VALUE = {"true|false": "true", "N": "3", "DURATION": "5s", "SIZE": "1MB", "A,B,…": "a,b"}


def test_defaults_are_the_reference_s() -> None:
    options = parse_flags({})
    assert (options.grpc_port, options.grpc_health_port, options.metrics_port) == (9002, 9003, 9090)
    assert options.secure_serving
    assert options.transport == "fast"
    assert options.drain_timeout == 30.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("50ms", 0.05), ("1m30s", 90.0), ("0.5s", 0.5), (".5s", 0.5), ("2h", 7200.0), ("3us", 3e-6)],
)
def test_durations_are_read_as_go_writes_them(text, seconds) -> None:
    assert parse_flags({"drain-timeout": text}).drain_timeout == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5", "", "s", "-1s", "1 s", "1d", "1s2", "1e3s", "nan"])
def test_what_is_no_duration_is_refused(text) -> None:
    with pytest.raises(ConfigError, match="--drain-timeout"):
        parse_flags({"drain-timeout": text})


@pytest.mark.parametrize(
    ("text", "size"), [("25MB", 25_000_000), ("10MiB", 10 << 20), ("4096", 4096), ("1Gi", 1 << 30)]
)
def test_sizes_are_read_as_the_reference_reads_them(text, size) -> None:
    assert parse_flags({"grpc-max-recv-msg-size": text}).grpc_max_recv_msg_size == size


@pytest.mark.parametrize("text", ["25XB", "-1", "0", "1.5MB", "MB"])
def test_what_is_no_size_is_refused(text) -> None:
    with pytest.raises(ConfigError, match="--grpc-max-recv-msg-size"):
        parse_flags({"grpc-max-recv-msg-size": text})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"config-file": "a", "config-text": "b"}, "not both"),
        ({"transport": "slow"}, "none of"),
        ({"cert-path": "c", "secure-serving": "false"}, "needs --secure-serving"),
        ({"enable-cert-reload": True}, "needs --cert-path"),
        ({"tls-min-version": "VersionTLS13", "transport": "grpcio"}, "needs --transport fast"),
        ({"tls-min-version": "1.3"}, "none of"),
        ({"grpc-port": "70000"}, "not a port"),
        ({"grpc-port": "9003"}, "already taken by --grpc-port"),
        ({"refresh-metrics-interval": "0s"}, "longer than 0s"),
        ({"metrics-staleness-threshold": "1s"}, "stale at once"),
        ({"secure-serving": "maybe"}, "neither true nor false"),
        ({"tls-cipher-suites": "p"}, "not built here yet"),
        ({"endpoints": "h:1", "pool-name": "p"}, "give one"),
        ({"pool-name": "p", "endpoint-selector": "a=b"}, "give one"),
        ({"endpoint-selector": "a=b"}, "give both"),
        ({"endpoints": "h:1", "ha-enable-leader-election": True}, "needs a cluster"),
        ({"metrics-client-ca-file": "f"}, "needs --metrics-cert-dir"),
        ({"v": "x"}, "not a whole number"),
    ],
)
def test_N02_what_cannot_work_is_refused_with_the_flag_s_name(values, says) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        parse_flags(values)
    assert "--" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda f: f.name)
def test_N03_every_flag_is_honoured_refused_or_said_to_have_no_effect(flag) -> None:
    value = flag.choices[0] if flag.choices else SOME_VALUE.get(flag.kind.value, "some")
    if flag.effect is Effect.NOT_BUILT:
        with pytest.raises(ConfigError, match="not built here yet"):
            parse_flags({flag.name: value})
    elif flag.effect is Effect.NONE:
        assert any(flag.name in notice for notice in parse_flags({flag.name: value}).notices)
    else:
        assert hasattr(parse_flags({}), flag.attribute)


def test_a_flag_not_built_may_be_given_its_own_default() -> None:
    parse_flags({"ha-enable-leader-election": "false"})


def test_N02_a_size_that_grpc_would_take_for_a_negative_one_is_refused() -> None:
    assert parse_flags({"grpc-max-recv-msg-size": "2047MiB"}).grpc_max_recv_msg_size == 2047 << 20
    for text in ("3G", "2GiB", "999999999999G"):
        with pytest.raises(ConfigError, match="at most 2047MiB"):
            parse_flags({"grpc-max-recv-msg-size": text})
