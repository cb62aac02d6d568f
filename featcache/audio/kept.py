"""What was made last is kept, and made once, though several threads ask for it."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from featcache.errors import AudioError

_Result = TypeVar("_Result")

_lock = threading.Lock()
"""Guards all of them: a process may fork only while it is free."""


class Kept(Generic[_Result]):
    """The results that were used last.

    Args:
        limit: What all results may weigh together. The last one is kept in any case.
        weigh: Gives a result's weight: by default, each weighs 1.
    """

    def __init__(self, limit: int, weigh: Callable[[_Result], int] = lambda _: 1) -> None:
        self._limit = limit
        self._weigh = weigh
        self._results: OrderedDict[Hashable, Future[_Result]] = OrderedDict()
        self._weights: dict[Hashable, int] = {}  # of those that are made
        self._total = 0
        _all_kept.add(self)

    def get(self, key: Hashable, make: Callable[[], _Result]) -> _Result:
        """The result for a key, which `make` makes if it is not kept.

        An AudioError that `make` raises is kept, too, and anything else it raises is not.
        """
        with _lock:
            known = self._results.get(key)
            future = known or self._results.setdefault(key, Future())
            self._results.move_to_end(key)
        if known is None:
            self._make(key, make, future)
        if isinstance(fault := future.exception(), AudioError):
            raise AudioError(fault.reason, str(fault))  # one that is raised again and again gathers tracebacks
        return future.result()

    def forget(self) -> None:
        """Keep nothing of what is made."""
        with _lock:
            for key in self._weights:
                del self._results[key]
            self._weights.clear()
            self._total = 0

    def _make(self, key: Hashable, make: Callable[[], _Result], future: Future[_Result]) -> None:
        weight = 1
        try:
            result = make()
        except AudioError as fault:
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
            self._weights[key] = weight
            self._total += weight
            for oldest in [*self._results]:
                if self._total <= self._limit:
                    break
                if oldest != key and oldest in self._weights:
                    self._total -= self._weights.pop(oldest)
                    del self._results[oldest]

    def after_fork(self) -> None:
        """Forget, in a child, what threads of its parent were making: here nobody goes on with it."""
        for key in [key for key, future in self._results.items() if not future.done()]:
            del self._results[key]


_all_kept: weakref.WeakSet[Kept[Any]] = weakref.WeakSet()


def _in_child() -> None:
    for kept in _all_kept:
        kept.after_fork()
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)
