"""Builds the package; what is in it, pyproject.toml says.

With EPP_COMPILE=1 in the environment the modules that run for each message are compiled by mypyc,
which about halves what they cost (docs/performance.md). That takes a C compiler and some minutes.
The sources are the same, lie beside the compiled modules and are what tracebacks show; Python
prefers the compiled ones. What such a module must not contain: epp/core/structs.py.
"""

import os
from typing import Any

from setuptools import setup

COMPILED = (
    "epp/core/answer.py",
    "epp/core/bodies.py",
    "epp/core/decide.py",
    "epp/core/directing.py",
    "epp/core/endpoint.py",
    "epp/core/exchange.py",
    "epp/core/inflight.py",
    "epp/core/kvindex/aside.py",
    "epp/core/kvindex/blocks.py",
    "epp/core/kvindex/expected.py",
    "epp/core/kvindex/folding.py",
    "epp/core/kvindex/holding.py",
    "epp/core/kvindex/index.py",
    "epp/core/kvindex/keys.py",
    "epp/core/kvindex/matching.py",
    "epp/core/kvindex/ranks.py",
    "epp/core/kvindex/table.py",
    "epp/core/kvuse.py",
    "epp/core/latency/backlog.py",
    "epp/core/latency/cost.py",
    "epp/core/latency/fit.py",
    "epp/core/latency/forecast.py",
    "epp/core/latency/rates.py",
    "epp/core/modelscan.py",
    "epp/core/parse.py",
    "epp/core/prompt.py",
    "epp/core/rawjson.py",
    "epp/core/renaming.py",
    "epp/core/replying.py",
    "epp/core/rewrite.py",
    "epp/core/schedule.py",
    "epp/core/serving.py",
    "epp/core/usage.py",
    "epp/edge/metrics.py",
    "epp/edge/telemetry.py",
    "epp/wire/extproc.py",
    "epp/wire/http2/calls.py",
    "epp/wire/http2/connection.py",
    "epp/wire/http2/frames.py",
    "epp/wire/http2/framing.py",
    "epp/wire/http2/guard.py",
    "epp/wire/http2/hpack.py",
    "epp/wire/http2/limits.py",
    "epp/wire/http2/output.py",
    "epp/wire/http2/replies.py",
    "epp/wire/http2/requests.py",
    "epp/wire/http2/streams.py",
    "epp/wire/http2/timers.py",
    "epp/wire/metadata.py",
    "epp/wire/protobuf.py",
    "epp/wire/stream.py",
)

NEEDED = ("mypy>=2.4,<3", "brotli", "librt>=0.17,<1", "msgspec", "xxhash", "zstandard")
"""mypyc, and the packages whose types it looks at."""


def compilation() -> dict[str, Any]:
    """Arguments of `setup` for a compiled build; none for another."""
    if os.environ.get("EPP_COMPILE") != "1":
        return {}
    try:
        from mypyc.build import mypycify
    except ImportError:  # pip asks first what it has to install, then builds
        return {"setup_requires": NEEDED}
    return {"ext_modules": mypycify([*COMPILED], group_name="epp", opt_level="2", debug_level="0")}


setup(**compilation())
