"""The flags of `epp serve`: one table, from which parsing, help text and documentation are made.

Names, defaults and meanings are those of the reference EPP where it has the flag. A flag it has and
we do not build yet stops start-up when it is set; a flag that can mean nothing here is accepted and
said to have no effect, so that a rendered deployment need not be edited.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from epp.core.errors import ConfigError

POOL_GROUP = "inference.networking.k8s.io"


class Effect(Enum):
    """What setting a flag does here."""

    HONOURED = "honoured"
    NONE = "accepted, no effect"
    NOT_BUILT = "not built yet"


class Kind(Enum):
    """How a flag's text is read."""

    BOOL = "true|false"
    INT = "N"
    TEXT = "TEXT"
    LIST = "A,B,…"
    DURATION = "DURATION"
    BYTES = "SIZE"


class Flag(msgspec.Struct, frozen=True):
    """One flag of `epp serve`."""

    name: str
    kind: Kind
    default: bool | int | float | str | tuple[str, ...] | None
    help: str
    effect: Effect = Effect.HONOURED
    ours: bool = False
    """The reference EPP does not have it."""
    choices: tuple[str, ...] = ()

    @property
    def attribute(self) -> str:
        return self.name.replace("-", "_")


_HONOURED, _NONE, _NOT_BUILT = Effect.HONOURED, Effect.NONE, Effect.NOT_BUILT

FLAGS: Sequence[Flag] = (
    # Where the endpoints are.
    Flag(
        "endpoints",
        Kind.LIST,
        (),
        "static pool: HOST:PORT,… (IPv4, [IPv6] or host name)",
        ours=True,
    ),
    Flag("config-file", Kind.TEXT, None, "EndpointPickerConfig file (YAML or JSON)"),
    Flag("config-text", Kind.TEXT, None, "EndpointPickerConfig as text"),
    # Servers.
    Flag("host", Kind.TEXT, "0.0.0.0", "address all servers bind to", ours=True),
    Flag("grpc-port", Kind.INT, 9002, "ext_proc port; 0 takes a free one"),
    Flag("grpc-health-port", Kind.INT, 9003, "gRPC health port, plaintext"),
    Flag("metrics-port", Kind.INT, 9090, "HTTP port of /metrics and /debug/state"),
    Flag(
        "transport",
        Kind.TEXT,
        "fast",
        "ext_proc server: fast (our own HTTP/2) or grpcio (grpc.aio, for comparison)",
        ours=True,
        choices=("fast", "grpcio"),
    ),
    Flag("grpc-max-recv-msg-size", Kind.BYTES, None, "largest message received (25MB, 10MiB)"),
    Flag(
        "grpc-max-send-msg-size",
        Kind.BYTES,
        None,
        "answers are sent in pieces of at most 62 000 bytes",
        _NONE,
    ),
    Flag("health-checking", Kind.BOOL, False, "health is always served on both ports", _NONE),
    # TLS.
    Flag("secure-serving", Kind.BOOL, True, "serve ext_proc over TLS; self-signed by default"),
    Flag("cert-path", Kind.TEXT, None, "folder with tls.crt and tls.key"),
    Flag("enable-cert-reload", Kind.BOOL, False, "reload the certificate when its files change"),
    Flag(
        "tls-min-version",
        Kind.TEXT,
        "VersionTLS12",
        "lowest TLS version: VersionTLS12 or VersionTLS13; --transport fast only",
        choices=("VersionTLS12", "VersionTLS13"),
    ),
    Flag("tls-cipher-suites", Kind.LIST, (), "TLS cipher suites", _NOT_BUILT),
    # Picking.
    Flag("disable-endpoint-subset-filter", Kind.BOOL, False, "ignore the gateway's subset"),
    Flag("emit-endpoint-scores", Kind.BOOL, False, "send every candidate's score as metadata"),
    Flag("allow-experimental-plugins", Kind.BOOL, False, "no plugin here needs it", _NONE),
    # Scraping.
    Flag("refresh-metrics-interval", Kind.DURATION, 1.0, "period of each endpoint's scrape"),
    Flag(
        "metrics-staleness-threshold",
        Kind.DURATION,
        None,
        "age at which a scrape counts as unknown (default: 5 periods, 2s at least)",
    ),
    Flag("refresh-prometheus-metrics-interval", Kind.DURATION, None, "gauges are live", _NONE),
    # Life.
    Flag("drain-timeout", Kind.DURATION, 30.0, "how long to serve on after SIGTERM"),
    # What is seen from outside.
    Flag("v", Kind.INT, 2, "log verbosity: 0 errors … 2 default, 4 every decision, 5 trace"),
    Flag("log-format", Kind.TEXT, "json", "json or text", ours=True, choices=("json", "text")),
    Flag("enable-grpc-stream-metrics", Kind.BOOL, False, "export extproc_streams_* metrics"),
    Flag(
        "metrics-endpoint-auth",
        Kind.BOOL,
        True,
        "ask the cluster who may read /metrics and /debug (with Kubernetes discovery only)",
    ),
    Flag(
        "metrics-cert-dir", Kind.TEXT, None, "TLS on the metrics port: folder of tls.crt, tls.key"
    ),
    Flag(
        "metrics-client-ca-file", Kind.TEXT, None, "CA that clients of the metrics port must have"
    ),
    Flag("enable-pprof", Kind.BOOL, True, "Go profiles do not exist here", _NONE),
    Flag("tracing", Kind.BOOL, True, "spans are not exported yet", _NONE),
    # Kubernetes.
    Flag("pool-name", Kind.TEXT, None, "InferencePool to serve; several: A,B; all of them: *"),
    Flag(
        "pool-namespace",
        Kind.TEXT,
        None,
        "namespace of the pools or pods (default: environment NAMESPACE, then that of the "
        "credentials, then default)",
    ),
    Flag("pool-group", Kind.TEXT, POOL_GROUP, "API group of the pool"),
    Flag(
        "endpoint-selector",
        Kind.TEXT,
        None,
        "serve the pods with these labels, without an InferencePool: app=vllm,tier in (a, b)",
    ),
    Flag("endpoint-target-ports", Kind.TEXT, None, "1 to 8 ports of the selected pods: 8000,8001"),
    Flag(
        "kubeconfig",
        Kind.TEXT,
        None,
        "how to reach the API server (default: as a pod; outside of one environment KUBECONFIG)",
        ours=True,
    ),
    Flag(
        "ha-enable-leader-election",
        Kind.BOOL,
        False,
        "of several replicas one serves, the others stand by",
    ),
    # zap's own.
    Flag("zap-encoder", Kind.TEXT, None, "use --log-format", _NONE),
    Flag("zap-log-level", Kind.TEXT, None, "use --v", _NONE),
    Flag("zap-devel", Kind.BOOL, None, "use --v and --log-format", _NONE),
    Flag("zap-stacktrace-level", Kind.TEXT, None, "tracebacks are always logged", _NONE),
    Flag("zap-time-encoding", Kind.TEXT, None, "times are RFC 3339", _NONE),
)
BY_NAME: Mapping[str, Flag] = {flag.name: flag for flag in FLAGS}


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The flags that have an effect, read and checked."""

    endpoints: tuple[str, ...]
    config_file: str | None
    config_text: str | None
    host: str
    grpc_port: int
    grpc_health_port: int
    metrics_port: int
    transport: str
    grpc_max_recv_msg_size: int | None
    secure_serving: bool
    cert_path: str | None
    enable_cert_reload: bool
    tls_min_version: str
    disable_endpoint_subset_filter: bool
    emit_endpoint_scores: bool
    refresh_metrics_interval: float
    metrics_staleness_threshold: float | None
    drain_timeout: float
    v: int
    log_format: str
    enable_grpc_stream_metrics: bool
    metrics_endpoint_auth: bool
    metrics_cert_dir: str | None
    metrics_client_ca_file: str | None
    pool_name: str | None
    pool_namespace: str | None
    pool_group: str
    endpoint_selector: str | None
    endpoint_target_ports: str | None
    kubeconfig: str | None
    ha_enable_leader_election: bool
    notices: tuple[str, ...] = ()
    """What was accepted without effect, one sentence each."""


def parse_flags(values: Mapping[str, str | bool]) -> ServeOptions:
    """Read the flags that were set.

    Args:
        values: flag name -> its text (`True` for a bare boolean flag).
    Raises: ConfigError naming the flag and the remedy.
    """
    read: dict[str, Any] = {flag.attribute: flag.default for flag in FLAGS}
    notices = []
    for name, text in values.items():
        flag = BY_NAME[name]
        value = _read(flag, text)
        if flag.effect is Effect.NOT_BUILT and value != flag.default:
            raise _bad(flag, "is a flag of the reference EPP that is not built here yet; remove it")
        if flag.effect is Effect.NONE and value is not False:
            notices.append(f"--{flag.name} has no effect here: {flag.help}")
        read[flag.attribute] = value
    fields = {name: read[name] for name in ServeOptions.__struct_fields__ if name != "notices"}
    options = ServeOptions(**fields, notices=tuple(notices))
    _check_together(options)
    return options


def _check_together(options: ServeOptions) -> None:
    if options.config_file is not None and options.config_text is not None:
        raise ConfigError("give --config-file or --config-text, not both", path="--config-text")
    if options.cert_path is not None and not options.secure_serving:
        raise _bad(BY_NAME["cert-path"], "needs --secure-serving")
    if options.enable_cert_reload and options.cert_path is None:
        raise _bad(BY_NAME["enable-cert-reload"], "needs --cert-path")
    if options.tls_min_version != "VersionTLS12" and options.transport != "fast":
        raise _bad(BY_NAME["tls-min-version"], "needs --transport fast: gRPC cannot set it")
    if options.metrics_client_ca_file is not None and options.metrics_cert_dir is None:
        raise _bad(BY_NAME["metrics-client-ca-file"], "needs --metrics-cert-dir")
    _check_discovery(options)
    if options.refresh_metrics_interval <= 0:
        raise _bad(BY_NAME["refresh-metrics-interval"], "must be longer than 0s")
    threshold = options.metrics_staleness_threshold
    if threshold is not None and threshold <= options.refresh_metrics_interval:
        raise _bad(
            BY_NAME["metrics-staleness-threshold"],
            "must be longer than --refresh-metrics-interval, or every scrape is stale at once",
        )
    ports: dict[int, str] = {}
    for name in ("grpc_port", "grpc_health_port", "metrics_port"):
        port, flag = getattr(options, name), BY_NAME[name.replace("_", "-")]
        if not 0 <= port <= 65535:
            raise _bad(flag, f"{port} is not a port (0..65535)")
        if port and port in ports:
            raise _bad(flag, f"port {port} is already taken by --{ports[port]}")
        ports[port] = flag.name


def _check_discovery(options: ServeOptions) -> None:
    sources = {
        "endpoints": bool(options.endpoints),
        "pool-name": options.pool_name is not None,
        "endpoint-selector": options.endpoint_selector is not None,
    }
    given = [name for name, is_given in sources.items() if is_given]
    if len(given) > 1:
        raise _bad(BY_NAME[given[1]], f"and --{given[0]} both say where endpoints are: give one")
    if (options.endpoint_selector is None) != (options.endpoint_target_ports is None):
        raise _bad(BY_NAME["endpoint-target-ports"], "goes with --endpoint-selector: give both")
    if options.endpoints and options.ha_enable_leader_election:
        raise _bad(
            BY_NAME["ha-enable-leader-election"],
            "needs a cluster: --pool-name or --endpoint-selector",
        )


def _read(flag: Flag, text: str | bool) -> Any:
    if flag.kind is Kind.BOOL:
        return _read_bool(flag, text)
    if isinstance(text, bool) or not text:
        raise _bad(flag, f"needs a value: --{flag.name}={flag.kind.value}")
    if flag.choices and text not in flag.choices:
        raise _bad(flag, f"{text!r} is none of {', '.join(flag.choices)}")
    if flag.kind is Kind.INT:
        if not re.fullmatch(r"-?\d{1,9}", text):
            raise _bad(flag, f"{text!r} is not a whole number")
        return int(text)
    if flag.kind is Kind.LIST:
        return tuple(item.strip() for item in text.split(",") if item.strip())
    if flag.kind is Kind.DURATION:
        return _read_duration(flag, text)
    if flag.kind is Kind.BYTES:
        return _read_bytes(flag, text)
    return text


def _read_bool(flag: Flag, text: str | bool) -> bool:
    if isinstance(text, bool):
        return text
    # What Go's flag package accepts.
    if text in {"1", "t", "T", "true", "TRUE", "True"}:
        return True
    if text in {"0", "f", "F", "false", "FALSE", "False"}:
        return False
    raise _bad(flag, f"{text!r} is neither true nor false")


_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


def _read_duration(flag: Flag, text: str) -> float:
    if text == "0":
        return 0.0
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise _bad(flag, f"{text!r} is not a duration; write 500ms, 2s or 1m30s")
    return sum(float(number) * _UNIT_S[unit] for number, unit in parts)


MESSAGE_BYTES_MAX = (1 << 31) - 1
"""gRPC's lengths are 32 bits with a sign; it would take a larger limit for a negative one."""
_UNIT_BYTES = {"": 1, "B": 1}
for _power, _letter in enumerate("KMG", start=1):
    _UNIT_BYTES |= {f"{_letter}": 1000**_power, f"{_letter}B": 1000**_power}
    _UNIT_BYTES |= {f"{_letter}i": 1024**_power, f"{_letter}iB": 1024**_power}


def _read_bytes(flag: Flag, text: str) -> int:
    match = re.fullmatch(r"(\d{1,12})\s*([A-Za-z]*)", text)
    if match is None or match[2] not in _UNIT_BYTES or not int(match[1]):
        raise _bad(flag, f"{text!r} is not a size; write 25MB or 10MiB")
    size_bytes = int(match[1]) * _UNIT_BYTES[match[2]]
    if size_bytes > MESSAGE_BYTES_MAX:
        raise _bad(flag, f"{text} is more than gRPC can take; write at most 2047MiB")
    return size_bytes


def _bad(flag: Flag, why: str) -> ConfigError:
    return ConfigError(f"--{flag.name} {why}", path=f"--{flag.name}")
