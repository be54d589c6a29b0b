"""What a run consists of: phases, workload, disturbances; for simulated engines or one's own."""

from __future__ import annotations

import json
import secrets

import msgspec

from bench.demo.arms import Outage, Overload
from bench.demo.options import Options
from bench.demo.promises import Roles
from bench.demo.workload import Phase, Plan, Shape, make_plan
from bench.engine.server import ServerConfig
from bench.stack import NotReadyError, http_get

ENGINES = 3
OVERLOADED, KILLED = 1, 2
"""Indices of engines."""
BYPASS_WORKERS = 24
SIMULATED_MODEL = "sim"
QUICK_SHAPE = Shape(chat_slots=10, turns=(6, 9), turn_gap_s=(0.9, 1.9), ramp_s=4.0)
"""Fewer chats whose turns follow faster, so that there are second turns in a short run, too."""


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is decided before the first process starts."""

    model: str
    phases: tuple[Phase, ...]
    shape: Shape
    roles: Roles
    overload: Overload | None = None
    outage: Outage | None = None
    fresh_openings: bool = False
    """Each run's prompts begin with words of their own, since caches are not emptied."""

    def plan(self, seed: int) -> Plan:
        """The plan of one arm: the same at every call, but for the openings."""
        nonce = secrets.token_hex(8) if self.fresh_openings else ""
        return make_plan(self.shape, self.phases, seed=seed, nonce=nonce)


def set_scene(options: Options) -> Scene:
    """Raises: NotReadyError when an engine of one's own does not answer or serves another model."""
    if options.endpoints:
        return _own(options)
    return _simulated(quick=options.quick)


def _simulated(*, quick: bool) -> Scene:
    overloaded, killed = f"engine-{OVERLOADED + 1}", f"engine-{KILLED + 1}"
    durations_s = (6.0, 5.0, 10.0) if quick else (15.0, 8.0, 13.0)
    names = ("nothing wrong", f"{overloaded} overloaded", f"{killed} killed, back")
    shape = QUICK_SHAPE if quick else Shape()
    return Scene(
        model=SIMULATED_MODEL,
        phases=tuple(Phase(n, s) for n, s in zip(names, durations_s, strict=True)),
        shape=shape.fitted(ServerConfig().max_model_len),
        roles=Roles(0, overload_phase=1, overloaded_engine=overloaded, outage=True),
        overload=Overload(phase=1, engine=OVERLOADED, workers=BYPASS_WORKERS),
        outage=Outage(2, KILLED, after_s=0.5, down_s=2.5 if quick else 3.0),
    )


def _own(options: Options) -> Scene:
    """One phase, nothing disturbed, prompts that fit the model."""
    cards = [_cards(address) for address in options.endpoints]
    common = [name for name in cards[0] if all(name in other for other in cards)]
    model = options.model or (common[0] if common else "")
    for address, served in zip(options.endpoints, cards, strict=True):
        if model not in served:
            wanted = f"model {model!r}" if model else "a model that all of them serve"
            raise NotReadyError(f"{address} does not have {wanted}; it serves {', '.join(served)}")
    lengths = [served[model] for served in cards]
    shape = (QUICK_SHAPE if options.quick else Shape()).fitted(min(lengths))
    phases = (Phase("nothing wrong", 8.0 if options.quick else 30.0),)
    return Scene(model=model, phases=phases, shape=shape, roles=Roles(), fresh_openings=True)


def _cards(address: str) -> dict[str, int]:
    """Models an engine serves and their longest context in tokens."""
    url = f"http://{address}/v1/models"
    try:
        cards = json.loads(http_get(url))["data"]
        unknown = Shape().longest_tokens * 2
        return {str(c["id"]): int(c.get("max_model_len") or unknown) for c in cards}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotReadyError(
            f"{url} gave no list of models ({type(error).__name__}: {error}); "
            "is a vLLM listening there, over plain HTTP?"
        ) from error
