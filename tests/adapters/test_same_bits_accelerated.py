"""vitfast.batch_invariant: accelerated models of other libraries give an image the same bits in any batch.

Of every family of families.py that takes images or tokens, and beside them the libraries' own, not accelerated.
"""

from contextlib import nullcontext

import pytest
import torch
from adapter_models import NAFLEX, NAMED, PIXTRAL, SIGLIP, family
from checks import Calls, randomize
from even_dot import even_dot
from same_bits import differing, floats, unlike

import vitfast
from vitfast import ops
from vitfast.kernels.launch import INTERPRETED, launches_made
from vitfast.ops import _fixed

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
IN_ROWS = {name for name in NAMED if "Qwen" in name} | {NAFLEX, SIGLIP, PIXTRAL}
FIRST_AXIS = {name for name in NAMED if "tokens first" in name}
RANDOM = {"transformers MAE"}  # draws the order of patches anew in each call
FAMILIES = sorted(NAMED.keys() - IN_ROWS - FIRST_AXIS - RANDOM)
TEN = ["timm ViT", "timm DeiT", "timm EVA-02", "timm BEiT", "timm SigLIP", "torchvision ViT"]
TEN += [f"transformers {name}" for name in ("ViT", "CLIP", "DINOv2 with registers", "DINOv3", "BEiT")]


@pytest.fixture(autouse=True)
def _invariant():
    with vitfast.batch_invariant(True):
        yield


def made(name: str, dtype: torch.dtype, accelerate: bool = True):
    model = randomize(family(name).make(), std=0.2).eval().to(dtype)
    return vitfast.accelerate(model) if accelerate else model


def check(name: str, dtype: torch.dtype, batches, accelerate: bool = True, count: int = 7) -> int:
    model, (argument, example) = made(name, dtype, accelerate), next(iter(family(name).batch().items()))
    images = torch.randn(count, *example.shape[1:]).to(dtype)
    return differing(lambda x: [t for t in floats(model(**{argument: x})) if len(t) == len(x)], images, batches)


@pytest.mark.parametrize("accelerate", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*TEN, *(pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES if n not in TEN)])
def test_on_plain_pytorch(name, dtype, accelerate):
    assert check(name, dtype, (2, 7), accelerate) == 0


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_in_batches_of_2_to_64_on_two_threads(name):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert sum(check(name, dtype, (2, 3, 4, 5, 17, 64), count=64) for dtype in DTYPES) == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in FAMILIES])
def test_on_interpreted_kernels(name, dtype):
    before = launches_made()
    with ops.use_kernels("on"), even_dot():
        assert check(name, dtype, (2, 3), count=3) == 0
    assert launches_made() > before


def one_of(name: str, batch: dict, i: int) -> dict:
    """The i-th image of a batch of two, alone and without padding."""
    if name == PIXTRAL:
        height, width = batch["image_sizes"][i].tolist()
        pixels = batch["pixel_values"][i : i + 1, :, :height, :width]
        return dict(pixel_values=pixels, image_sizes=batch["image_sizes"][i : i + 1])
    valid = batch[{NAFLEX: "patch_valid", SIGLIP: "pixel_attention_mask"}[name]]
    own = {key: value[i : i + 1] for key, value in batch.items()}
    return {k: v if k == "spatial_shapes" else v[:, : int(valid[i].sum())] for k, v in own.items()}


@pytest.mark.parametrize("mode", ["off", pytest.param("on", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [NAFLEX, SIGLIP, PIXTRAL])
def test_images_of_many_sizes(name, dtype, mode):
    """Padded, or in one row, beside another; and alone."""
    if mode == "on" and not INTERPRETED:
        pytest.skip("interpreted kernels")
    model, batch = made(name, dtype), family(name).batch()
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    with torch.no_grad(), ops.use_kernels(mode), even_dot() if mode == "on" else nullcontext():
        both, start = model(**batch), 0
        for i in range(2):
            alone = model(**one_of(name, batch, i))
            if name == NAFLEX:
                assert not unlike([both[i : i + 1]], [alone])
                continue
            tokens = alone.last_hidden_state
            found = both.last_hidden_state[0, start:] if name == PIXTRAL else both.last_hidden_state[i]
            assert not unlike([found[: tokens.shape[1]]], [tokens])
            start += tokens.shape[1]
            if name == SIGLIP:
                assert not unlike([both.pooler_output[i : i + 1]], [alone.pooler_output])


@pytest.mark.skipif(torch.cuda.is_available(), reason="of this CPU's kernels")
def test_without_the_mode_bits_depend_on_the_batch():
    with vitfast.batch_invariant(False):
        assert sum(check(name, torch.float32, (2, 7)) > 0 for name in TEN) > 3


# What models call beside the operations that _fixed.py replaces: copies, comparisons, whole numbers, arithmetic that
# IEEE 754 rounds, functions that PyTorch has by vectors alone, rows by themselves, and tables that no image changes.
ALIKE = set(
    """
    _is_all_true _local_scalar_dense _safe_softmax _to_copy _unique2 _unsafe_view abs add alias all amax any arange
    as_strided bitwise_and bitwise_not cat clamp clone constant_pad_nd copy cos cumsum detach div embedding empty
    empty_like eq expand fill floor floor_divide full full_like gather ge gt index index_add index_copy index_select
    le lift_fresh logical_and logical_not logical_or lt masked_fill max maximum minimum mul native_layer_norm ne neg
    new_empty new_full new_ones new_zeros nonzero_static ones ones_like permute prod promote_types reciprocal
    remainder repeat repeat_interleave rsub scalar_tensor scatter select sin slice sort split split_with_sizes sqrt
    squeeze stack sub sum t tanh transpose unbind unique_consecutive unsqueeze upsample_linear1d view where zeros
    zeros_like
    """.split()
)


@pytest.mark.slow
@pytest.mark.parametrize("accelerate", [True, False])
def test_models_call_nothing_else(accelerate):
    """An operation of PyTorch's that nobody looked at fails here."""
    fixed = {each.partition(".")[0] for each in (*_fixed.ALGORITHMS, *_fixed.ON_CPU.split())}
    for name in sorted(NAMED.keys() - RANDOM):
        model, batch = made(name, torch.float32, accelerate), family(name).batch()
        with torch.no_grad(), Calls() as calls:
            model(**batch)
        names = {func.name().partition("::")[2].partition(".")[0].removesuffix("_") for func, *_ in calls.found}
        assert not {each for each in names - fixed - ALIKE if not hasattr(ops, each)}, name
