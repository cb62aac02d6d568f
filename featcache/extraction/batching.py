"""The choice how rows share a batch, by what the extractor declares and a probe has measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from featcache.errors import ConfigError, did_you_mean, listing, percent
from featcache.extractors import Extractor, Params
from featcache.extractors.base import BATCHINGS, Batching, declared_batchings


@dataclass(frozen=True)
class BatchingChoice:
    """The choice how rows share a batch."""

    batching: Batching
    """One of `BATCHINGS`; `frames` for extractors that take no rows."""
    mismatch: float | None = None
    """The share of codes (or of frames of floats) that differed from each clip alone in
    fp32, in a probe of this device with this batching; None without a probe."""
    note: str | None = None


def precision_of(params: Params | None) -> str:
    """Return the precision of an extractor's parameters."""
    return str(getattr(params, "precision", "fp32"))


_Probes = Iterable[Mapping[str, Any]]
"""Documents of `featcache probe` that are kept with a version."""


def choose_batching(
    extractor: Extractor[Params],
    probes: _Probes,
    device: str,
    request: str | None = None,
    allow_mismatch: bool = False,
) -> BatchingChoice:
    """Choose how rows share a batch. Raises ConfigError if a request is unknown, or looser
    than declared, or found to change frames, unless `allow_mismatch`.

    Without a request, it is the loosest batching that the extractor declares and that the
    newest probe of the `device` (a label), if any, found to change no frame by more than
    rounding."""
    kind, where = type(extractor).__name__, f"--batching {request}"
    only = extractor.batching
    if not extractor.takes_rows:
        if request not in (None, only):
            raise ConfigError(
                f"{where}: {kind} has one batching policy, {only}: leave --batching out"
            )
        return BatchingChoice(only)
    if request not in (None, *BATCHINGS):
        meant = did_you_mean(str(request), BATCHINGS)
        choices = listing(BATCHINGS)
        raise ConfigError(f"{where}: there is no such policy{meant}; choose from {choices}")
    measured = _measured(probes, device, precision_of(getattr(extractor, "params", None)))
    disturbed = {name: trial["disturbed"] for name, trial in measured.items() if trial["disturbed"]}
    declared = declared_batchings(extractor)
    cleanest = ["single", *(name for name in declared if name not in disturbed)][-1]
    preferred = request or declared[-1]
    objection = None
    if preferred in disturbed:
        share = percent(disturbed[preferred])
        objection = f"by the probe of {device}, {preferred} changes {share} of the frames"
    elif preferred not in declared:
        objection = f"it is looser than {declared[-1]}, the loosest policy that {kind} declares"
        if preferred in measured:
            objection += "; a probe found no difference in its sample"
    if request and objection and not allow_mismatch:
        raise ConfigError(
            f"{where}: {objection}: use --batching {cleanest}, or add --allow-mismatch"
        )
    chosen = request or cleanest
    mismatch = measured.get(chosen, {}).get("mismatch")
    return BatchingChoice(chosen, mismatch, objection and f"batching {chosen}: {objection}")


def _measured(probes: _Probes, device: str, precision: str) -> dict[str, Mapping[str, Any]]:
    """Return the measurements of the device's newest probe at a precision, by batching."""
    of_device = [probe for probe in probes if probe.get("device") == device]
    newest: Mapping[str, Any] = max(of_device, key=lambda probe: str(probe.get("date")), default={})
    return {
        trial["policy"]: trial
        for trial in newest.get("measured", ())
        if trial["error"] is None and trial["precision"] == precision
    }
