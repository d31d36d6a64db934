"""Random erasing of raw images."""

import torch

from vitfast.data.transforms import Erase


def test_erasing_changes_one_rectangle_of_its_share():
    torch.manual_seed(1)
    image = torch.zeros(3, 40, 40, dtype=torch.uint8)
    changed = 0
    for _ in range(400):
        out = Erase(0.25)(image)
        assert out.dtype == torch.uint8 and not image.any()
        if out.any():
            changed += 1
            rows, columns = out.any(0).any(1).nonzero(), out.any(0).any(0).nonzero()
            area = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1) / 1600
            assert 0.01 < area < 0.36 and (out.any(0).sum() / 1600 - area).abs() < 0.02
    assert 70 <= changed <= 130  # 400 x 0.25, four standard deviations
