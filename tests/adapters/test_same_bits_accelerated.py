"""vitfast.batch_invariant: accelerated models of other libraries give an image the same bits in any batch."""

import pytest
import torch
from adapter_models import NAFLEX, NAMED, PIXTRAL, SIGLIP, counted, family
from checks import randomize, slow_but
from even_dot import even_dot
from same_bits import differing, floats, unlike

import vitfast
from vitfast import ops
from vitfast.kernels.launch import INTERPRETED, launches_made

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OTHERS = {name for name in NAMED if "Qwen" in name or "tokens first" in name} | {NAFLEX, SIGLIP, PIXTRAL}
FAMILIES = sorted(NAMED.keys() - OTHERS - {"transformers MAE"})  # which draws the order of patches in each call
SOME = ["timm ViT", "timm EVA-02", "torchvision ViT", "transformers DINOv3"]


@pytest.fixture(autouse=True)
def _invariant():
    with vitfast.batch_invariant(True):
        yield


def made(name: str, dtype: torch.dtype, **options):
    return vitfast.accelerate(randomize(family(name).make(), std=0.2).eval().to(dtype), **options)


def check(name: str, dtype: torch.dtype, batches, count: int = 7) -> int:
    """How many outputs differ; the largest batch, all sizes again and one image alone have graphs of their own."""
    model, (argument, example) = made(name, dtype), next(iter(family(name).batch().items()))
    images = torch.randn(count, *example.shape[1:]).to(dtype)
    found = differing(lambda x: [t for t in floats(model(**{argument: x})) if len(t) == len(x)], images, batches)
    assert sum(counted(model, {argument: images}).values()) > 3
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_on_plain_pytorch(name, dtype):
    assert check(name, dtype, (2, 7)) == 0


@pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in FAMILIES])
def test_on_interpreted_kernels(name, dtype):
    before = launches_made()
    with ops.use_kernels("on"), even_dot():
        assert check(name, dtype, (2, 3), count=3) == 0
    assert launches_made() > before


@pytest.mark.parametrize("dtype", slow_but([torch.float32], [torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("name", slow_but([NAFLEX], [NAFLEX, SIGLIP]))
@pytest.mark.parametrize("pack", slow_but([True], [False, True]))
def test_padded_batches(name, dtype, pack):
    """An image with its padding, or without it, beside another one and alone."""
    model, batch = made(name, dtype, pack=pack), family(name).batch()
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    with torch.no_grad():
        both = floats(model(**batch))
        for i in range(2):
            alone = floats(model(**{key: value[i : i + 1] for key, value in batch.items()}))
            assert not unlike([t[i : i + 1] for t in both if len(t) == 2], [t for t in alone if len(t) == 1])
    assert [e.why for e in vitfast.acceleration_report(model) if e.part == "packing"] == [None] * pack


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="of this CPU's kernels")
def test_without_the_mode_bits_depend_on_the_batch():
    with vitfast.batch_invariant(False):
        assert any(check(name, torch.float32, (2, 7)) > 0 for name in SOME)
