"""The measure of errors, and the random inputs that launchers are run on."""

import math

import pytest
import torch

from vitfast.verify import errors
from vitfast.verify.draw import Draw


def test_a_lost_row_and_a_wrong_number_are_seen_however_many_there_are():
    truth = torch.randn(100_000, 8, dtype=torch.float64)
    lost = truth.float()
    lost[77_777] = 0
    assert (lost - truth).norm() / truth.norm() < 0.01  # which the norm of the whole would let pass
    assert max(errors(truth.float(), truth)) < 1e-6 and errors(lost, truth)[0] > 0.2
    assert errors(truth.float().index_fill(0, torch.tensor([3]), math.nan), truth) == (math.inf, math.inf)
    assert errors(truth[:-1].float(), truth) == (math.inf, math.inf)
    sums = torch.ones(40_000, dtype=torch.float64)  # a bias gradient: one row
    missing = sums.clone()
    missing[123] = 0
    by_row, by_number = errors(missing, sums)
    assert by_row == pytest.approx(0.005) and by_number == pytest.approx(0.5)


def test_drawn_inputs_are_random_but_on_meta():
    draw = Draw(torch.float16, torch.device("cpu"), torch.Generator().manual_seed(0))
    assert draw.values(50, 50).std() == pytest.approx(1, abs=0.1) and draw.weight(10, 400).std() == pytest.approx(
        0.05, abs=0.01
    )
    assert 0.5 <= draw.factors(100).min() and draw.factors(100).max() <= 1.5 and draw.pixels(99).dtype == torch.uint8
    assert Draw(torch.float16, torch.device("meta")).pixels(2, 3).shape == (2, 3)
