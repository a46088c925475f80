"""Values between the operations of one step on one rank, by (name, layer, micro-batch, chunk)."""

from __future__ import annotations

import threading
from typing import Any

from bench.execute.streams import Streams


class Stopped(Exception):  # noqa: N818 - not an error of its own
    """Another thread failed, and the step is over."""


Key = tuple[str, int, int, int]


class Values:
    """A value is put once and lives until the last of its uses took it. What is there once has chunk 0."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._held: dict[Key, tuple[Any, int]] = {}
        self._changed = threading.Condition()
        self._stopped = False

    def put(self, name: str, layer: int, microbatch: int, value: Any, uses: int = 1, chunk: int = 0) -> None:
        with self._changed:
            if self._stopped:
                return
            key = (name, layer, microbatch, chunk)
            assert key not in self._held, f"{key} is there already"
            self._held[key] = (value, uses)
            self._changed.notify_all()

    def take(self, name: str, layer: int, microbatch: int, chunk: int = 0) -> Any:
        """The value, once less to be used. Raises KeyError where it is not there."""
        with self._changed:
            key = (name, layer, microbatch, chunk)
            value, uses = self._held.pop(key)
            if uses > 1:
                self._held[key] = (value, uses - 1)
        self._streams.hold(value)
        return value

    def peek(self, name: str, layer: int, microbatch: int, chunk: int = 0) -> Any:
        """The value, which stays. Raises KeyError where it is not there."""
        with self._changed:
            value = self._held[name, layer, microbatch, chunk][0]
        self._streams.hold(value)
        return value

    def wait(self, name: str, layer: int, microbatch: int, chunk: int = 0) -> Any:
        """`peek`, as soon as the value is there. Raises Stopped."""
        key = (name, layer, microbatch, chunk)
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or key in self._held)
            if self._stopped:
                raise Stopped
        return self.peek(*key)

    def stop(self) -> None:
        """Lets go of all values and of all who wait."""
        with self._changed:
            self._stopped = True
            self._held.clear()
            self._changed.notify_all()

    @property
    def names(self) -> list[Key]:
        """What is held; nothing, once a step has ended well."""
        with self._changed:
            return sorted(self._held)
