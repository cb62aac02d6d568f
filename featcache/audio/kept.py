"""A cache of results, each made once even if several threads ask for it."""

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

_FAULT_SECONDS = 60.0  # after which a disk may have room again, and a server may answer
_lock = threading.Lock()  # guards all caches: a process may fork only while it is free


class Kept(Generic[_Result]):
    """The results used last, for so many `seconds`. Their weights add up to at most
    `limit`, but the last result is always kept."""

    def __init__(
        self, limit: int, weigh: Callable[[_Result], int] = lambda _: 1, seconds: float = math.inf
    ) -> None:
        self._limit = limit
        self._weigh = weigh
        self._seconds = seconds
        self._results: OrderedDict[Hashable, Future[_Result]] = OrderedDict()
        self._made: dict[Hashable, tuple[int, float]] = {}  # weights, ends by `time.monotonic`
        self._total = 0
        _all_kept.add(self)

    def get(self, key: Hashable, make: Callable[[], _Result]) -> _Result:
        """Return the result for a key, made unless it is kept. An AudioError of `make` is
        kept for a minute."""
        with _lock:
            if key in self._made and time.monotonic() > self._made[key][1]:
                self._drop(key)
            is_new = key not in self._results
            future = self._results.setdefault(key, Future())
            self._results.move_to_end(key)
        if is_new:
            self._make(key, make, future)
        fault = future.exception()
        if isinstance(fault, AudioError):  # a copy, since raising again gathers tracebacks
            raise type(fault)(fault.reason, str(fault))
        return future.result()

    def forget(self) -> None:
        """Drop all results."""
        with _lock:
            for key in list(self._made):
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
            for oldest in list(self._results):
                if self._total <= self._limit:
                    break
                if oldest != key and oldest in self._made:
                    self._drop(oldest)


_all_kept: weakref.WeakSet[Kept[Any]] = weakref.WeakSet()


def _in_child() -> None:
    for kept in _all_kept:
        for key in [key for key, future in kept._results.items() if not future.done()]:
            del kept._results[key]
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)
