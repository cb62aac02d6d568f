"""What was made last is kept, and made once, though several threads ask for it."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from featcache.errors import AudioError

_Result = TypeVar("_Result")

# for so long an AudioError is kept: a disk may have room again, and a server may answer
_FAULT_SECONDS = 60.0
_lock = threading.Lock()  # guards all of them: a process may fork only while it is free


class Kept(Generic[_Result]):
    """The results that were used last, for at most so many `seconds`. The weights that
    `weigh` gives them add up to at most `limit`; by default each weighs 1, and the last
    one is kept in any case."""

    def __init__(
        self, limit: int, weigh: Callable[[_Result], int] = lambda _: 1, seconds: float = math.inf
    ) -> None:
        self._limit = limit
        self._weigh = weigh
        self._seconds = seconds
        self._results: OrderedDict[Hashable, Future[_Result]] = OrderedDict()
        # of each, its weight, and its end by `time.monotonic`
        self._made: dict[Hashable, tuple[int, float]] = {}
        self._total = 0
        _all_kept.add(self)

    def get(self, key: Hashable, make: Callable[[], _Result]) -> _Result:
        """The result for a key, which `make` makes if it is not kept. An AudioError that
        `make` raises is kept for a minute, and anything else it raises is not."""
        with _lock:
            if key in self._made and time.monotonic() > self._made[key][1]:
                self._drop(key)
            known = self._results.get(key)
            future = known or self._results.setdefault(key, Future())
            self._results.move_to_end(key)
        if known is None:
            self._make(key, make, future)
        if isinstance(fault := future.exception(), AudioError):
            # one that is raised again and again gathers tracebacks
            raise type(fault)(fault.reason, str(fault))
        return future.result()

    def forget(self) -> None:
        """Keep nothing of what is made."""
        with _lock:
            for key in [*self._made]:
                self._drop(key)

    def _drop(self, key: Hashable) -> None:
        del self._results[key]
        self._total -= self._made.pop(key)[0]

    def _make(self, key: Hashable, make: Callable[[], _Result], future: Future[_Result]) -> None:
        weight, seconds = 1, self._seconds
        try:
            result = make()
        except AudioError as fault:
            seconds = min(seconds, _FAULT_SECONDS)
            future.set_exception(fault)
        except BaseException as fault:
            with _lock:
                del self._results[key]
            future.set_exception(fault)
            raise
        else:
            weight = self._weigh(result)
            future.set_result(result)
        with _lock:
            self._made[key] = weight, time.monotonic() + seconds
            self._total += weight
            while self._total > self._limit:
                oldest = next(
                    (made for made in self._results if made != key and made in self._made), None
                )
                if oldest is None:
                    break
                self._drop(oldest)


_all_kept: weakref.WeakSet[Kept[Any]] = weakref.WeakSet()


def _in_child() -> None:
    """Forget what threads of the parent were making: here nobody goes on with it."""
    for kept in _all_kept:
        for key in [key for key, future in kept._results.items() if not future.done()]:
            del kept._results[key]
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)
