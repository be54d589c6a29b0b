"""The house rules that a program can check: functions from a file's text to complaints.

A rule gets a path (from the root, with slashes) and a text, never the file system, so that
`test_tidy.py` can show it a planted violation. A complaint is one line: where, what is wrong, and
what to do about it.
"""

from __future__ import annotations

import ast
import posixpath
import pydoc
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

MODULE_LINES = 500
TEST_MODULE_LINES = 800
FUNCTION_LINES = 60
TEST_NAME_WORDS = 3

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

parse = lru_cache(maxsize=None)(ast.parse)


# -- imports -------------------------------------------------------------------------------

OUTSIDE = frozenset(
    {
        *("aiohttp", "asyncio", "concurrent", "envoy_data_plane", "grpc", "http", "httpx"),
        *("importlib", "kubernetes", "logging", "multiprocessing", "os", "pathlib"),
        *("prometheus_client", "requests", "selectors", "shutil", "signal", "socket"),
        *("socketserver", "ssl", "subprocess", "tempfile", "threading", "time", "urllib"),
        *("uvloop", "zmq"),
    }
)
"""What does I/O, reads a clock or the environment."""
ORACLE = "epp.wire.pb"
"""Generated code for tests and benches; the wheel is built without it."""


OWN = frozenset({"bench", "epp", "protos", "tests"}) | sys.stdlib_module_names
"""Top-level names that no distribution has to bring."""


class Layer(NamedTuple):
    """What one part of the tree may import."""

    ours: tuple[str, ...]
    """Of `epp`, `bench` and `tests`: these and what is below them."""
    banned: frozenset[str] = frozenset()
    """Top-level names of other packages."""


BELOW_APP = ("epp.edge", "epp.wire", "epp.config", "epp.core", "epp.flags")
LAYERS: Mapping[str, Layer] = {
    "epp/core/": Layer(("epp.core",), OUTSIDE),
    "epp/wire/": Layer(("epp.wire", "epp.core"), OUTSIDE),
    "epp/config/": Layer(("epp.config", "epp.core"), OUTSIDE),
    "epp/edge/": Layer(("epp.edge", "epp.wire", "epp.config", "epp.core")),
    "epp/flags.py": Layer(("epp.config", "epp.core")),
    "epp/scraping.py": Layer(BELOW_APP),
    "epp/sites.py": Layer((*BELOW_APP, "epp.scraping")),
    "epp/cluster.py": Layer((*BELOW_APP, "epp.sites")),
    "epp/app.py": Layer((*BELOW_APP, "epp.build", "epp.cluster", "epp.scraping", "epp.sites")),
    "epp/": Layer(("epp",)),
    "bench/": Layer(("bench", "epp")),
}
"""By path; the first that fits."""


def import_direction(path: str, source: str) -> list[str]:
    """Imports, nested ones too, point one way: cli, app, edge, wire, core."""
    layer = next((LAYERS[start] for start in LAYERS if path.startswith(start)), None)
    if layer is None:
        return []
    complaints = []
    for line, module in imports(path, source):
        top = module.partition(".")[0]
        if top in ("bench", "epp", "tests"):
            if not _below(module, layer.ours):
                complaints.append(f"{path}:{line}: imports {module}, which is not below it")
            elif path.startswith("epp/") and _below(module, (ORACLE,)):
                complaints.append(f"{path}:{line}: imports {module}, which is not installed")
        elif top in layer.banned:
            complaints.append(f"{path}:{line}: imports {module}: no I/O and no clock here")
        elif layer.banned and top == "random" and module != "random.Random":
            complaints.append(f"{path}:{line}: imports {module}: chance comes in as a Random")
    return complaints


def imports(path: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported: `from a import b` is `a.b`."""
    package = path.split("/")[:-1]
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{start}.{name.name}") for name in node.names)


def _below(module: str, tops: tuple[str, ...]) -> bool:
    return any(module == top or module.startswith(f"{top}.") for top in tops)


def star_imports(path: str, source: str) -> list[str]:
    """A reader can find where each name comes from."""
    return [
        f"{path}:{line}: imports {module}; name what is used"
        for line, module in imports(path, source)
        if module.endswith(".*")
    ]


def undeclared_imports(
    path: str, source: str, third_party: Mapping[str, Collection[str]], declared: Collection[str]
) -> list[str]:
    """What is imported is declared, not just there because something else needs it.

    Args:
        third_party: top-level module -> distributions that install it, in lower case. A module that
            is not in it is taken for a distribution of that name.
        declared: distributions that pyproject.toml names for this part of the tree.
    """
    complaints = []
    for line, module in imports(path, source):
        top = module.partition(".")[0]
        owners = third_party.get(top, {top})
        if top not in OWN and not any(owner in declared for owner in owners):
            complaints.append(f"{path}:{line}: imports {module}: declare {' or '.join(owners)}")
    return complaints


# -- sizes ---------------------------------------------------------------------------------


def module_size(path: str, source: str) -> list[str]:
    """Modules stay below 500 lines, those of the tests below 800."""
    most = TEST_MODULE_LINES if path.startswith("tests/") else MODULE_LINES
    lines = len(source.splitlines())
    return [f"{path}: {lines} lines; split it below {most}"] if lines >= most else []


def function_size(path: str, source: str) -> list[str]:
    """Functions have 60 lines at most, docstring included, decorators not."""
    return [
        f"{path}:{node.lineno}: {node.name} has {lines} lines; at most {FUNCTION_LINES}"
        for node in ast.walk(parse(source))
        if isinstance(node, FUNCTIONS)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    ]


# -- docstrings ----------------------------------------------------------------------------


def docstrings(path: str, source: str, contracts: Collection[str] = ()) -> list[str]:
    """Modules, public classes and public functions say what they are for.

    A method need not when its name is not its own (`contracts`; an override of the standard
    library) or when one statement (in a property: two) says as much as a sentence would.
    """
    if not path.startswith(("epp/", "bench/")):
        return []
    tree = parse(source)
    missing = [] if ast.get_docstring(tree) else [f"{path}:1: the module has no docstring"]
    for node, owner in _public(tree):
        if ast.get_docstring(node) or (owner and _needs_none(node, owner, contracts)):
            continue
        name = f"{owner.name}.{node.name}" if owner else node.name
        missing.append(f"{path}:{node.lineno}: {name} has no docstring")
    return missing


def protocol_methods(source: str) -> Iterator[str]:
    """Names of the methods of every `Protocol` in a module: described there, once."""
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.ClassDef) and any(
            ast.unparse(base).partition("[")[0] == "Protocol" for base in node.bases
        ):
            yield from (each.name for each in node.body if isinstance(each, FUNCTIONS))


def _public(
    scope: ast.Module | ast.ClassDef,
) -> Iterator[tuple[Function | ast.ClassDef, ast.ClassDef | None]]:
    owner = scope if isinstance(scope, ast.ClassDef) else None
    for node in scope.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
            yield node, owner
            if isinstance(node, ast.ClassDef):
                yield from _public(node)


def _needs_none(
    node: Function | ast.ClassDef, owner: ast.ClassDef, contracts: Collection[str]
) -> bool:
    if isinstance(node, ast.ClassDef):
        return False
    bases = (pydoc.locate(ast.unparse(base)) for base in owner.bases)
    inherited = any(base is not None and hasattr(base, node.name) for base in bases)
    is_property = "property" in (ast.unparse(each) for each in node.decorator_list)
    return node.name in contracts or inherited or len(node.body) <= 1 + is_property


# -- words ---------------------------------------------------------------------------------

# The brackets keep these lines from finding themselves.
FORBIDDEN: Mapping[str, str] = {
    r"/(?:tm[p]|roo[t]|wor[k])/|/hom[e]/\w": "a path of one machine",
    r"\b(?:TOD[O]|FIXM[E]|XX[X])\b": "do it or leave it out",
    r"(?i)\b(?:this|last|next|previous|earlier|other|my|our) sessio[n]s?\b": "say what is, not who",
    r"(?i)\bhelper sessio[n]|\bsub-?agent[s]?\b|\bcoding agent[s]?\b": "say what is, not who",
    r"(?i)known-failure[s]|house-styl[e]|shared/(?:referenc[e]|case[s])": "a page not in here",
    r"(?i)\bissue #?\d|/issues/\d|\bindex-ur[l]\b": "nothing to look up outside of the repository",
}
"""What no file may say, and why not."""


def forbidden_words(path: str, text: str) -> list[str]:
    """The files speak about the code as it is, on whatever machine."""
    return [
        f"{path}:{text.count(chr(10), 0, found.start()) + 1}: {found.group()!r}: {why}"
        for pattern, why in FORBIDDEN.items()
        for found in re.finditer(pattern, text)
    ]


def sentence_names(path: str, source: str) -> list[str]:
    """Names of tests are sentences, and stand where pytest looks for them."""
    if not path.startswith("tests/"):
        return []
    collected = path.rpartition("/")[2].startswith("test_")
    complaints = []
    for node in ast.walk(parse(source)):
        if not isinstance(node, FUNCTIONS) or not node.name.startswith("test"):
            continue
        words = [word for word in node.name.split("_")[1:] if word]
        if collected and (not node.name.startswith("test_") or len(words) < TEST_NAME_WORDS):
            complaints.append(f"{path}:{node.lineno}: {node.name} is not a sentence")
    return complaints


# -- pages and targets ---------------------------------------------------------------------

_LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def links(path: str, text: str) -> Iterator[tuple[str, str]]:
    """Targets of a page's links within the repository: path from the root, anchor or ''."""
    for target, anchor in _LINK.findall(text):
        folder = posixpath.dirname(path)
        yield (posixpath.normpath(posixpath.join(folder, target)) if target else path), anchor


def broken_links(path: str, text: str, files: Mapping[str, str]) -> list[str]:
    """Links lead somewhere. `files`: every file's path -> its text."""
    complaints = []
    for target, anchor in links(path, text):
        if target not in files and not any(each.startswith(f"{target}/") for each in files):
            complaints.append(f"{path}: links to {target}, which does not exist")
        elif anchor and anchor not in _anchors(files.get(target, "")):
            complaints.append(f"{path}: links to {target}#{anchor}, which has no such heading")
    return complaints


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def unlinked_pages(files: Mapping[str, str]) -> list[str]:
    """Every page of `docs/` can be reached from README.md."""
    reached, todo = {"README.md"}, ["README.md"]
    while todo:
        path = todo.pop()
        new = {target for target, _ in links(path, files.get(path, ""))} - reached
        reached |= new
        todo += sorted(new)
    return [
        f"{path}: no page that README.md leads to links to it"
        for path in sorted(files)
        if path.startswith("docs/") and path.endswith(".md") and path not in reached
    ]


def targets(makefile: str) -> set[str]:
    """The targets of a Makefile that stand for no file."""
    text = makefile.replace("\\\n", " ")
    return {
        name for line in re.findall(r"^\.PHONY:(.*)$", text, re.MULTILINE) for name in line.split()
    }


def makefile_targets(makefile: str) -> list[str]:
    """Every target is phony, and says what it is for."""
    named = re.findall(r"^([a-z][\w-]*):(.*)$", makefile, re.MULTILINE)
    return [
        f"Makefile: {name} has no line of help" for name, rest in named if "## " not in rest
    ] + [f"Makefile: {name} is not in .PHONY" for name, _ in named if name not in targets(makefile)]


def make_commands(path: str, text: str, known: Collection[str]) -> list[str]:
    """`make x` on a page is a target there is."""
    named = re.findall(r"`make ([a-z][\w-]*)|^make ([a-z][\w-]*) +#", text, re.MULTILINE)
    return [
        f"{path}: `make {name}` is no target"
        for name in (first or second for first, second in named)
        if name not in known and not name.endswith("-")
    ]
