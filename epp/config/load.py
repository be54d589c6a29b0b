"""From the file's text to the schema: strict, with the path of what is wrong.

Outside `parameters`, a key with nothing after it counts as not written, as in the reference.
Inside, nothing is guessed: an empty label value must not turn a filter off."""

from __future__ import annotations

from typing import Any

from epp.config.decode import decode
from epp.config.schema import API_VERSION, KIND, EndpointPickerConfig
from epp.config.text import read_yaml
from epp.core.errors import ConfigError


def load_config(text: str) -> EndpointPickerConfig:
    """Read a configuration file. References and parameters are looked at by `resolve`.

    Raises: ConfigError.
    """
    value = read_yaml(text)
    if not isinstance(value, dict):
        raise ConfigError(
            "the configuration is empty or not a mapping: begin with "
            f"`apiVersion: {API_VERSION}` and `kind: {KIND}`, or give no file for the defaults"
        )
    return decode(_without_empty(value), EndpointPickerConfig, path="$")


def _without_empty(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: item if key == "parameters" else _without_empty(item)
        for key, item in value.items()
        if item is not None
    }
