"""The repository keeps its own rules: `tidy.py` has them, each is shown here to bite."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import epp
from epp import document
from epp.core.registry import FILTERS, PICKERS, SCORERS
from tests import tidy

ROOT = Path(__file__).resolve().parent.parent
GENERATED = "epp/wire/pb/"
NOT_OURS = frozenset({"LICENSE"})

Rule = Callable[[str, str], list[str]]


# -- the tree ------------------------------------------------------------------------------


@cache
def paths() -> Collection[str]:
    """Every file of the repository: what git tracks or would add."""
    return sorted(path for path in set(_listed() or _walk()) if (ROOT / path).is_file())


@cache
def files() -> Mapping[str, str]:
    """Every text file of the repository; path -> text."""
    texts = ((path, _text(ROOT / path)) for path in paths())
    return {path: text for path, text in texts if text is not None}


def _listed() -> list[str]:
    if shutil.which("git") is None:
        return []
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    named = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    return [path for path in named.stdout.decode().split("\0") if path]


def _walk() -> list[str]:
    """Without git: everything but what tools leave behind."""
    made = re.compile(r"\.(?!ci$)|build$|dist$|__pycache__$|.*\.egg-info$")
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not made.match(name)]
        found += [(Path(folder) / name).relative_to(ROOT).as_posix() for name in names]
    return found


def _text(path: Path) -> str | None:
    if b"\0" in (data := path.read_bytes()):
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def sources() -> Mapping[str, str]:
    """The Python files that people write."""
    return {
        path: text
        for path, text in files().items()
        if path.endswith(".py") and not path.startswith(GENERATED)
    }


@cache
def contracts() -> Collection[str]:
    return {name for text in sources().values() for name in tidy.protocol_methods(text)}


@cache
def project() -> Mapping[str, object]:
    return tomllib.loads(files()["pyproject.toml"])["project"]


@cache
def third_party() -> Mapping[str, Collection[str]]:
    return {
        module: {_normal(owner) for owner in owners}
        for module, owners in packages_distributions().items()
    }


def declared(path: str) -> Collection[str]:
    """Distributions that pyproject.toml names for this part of the tree."""
    meta = project()
    wanted = list(meta["dependencies"])
    if not path.startswith("epp/"):
        wanted += meta["optional-dependencies"]["dev"]
    else:
        wanted += meta["optional-dependencies"]["kv-events"]  # imported only when asked for
    return {_normal(re.split(r"[<>=!~;\[ ]", each)[0]) for each in wanted}


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def docstrings(path: str, source: str) -> list[str]:
    return tidy.docstrings(path, source, contracts())


def undeclared_imports(path: str, source: str) -> list[str]:
    return tidy.undeclared_imports(path, source, third_party(), declared(path))


SOURCE_RULES: list[Rule] = [
    tidy.import_direction,
    tidy.star_imports,
    undeclared_imports,
    tidy.module_size,
    tidy.function_size,
    docstrings,
    tidy.sentence_names,
]


@pytest.mark.parametrize("rule", SOURCE_RULES, ids=lambda rule: rule.__name__)
def test_every_source_file_keeps_the_rule(rule: Rule) -> None:
    assert len(sources()) > 50
    complaints = [line for path, text in sources().items() for line in rule(path, text)]
    assert not complaints, "\n" + "\n".join(complaints)


def test_without_git_no_file_is_overlooked() -> None:
    assert set(paths()) <= set(_walk())


def test_no_file_says_a_forbidden_word() -> None:
    complaints = [
        line
        for path, text in files().items()
        if path not in NOT_OURS
        for line in tidy.forbidden_words(path, text)
    ]
    assert not complaints, "\n" + "\n".join(complaints)


def test_no_two_test_modules_share_a_name() -> None:
    names = Counter(path.rpartition("/")[2] for path in sources() if "/test_" in path)
    assert [name for name, times in names.items() if times > 1] == []


def test_every_folder_of_recorded_data_says_how_it_was_taken() -> None:
    data = [path.split("/") for path in paths() if re.match(r"tests/\w+/data/", path)]
    folders = {"/".join(parts[:4]) for parts in data}
    assert folders
    assert [folder for folder in sorted(folders) if f"{folder}/README.md" not in paths()] == []


def test_the_version_is_the_same_wherever_it_stands() -> None:
    image = re.search(r"^ARG VERSION=(\S+)$", files()["Dockerfile"], re.MULTILINE)
    assert image is not None
    assert epp.__version__ == project()["version"] == image[1]


# -- pages and targets ---------------------------------------------------------------------


def pages() -> Mapping[str, str]:
    return {path: text for path, text in files().items() if path.endswith(".md")}


def test_every_link_between_pages_leads_somewhere() -> None:
    pictures_too = {**dict.fromkeys(paths(), ""), **files()}
    rule = partial(tidy.broken_links, files=pictures_too)
    complaints = [line for path, text in pages().items() for line in rule(path, text)]
    assert not complaints, "\n" + "\n".join(complaints)


def test_every_page_can_be_reached_from_the_readme() -> None:
    assert tidy.unlinked_pages(files()) == []


def test_every_plugin_is_on_the_configuration_page() -> None:
    page = files()["docs/configuration.md"]
    missing = [
        name for table in (FILTERS, SCORERS, PICKERS) for name in table if f"`{name}`" not in page
    ]
    assert missing == []


@pytest.mark.parametrize("name", sorted(document.PAGES))
def test_a_generated_page_is_as_the_code_would_write_it(name: str) -> None:
    assert files()[f"docs/{name}"] == document.PAGES[name](), "run `make docs`"


def test_a_generated_page_that_was_edited_is_noticed_and_put_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(document, "DOCS", tmp_path)

    def run(*flags: str) -> int:
        monkeypatch.setattr(sys, "argv", ["document", *flags])
        return document.main()

    assert (run("--check"), run(), run("--check")) == (1, 0, 0)
    (tmp_path / "flags.md").write_text("edited by hand")
    capsys.readouterr()
    assert run("--check") == 1
    assert capsys.readouterr().err == "docs/flags.md is out of date: run `make docs`\n"


def test_make_help_lists_every_target() -> None:
    makefile = files()["Makefile"]
    assert tidy.makefile_targets(makefile) == []
    listed = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {line.split()[0] for line in listed.stdout.splitlines()} == tidy.targets(makefile)


def test_every_make_command_on_a_page_is_a_target() -> None:
    known = tidy.targets(files()["Makefile"])
    complaints = [
        line for path, text in pages().items() for line in tidy.make_commands(path, text, known)
    ]
    assert complaints == []


# -- each rule bites -----------------------------------------------------------------------

DOC = '"""What it is."""\n'


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("epp/core/a.py", "import asyncio"),
        ("epp/core/a.py", "from time import monotonic"),
        ("epp/core/a.py", "import os.path"),
        ("epp/core/scorers/a.py", "def f():\n    if x:\n        import logging"),
        ("epp/core/a.py", "from epp.wire import extproc"),
        ("epp/core/a.py", "from epp import config"),
        ("epp/core/scorers/a.py", "from ...wire import extproc"),
        ("epp/core/a.py", "from .. import config"),
        ("epp/core/a.py", "import random"),
        ("epp/core/a.py", "from random import random"),
        ("epp/wire/a.py", "from epp.config import Plan"),
        ("epp/wire/a.py", "import socket"),
        ("epp/wire/a.py", "from epp.wire.pb import epp_health_pb2"),
        ("epp/config/a.py", "from epp.edge.scrape import Scraper"),
        ("epp/config/a.py", "from pathlib import Path"),
        ("epp/edge/a.py", "from epp.app import run"),
        ("epp/edge/a.py", "import epp"),
        ("epp/app.py", "from epp.cli import main"),
        ("epp/document.py", "from bench.stack import Stack"),
        ("bench/a.py", "from tests.e2e import site"),
    ],
)
def test_an_import_that_points_the_wrong_way_is_found(path: str, source: str) -> None:
    assert tidy.import_direction(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("epp/core/a.py", "from random import Random\nfrom epp.core.model import Load"),
        ("epp/core/a.py", "from .model import Load\nfrom . import model\nimport msgspec"),
        ("epp/wire/a.py", "from epp.core import messages"),
        ("epp/config/a.py", "from epp.core.errors import ConfigError"),
        ("epp/edge/a.py", "import asyncio, time\nfrom epp.config.units import Seconds"),
        ("epp/cli.py", "from epp.app import run"),
        ("bench/a.py", "from epp.wire.pb import epp_extproc_pb2"),
        ("tests/unit/test_a.py", "from epp.wire.pb import epp_health_pb2"),
    ],
)
def test_an_import_that_points_downwards_is_allowed(path: str, source: str) -> None:
    assert tidy.import_direction(path, source) == []


def test_a_star_import_is_found_wherever_it_stands() -> None:
    assert tidy.star_imports("tests/a.py", "from epp.core.model import *")
    assert not tidy.star_imports("tests/a.py", "from epp.core.model import Load")


@pytest.mark.parametrize(("path", "fine"), [("epp/edge/a.py", False), ("tests/a.py", True)])
def test_what_only_tests_install_is_not_imported_by_the_package(path: str, fine: bool) -> None:
    assert (undeclared_imports(path, "import hypothesis.strategies") == []) is fine


def test_a_package_that_is_there_by_accident_is_found() -> None:
    owners = {"multidict": {"multidict"}, "yaml": {"pyyaml"}}
    rule = partial(tidy.undeclared_imports, third_party=owners, declared={"pyyaml", "aiohttp"})
    assert rule("epp/a.py", "import multidict")
    assert rule("epp/a.py", "def f():\n    import nobody_installed_this")
    assert not rule("epp/a.py", "import yaml, json\nfrom epp import app")


@pytest.mark.parametrize(
    ("path", "most"), [("epp/a.py", 499), ("bench/a.py", 499), ("tests/a.py", 799)]
)
def test_a_module_that_grew_by_one_line_too_many_is_found(path: str, most: int) -> None:
    assert not tidy.module_size(path, "x = 1\n" * most)
    assert tidy.module_size(path, "x = 1\n" * (most + 1))


@pytest.mark.parametrize("start", ["def f():\n", "async def f():\n"])
def test_a_function_that_grew_by_one_line_too_many_is_found(start: str) -> None:
    assert not tidy.function_size("epp/a.py", start + "    x = 1\n" * 59)
    assert tidy.function_size("epp/a.py", start + "    x = 1\n" * 60)
    nested = "class C:\n    def g(self):\n        def f():\n" + "            x = 1\n" * 60
    assert len(tidy.function_size("epp/a.py", nested)) == 2


@pytest.mark.parametrize(
    "source",
    [
        "x = 1",
        DOC + "def f():\n    return 1",
        DOC + "async def f():\n    return 1",
        DOC + "class C:\n    x = 1",
        DOC + "class C:\n    '''C.'''\n    class D:\n        x = 1",
        DOC + "class C:\n    '''C.'''\n    def f(self):\n        x = 1\n        return x",
        DOC + "class C(Other):\n    '''C.'''\n    def f(self):\n        x = 1\n        return x",
        DOC + "class C:\n    '''C.'''\n    @property\n    def f(self):\n        x; y; z",
    ],
)
def test_something_public_without_a_docstring_is_found(source: str) -> None:
    assert len(docstrings("epp/a.py", source)) == 1
    assert len(docstrings("bench/a.py", source)) == 1
    assert docstrings("tests/a.py", source) == []


@pytest.mark.parametrize(
    "source",
    [
        "def _f():\n    return 1",
        "class _C:\n    def f(self):\n        x = 1\n        return x",
        "class C:\n    '''C.'''\n    def __len__(self):\n        x = 1\n        return x",
        "class C:\n    '''C.'''\n    def f(self):\n        return 1",
        "class C:\n    '''C.'''\n    @property\n    def f(self):\n        x = 1\n        return x",
        "class C(asyncio.Protocol):\n    '''C.'''\n    def eof_received(self):\n        x; y",
        "class C:\n    '''C.'''\n    def told(self):\n        x = 1\n        return x",
    ],
)
def test_what_is_private_or_plain_or_described_elsewhere_needs_no_docstring(source: str) -> None:
    listener = "class P(Protocol):\n    def told(self):\n        '''Told.'''"
    described = set(tidy.protocol_methods(listener))
    assert tidy.docstrings("epp/a.py", DOC + source, described) == []


@pytest.mark.parametrize(
    "words",
    [
        ("/tm", "p/x"),
        ("/roo", "t/.cache"),
        ("/wor", "k/main"),
        ("/hom", "e/me"),
        ("# TO", "DO: later"),
        ("FIX", "ME"),
        ("as the last ses", "sion found"),
        ("see known-fail", "ures.md"),
        ("issue", " #12"),
        ("--extra-index-", "url"),
    ],
)
def test_a_forbidden_word_is_found(words: tuple[str, str]) -> None:
    assert tidy.forbidden_words("a.md", "first line\n" + "".join(words))[0].startswith("a.md:2: ")


def test_words_that_only_look_forbidden_are_let_through() -> None:
    text = "session-affinity-scorer, a TLS session, aiohttp.ClientSession, network/tmpfs, tissue"
    assert tidy.forbidden_words("a.md", text) == []


def test_a_test_whose_name_says_nothing_is_found() -> None:
    path = "tests/unit/test_a.py"
    for name in ("test_it", "test_pool_works", "testing_all_of_the_pool", "test___pool__works"):
        assert tidy.sentence_names(path, f"class C:\n    async def {name}(self): ...")
    assert tidy.sentence_names(path, "def test_F05_an_endpoint_leaves(): ...") == []


def test_links_and_pages_that_lead_nowhere_are_found() -> None:
    tree = {
        "README.md": "[a](docs/a.md), [b](docs/a.md#the-way-its-gone), [c](https://example.org/x)",
        "docs/a.md": "# A\n## The way, it's gone\n[up](../README.md) [here](#a) [folder](../epp)",
        "epp/app.py": "",
    }
    for path, text in tree.items():
        assert tidy.broken_links(path, text, tree) == []
    assert tidy.broken_links("docs/a.md", "[b](b.md)", tree)
    assert tidy.broken_links("README.md", "[b](docs/a.md#the-way)", tree)
    assert tidy.unlinked_pages(tree) == []
    assert tidy.unlinked_pages({**tree, "docs/b.md": "[c](c.md)", "docs/c.md": "[b](b.md)"}) != []


def test_a_target_without_help_and_a_command_without_target_are_found() -> None:
    makefile = ".PHONY: a \\\n\tb\na:  ## the first\n\techo\nb: a  ## the second\n"
    assert tidy.targets(makefile) == {"a", "b"}
    assert tidy.makefile_targets(makefile) == []
    assert len(tidy.makefile_targets(makefile + "c:\n")) == 2
    assert (
        tidy.make_commands("a.md", "`make a`, `make bench-…`\nmake b  # x\nmake room", "ab") == []
    )
    assert len(tidy.make_commands("a.md", "`make c`\n\nmake d   # x", "ab")) == 2
