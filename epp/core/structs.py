"""Base classes that carry what a struct's keywords say into a compiled build.

mypyc drops the keywords of a class (`frozen=True`) and keeps of its annotations only the plain
types. msgspec inherits keywords, so in a module that may be compiled (see setup.py) a struct
derives from a class of this one, which never is, and repeats the keyword for mypy and for people.
A struct that msgspec decodes into, or that has a `msgspec.field`, belongs in a module that is not
compiled. tests/unit/test_compiled.py holds us to both.
"""

from __future__ import annotations

import msgspec


class Frozen(msgspec.Struct, frozen=True):
    """A value: its fields do not change."""


class ByIdentity(msgspec.Struct, eq=False):
    """An object with an identity: equal to itself only, and hashable."""
