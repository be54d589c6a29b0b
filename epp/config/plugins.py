"""The `plugins` of a configuration: named, decoded, and looked up by reference.

`PluginTable` lives during `resolve` only. It also holds the plugins that the defaulting rules add,
so that afterwards it lists everything that runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from epp.config.decode import decode, did_you_mean
from epp.config.parameters import (
    BUILT,
    SCRAPE_INTERVAL_S_MIN,
    ApproxPrefixCacheProducer,
    MetricsDataSource,
    PredictedLatencyProducer,
    TokenProducer,
)
from epp.config.schema import PluginSpec
from epp.config.units import Seconds, shown
from epp.core.errors import ConfigError
from epp.core.registry import COSTS, DEPRECATED, FILTERS, PICKERS, REFERENCE, SCORERS, Kind

_SCHEDULING = {
    Kind.FILTER: FILTERS,
    Kind.SCORER: SCORERS,
    Kind.COST: COSTS,
    Kind.PICKER: PICKERS,
}
PARAMETERS: Mapping[str, type[msgspec.Struct]] = MappingProxyType(
    {
        **{type_: cls for table in _SCHEDULING.values() for type_, cls in table.items()},
        **{type_: cls for type_, (_, cls) in BUILT.items()},
    }
)
"""Every plugin type built here and the struct of its parameters."""


class Declared(msgspec.Struct, frozen=True):
    """A plugin with everything known about it."""

    name: str
    type: str
    """Its type, deprecated spellings replaced."""
    parameters: msgspec.Struct
    """Decoded; for a scheduling plugin, the plugin itself."""
    path: str
    """JSON path of its entry; `$.plugins` for one that a default rule added."""

    @property
    def kinds(self) -> frozenset[Kind]:
        """What it can be used as; a type may be a filter and a scorer at once."""
        if self.type in BUILT:
            return frozenset((BUILT[self.type][0],))
        kinds = {kind for kind, table in _SCHEDULING.items() if self.type in table}
        # `context-length-aware` scores, and filters when told to.
        if not getattr(self.parameters, "enable_filtering", True):
            kinds.discard(Kind.FILTER)
        return frozenset(kinds)

    def acting_as(self, kind: Kind) -> msgspec.Struct:
        """The scheduling plugin in one of its kinds: a type of two kinds has a class for each."""
        cls = _SCHEDULING[kind][self.type]
        if isinstance(self.parameters, cls):
            return self.parameters
        return cls(**msgspec.structs.asdict(self.parameters))


def canonical(type_: str) -> str:
    """The type that an old name stands for, where its parameters are the same; else the name."""
    replacement = DEPRECATED[type_].replacement if type_ in DEPRECATED else type_
    same = PARAMETERS.get(type_) in (None, PARAMETERS.get(replacement))
    return replacement if same and replacement in PARAMETERS else type_


def refusal(type_: str, *, path: str) -> ConfigError:
    """The error for a plugin type that is not built here."""
    if type_ in REFERENCE:
        return ConfigError(
            f"plugin type `{type_}` ({REFERENCE[type_]}) exists in the reference EPP but is not "
            "built here yet: remove it, with what refers to it",
            path=path,
        )
    near = did_you_mean(type_, PARAMETERS) or ": docs/configuration.md lists the types"
    return ConfigError(f"unknown plugin type {shown(type_)}{near}", path=path)


class PluginTable:
    """Plugins by name, in the order written, then in the order added."""

    def __init__(self, specs: Iterable[PluginSpec], notices: list[str]) -> None:
        """Raises: ConfigError for an unusable entry."""
        self._notices = notices
        self._used: set[str] = set()
        self._plugins: dict[str, Declared] = {}
        for index, spec in enumerate(specs):
            self._add(_declare(spec, f"$.plugins[{index}]", notices), named=bool(spec.name))

    def _add(self, plugin: Declared, *, named: bool) -> None:
        path = f"{plugin.path}.name" if named else f"{plugin.path}.type"
        if plugin.name in self._plugins:
            raise ConfigError(
                f"two plugins are called `{plugin.name}`: give one of them another `name`",
                path=path,
            )
        # Defaults are added under their type's name, which must mean this type.
        if plugin.name in PARAMETERS and canonical(plugin.name) != plugin.type:
            raise ConfigError(
                f"a plugin of type `{plugin.type}` is called `{plugin.name}`, which is another "
                "plugin type: choose another `name`",
                path=path,
            )
        self._plugins[plugin.name] = plugin

    def __contains__(self, name: object) -> bool:
        return name in self._plugins

    def __iter__(self) -> Iterator[Declared]:
        return iter(list(self._plugins.values()))

    def find(self, ref: str, *kinds: Kind, path: str) -> Declared:
        """The plugin that `pluginRef` at `path` means.

        Raises: ConfigError when there is none, or it is of no kind asked for.
        """
        plugin = self._plugins.get(ref)
        if plugin is None:
            raise self._undefined(ref, path)
        if not plugin.kinds & set(kinds):
            raise ConfigError(
                f"`{ref}` is a {_words(plugin.kinds)}, and a {_words(kinds)} is needed here: "
                "refer to another plugin",
                path=path,
            )
        self._used.add(ref)
        return plugin

    def _undefined(self, ref: str, path: str) -> ConfigError:
        if ref in PARAMETERS:
            remedy = f": add `- type: {ref}` to `plugins`"
        elif ref in REFERENCE:
            return refusal(ref, path=path)
        else:
            remedy = did_you_mean(ref, self._plugins) or ": declare it in `plugins`"
        return ConfigError(f"no plugin is called {shown(ref)}{remedy}", path=path)

    def of_kind(self, *kinds: Kind) -> list[Declared]:
        """The plugins of these kinds."""
        return [p for p in self._plugins.values() if p.kinds & set(kinds)]

    def use(self, type_: str) -> Declared:
        """The one plugin of a type, added with its defaults when it is not declared."""
        plugin = self.declared(type_) or self._added(type_)
        self._used.add(plugin.name)
        return plugin

    def _added(self, type_: str) -> Declared:
        plugin = Declared(type_, type_, PARAMETERS[type_](), "$.plugins")
        self._plugins[type_] = plugin
        return plugin

    def declared(self, type_: str) -> Declared | None:
        """The one plugin of a type, if it is declared.

        Raises: ConfigError when it is declared twice.
        """
        found = [p for p in self._plugins.values() if p.type == type_]
        if len(found) > 1:
            raise ConfigError(
                f"two plugins of type `{type_}`, of which one is possible here: remove one",
                path=found[1].path,
            )
        if found:
            self._used.add(found[0].name)
        return found[0] if found else None

    def used(self) -> list[Declared]:
        """The plugins that something refers to or uses; a notice for each that nothing does."""
        for plugin in self._plugins.values():
            if plugin.name not in self._used:
                self._notices.append(
                    f"`{plugin.name}` is declared and never used: remove it or refer to it - at "
                    f"`{plugin.path}`"
                )
        return [p for p in self._plugins.values() if p.name in self._used]


def _words(kinds: Iterable[Kind]) -> str:
    return " or ".join(sorted(kinds))


def _declare(spec: PluginSpec, path: str, notices: list[str]) -> Declared:
    type_ = canonical(spec.type)
    if type_ not in PARAMETERS:
        raise refusal(type_, path=f"{path}.type")
    if deprecated := DEPRECATED.get(spec.type):
        notices.append(
            f"plugin type `{spec.type}` is deprecated, use `{deprecated.replacement}`: "
            f"{deprecated.note} - at `{path}.type`"
        )
    where = f"{path}.parameters"
    parameters = decode(spec.parameters, PARAMETERS[type_], path=where)
    return Declared(
        name=spec.name or spec.type,
        type=type_,
        parameters=_settled(parameters, where, notices),
        path=path,
    )


def _settled(parameters: Any, path: str, notices: list[str]) -> msgspec.Struct:
    """The parameters with old names replaced and what is out of bounds raised, each with a
    notice."""
    match parameters:
        case ApproxPrefixCacheProducer(block_size=int(tokens)):
            notices.append(
                f"`blockSize` is deprecated, use `blockSizeTokens` - at `{path}.blockSize`"
            )
            return msgspec.structs.replace(parameters, block_size=None, block_size_tokens=tokens)
        case MetricsDataSource():
            return _settled_source(parameters, path, notices)
        case PredictedLatencyProducer():
            _notice_unused(parameters, path, notices)
        case TokenProducer():
            _refuse_backends(parameters, path)
    return parameters  # type: ignore[no-any-return]


def _settled_source(source: MetricsDataSource, path: str, notices: list[str]) -> MetricsDataSource:
    verifies = source.scheme == "https" and not source.insecure_skip_verify
    if source.ca_cert_path and not verifies:
        notices.append(
            "`caCertPath` has no effect without `scheme: https` and `insecureSkipVerify: false` - "
            f"at `{path}.caCertPath`"
        )
    if source.client_cert_path and source.scheme != "https":
        notices.append(
            f"`clientCertPath` has no effect without `scheme: https` - at `{path}.clientCertPath`"
        )
    interval_s = source.interval_s
    if interval_s is not None and interval_s < SCRAPE_INTERVAL_S_MIN:
        floor_s = Seconds(SCRAPE_INTERVAL_S_MIN)
        notices.append(
            f"`interval` is raised from {interval_s.written()} to {floor_s.written()}, the "
            f"shortest there is - at `{path}.interval`"
        )
        interval_s = floor_s
    return msgspec.structs.replace(source, path=source.path.strip(), interval_s=interval_s)


def _notice_unused(producer: PredictedLatencyProducer, path: str, notices: list[str]) -> None:
    for key, value in (
        ("contextTTL", producer.context_ttl),
        ("endpointRoleLabel", producer.endpoint_role_label),
        ("useEncoderCacheFeatures", producer.use_encoder_cache_features),
        ("encoderCacheMatchInfoProducerName", producer.encoder_cache_match_info_producer_name),
        ("samplingMean", producer.sampling_mean),
        (
            "maxDecodeTokenSamplesForPrediction",
            producer.max_decode_token_samples_for_prediction,
        ),
    ):
        if value:
            notices.append(
                f"`{key}` has no effect here: latency is predicted without a sidecar - at "
                f"`{path}.{key}`"
            )


def _refuse_backends(producer: TokenProducer, path: str) -> None:
    for key, value in (
        ("modelName", producer.model_name),
        ("vllm", producer.vllm),
        ("udsTokenizerConfig", producer.uds_tokenizer_config),
        ("estimate", producer.estimate),
    ):
        if value or (isinstance(value, dict) and key != "estimate"):
            raise ConfigError(
                f"`{key}` exists in the reference EPP but is not built here yet: remove it; "
                "tokens are estimated from the prompt's length",
                path=f"{path}.{key}",
            )
