"""The fake on a thread of its own, for tests that are no coroutines or run another process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from tests.kubernetes.authority import Access
from tests.kubernetes.calls import Call
from tests.kubernetes.fake_api import FakeApi
from tests.kubernetes.faults import Faults
from tests.kubernetes.store import Store

T = TypeVar("T")
PATIENCE_S = 30.0
"""Longest wait for the other thread."""


class FakeApiThread:
    """A `FakeApi` and its loop; a context manager with the arguments of `FakeApi`.

    `store`, `faults` and `access` can be used as those of a `FakeApi`: each call of a method is
    made on the loop, and returns or raises what it did there. `call` does it with any function.
    """

    def __init__(self, **options: Any) -> None:
        self._api = FakeApi(**options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fake-api", daemon=True)
        self._stack = AsyncExitStack()
        self.store = cast("Store", _OnLoop(self, self._api.store))
        self.faults = cast("Faults", _OnLoop(self, self._api.faults))
        self.access = cast("Access", _OnLoop(self, self._api.access))

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._wait(self._stack.enter_async_context(self._api))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._wait(self._stack.aclose())
        finally:
            self._stop()

    @property
    def url(self) -> str:
        return self._api.url

    @property
    def port(self) -> int:
        return self._api.port

    @property
    def ca(self) -> bytes | None:
        return self._api.ca

    @property
    def token(self) -> str | None:
        return self._api.token

    @token.setter
    def token(self, token: str | None) -> None:
        self.call(lambda api: api.rotate(token))

    @property
    def seen(self) -> list[Call]:
        """The requests that came in so far."""
        return self.call(lambda api: list(api.seen))

    def calls(self, verb: str | None = None, plural: str | None = None) -> list[Call]:
        return self.call(lambda api: api.calls(verb, plural))

    def kubeconfig(self, folder: Path, **options: Any) -> Path:
        return self.call(lambda api: api.kubeconfig(folder, **options))

    def service_account(self, folder: Path, **options: Any) -> dict[str, str]:
        return self.call(lambda api: api.service_account(folder, **options))

    def until(self, condition: Callable[[FakeApi], object], within_s: float = 15.0) -> None:
        """Wait until a condition holds; it is looked at on the loop. Raises: TimeoutError."""
        self._wait(self._api.until(lambda: condition(self._api), within_s), within_s)

    def outage(self) -> None:
        """See `FakeApi.outage`."""
        self._wait(self._api.outage())

    def recover(self) -> None:
        """See `FakeApi.recover`."""
        self._wait(self._api.recover())

    def call(self, function: Callable[[FakeApi], T]) -> T:
        """Call a function with the `FakeApi`, on its loop; what it returns or raises."""

        async def called() -> T:
            return function(self._api)

        return cast("T", self._wait(called()))

    def _wait(self, work: Any, more_s: float = 0.0) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(PATIENCE_S + more_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


class _OnLoop:
    """Stands for an object that belongs to the loop: methods are called there."""

    def __init__(self, thread: FakeApiThread, target: object) -> None:
        self.__dict__.update({"_thread": thread, "_target": target})

    def __getattr__(self, name: str) -> Any:
        thread, target = self.__dict__["_thread"], self.__dict__["_target"]
        if not callable(getattr(target, name)):
            return thread.call(lambda _: getattr(target, name))

        def called(*args: Any, **options: Any) -> Any:
            return thread.call(lambda _: getattr(target, name)(*args, **options))

        return called

    def __setattr__(self, name: str, value: Any) -> None:
        target = self.__dict__["_target"]
        self.__dict__["_thread"].call(lambda _: setattr(target, name, value))
