"""Fetches audio at URLs before a worker wants it, by many threads that mostly wait for
servers.

The engine announces files (`expect`), a batch at a time and in order, as long as there
`is_room`; the worker that decodes a file takes it. Rows of a file share its copy as long
as one of them is expected. The next two containers are fetched while one is decoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from threading import Event, Lock

from featcache.audio.members import copy_of, fetch_ahead
from featcache.audio.remote import Fetched, StoppedError, TriedInVainError, fetch
from featcache.errors import AudioError, Reason, counted
from featcache.manifest.audio_locations import (
    AudioLocation,
    CopiedSource,
    Member,
    Url,
    locate,
    url_of,
)
from featcache.manifest.segments import Utterance

_PER_WORKER = 32
_MOST = 256
_LEAST = 64
"""Requests at once: enough for answers after 50 ms, and workers that decode 600 files/s."""

_MOST_IN_A_ROW = 100
"""Files in a row that cannot be fetched, after which the run gives up."""

_AHEAD_BYTES = 256 << 20
"""Bytes held ahead, approximately."""

_CONTAINERS_AHEAD = 2

_FILES_PER_CONTAINER = 25
"""The files that a container counts as if it cannot be fetched."""


@dataclass
class _File:
    fetched: Future[Fetched]
    takers: int = 0
    """The number of times that it will be taken."""
    size: int | None = None
    """The bytes that were fetched; None until then."""


class Downloads:
    """Files that are fetched, or were and are still wanted. Leaving the `with` block gives
    up the others.

    Args:
        workers: The number of threads that decode.
        give_up: Called once, with the reason, if nothing can be fetched any more.
        stop: Once it is set, nobody waits for a container or a command.
    """

    def __init__(
        self, root: AudioLocation, workers: int, give_up: Callable[[str], object], stop: Event
    ) -> None:
        self._root = root
        self._give_up = give_up
        self._stop = stop
        self._at_once = min(_MOST, max(_LEAST, _PER_WORKER * workers))
        self._threads = ThreadPoolExecutor(self._at_once, "featcache-fetch")
        self._containers_pool = ThreadPoolExecutor(_CONTAINERS_AHEAD, "featcache-fetch-container")
        self.closed = Event()
        """Set once nobody waits any more."""
        self._lock = Lock()  # guards what follows
        self._files: dict[Url, _File] = {}
        self._fetched_bytes = self._fetched_files = 0
        self._in_vain = 0  # files in a row
        self._containers: dict[Url, int] = {}  # all expected ones, numbered
        self._wanted_containers = 0  # the number after the last one that was wanted
        self._coming: deque[Url] = deque()  # containers that are not fetched yet

    def __enter__(self) -> Downloads:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()
        self._threads.shutdown(cancel_futures=True)
        self._containers_pool.shutdown(cancel_futures=True)

    @property
    def is_room(self) -> bool:
        """True if more should be expected."""
        with self._lock:
            if len(self._containers) >= self._wanted_containers + _CONTAINERS_AHEAD:
                return False
            sizes = [file.size for file in self._files.values()]
            in_progress = sizes.count(None)
            # At first their size is unknown: the requests grow with the fetched files.
            if in_progress >= min(2 * self._at_once, 8 + 2 * self._fetched_files):
                return False
            mean_bytes = self._fetched_bytes / max(1, self._fetched_files)
            return sum(filter(None, sizes)) + mean_bytes * in_progress < _AHEAD_BYTES

    def expect(self, utterances: Iterable[Utterance]) -> bool:
        """Begin to fetch a batch's containers and files, once for each run of equal paths.
        Returns True if there are any."""
        is_any = False
        for path, _ in groupby(utterances, key=lambda utterance: utterance.path):
            if "://" not in path and not isinstance(self._root, Url):
                continue  # `locate` takes 10 µs
            location = locate(self._root, path)
            url = url_of(location)
            if url is None:
                continue
            is_any = True
            with self._lock:
                if isinstance(location, Member):
                    if url not in self._containers:
                        self._containers[url] = len(self._containers)
                        self._coming.append(url)
                        self._fetch_containers()
                    continue
                if url not in self._files:
                    self._files[url] = _File(self._threads.submit(self._fetch, url))
                self._files[url].takers += 1
        return is_any

    def take(self, source: CopiedSource) -> Fetched:
        """Return a copy of audio, once it is there. Raises AudioError if there is none, or
        it is empty; StoppedError if the run is being stopped, and it takes long."""
        if isinstance(source, Member) and isinstance(source.container, Url):
            with self._lock:
                number = self._containers.get(source.container, -1)
                self._wanted_containers = max(self._wanted_containers, number + 1)
                self._fetch_containers()
        if not isinstance(source, Url):
            return copy_of(source, self.wait_for_copy)
        with self._lock:
            file = self._files.get(source)
            if file is not None:
                file.takers -= 1
                if not file.takers:
                    del self._files[source]
        return fetch(source, self._wait) if file is None else file.fetched.result()

    def _fetch_containers(self) -> None:
        """Begin to fetch the next containers; the caller holds the lock."""
        end = self._wanted_containers + _CONTAINERS_AHEAD
        while self._coming and self._containers[self._coming[0]] < end:
            self._containers_pool.submit(self._fetch_container, self._coming.popleft())

    def _fetch_container(self, container: Url) -> None:
        if self._containers[container] < self._wanted_containers:
            return  # the worker that wants it fetches it
        # The worker that wants it gets the error.
        with suppress(AudioError, StoppedError), self._counting(container, _FILES_PER_CONTAINER):
            fetch_ahead(container, self.wait_for_copy)

    def wait_for_copy(self, seconds: float) -> None:
        """Wait for a copy. Raises StoppedError if the run is being stopped."""
        if self._stop.wait(seconds) or self.closed.is_set():
            raise StoppedError

    @contextmanager
    def _counting(self, url: Url, files: int) -> Iterator[None]:
        """Count failures in a row, and give up if there are too many."""
        try:
            yield
        except TriedInVainError as error:
            with self._lock:
                before = self._in_vain
                self._in_vain += files
            if before < _MOST_IN_A_ROW <= before + files:
                noun = "audio file" if files == 1 else "container"
                count = counted(_MOST_IN_A_ROW // files, noun)
                self._give_up(f"{count} in a row could not be fetched, the last one {url}: {error}")
                self.closed.set()
            raise
        with self._lock:
            self._in_vain = 0

    def _fetch(self, url: Url) -> Fetched:
        with self._counting(url, 1):
            fetched = fetch(url, self._wait)
        with self._lock:
            self._fetched_bytes += fetched.stamp.size
            self._fetched_files += 1
            if url in self._files:
                self._files[url].size = fetched.stamp.size
        return fetched

    def _wait(self, seconds: float) -> None:
        if self.closed.wait(seconds):
            raise AudioError(Reason.FILE_UNREADABLE, "cannot be fetched: the run ends")
