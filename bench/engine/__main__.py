"""`python -m bench.engine`: one simulated vLLM on one port. Prints `ready URL` when it listens."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Sequence
from importlib.util import find_spec

import uvloop

from bench.engine.bodies import ApiError
from bench.engine.cost import CostModel
from bench.engine.faults import Faults, parse_faults
from bench.engine.kvevents import KvEventsConfig, PublishingError, parse_kv_events_config
from bench.engine.scheduler import EngineLimits
from bench.engine.server import Server, ServerConfig

DESCRIPTION = """\
A simulated vLLM 0.32: the OpenAI routes, /metrics and timing of a real engine, without a model.
Step times are those of Qwen3-32B on two H100, divided by --speed. Flags that vLLM has, too, mean
the same there.
"""
EPILOG = """\
At run time: GET /sim/state[?log=N] shows counters, load and the last N requests;
POST /sim/fault takes the JSON of --fault and replaces all switches ({} ends every fault):
  hang, error_500, drop, unhealthy: true or false;  drop_after_tokens: N
  metrics: "refuse", "error", "html" or "nan";      metrics_delay_s: seconds
  kv_events_pause, kv_events_copies, kv_events_arrays, kv_events_no_session: true or false
  kv_events_drop_every, kv_events_repeat_every: N
GET /sim/kv_blocks shows the hashes of the cached blocks, GET /kv_event_sources who publishes them.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = _parser()
    args = parser.parse_args(argv)
    config = _config(parser, args)
    try:
        uvloop.run(_serve(config, args.host, args.port))
    except PublishingError as error:
        parser.error(str(error))


async def _serve(config: ServerConfig, host: str, port: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = Server(config)
    bound_port = await server.start(host, port)
    print(f"ready http://{host}:{bound_port}", flush=True)
    await stop.wait()
    await server.stop()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    limits, config = EngineLimits(), ServerConfig()
    add("--host", default="127.0.0.1", help="address to bind (default %(default)s)")
    add("--port", type=int, default=8000, help="0: any free one (default %(default)s)")
    add("--name", default="", help="value of the header x-sim-engine (default: sim-PORT)")
    add("--model", "--served-model-name", nargs="+", default=["sim"], help="served names")
    add("--lora-modules", nargs="*", default=[], metavar="NAME", help="LoRA names served, too")
    add("--seed", type=int, default=0, help="of the generated text (default 0)")
    add("--speed", type=_positive, default=1.0, help="divides every step's time (default 1)")
    add("--max-model-len", type=_count, default=config.max_model_len, metavar="TOKENS")
    add("--block-size", type=_count, default=limits.block_tokens, metavar="TOKENS")
    add(
        "--num-gpu-blocks-override",
        type=_count,
        default=limits.kv_blocks,
        metavar="BLOCKS",
        help="KV cache capacity (default %(default)s)",
    )
    add("--max-num-seqs", type=_count, default=limits.max_num_seqs, metavar="N")
    add("--max-num-batched-tokens", type=_count, default=limits.max_num_batched_tokens, metavar="N")
    add("--max-num-queued-reqs", type=_count, metavar="N", help="503 beyond (default: no limit)")
    add("--max-loras", type=_count, default=limits.max_loras, metavar="N")
    add("--no-enable-prefix-caching", action="store_true")
    add("--no-prompt-tokens-details", action="store_true", help="usage without cached_tokens")
    add("--enable-request-id-headers", action="store_true")
    add("--enable-server-load-tracking", action="store_true", help="/load counts")
    add(
        "--default-output-tokens",
        type=_count,
        default=config.default_output_tokens,
        metavar="N",
        help="answer length when the client sets no limit (default %(default)s)",
    )
    add(
        "--shutdown-timeout",
        type=_positive,
        metavar="SECONDS",
        help="on SIGTERM let requests finish, answering 500 to new ones (default: end at once)",
    )
    _add_kv_events(parser, config.kv_events)
    add("--fault", type=_faults, default=Faults(), metavar="JSON", help="see below")
    return parser


def _add_kv_events(parser: argparse.ArgumentParser, default: KvEventsConfig) -> None:
    parser.add_argument(
        "--kv-events-config",
        type=_kv_events,
        default=default,
        metavar="JSON",
        help="publish KV events over ZeroMQ, in the form that vLLM's flag has; needs pyzmq",
    )
    parser.add_argument(
        "--kv-events",
        type=_port,
        nargs="?",
        const=0,
        metavar="PORT",
        help="publish on PORT of --host and replay on the next one (without PORT: on free ones)",
    )


def _config(parser: argparse.ArgumentParser, args: argparse.Namespace) -> ServerConfig:
    limits = EngineLimits(
        block_tokens=args.block_size,
        kv_blocks=args.num_gpu_blocks_override,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_queued_reqs=args.max_num_queued_reqs,
        max_loras=args.max_loras,
        prefix_caching=not args.no_enable_prefix_caching,
    )
    if args.max_model_len > limits.kv_tokens:
        parser.error(
            f"--max-model-len {args.max_model_len} does not fit the KV cache of "
            f"{limits.kv_tokens} tokens; raise --num-gpu-blocks-override or lower it"
        )
    kv_events = args.kv_events_config
    if args.kv_events is not None:
        kv_events = _kv_events_on(args.host, args.kv_events)
    if kv_events.active and find_spec("zmq") is None:
        parser.error("KV events need the package pyzmq: pip install pyzmq")
    return ServerConfig(
        name=args.name,
        models=tuple(args.model),
        loras=tuple(args.lora_modules),
        limits=limits,
        cost=CostModel(speed=args.speed),
        seed=args.seed,
        max_model_len=args.max_model_len,
        default_output_tokens=args.default_output_tokens,
        shutdown_timeout_s=args.shutdown_timeout,
        request_id_headers=args.enable_request_id_headers,
        load_tracking=args.enable_server_load_tracking,
        prompt_tokens_details=not args.no_prompt_tokens_details,
        faults=args.fault,
        kv_events=kv_events,
    )


def _kv_events_on(host: str, port: int) -> KvEventsConfig:
    live, replay = (port, port + 1) if port else ("*", "*")
    return KvEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"tcp://{host}:{live}",
        replay_endpoint=f"tcp://{host}:{replay}",
        bind=True,
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text}")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 65535:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65534, not {value}")
    return value


def _kv_events(text: str) -> KvEventsConfig:
    try:
        return parse_kv_events_config(text.encode())
    except ApiError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _faults(text: str) -> Faults:
    try:
        return parse_faults(text.encode())
    except ApiError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    main()
