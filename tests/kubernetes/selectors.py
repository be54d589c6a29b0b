"""Label and field selectors as the API server reads them; its own, so that it can disagree."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tests.kubernetes.answers import bad_request
from tests.kubernetes.resources import POD, Kind, Object

Labels = Mapping[str, str]
Test = Callable[[Labels], bool]

_NAME = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"(?:[a-z0-9](?:[-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_NAME}")
_VALUE = re.compile(rf"(?:{_NAME})?")
_TERM = re.compile(
    r"\s*(?:"
    r"!\s*(?P<absent>[^\s,()=!]+)"
    r"|(?P<key>[^\s,()=!<>]+)\s*(?:"
    r"(?P<test>==|=|!=)\s*(?P<value>[^\s,()=!]*)"
    r"|(?<=\s)(?P<word>in|notin)\s*\((?P<values>[^()]*)\)"
    r"|(?P<order>[<>])\s*(?P<bound>-?\d+)"
    r"|)"
    r")\s*(?:,|$)"
)


def label_test(selector: str | None) -> Test:
    """A predicate over an object's labels; None and '' match everything.

    Grammar: `k=v`, `k==v`, `k!=v` (also when k is absent), `k in (a,b)`, `k notin (a,b)` (also
    when absent), `k`, `!k`, `k>1`, `k<1`, joined by commas, all of which must hold.
    Raises: RefusedError 400 on anything else.
    """
    if not selector or not selector.strip():
        return lambda _: True
    tests, at = [], 0
    while at < len(selector):
        term = _TERM.match(selector, at)
        if term is None or term.end() == at:
            raise _bad(selector)
        tests.append(_label_term(selector, term))
        at = term.end()
    if selector.rstrip().endswith(","):
        raise _bad(selector)
    return lambda labels: all(test(labels) for test in tests)


def _label_term(selector: str, term: re.Match[str]) -> Test:
    key = term["absent"] or term["key"]
    values = {each.strip() for each in (term["values"] or "").split(",")}
    values = {term["value"]} if term["test"] else values
    if not _KEY.fullmatch(key) or not all(_VALUE.fullmatch(each) for each in values):
        raise _bad(selector)
    if term["absent"]:
        return lambda labels: key not in labels
    if term["test"] == "!=" or term["word"] == "notin":
        return lambda labels: labels.get(key) not in values
    if term["test"] or term["word"]:
        return lambda labels: labels.get(key) in values
    if term["order"]:
        sign, bound = (1 if term["order"] == ">" else -1), int(term["bound"])
        return lambda labels: _is_int(labels.get(key)) and sign * (int(labels[key]) - bound) > 0
    return lambda labels: key in labels


def _is_int(text: str | None) -> bool:
    return re.fullmatch(r"-?\d+", text or "") is not None


def _bad(selector: str) -> Exception:
    return bad_request(f"unable to parse requirement: found in selector {selector!r}")


ANY_KIND = ("metadata.name", "metadata.namespace")
OF_PODS = ("spec.nodeName", "status.phase", "status.podIP", "spec.restartPolicy")


def field_test(selector: str | None, kind: Kind) -> Callable[[Object], bool]:
    """A predicate over objects: `path=value`, `path==value`, `path!=value`, joined by commas.

    Raises: RefusedError 400 on other syntax, and on a field that this kind does not index.
    """
    tests = []
    for term in (selector or "").split(","):
        if not term.strip():
            continue
        found = re.fullmatch(r"\s*([\w.]+)\s*(==|=|!=)\s*(.*?)\s*", term)
        if found is None:
            raise bad_request(f"invalid field selector {selector!r}")
        path, test, value = found.groups()
        known = ANY_KIND + (OF_PODS if kind == POD else ())
        if path not in known:
            raise bad_request(
                f'Unable to find "{kind.api_version}, Resource={kind.plural}" that match label '
                f'selector "", field selector "{selector}": field label not supported: {path}'
            )
        tests.append((path, value, test != "!="))
    return lambda obj: all((field(obj, path) == value) is equal for path, value, equal in tests)


def field(obj: Object, path: str) -> str:
    """A field's value by dotted path; '' when it is not set."""
    value: Any = obj
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return "" if value is None else str(value)


def selected_name(selector: str | None) -> str | None:
    """The name in `metadata.name=x`: what an authorizer takes a list's name to be."""
    found = re.search(r"(?:^|,)\s*metadata\.name\s*==?\s*([^,\s]+)", selector or "")
    return found[1] if found else None
