"""`onnx`: frames, codes or a vector from any ONNX model.

The config says what the model takes, the names of its inputs and outputs, and the order of
their dimensions. The model is tried out when the extractor is built, so what does not fit
is known before a run begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from featcache.errors import ConfigError, listing
from featcache.extractors.base import Batching, Clip, Extractor, Params, main_track
from featcache.extractors.codec import code_dtype
from featcache.extractors.frames import FrameExtractor
from featcache.extractors.kaldi import Fbank, FbankParams
from featcache.extractors.log_mel import LogMel, LogMelParams
from featcache.extractors.model import LONGEST_SECONDS
from featcache.extractors.onnx_model import Array, OnnxError, OnnxModel
from featcache.extractors.weight_file import WeightFileParams
from featcache.spec import MAIN, FeatureSpec, Frames, Track
from featcache.spec import Clip as ClipAxis
from featcache.weights import weights_error

_TRIALS = (1.0, 1.37)
"""Lengths of the waveforms with which a model is tried out, in seconds; doubled until they
have a frame."""


class Window(Params):
    """The windows in which a model computes a clip."""

    added_later: ClassVar[frozenset[str]] = frozenset({"keep_ends"})

    length: int = Field(ge=1)
    """Steps in a window."""
    hop: int = Field(ge=1)
    """Steps between the starts of neighbouring windows. A window gives the frames of `hop`
    steps, or a vector."""
    before: int = Field(default=0, ge=0)
    """Number of first steps of a window that are only context."""
    pad: bool = False
    """If a window reaches beyond the clip, fill it with zeros, so that all have equal
    length. Otherwise windows end with the clip."""
    keep_ends: bool = False
    """Begin the first window with the clip, and take its first `before` steps too. The
    first window that reaches the clip's end is the last one, and gives all remaining
    frames."""

    @model_validator(mode="after")
    def _fits(self) -> Window:
        if self.before + self.hop > self.length:
            raise ValueError(
                f"{self.before} steps before and {self.hop} of hop do not fit into {self.length}"
            )
        if self.keep_ends and self.pad:
            raise ValueError("keep_ends: windows that are padded have no ends to keep")
        return self


class OnnxParams(WeightFileParams):
    """The parameters of `onnx`."""

    input: str
    """The name of the model's input for the waveform or the features."""
    input_axes: Literal["T", "BT", "TD", "BTD", "DT", "BDT"] = "BT"
    """The dimensions of this input: a batch of one, time steps, and the values of a
    step."""
    fbank: FbankParams | None = None
    """The parameters of `fbank`, if the model takes its frames: `{num_mel_bins: 80}`."""
    log_mel: LogMelParams | None = None
    """The parameters of `log_mel`, if the model takes its frames. Without `fbank` and
    `log_mel`, it takes the waveform. A step is a frame of these features, or a sample."""
    subtract_mean: bool = False
    """Subtract the mean over the clip from each dimension of the features."""
    length_input: str | None = None
    """The name of the input for the number of steps, if the model has one."""
    constants: dict[str, float] = Field(default_factory=dict)
    """The values of other inputs, by name."""
    states: dict[str, str] = Field(default_factory=dict)
    """Inputs, each with the name of an output. In a clip's first window, the input is
    zeros. In later windows, it is this output of the window before."""
    output: str
    """The name of the output that is stored."""
    output_axes: Literal["T", "BT", "TD", "BTD", "DT", "BDT", "D", "BD"] = "BTD"
    """The dimensions of the output, as in `input_axes`. Without `T`, the output is one
    vector for the clip, the mean over its windows."""
    stride: int = Field(default=1, ge=1)
    """Steps from one frame of the output to the next. The model must give `(n + extra) //
    stride` frames for `n` steps."""
    extra: int = 0
    """See `stride`. `stride - 1` if the model also gives an incomplete last frame. Below 0
    if a frame needs more than `stride` steps."""
    codebook_size: int | None = Field(default=None, ge=2, le=1 << 24)
    """The number of codewords, if the output is codes."""
    window: Window | None = None
    """Windows, for long recordings. Without windows, a clip is computed whole, and may have
    120 s."""

    @model_validator(mode="after")
    def _fits(self) -> OnnxParams:
        if self.fbank and self.log_mel:
            raise ValueError("log_mel: a model takes this or fbank")
        if self.subtract_mean and not self.takes_frames:
            raise ValueError("subtract_mean: is about features, and there are none")
        if self.takes_frames and "D" not in self.input_axes:
            raise ValueError("input_axes: features have a dimension D, as in BTD")
        if self.states and (self.window is None or not self.gives_frames):
            raise ValueError("states: are handed on between windows of frames: give a window")
        if self.codebook_size and not self.gives_frames:
            raise ValueError("codebook_size: a vector has no codes")
        names = [self.input, self.length_input, *self.constants, *self.states]
        if len({*names}) < len(names):
            raise ValueError("constants: an input is named twice: give each in one parameter")
        window = self.window
        if window is None:
            return self
        if not self.gives_frames and (window.before or window.keep_ends):
            raise ValueError("window: before and keep_ends are about frames, and there are none")
        steps = {"hop": window.hop} if window.pad else {"hop": window.hop, "before": window.before}
        for name, count in steps.items():
            if self.gives_frames and count % self.stride:
                raise ValueError(f"window.{name}: {count} steps are no multiple of the stride")
        return self

    @property
    def takes_frames(self) -> bool:
        """True if the model takes features, and not the waveform."""
        return bool(self.fbank or self.log_mel)

    @property
    def gives_frames(self) -> bool:
        """True if the output is along time."""
        return "T" in self.output_axes


class Onnx(Extractor[OnnxParams]):
    """The output of an ONNX model for the clip alone: frames, codes, or a vector.

    Frames are float32 `[T, D]`, codes int64 `[T, D]`, a vector float32 `[D]`; `D` is 1 if
    the output has no such dimension. A clip is computed by itself, in one call or window
    after window, so no neighbour changes a bit.

    Shapes: `S` steps of the input, `C` values of a step (1 of a waveform)."""

    Params = OnnxParams
    revision = 1
    batching: Batching = "single"

    def __init__(self, params: OnnxParams, sample_rate: int, device: torch.device) -> None:
        self._params = params
        self._source: FrameExtractor[Any] | None = None
        if params.fbank:
            self._source = Fbank(params.fbank, sample_rate, device)
        elif params.log_mel:
            self._source = LogMel(params.log_mel, sample_rate, device)
        self._model = OnnxModel(params.file, device)
        self._require_names()
        filled = self._model.filled
        self._constants = {name: filled(name, value) for name, value in params.constants.items()}
        self._first_states = {name: filled(name, 0) for name in params.states}
        if params.window is None:
            self.max_seconds = LONGEST_SECONDS
        num_values = self._values_of_trials(sample_rate, device)
        axis: Frames | ClipAxis = ClipAxis()
        if params.gives_frames:
            step_rate = self._source.spec.frame_rate if self._source else sample_rate
            axis = Frames(step_rate / params.stride)
        dtype, kind = "float32", params.output
        sizes: tuple[int, ...] = ()
        if params.codebook_size:
            dtype, kind, sizes = "int64", "codes", (params.codebook_size,) * num_values
        units = f"{kind} of an ONNX model"
        self.spec = FeatureSpec.of(
            sample_rate, Track(MAIN, (num_values,), dtype, units, axis, sizes)
        )

    @classmethod
    def stored_dtype(cls, params: OnnxParams) -> str:
        return code_dtype(params.codebook_size) if params.codebook_size else "float32"

    @classmethod
    def weights_digest(cls, params: OnnxParams) -> str:
        if not params.takes_frames:
            return params.digest
        source = Fbank if params.fbank else LogMel
        return f"{params.digest} {source.revision}"

    def num_frames(self, num_samples: int) -> int:
        steps = num_samples
        if self._source is not None:
            steps = self._source.num_frames(num_samples)
        if not steps:
            return 0
        return self._frames_of(steps) if self._params.gives_frames else 1

    def extract(self, clips: Sequence[Clip]) -> list[Tensor]:
        return [self._computed(clip) for clip in clips]

    def _computed(self, clip: Clip) -> Tensor:
        steps_SC = clip.waveform[:, None]
        if self._source is not None:
            steps_SC = main_track(self._source.extract([clip])[0])
            if self._params.subtract_mean:
                steps_SC = steps_SC - steps_SC.mean(dim=0)
        parts = [*self._windows(steps_SC.cpu().numpy())]
        self._require_one_size(part.shape[-1] for part in parts)
        if self._params.gives_frames:
            computed = np.concatenate(parts)
        else:
            computed = np.mean(parts, axis=0, dtype=np.float64)
        dtype: type[Any] = np.float32
        size = self._params.codebook_size
        if size is not None:
            dtype = np.int64
            if computed.min() < 0 or computed.max() >= size:
                raise ConfigError(
                    f"params.codebook_size: {size}, but {self._model.file.name} gives the codes "
                    f"{computed.min()} to {computed.max()}"
                )
        return torch.from_numpy(computed.astype(dtype)).to(clip.waveform.device)

    def _frames_of(self, num_steps: int) -> int:
        return max(0, (num_steps + self._params.extra) // self._params.stride)

    def _windows(self, steps_SC: Array) -> Iterator[Array]:
        """Yield the frames `[n, D]` that each window gives, or its vector `[D]`."""
        states, whole = self._first_states, max(1, len(steps_SC))
        # without windows, the clip is one
        window = self._params.window or Window(length=whole, hop=whole, keep_ends=True)
        for start, skip, count in self._spans(len(steps_SC), window):
            values, states = self._run(_cut(steps_SC, start, window), states, skip, count)
            yield values

    def _spans(self, num_steps: int, window: Window) -> Iterator[tuple[int, int, int]]:
        """Yield the first step of each window, the number of its first frames that are left
        out, and the number that is taken after them; for vectors, 0 and 0."""
        if not self._params.gives_frames:
            end = max(1, num_steps - window.length + window.hop)
            yield from ((start, 0, 0) for start in range(0, end, window.hop))
            return
        stride, total, first = self._params.stride, self._frames_of(num_steps), 0
        start = 0 if window.keep_ends else -window.before
        while first < total:
            end = min((start + window.before + window.hop) // stride, total)
            if window.keep_ends and start + window.length >= num_steps:
                end = total
            begins = start if window.pad else max(0, start)
            yield start, (first * stride - begins) // stride, end - first
            start, first = start + window.hop, end

    def _run(
        self, steps_SC: Array, states: Mapping[str, Array], skip: int, count: int
    ) -> tuple[Array, dict[str, Array]]:
        """Compute a window. Returns `count` frames after the first `skip` frames, or its
        vector; and the states after it."""
        params, model = self._params, self._model
        inputs = {**self._constants, **states}
        inputs[params.input] = np.ascontiguousarray(
            _arranged(steps_SC, params.input_axes), model.dtype("input", params.input)
        )
        if params.length_input is not None:
            inputs[params.length_input] = model.filled(params.length_input, len(steps_SC))
        output, *next_states = model.run(inputs, [params.output, *params.states.values()])
        values = self._rearranged(output)
        if params.gives_frames:
            is_exact = params.window is None or not params.window.pad
            expected = self._frames_of(len(steps_SC)) if is_exact else skip + count
            if len(values) < skip + count or (is_exact and len(values) != expected):
                raise ConfigError(
                    f"params.stride: {model.file.name} gives {len(values)} frames for "
                    f"{len(steps_SC)} steps; with this stride, extra and window they are {expected}"
                )
            values = values[skip : skip + count]
        return values, dict(zip(params.states, next_states, strict=True))

    def _rearranged(self, output: Array) -> Array:
        """Return an output as `[T, D]` or `[D]`."""
        axes: str = self._params.output_axes
        if output.ndim != len(axes) or (axes[0] == "B" and len(output) != 1):
            raise ConfigError(
                f"params.output_axes: {axes}, but {self._params.output} of "
                f"{self._model.file.name} is {[*output.shape]}"
            )
        values = output[0] if axes[0] == "B" else output
        axes = axes.removeprefix("B")
        if axes == "T":
            return values[:, None]
        return values.T if axes == "DT" else values

    def _require_names(self) -> None:
        """Raise ConfigError unless the parameters name what the model has."""
        params, model = self._params, self._model
        inputs = {"input": [params.input], "constants": params.constants, "states": params.states}
        if params.length_input is not None:
            inputs["length_input"] = [params.length_input]
        model.require("input", inputs)
        model.require("output", {"output": [params.output], "states": params.states.values()})
        given, made = model.dtype("input", params.input), model.dtype("output", params.output)
        if given.kind != "f":
            raise ConfigError(f"params.input: {params.input} is {given}, and no float")
        if made.kind == "i" and not params.gives_frames:
            raise ConfigError(
                f"params.output: {params.output} is {made}, and a vector is of floats"
            )
        if (made.kind == "i") != bool(params.codebook_size):
            raise ConfigError(
                f"params.codebook_size: {params.codebook_size}, but {params.output} is {made}: "
                "codes are whole numbers, and have one"
            )

    def _values_of_trials(self, sample_rate: int, device: torch.device) -> int:
        """Try the model out. Returns the number of values of a frame, or of a vector."""
        noise = torch.Generator().manual_seed(0)
        sizes = []
        for seconds in _TRIALS:
            num_samples = round(seconds * sample_rate)
            while not self.num_frames(num_samples):
                num_samples *= 2
                if num_samples > LONGEST_SECONDS * sample_rate:
                    raise ConfigError(f"params.stride: {LONGEST_SECONDS:g} s have no frame")
            clip = Clip("trial", (torch.randn(num_samples, generator=noise) / 10).to(device))
            try:
                computed, again = (self._computed(clip) for _ in range(2))
            except OnnxError as error:
                raise weights_error(self._model.file, str(error)) from error
            if not torch.equal(computed.nan_to_num(), again.nan_to_num()):
                what = "gives other values for the same waveform the second time"
                raise weights_error(
                    self._model.file, f"{what}: export it for inference, without dropout"
                )
            sizes.append(computed.shape[-1])
        self._require_one_size(sizes)
        return sizes[0]

    def _require_one_size(self, sizes: Iterable[int]) -> None:
        """Raise ConfigError unless frames, or vectors, have one number of values."""
        several = sorted({*sizes})
        if len(several) > 1:
            params = self._params
            raise ConfigError(
                f"params.output_axes: {params.output_axes}, but D of {params.output} depends on "
                f"the clip: it is {listing(map(str, several))}"
            )


def _cut(steps_SC: Array, start: int, window: Window) -> Array:
    """Cut a window that begins at a step, which may be before the first one."""
    end = start + window.length
    piece_SC = steps_SC[max(0, start) : end]
    if not window.pad:
        return piece_SC
    before = max(0, -start)
    after = window.length - before - len(piece_SC)
    return np.pad(piece_SC, ((before, after), (0, 0)))


def _arranged(steps_SC: Array, axes: str) -> Array:
    """Return steps with the dimensions of an input."""
    array = steps_SC
    if "D" not in axes:
        array = array[:, 0]
    elif axes.endswith("DT"):
        array = array.T
    return array[None] if axes[0] == "B" else array
