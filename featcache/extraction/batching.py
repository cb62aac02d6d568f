"""How a run puts rows together: as the extractor declares, unless a probe of the device found a difference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from featcache.errors import ConfigError, listing, percent
from featcache.extractors.base import Batching, Extractor, Params

BATCHINGS: tuple[Batching, ...] = ("single", "equal_length", "padded")
"""The ways to put rows together, from the strictest to the loosest."""


@dataclass(frozen=True)
class BatchingChoice:
    """How a run puts the rows of one version together."""

    batching: Batching
    """One of `BATCHINGS`; `frames` for extractors that take no rows."""
    mismatch: float | None = None
    """The share of codes (of frames, for float features) that differed, with this batching and by more than ties, from
    each clip alone in fp32, in a probe of this device; None if there was no such probe."""
    note: str | None = None
    """A line that a user should read."""


def declared_batchings(extractor: Extractor[Params]) -> tuple[Batching, ...]:
    """The batchings that an extractor of rows declares to be safe, from the strictest to the loosest."""
    return BATCHINGS[: BATCHINGS.index(extractor.batching) + 1]


def precision_of(params: Params | None) -> str:
    """The precision that an extractor's parameters ask for; `fp32` if they have none."""
    return str(getattr(params, "precision", "fp32"))


def choose_batching(
    extractor: Extractor[Params],
    probes: Iterable[Mapping[str, Any]],
    device_label: str,
    requested: str | None = None,
    allow_mismatch: bool = False,
) -> BatchingChoice:
    """Decide how a run puts rows together.

    If the user requests nothing, it is the loosest batching that the extractor declares and that the device's newest
    probe, if there is one, found to be clean: at the config's precision, it changed no frame by more than rounding.
    (What a lower precision changes by itself, the config has asked for.)

    Args:
        probes: The documents that `featcache probe` has kept with the version.
        requested: What the user asks for, one of `BATCHINGS`.
        allow_mismatch: Accept the request even if it is looser than what is declared or was found to be clean.

    Raises:
        ConfigError: The request is unknown, or it is looser than that and was not allowed.
    """
    if extractor.as_row_extractor() is None:
        if requested not in (None, extractor.batching):
            raise ConfigError(
                f"--batching {requested}: {_name(extractor)} has only one batching policy, {extractor.batching}: leave "
                "--batching out"
            )
        return BatchingChoice(extractor.batching)
    measured = _measured(probes, device_label, precision_of(getattr(extractor, "params", None)))
    disturbed = {batching: float(trial["disturbed"]) for batching, trial in measured.items()}
    mismatch = {batching: float(trial["mismatch"]) for batching, trial in measured.items()}
    declared = declared_batchings(extractor)
    clean = [batching for batching in declared if not disturbed.get(batching)] or ["single"]
    if requested is None:
        batching, loosest = clean[-1], declared[-1]
        note = None
        if batching != loosest:
            share = percent(disturbed[loosest])
            note = f"batching {batching}: by the probe of {device_label}, {loosest} changes {share} of the frames"
        return BatchingChoice(batching, mismatch.get(batching), note)
    if requested not in BATCHINGS:
        raise ConfigError(f"--batching {requested}: there is no such policy; choose from {listing(BATCHINGS)}")
    why = None
    if share_disturbed := disturbed.get(requested):
        why = f"the probe of {device_label} found that it changes {percent(share_disturbed)} of the frames"
    elif requested not in declared:
        tested = "; a probe found no difference in its sample" if requested in measured else ""
        why = f"it is looser than {declared[-1]}, the loosest policy that {_name(extractor)} declares{tested}"
    if why and not allow_mismatch:
        raise ConfigError(
            f"--batching {requested}: {why}: use --batching {clean[-1]}, or --allow-mismatch to accept that"
        )
    return BatchingChoice(requested, mismatch.get(requested), why and f"batching {requested}: {why}")


def _measured(probes: Iterable[Mapping[str, Any]], device_label: str, precision: str) -> dict[str, Mapping[str, Any]]:
    """What the device's newest probe measured at a precision, by batching."""
    of_device = [probe for probe in probes if probe.get("device") == device_label]
    if not of_device:
        return {}
    newest = max(of_device, key=lambda probe: str(probe.get("date")))
    return {
        str(trial["policy"]): trial
        for trial in newest.get("measured", ())
        if trial["precision"] == precision and trial["error"] is None
    }


def _name(extractor: object) -> str:
    return type(extractor).__name__
