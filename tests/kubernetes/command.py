"""The command line: one fake API server to play with, until it is interrupted."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes.answers import RefusedError
from tests.kubernetes.fake_api import FakeApi
from tests.kubernetes.resources import CUSTOM, Object


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m tests.kubernetes.fake_api",
        description="Run a fake Kubernetes API server on 127.0.0.1 until it is interrupted. It "
        "prints its URL and the path of a kubeconfig; use that with kubectl or with epp.",
    )
    made.add_argument(
        "manifests", nargs="*", type=Path, help="YAML files, or folders of them, to start with"
    )
    made.add_argument("--port", type=int, default=0, help="default: a free one")
    made.add_argument("--plaintext", action="store_true", help="HTTP instead of HTTPS")
    made.add_argument("--token", default="admin", help="the bearer token (default: %(default)s)")
    made.add_argument("--namespace", default="default", help="of the kubeconfig's context")
    made.add_argument(
        "--absent",
        action="append",
        default=[],
        choices=sorted({kind.group for kind in CUSTOM}),
        help="API group whose CRDs are not installed; may be given again",
    )
    return made


def objects_in(path: Path) -> Iterator[tuple[Path, Object]]:
    """The objects of a YAML file, or of all .yaml, .yml and .json files below a folder."""
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in (".yaml", ".yml", ".json"))
    for file in files:
        for document in _documents(file):
            if isinstance(document, dict) and str(document.get("kind")).endswith("List"):
                yield from ((file, each) for each in document.get("items") or ())
            elif isinstance(document, dict):
                yield file, document
            elif document is not None:
                raise ValueError(f"{file}: not a Kubernetes object: {document!r}")


def _documents(file: Path) -> list[Any]:
    try:
        return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: {error}") from error


def load(api: FakeApi, paths: Sequence[Path]) -> int:
    """Put the objects of files and folders into the store.

    Returns: how many. Raises: ValueError naming the file and what is wrong with it.
    """
    count = 0
    for path in paths:
        for file, obj in objects_in(path):
            try:
                api.store.put(obj)
            except RefusedError as error:
                raise ValueError(f"{file}: {error}") from error
            except KeyError as error:
                raise ValueError(f"{file}: {error.args[0]}") from error
            count += 1
    return count


async def serve(args: argparse.Namespace, folder: Path) -> None:
    """Run until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    options = {"tls": not args.plaintext, "token": args.token, "absent": args.absent}
    async with FakeApi(port=args.port, grace_s=1.0, **options) as api:
        count = load(api, args.manifests)
        path = api.kubeconfig(folder, namespace=args.namespace)
        print(f"url:        {api.url}\nkubeconfig: {path}\nobjects:    {count}", flush=True)
        await stop.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns: the exit status; 2 when a manifest is wrong."""
    args = parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fake-api-") as folder:
        try:
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(serve(args, Path(folder)))
        except (ValueError, OSError) as error:
            print(f"error: {error}")
            return 2
    return 0
