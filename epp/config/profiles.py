"""The scheduling profile: from what the file says to what runs.

The reference's defaulting rules, made deterministic: where it would take any of several declared
pickers, an error asks to name one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from epp.config.plugins import Declared, PluginTable
from epp.config.schema import ProfilePlugin, SchedulingProfile
from epp.core.errors import ConfigError
from epp.core.model import Filter, Picker, Scorer
from epp.core.registry import Kind
from epp.core.schedule import Cost, NamedFilter, Profile, WeightedScorer

DEFAULT_PROFILE = "default"
DEFAULT_COST = "expected-latency"
"""What chooses without any configuration; the reference would take its scorers for prefix, queue
and KV cache."""
DEFAULT_PICKER = "max-score-picker"
DEFAULT_WEIGHT = 1.0
_SCHEDULING = (Kind.FILTER, Kind.SCORER, Kind.COST, Kind.PICKER)


def complete_profile(
    profiles: tuple[SchedulingProfile, ...], table: PluginTable, notices: list[str]
) -> SchedulingProfile:
    """The one profile with every plugin and weight written out; what is missing is added to
    `table`.

    Raises: ConfigError.
    """
    _check_handler(profiles, table)
    profile = profiles[0] if profiles else _declared_profile(table)
    path = "$.schedulingProfiles[0]" if profiles else "$.plugins"
    entries: dict[str, ProfilePlugin] = {}
    pickers: list[str] = []
    producers = {plugin.name for plugin in table.of_kind(Kind.PRODUCER)}
    for index, entry in enumerate(profile.plugins):
        where = f"$.schedulingProfiles[0].plugins[{index}]" if profiles else "$.plugins"
        if entry.plugin_ref in producers:
            notices.append(
                f"`{entry.plugin_ref}` has no effect in a profile: a {Kind.PRODUCER} works for all "
                f"- at `{where}.pluginRef`"
            )
            continue
        plugin = table.find(entry.plugin_ref, *_SCHEDULING, path=f"{where}.pluginRef")
        if plugin.name in entries:
            raise ConfigError(
                f"`{plugin.name}` stands twice in the profile: remove one", path=where
            )
        if Kind.PICKER in plugin.kinds:
            pickers.append(plugin.name)
        entries[plugin.name] = _weighted(entry, plugin, where, notices)
    if len(pickers) > 1:
        raise ConfigError(
            f"a profile has one picker, not {len(pickers)} ({', '.join(pickers)}): keep one"
            + ("" if profiles else ", or write `schedulingProfiles` that names one"),
            path=path,
        )
    if not pickers:
        picker = _only_picker(table, path)
        entries[picker] = ProfilePlugin(plugin_ref=picker)
    return SchedulingProfile(name=profile.name, plugins=tuple(entries.values()))


def build_profile(profile: SchedulingProfile, table: PluginTable, notices: list[str]) -> Profile:
    """The runnable profile of a completed one."""
    path = "$.schedulingProfiles[0]"
    plugins = [(e, table.find(e.plugin_ref, *_SCHEDULING, path=path)) for e in profile.plugins]
    picker = next(p for _, p in plugins if Kind.PICKER in p.kinds)
    scorers = [(e, p) for e, p in plugins if Kind.SCORER in p.kinds]
    cost = _only_cost([p for _, p in plugins], path)
    if not scorers and cost is None and picker.type != "random-picker":
        notices.append(f"profile `{profile.name}` has no scorer: endpoints are picked by chance")
    # The registry promises that a class in its table has that table's protocol.
    return Profile(
        name=profile.name,
        filters=tuple(
            NamedFilter(p.name, cast("Filter", p.acting_as(Kind.FILTER)))
            for _, p in plugins
            if Kind.FILTER in p.kinds
        ),
        scorers=tuple(
            WeightedScorer(p.name, _weight(e), cast("Scorer", p.acting_as(Kind.SCORER)))
            for e, p in scorers
            if cost is None
        ),
        picker=cast("Picker", picker.parameters),
        cost=None if cost is None else cast("Cost", cost.parameters),
    )


def _only_cost(plugins: Sequence[Declared], path: str) -> Declared | None:
    """The cost policy of a profile, which is then alone but for filters and the best-first picker.

    Raises: ConfigError.
    """
    costs = [p for p in plugins if Kind.COST in p.kinds]
    if not costs:
        return None
    cost = costs[0]
    others = [p for p in plugins if Kind.SCORER in p.kinds and Kind.FILTER not in p.kinds]
    for other in (*costs[1:], *others):
        raise ConfigError(
            f"`{cost.name}` weighs everything itself, so nothing else scores in its profile: "
            f"remove `{other.name}`, or `{cost.name}`",
            path=path,
        )
    picker = next(p for p in plugins if Kind.PICKER in p.kinds)
    if picker.type != DEFAULT_PICKER:
        raise ConfigError(
            f"`{cost.name}` picks the least cost, not by chance: remove `{picker.name}` or make it "
            f"a `{DEFAULT_PICKER}`",
            path=path,
        )
    return cost


def _weight(entry: ProfilePlugin) -> float:
    return DEFAULT_WEIGHT if entry.weight is None else entry.weight


def _check_handler(profiles: tuple[SchedulingProfile, ...], table: PluginTable) -> None:
    handlers = table.of_kind(Kind.PROFILE_HANDLER)
    if len(handlers) > 1:
        raise ConfigError(
            f"one profile handler is possible, not {len(handlers)}: keep one", path=handlers[1].path
        )
    if len(profiles) > 1:
        raise ConfigError(
            f"{len(profiles)} profiles, of which `single-profile-handler` runs exactly one; the "
            "handlers that choose among several are not built here yet: keep one profile",
            path="$.schedulingProfiles[1]",
        )
    table.use("single-profile-handler")


def _declared_profile(table: PluginTable) -> SchedulingProfile:
    """The profile of a file without profiles."""
    declared = table.of_kind(*_SCHEDULING)
    if declared:
        entries = tuple(ProfilePlugin(plugin_ref=plugin.name) for plugin in declared)
    else:
        entries = (ProfilePlugin(plugin_ref=table.use(DEFAULT_COST).name),)
    return SchedulingProfile(name=DEFAULT_PROFILE, plugins=entries)


def _weighted(
    entry: ProfilePlugin, plugin: Declared, path: str, notices: list[str]
) -> ProfilePlugin:
    if Kind.SCORER in plugin.kinds:
        return ProfilePlugin(plugin_ref=plugin.name, weight=_weight(entry))
    if entry.weight is not None:
        notices.append(
            f"`weight` has no effect: `{plugin.name}` does not score - at `{path}.weight`"
        )
    return ProfilePlugin(plugin_ref=plugin.name)


def _only_picker(table: PluginTable, path: str) -> str:
    declared = [plugin.name for plugin in table.of_kind(Kind.PICKER)]
    if len(declared) > 1:
        raise ConfigError(
            f"the profile names no picker and {len(declared)} are declared "
            f"({', '.join(declared)}): name one in the profile",
            path=path,
        )
    if declared:
        return table.find(declared[0], Kind.PICKER, path=path).name
    return table.use(DEFAULT_PICKER).name
