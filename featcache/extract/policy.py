"""How rows are batched in a run: what the extractor declares, checked against what was measured on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from featcache.errors import ConfigError, listing
from featcache.extractors.base import Batching, Extractor, Params
from featcache.extractors.rows import RowExtractor

POLICIES: tuple[Batching, ...] = ("single", "equal_length", "padded")
"""From the strictest to the loosest."""


@dataclass(frozen=True)
class Choice:
    """How a run batches one version.

    Attributes:
        policy: of rows; `frames` for extractors that have no rows.
        mismatch: the share of codes (of frames, for float features) that a probe of this device found to differ, under
            this policy, from each clip alone in fp32, ties not counted; None where nothing was probed.
        note: a line worth telling a user.
    """

    policy: Batching
    mismatch: float | None = None
    note: str | None = None


def declared(extractor: Extractor[Params]) -> tuple[Batching, ...]:
    """The policies that an extractor of rows declares it can stand, from the strictest to the loosest."""
    return POLICIES[: POLICIES.index(extractor.batching) + 1]


def precision_of(params: Params | None) -> str:
    """Of an extractor's parameters: `fp32` where they name none."""
    return str(getattr(params, "precision", "fp32"))


def choose_policy(
    extractor: Extractor[Params],
    probes: Iterable[Mapping[str, Any]],
    device_label: str,
    requested: str | None = None,
    allow_mismatch: bool = False,
) -> Choice:
    """Decide how a run batches.

    Without a request it is the loosest policy that the extractor declares and that the device's newest probe, where
    there is one, found clean: at the config's precision, it moved no frame by more than rounding. (What a lower
    precision changes by itself, the config has asked for.)

    Args:
        extractor: of the config.
        probes: the documents that `featcache probe` has kept with the version.
        device_label: of the device that will extract.
        requested: what the user asks for, one of `POLICIES`.
        allow_mismatch: take it, though it is looser than what was declared or found clean.

    Raises:
        ConfigError: there is no such policy, or it is looser than declared or found clean and was not allowed.
    """
    if not isinstance(extractor, RowExtractor):
        if requested not in (None, extractor.batching):
            raise ConfigError(
                f"--batching {requested}: {_name(extractor)} has only one batching policy, {extractor.batching}: leave "
                "--batching out"
            )
        return Choice(extractor.batching)
    measured = _measured(probes, device_label, precision_of(getattr(extractor, "params", None)))
    can_stand = declared(extractor)
    clean = [policy for policy in can_stand if not _disturbed(measured, policy)] or ["single"]
    if requested is None:
        policy = clean[-1]
        loosest = can_stand[-1]
        share = _disturbed(measured, loosest)
        note = None
        if policy != loosest:
            note = (
                f"batching {policy}: by the probe of {device_label}, {loosest} changes {_percent(share)} of the frames"
            )
        return Choice(policy, _mismatch(measured, policy), note)
    if requested not in POLICIES:
        raise ConfigError(f"--batching {requested}: there is no such policy; choose from {listing(POLICIES)}")
    policy = requested
    share = _disturbed(measured, policy)
    why = None
    if share:
        why = f"the probe of {device_label} found that it changes {_percent(share)} of the frames"
    elif policy not in can_stand:
        tested = "; a probe found no difference in its sample" if policy in measured else ""
        why = f"it is looser than {can_stand[-1]}, the loosest policy that {_name(extractor)} declares{tested}"
    if why and not allow_mismatch:
        raise ConfigError(f"--batching {policy}: {why}: use --batching {clean[-1]}, or --allow-mismatch to accept that")
    return Choice(policy, _mismatch(measured, policy), why and f"batching {policy}: {why}")


def _measured(probes: Iterable[Mapping[str, Any]], device_label: str, precision: str) -> dict[str, Mapping[str, Any]]:
    """What the device's newest probe measured at the precision, by policy."""
    of_device = [probe for probe in probes if probe["device"] == device_label]
    if not of_device:
        return {}
    newest = max(of_device, key=lambda probe: str(probe["date"]))
    return {
        str(one["policy"]): one for one in newest["measured"] if one["precision"] == precision and one["error"] is None
    }


def _disturbed(measured: Mapping[str, Mapping[str, Any]], policy: str) -> float:
    return float(measured[policy]["disturbed"]) if policy in measured else 0.0


def _mismatch(measured: Mapping[str, Mapping[str, Any]], policy: str) -> float | None:
    return float(measured[policy]["mismatch"]) if policy in measured else None


def _name(extractor: object) -> str:
    return type(extractor).__name__


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
