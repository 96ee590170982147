from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.errors import NonFiniteError, OptionError
from sparseflow.sampling import Sampler, SamplingOptions, candidates


def logits_of(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def kept(logits: np.ndarray, **options: float) -> list[int]:
    return candidates(logits, SamplingOptions(temperature=1.0, **options))[0].tolist()


random_logits = st.lists(st.integers(-300, 300), min_size=1, max_size=40).map(lambda values: logits_of(*values) / np.float32(10))


@pytest.mark.parametrize(("option", "value", "allowed"), [
    ("temperature", -0.1, "at least 0"), ("temperature", math.nan, "at least 0"), ("temperature", math.inf, "finite"),
    ("temperature", "hot", "finite"), ("temperature", True, "finite"),
    ("top_k", -1, "at least 0"), ("top_k", 2.5, "whole number"),
    ("top_p", 1.1, "from 0 to 1"), ("top_p", -0.1, "from 0 to 1"), ("top_p", math.nan, "from 0 to 1"),
    ("min_p", 2, "from 0 to 1"), ("min_p", math.nan, "from 0 to 1"),
    ("repetition_penalty", 0, "from 0.01 to 100"), ("repetition_penalty", math.nan, "from 0.01 to 100"),
    ("seed", -1, "at least 0"), ("seed", 1.0, "whole number"),
])
def test_options_out_of_range(option, value, allowed):
    with pytest.raises(OptionError, match=f"^{option} is {value!r}, expected .*{allowed}"):
        SamplingOptions(**{option: value})


def test_options_from_a_generation_config():
    config = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "eos_token_id": [1, 2]}
    assert SamplingOptions.from_generation_config(config) == SamplingOptions(temperature=0.7, top_k=20, top_p=0.8)
    assert SamplingOptions.from_generation_config({**config, "do_sample": False}) == SamplingOptions()
    assert SamplingOptions.from_generation_config({"repetition_penalty": 1.2}) == SamplingOptions(repetition_penalty=1.2)
    assert SamplingOptions.from_generation_config({"do_sample": True}) == SamplingOptions(temperature=1.0, top_k=50)


def test_given_options_replace_the_others():
    options = SamplingOptions(temperature=0.7, top_k=20).replace(temperature=0.0, top_k=None, seed=3)
    assert options == SamplingOptions(temperature=0.0, top_k=20, seed=3)


def test_greedy_takes_the_lowest_id_of_equals():
    assert Sampler().next(logits_of(1, 3, 3, 2)) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_never_sampled(bad, temperature):
    with pytest.raises(NonFiniteError, match="for token 2"):
        Sampler(SamplingOptions(temperature=temperature)).next(logits_of(0, 1, bad))


def test_top_k_keeps_ties_with_the_last():
    assert kept(logits_of(1, 5, 3, 3, 2), top_k=2) == [1, 2, 3]
    assert kept(logits_of(1, 5, 3), top_k=9) == [0, 1, 2]


def test_top_p_keeps_the_fewest_that_hold_p_and_at_least_one():
    logits = np.log(logits_of(0.5, 0.25, 0.15, 0.1))
    assert kept(logits, top_p=0.74) == [0, 1]
    assert kept(logits, top_p=0.76) == [0, 1, 2]
    assert kept(logits, top_p=0.0) == [0]
    assert kept(logits_of(0, 0, 0, 0), top_p=0.6) == [0, 1, 2]


def test_top_p_counts_what_top_k_left():
    logits = np.log(logits_of(0.4, 0.3, 0.2, 0.1))
    assert kept(logits, top_k=2, top_p=0.55) == [0]


def test_min_p_is_relative_to_the_best():
    assert kept(np.log(logits_of(0.5, 0.3, 0.1, 0.04)), min_p=0.1) == [0, 1, 2]
    assert kept(logits_of(2, 1, 2), min_p=1.0) == [0, 2]


def test_temperature_comes_before_the_cuts():
    logits = np.log(logits_of(0.6, 0.4))
    assert candidates(logits, SamplingOptions(temperature=0.1, top_p=0.9))[0].tolist() == [0]
    assert candidates(logits, SamplingOptions(temperature=10.0, top_p=0.9))[0].tolist() == [0, 1]


def test_repetition_penalty_acts_on_each_seen_token_once():
    greedy = Sampler(SamplingOptions(repetition_penalty=2.0))
    assert greedy.next(logits_of(3, 2), [0, 0, 0]) == 1
    assert greedy.next(logits_of(3.9, 2), [1, 9]) == 0
    assert greedy.next(logits_of(-3, -2), [1]) == 0


@settings(deadline=None)
@given(random_logits, st.integers(0, 9), st.floats(0, 1), st.floats(0, 1), st.floats(1e-300, 1e6))
def test_candidates_are_a_distribution_over_likely_ids(logits, top_k, top_p, min_p, temperature):
    options = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, probabilities = candidates(logits, options)
    assert len(ids) and (np.diff(ids) > 0).all()
    assert probabilities.sum() == pytest.approx(1) and (probabilities >= 0).all()
    assert logits.max() == logits[ids].max()
    left_out = np.setdiff1d(np.arange(len(logits)), ids)
    assert not len(left_out) or logits[left_out].max() <= logits[ids].min()


def test_draws_follow_the_probabilities_and_the_seed():
    logits = np.log(logits_of(0.5, 0.3, 0.2))
    samplers = [Sampler(SamplingOptions(temperature=1.0, seed=7)) for _ in range(2)]
    draws = [[sampler.next(logits) for _ in range(4000)] for sampler in samplers]
    assert draws[0] == draws[1]
    assert np.bincount(draws[0]) / 4000 == pytest.approx([0.5, 0.3, 0.2], abs=0.03)
    other = Sampler(SamplingOptions(temperature=1.0, seed=8))
    assert [other.next(logits) for _ in range(100)] != draws[0][:100]


def test_the_last_candidate_can_be_drawn_and_none_beyond():
    class Ones:
        def random(self) -> float:
            return 1.0

    sampler = Sampler(SamplingOptions(temperature=1.0))
    sampler._random = Ones()
    assert sampler.next(logits_of(0, 0, 0)) == 2


@pytest.mark.parametrize("kind", [np.uint8, np.uint32, np.uint64, np.int64])
def test_numpy_numbers_mean_what_they_say(kind: type) -> None:
    options = SamplingOptions(temperature=np.float32(1), top_k=kind(5), seed=kind(1))
    assert (type(options.top_k), options.top_k) == (int, 5)
    ids, _ = candidates(np.random.default_rng(0).standard_normal(100).astype(np.float32), options)
    assert len(ids) == 5


def test_a_number_beyond_float_is_refused() -> None:
    with pytest.raises(OptionError, match="temperature"):
        SamplingOptions(temperature=10**400)
