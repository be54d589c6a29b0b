"""What the server checks of a Lease: numbers in range, and times that are exactly a MicroTime."""

from __future__ import annotations

import re

from tests.kubernetes.answers import bad_request, invalid
from tests.kubernetes.resources import LEASE, Object

_MICRO_TIME = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(?:Z|[+-]\d\d:\d\d)"
)  # as Go parses 2006-01-02T15:04:05.000000Z07:00


def check(lease: Object) -> None:
    """Raises: RefusedError 400 for a time that is none, 422 for numbers out of range."""
    spec = lease.get("spec") or {}
    for name in ("acquireTime", "renewTime"):
        value = spec.get(name)
        if value is not None and not (isinstance(value, str) and _MICRO_TIME.fullmatch(value)):
            raise bad_request(
                'Lease in version "v1" cannot be handled as a Lease: parsing time '
                f'"{value}" as "2006-01-02T15:04:05.000000Z07:00": cannot parse it'
            )
    _check_numbers(lease, spec)


def _check_numbers(lease: Object, spec: Object) -> None:
    causes = []
    for name, least, rule in (
        ("leaseDurationSeconds", 1, "must be greater than 0"),
        ("leaseTransitions", 0, "must be greater than or equal to 0"),
    ):
        value = spec.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            kind = type(value).__name__
            raise bad_request(
                'Lease in version "v1" cannot be handled as a Lease: json: cannot unmarshal '
                f"{kind} into Go struct field LeaseSpec.spec.{name} of type int32"
            )
        if value < least:
            causes.append(f"spec.{name}: Invalid value: {value}: {rule}")
    if causes:
        raise invalid(LEASE, lease["metadata"]["name"], causes)
