"""What was made last is kept, and made once, though several threads ask for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from featcache.errors import AudioError

_Result = TypeVar("_Result")


class Kept(Generic[_Result]):
    """The results that were used last.

    Args:
        limit: What all results may weigh together. The last one is kept in any case.
        weigh: Gives a result's weight: by default, each weighs 1.
    """

    def __init__(self, limit: int, weigh: Callable[[_Result], int] = lambda _: 1) -> None:
        self._limit = limit
        self._weigh = weigh
        self._lock = threading.Lock()  # guards what follows
        self._results: OrderedDict[Hashable, Future[_Result]] = OrderedDict()
        self._weights: dict[Hashable, int] = {}  # of those that are made
        self._total = 0

    def get(self, key: Hashable, make: Callable[[], _Result]) -> _Result:
        """The result for a key, which `make` makes if it is not kept.

        An AudioError that `make` raises is kept, too, and anything else it raises is not.
        """
        with self._lock:
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
        with self._lock:
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
            with self._lock:
                del self._results[key]
            future.set_exception(fault)
            raise
        else:
            weight = self._weigh(result)
            future.set_result(result)
        with self._lock:
            self._weights[key] = weight
            self._total += weight
            for oldest in [*self._results]:
                if self._total <= self._limit:
                    break
                if oldest != key and oldest in self._weights:
                    self._total -= self._weights.pop(oldest)
                    del self._results[oldest]
