"""Floats as uint8: the arithmetic, and a cache that holds them."""

import pickle

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import small_shards
import torch
from damage import flip
from hypothesis import given
from make_cache import in_three_shards, made_cache, make_features, make_version
from torch.nn.utils.rnn import pad_sequence

import featcache
from featcache.care.verify import examine_shard
from featcache.errors import ArgumentError, DamagedError, ExtractorError, StoreError
from featcache.spec import QUANTIZATION, FeatureSpec, Track, dequantize_array
from featcache.spec.quantize import dequantize, quantize, stored_spec

EPS = float(np.finfo(np.float32).eps)
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
SPEC = FeatureSpec((80,), "float32", 100.0, 400, 16000, "log mel energy")


def reference(item):
    """One item `[frames, *item_shape]` quantised in float64, one dimension after the
    other: levels, scale, offset."""
    columns = item.reshape(len(item), -1).astype(np.float64)
    levels, scales, offsets = np.zeros(columns.shape, np.int64), [], []
    for number, column in enumerate(columns.T):
        offset = min(column)
        scale = (max(column) - offset) / 255
        for frame, value in enumerate(column):
            levels[frame, number] = round((value - offset) / scale) if scale else 0
        scales.append(scale)
        offsets.append(offset)
    shape = item.shape[1:]
    return levels.reshape(item.shape), np.reshape(scales, shape), np.reshape(offsets, shape)


def quantized(*items):
    """Levels and parameters of items, as numpy arrays."""
    features = torch.from_numpy(np.concatenate(items))
    levels, parameters = quantize(features, [len(item) for item in items])
    return levels.numpy(), parameters.numpy()


def values_of(item):
    """What an item is read as."""
    levels, parameters = quantized(item)
    return dequantize_array(levels, *parameters[0])


def noise(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


items_of_floats = hnp.array_shapes(min_dims=2, max_dims=3, max_side=7).flatmap(
    lambda shape: hnp.arrays(np.float32, shape, elements=st.floats(-(2.0**100), 2.0**100, width=32))
)


class TestArithmetic:
    def test_levels_and_parameters_are_those_of_the_slow_reference(self):
        item = noise(50, 6)
        levels, parameters = quantized(item)
        expected, scale, offset = reference(item)
        assert levels.dtype == np.uint8
        assert parameters.dtype == np.float32
        assert parameters.shape == (1, 2, 6)
        assert np.allclose(parameters[0, 0], scale, rtol=EPS)
        assert np.array_equal(parameters[0, 1], offset)
        # where float32 rounds across the middle of two levels
        assert (levels != expected).mean() < 0.02
        assert np.abs(levels.astype(int) - expected).max() <= 1

    @given(items_of_floats)
    def test_a_value_is_off_by_half_a_scale_at_most_and_float32_rounding(self, item):
        """The ends of the range are levels 0 and 255."""
        levels, parameters = quantized(item)
        scale, offset = parameters[0].astype(np.float64)
        assert np.array_equal(offset, item.min(0))
        found = dequantize_array(levels, *parameters[0])
        rounding = 2 * EPS * (np.abs(item).max(0) + 255 * scale) + 300 * SMALLEST
        assert (np.abs(found.astype(np.float64) - item) <= scale / 2 + rounding).all()
        assert (levels.min(0) == 0).all()
        assert (levels.max(0) == 255)[scale > 1e3 * SMALLEST].all()

    def test_what_is_constant_is_exact_and_so_is_one_frame(self):
        item = np.stack([np.full(9, 0.1), np.zeros(9), np.full(9, -3e7)], 1).astype(np.float32)
        assert np.array_equal(values_of(item), item)
        assert np.array_equal(values_of(item[:1]), item[:1])
        _, parameters = quantized(item)
        assert (parameters[0, 0] == 0).all()

    def test_zero_has_one_sign_whatever_the_order(self):
        item = np.array([[0.0], [-0.0], [0.0]], np.float32)
        for some in (item, item[1:], item[:2], -item):
            assert quantized(some)[1].tobytes() == bytes(8)

    def test_each_item_is_quantised_by_itself(self):
        items = [noise(length, 3, 2, seed=length, scale=length) for length in (1, 40, 7, 300, 1)]
        levels, parameters = quantized(*items)
        alone = [quantized(item) for item in items]
        assert levels.tobytes() == b"".join(one.tobytes() for one, _ in alone)
        assert parameters.tobytes() == b"".join(one.tobytes() for _, one in alone)

    @pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
    def test_an_item_that_is_not_finite_has_parameters_that_are_not(self, wrong):
        items = [noise(5, 4), noise(6, 4), noise(7, 4)]
        items[1][3, 2] = wrong
        _, parameters = quantized(*items)
        assert np.isfinite(parameters).all(axis=(1, 2)).tolist() == [True, False, True]

    def test_a_range_beyond_float32_counts_as_not_finite(self):
        largest = float(np.finfo(np.float32).max)
        for low, high in ((-largest, largest), (0.0, largest)):
            levels, parameters = quantized(np.array([[low], [high]], np.float32))
            assert (
                not np.isfinite(parameters).all()
                or np.isfinite(dequantize_array(levels, *parameters[0])).all()
            )
        assert not np.isfinite(quantized(np.array([[-largest], [largest]], np.float32))[1]).all()

    def test_other_floats_are_float32_first_and_are_left_alone(self):
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float32):
            item = torch.from_numpy(noise(20, 3)).to(dtype)
            before = item.clone()
            found = [one.numpy().tobytes() for one in quantize(item, [20])]
            assert found == [one.numpy().tobytes() for one in quantize(item.float(), [20])]
            assert torch.equal(item, before)

    @pytest.mark.parametrize("item_shape", [(80,), (5, 2)])
    def test_torch_computes_the_bits_of_numpy_and_leaves_the_padding_value_itself(self, item_shape):
        items = [noise(60, *item_shape, scale=7), noise(100, *item_shape, seed=1)]
        levels, parameters = map(torch.from_numpy, quantized(*items))
        padded, lengths = (
            pad_sequence(levels.split([60, 100]), batch_first=True),
            torch.tensor([60, 100]),
        )
        found = dequantize(padded, parameters, lengths=lengths, padding_value=-100)
        assert found[0, :60].numpy().tobytes() == values_of(items[0]).tobytes()
        assert (found[0, 60:] == -100).all()
        assert found[1].numpy().tobytes() == values_of(items[1]).tobytes()
        assert torch.equal(dequantize(padded, parameters)[0, :60], found[0, :60])
        half = dequantize(padded, parameters, torch.bfloat16, lengths=lengths, padding_value=-100)
        assert torch.equal(half, found.bfloat16())

    @pytest.mark.parametrize("item_shape", [(80,), (5, 2), (), (5000,)])
    def test_items_of_any_length_are_computed_frame_by_frame(self, item_shape):
        rng = np.random.default_rng(0)
        scale, offset = rng.standard_normal((2, *item_shape)).astype(np.float32)
        frames = 6 * (4096 // scale.size + 1)  # from here on, several at a time
        for count in (0, 1, frames - 1, frames, frames + 1, 2 * frames + 5):
            levels = rng.integers(0, 256, (count, *item_shape)).astype(np.uint8)
            expected = np.multiply(levels, scale, dtype=np.float32) + offset
            out = np.full_like(expected, -1)
            assert dequantize_array(levels, scale, offset, out) is out
            of_each = [np.broadcast_to(parameter, levels.shape) for parameter in (scale, offset)]
            for found in (
                out,
                dequantize_array(levels, scale, offset),
                dequantize_array(levels, *of_each),
            ):
                assert found.tobytes() == expected.tobytes()

    @pytest.mark.parametrize(
        ("given", "what"),
        [
            ({"levels": None}, r"levels is a NoneType: give uint8 \[batch, frames, \.\.\.\]"),
            ({"levels": torch.zeros(2, 5, 3)}, "levels is torch.float32"),
            (
                {"parameters": torch.zeros(1, 2, 3)},
                r"is torch.float32 \[1, 2, 3\] on cpu: give .* \[2, 2, 3\]",
            ),
            ({"parameters": torch.zeros(2, 2, 4)}, "from quantization"),
            ({"parameters": torch.zeros(2, 2, 3).double()}, "parameters is torch.float64"),
            ({"dtype": torch.int32}, "dtype is torch.int32: give a float dtype"),
            ({"lengths": [5, 5]}, r"lengths is a list: give integers \[2\] on cpu"),
            ({"lengths": torch.tensor([5])}, r"lengths is torch.int64 \[1\]"),
            ({"lengths": torch.tensor([5.0, 5.0])}, "lengths is torch.float32"),
        ],
    )
    def test_what_does_not_fit_together_is_refused(self, given, what):
        fine = {
            "levels": torch.zeros(2, 5, 3, dtype=torch.uint8),
            "parameters": torch.zeros(2, 2, 3),
        }
        with pytest.raises(ArgumentError, match=what):
            dequantize(**{**fine, **given})

    def test_an_empty_batch_has_no_values(self):
        levels, parameters = torch.zeros(0, 0, 80, dtype=torch.uint8), torch.zeros(0, 2, 80)
        assert dequantize(levels, parameters, lengths=torch.tensor([]).long()).shape == (0, 0, 80)


class TestSpec:
    @pytest.mark.parametrize(
        ("spec", "dtype", "read", "side"),
        [
            (SPEC, "uint8", "float32", [(QUANTIZATION, (2, 80), "float32")]),
            (SPEC, "float16", "float16", []),
            (SPEC, "float32", "float32", []),
            (FeatureSpec((8,), "int64", 75.0, 0, 24000, "codes", (256,) * 8), "uint8", "uint8", []),
        ],
    )
    def test_floats_in_uint8_have_one_more_side_array_and_codes_are_codes(
        self, spec, dtype, read, side
    ):
        stored = stored_spec(spec, dtype)
        assert (stored.dtype, stored.stored_dtype, stored.is_quantized) == (read, dtype, bool(side))
        assert [(one.name, one.item_shape, one.dtype) for one in stored.side] == side

    @pytest.mark.parametrize("dtype", ["float16", "uint8"])
    def test_an_extractor_cannot_have_a_side_array_of_that_name(self, dtype):
        taken = FeatureSpec(
            (8,), "float32", 75.0, 0, 24000, "x", side=(Track(QUANTIZATION, (), "float32", "x"),)
        )
        with pytest.raises(ExtractorError, match="quantization: the name is reserved"):
            stored_spec(taken, dtype)


@pytest.fixture(scope="module")
def features():
    return make_features(20, dtype="float32")


@pytest.fixture(scope="module")
def cache(tmp_path_factory, features):
    """A cache of one quantised version of three shards."""
    return made_cache(
        tmp_path_factory.mktemp("features"), *in_three_shards(features), quantized=True
    )


class TestCache:
    def test_gives_values_not_levels(self, cache, features):
        assert cache.spec.dtype == "float32"
        for position, (name, item) in enumerate(features.items()):
            for found in (cache[name], cache[position], cache.item(name, check=True)):
                assert found.dtype == np.float32
                assert np.array_equal(found, values_of(item))
        assert all(map(np.array_equal, cache.values(), map(values_of, features.values())))
        cache["utt-3"][...] = 0  # an array of your own
        assert np.array_equal(cache["utt-3"], values_of(features["utt-3"]))
        assert "float32 in uint8 [frames, 80]" in repr(cache)
        assert np.array_equal(pickle.loads(pickle.dumps(cache))[3], cache[3])

    @pytest.mark.parametrize("padding_value", [0, -100, 0.3])
    @pytest.mark.parametrize("check", [False, True])
    def test_a_batch_is_values_padded_with_the_padding_value(
        self, cache, features, padding_value, check
    ):
        names = ["utt-11", "utt-0", "utt-7", "utt-0"]
        batch, lengths = cache.batch(names, padding_value=padding_value, check=check)
        assert batch.dtype == torch.float32
        for row, length, name in zip(batch.numpy(), lengths.tolist(), names, strict=True):
            assert np.array_equal(row[:length], values_of(features[name]))
            assert (row[length:] == np.float32(padding_value)).all()

    def test_a_part_has_the_values_it_has_in_the_whole(self, cache, features):
        longest = max(features, key=lambda name: len(features[name]))
        whole = cache[longest]
        assert np.array_equal(cache.item(longest, start=0.05, duration=0.1), whole[5:15])
        batch, lengths = cache.batch([longest], start=0.05, duration=0.1)
        assert lengths.tolist() == [10]
        assert np.array_equal(batch[0], whole[5:15])

    def test_levels_and_parameters_give_the_same_on_the_device_and_padding_is_0_and_nothing_else(
        self, cache
    ):
        names = list(cache.ids)
        levels, lengths = cache.batch(names, raw=True)
        parameters = cache.quantization(names)
        assert (levels.dtype, parameters.dtype) == (torch.uint8, torch.float32)
        assert parameters.shape == (20, 2, 80)
        found = featcache.dequantize(levels, parameters, lengths=lengths, padding_value=-1)
        assert torch.equal(found, cache.batch(names, padding_value=-1)[0])
        assert torch.equal(cache.quantization([3, 0]), parameters[[3, 0]])
        assert np.array_equal(cache.item("utt-2", raw=True), levels[2, : lengths[2]])
        assert all(
            (row[length:] == 0).all() for row, length in zip(levels, lengths.tolist(), strict=True)
        )
        with pytest.raises(ArgumentError, match="levels are padded with 0"):
            cache.batch(["utt-0"], raw=True, padding_value=-100)

    def test_gathers_into_a_tensor_of_the_dtype_that_comes_out(self, cache):
        size = 3 * int(cache.lengths.max()) * 80
        for raw, dtype in ((False, torch.float32), (True, torch.uint8)):
            room = torch.empty(size, dtype=dtype)
            batch, _ = cache.batch([0, 1, 2], out=room, raw=raw)
            assert batch.data_ptr() == room.data_ptr()
            assert torch.equal(batch, cache.batch([0, 1, 2], raw=raw)[0])
        with pytest.raises(ValueError, match=r"it must be torch\.float32"):
            cache.batch([0], out=torch.empty(size, dtype=torch.uint8))

    def test_what_is_not_quantised_is_raw_as_it_is(self, tmp_path):
        cache = made_cache(tmp_path, make_features(3))
        assert torch.equal(cache.batch([0, 1], raw=True)[0], cache.batch([0, 1])[0])
        assert np.array_equal(cache.item(0, raw=True), cache[0])
        with pytest.raises(StoreError, match="not quantised"):
            cache.quantization([0])


class TestDamage:
    def problems(self, version):
        """What is found in its only shard, with whose it is."""
        (name,) = version.shard_names()
        return [(one.kind, one.id) for one in examine_shard(version, name, data=True)[1]]

    @pytest.mark.parametrize(
        ("chunk", "id_", "words"),
        [
            ("features/c/0/0", "utt-0", "utt-0: damaged"),
            (
                "side_quantization/c/0/0/0",
                None,
                "side_quantization/c/0/0/0: damaged: its checksum does not match",
            ),
        ],
        ids=["of a level", "of a scale"],
    )
    def test_a_flipped_bit_is_found_by_its_checksum(self, tmp_path, features, chunk, id_, words):
        version = make_version(tmp_path, features, quantized=True)
        assert self.problems(version) == []
        flip(version.shard(version.shard_names()[0]).folder / chunk, 3)
        assert self.problems(version) == [("checksum", id_)]
        cache = featcache.open(tmp_path)
        cache.batch(["utt-0"])  # it is not looked for so far
        for opened, check in ((featcache.open(tmp_path, check=True), None), (cache, True)):
            with pytest.raises(DamagedError, match=words):
                opened.item("utt-0", check=check)
            for raw in (False, True):
                with pytest.raises(DamagedError, match=words):
                    opened.batch(["utt-0"], check=check, raw=raw)

    def test_two_entries_of_one_item_and_none_of_another_are_found(self, tmp_path, features):
        version = make_version(tmp_path, quantized=True)
        values = dict(list(features.items())[:3])
        levels, parameters = quantized(*values.values())
        items = [small_shards.item(id_, len(value)) for id_, value in values.items()]
        side = [{QUANTIZATION: entries} for entries in np.split(parameters, [1, 3])]
        small_shards.write(version, items, levels, side=side)
        assert self.problems(version) == [("structure", None)]
        with pytest.raises(
            DamagedError, match="offsets of side_quantization do not rise to their ends"
        ):
            featcache.open(tmp_path)

    def test_parameters_that_are_not_finite_are_found(self, tmp_path, features):
        infinite = np.full((4, 80), np.inf, np.float32)
        version = make_version(tmp_path, {**features, "utt-3": infinite}, quantized=True)
        assert self.problems(version) == [("non_finite", "utt-3")]
