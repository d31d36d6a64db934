"""Offsets of packed samples that say what is not so: nothing outside the tensors is read or written."""

import pytest
import torch

from vitfast.kernels import attention, launch
from vitfast.kernels.logits import Logits
from vitfast.verify.sanitizer import Sanitizer

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="the sanitizer watches the interpreter")


@pytest.mark.parametrize("offsets", [[0, 90, 30, 70], [5, 5, 5, 5], [-9, 40, 2**31 - 1, 12], [70, 0, 70, 0]])
def test_offsets_that_lie_stay_within_the_tensors(offsets):
    q, k, v, do = torch.randn(4, 1, 70, 2, 16).unbind(0)
    logits = Logits(offsets=torch.tensor(offsets, dtype=torch.int32), longest=70)
    with Sanitizer() as watch:
        o, lse = attention.attention_fwd(q, k, v, 0.2, logits)
        attention.attention_bwd(q, k, v, torch.zeros_like(o), torch.zeros_like(lse), do, 0.2, False, logits)
    # samples may overlap and leave tokens out: the numbers are nonsense
    assert watch.counts["launches"] == 6
    assert {finding.kind for finding in watch.findings} <= {"left unwritten", "write-write race"}, str(watch)
