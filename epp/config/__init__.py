"""The configuration file: read strictly, completed by the defaulting rules, resolved to a plan.

    text --load_config--> EndpointPickerConfig --resolve--> Plan --effective_yaml--> text

`load_config` knows the schema (`schema`), `resolve` knows what the plugins mean and what is built.
The reference EPP's `EndpointPickerConfig` is accepted as it is as far as it is built here; what it
knows beyond is refused by name, never ignored. Every error is a `ConfigError` with the JSON path of
the key and the remedy; what is accepted but deprecated or without effect is a notice of the plan.
"""

from epp.config.load import load_config
from epp.config.plan import Plan, effective_yaml, resolve
from epp.config.schema import EndpointPickerConfig, Limits

__all__ = ["EndpointPickerConfig", "Limits", "Plan", "effective_yaml", "load_config", "resolve"]
