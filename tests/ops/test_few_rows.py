"""Blocks and a ViT in evaluation: when they take the kernels of few rows, that these are right, what is launched."""

import functools

import pytest
import torch
from attention_cases import interpreted
from even_dot import even_dot

from vitfast import ViT, ops
from vitfast.kernels.dependent import MOST_ROWS
from vitfast.kernels.launch import record
from vitfast.kernels.matmul import few_rows
from vitfast.ops import reference as ref
from vitfast.tools.verify import Judge, cases
from vitfast.tools.verify.draw import Draw, Sizes
from vitfast.tools.verify.launcher import Launcher

pytestmark = interpreted
CPU, BF16 = torch.device("cpu"), torch.bfloat16
SIZES = Sizes(batch=1, tokens=9, width=64, heads=2, hidden=96, image=16, patch=8)
FEW = ["norm_linear_kernel", "split_linear_kernel"]
INPUTS = {name: cases(SIZES, ops)[name][1] for name in ("attention_block, one image", "mlp_block, one image")}
MLP = INPUTS["mlp_block, one image"]  # x and the norm; two layers with their biases
BLOCKS = {
    "attention_block": (dict(num_heads=2), INPUTS["attention_block, one image"]),
    "mlp_block": ({}, MLP),
    "gated_mlp_block": ({}, [*MLP[:5], *MLP[3:]]),
}
EVERY = pytest.mark.parametrize("name", BLOCKS)


@pytest.fixture(autouse=True)
def _kernels():
    with ops.use_kernels("on"), torch.no_grad():
        yield


def drawn(name: str, dtype: torch.dtype = BF16, batch: int = 1, tokens: int = 9) -> tuple[torch.Tensor, ...]:
    t = Draw(dtype, CPU, torch.Generator().manual_seed(0))
    tensors = [each.detach() for each in t.leaves(BLOCKS[name][1])]
    return t.values(batch, tokens, SIZES.width), *tensors[1:]


def block(name: str, module=ops, **options):
    return functools.partial(getattr(module, name), **BLOCKS[name][0], **options)


def kernels(run) -> list[str]:
    return [launch.kernel.__name__ for launch in record(run)]


def few(run) -> bool:
    """Whether it takes the kernels of few rows: both, and between them attention alone."""
    names = kernels(run)
    assert (names[0] == FEW[0]) == (names[-1] == FEW[1]) and names.count(FEW[0]) == names.count(FEW[1]) <= 1, names
    assert names[0] != FEW[0] or len(names) == 2 + any("attention" in each for each in names), names
    return names[0] == FEW[0]


# Other options: what each needs beside the block's tensors.
OPTIONS = [{}, dict(norm="rms"), dict(layer_scale=torch.randn(64).to(BF16)), dict(eps=0.1), dict(keep="all")]


@EVERY
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "".join(options))
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_a_block_of_few_rows_is_right(name, options, dtype):
    """Against float64, of two images, as is any other block; keep says nothing without gradients."""
    options = {key: value.to(dtype) if torch.is_tensor(value) else value for key, value in options.items()}

    def make(t):
        x, weight, bias, *layers = drawn(name, dtype, batch=2)
        return x, weight, None if "norm" in options else bias, *layers

    def formula(*tensors):
        return block(name, ref, **{key: value for key, value in options.items() if key != "keep"})(*tensors)

    judge = Judge(Launcher(make, None, formula), dtype, CPU)
    assert few(lambda: block(name, **options)(*judge.inputs))
    judge.judge([block(name, **options)(*judge.inputs)])


@EVERY
def test_who_takes_the_kernels_of_few_rows(name):
    """Up to 1,024 rows of 16 bits in evaluation; and not in training, in fp32, with drop path or batch invariance."""
    tensors = drawn(name)
    call = lambda *changed, **options: few(lambda: block(name, **options)(*(changed or tensors)))  # noqa: E731
    assert call() and call(*drawn(name, batch=2, tokens=MOST_ROWS // 2))
    assert not call(*drawn(name, tokens=MOST_ROWS + 1)) and not call(*drawn(name, torch.float32))
    assert not call(drop_path=torch.ones(1)) and not call(tensors[0].float(), *tensors[1:], residual_in_fp32=True)
    with ops.batch_invariant(True):
        assert not call()
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in tensors]
        assert call() and not call(tensors[0], leaves[1], *tensors[2:]) and not call(*leaves)
    with torch.inference_mode():
        assert call()


def test_an_inner_norm_is_for_the_other_kernels():
    options = dict(inner_norm_weight=torch.ones(96, dtype=BF16))
    assert FEW[0] not in kernels(lambda: block("gated_mlp_block", **options)(*drawn("gated_mlp_block")))


@EVERY
def test_under_autocast_fp32_weights_are_right(name):
    """Whichever kernels run: float64 of what autocast casts, to bf16, is the truth."""
    tensors = drawn(name, torch.float32)
    kept = (1, 2)  # the norm's parameters stay in fp32
    cast = tuple(t if i in kept else t.to(BF16) for i, t in enumerate(tensors))
    with torch.autocast("cpu", BF16):
        found = block(name)(*tensors)
    judge = Judge(Launcher(lambda t: tuple(t.to(BF16) for t in cast), None, block(name, ref)), BF16, CPU)
    judge.truth = [block(name, ref)(*(t.double() for t in cast))]
    assert found.dtype == BF16
    judge.judge([found])


@EVERY
def test_with_batch_invariance_the_number_of_rows_decides_nothing(name, monkeypatch):
    """An image alone has the bits that it has among others, on either side of the most rows."""
    monkeypatch.setattr(few_rows, "MOST_ROWS", 20)
    x, *layers = drawn(name, batch=3)
    call = block(name)
    assert few(lambda: call(x[:2], *layers)) and not few(lambda: call(x, *layers))
    with ops.batch_invariant(True), even_dot():
        together = call(x, *layers)
        assert all(torch.equal(call(x[i : i + 1], *layers)[0], together[i]) for i in range(3))


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_norm_and_head(norm, dtype):
    """In one kernel for few rows of 16 bits, else in two. test_operations.py has the gradients."""
    given = dict(zip(("x", "norm_weight", "norm_bias", "weight", "bias"), cases(SIZES, ops)["norm_linear"][1]))
    tensors = Draw(dtype, CPU, torch.Generator().manual_seed(0)).leaves(list(given.values()))
    tensors = [None if i == 2 and norm == "rms" else t for i, t in enumerate(tensors)]
    launcher = Launcher(lambda t: tuple(tensors), None, functools.partial(ref.norm_linear, norm=norm))
    call = functools.partial(ops.norm_linear, *tensors, norm=norm)
    Judge(launcher, dtype, CPU).judge([call()])
    assert (kernels(call) == FEW[:1]) == (dtype != torch.float32)
    with torch.enable_grad():
        Judge(launcher, dtype, CPU).judge([call().detach()])
        assert (kernels(call) == FEW[:1]) == (dtype != torch.float32)


def small_vit(**changes) -> ViT:
    sizes = dict(img_size=16, patch_size=8, embed_dim=64, num_heads=2, num_classes=5, depth=2)
    return ViT(**sizes | changes).to(BF16).eval()


PATCHES = ["patch_embed_fwd_kernel"]
LAYER = [FEW[0], "_attention_fwd_short_kernel", FEW[1], *FEW]


CHANGES = [{}, dict(global_pool="avg"), dict(norm_layer="rmsnorm"), dict(swiglu_mlp=True)]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_vit_of_few_rows_is_right(changes):
    """Against itself in float64; five kernels a layer."""
    vit = small_vit(**changes)
    images = torch.randn(2, 3, 16, 16).to(BF16)
    with ops.use_kernels("off"):
        truth, plain = small_vit(**changes).double(), vit(images)
        truth.load_state_dict({name: value.double() for name, value in vit.state_dict().items()})
        exact = truth(images.double())
    error, own = (((t.double() - exact).norm() / exact.norm()).item() for t in (vit(images), plain))
    assert error <= 2 * own and own > 0
    names = kernels(lambda: vit(images))
    assert names == [*PATCHES, *LAYER * 2, FEW[0]]


# ---- the kept projection with the normalisation of raw pixels in it


FOLD = "patch_embed_fold_kernel"


def test_the_normalisation_is_folded_once_and_again_after_each_change():
    """In place, by another tensor, in another dtype, for another layout of the images; training drops it."""
    vit = small_vit()
    proj, images = vit.patch_embed.proj, torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8)

    def right() -> bool:
        """Whether the tokens are those of the weights as they are now."""
        with ops.use_kernels("off"):
            truth = vit.patch_embed(images, mean=vit.mean, std=vit.std)
        found = vit.patch_embed(images, mean=vit.mean, std=vit.std)
        return torch.allclose(found.double(), truth.double(), atol=3e-2, rtol=2e-2)

    def folds() -> bool:
        return FOLD in kernels(lambda: vit(images))

    def kept() -> bool:
        """Whether the second call launches no fold, and both are right."""
        return right() and not folds() and right()

    assert folds() and folds() and kept(), "launches that are only recorded write nothing to keep"
    changes = {
        "in place": lambda: proj.weight.add_(1),
        "the bias": lambda: proj.bias.sub_(3),
        "replaced": lambda: setattr(proj, "weight", torch.nn.Parameter(proj.weight * -2)),
        "loaded": lambda: vit.load_state_dict({k: v * 0.5 for k, v in vit.state_dict().items()}),
        "the dtype": lambda: vit.half(),
        "the mean": lambda: setattr(vit, "mean", [0.1, 0.2, 0.3]),
        "training": lambda: vit.train().eval(),
    }
    for change in changes.values():
        change()
        assert folds() and kept()
    images = images.contiguous(memory_format=torch.channels_last)
    assert folds() and kept()
    proj.weight.data.mul_(-1)  # which no version tells
    vit.train().eval()
    assert kept()


def test_no_fold_is_kept_for_gradients_nor_in_copies_and_files():
    vit, images = small_vit(), torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8)
    before = set(vit.state_dict()), set(vars(vit.patch_embed))
    vit(images)
    with torch.enable_grad():
        assert FOLD in kernels(lambda: vit(images))
    assert (set(vit.state_dict()), set(vars(vit.patch_embed))) == before
    assert FOLD not in kernels(lambda: vit(images))


def test_another_weight_at_the_address_of_one_that_was_freed_is_folded():
    vit, images = small_vit(), torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8)
    proj = vit.patch_embed.proj
    for _ in range(5):
        values, proj.weight = torch.randn_like(proj.weight), None  # what is freed here is allocated again below
        proj.weight = torch.nn.Parameter(values.clone())
        with ops.use_kernels("off"):
            truth = vit.patch_embed(images, mean=vit.mean, std=vit.std)
        found = vit.patch_embed(images, mean=vit.mean, std=vit.std)
        torch.testing.assert_close(found.double(), truth.double(), atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("name", ["_last_norm", "_head", "_encode", "pool"])
def test_a_vit_whose_end_is_replaced_runs_it(name):
    vit, images = small_vit(), torch.randn(1, 3, 16, 16).to(BF16)
    before = getattr(vit, name)
    setattr(vit, name, lambda *args, **options: before(*args, **options) * 0)
    assert FEW[0] not in kernels(lambda: vit(images))[-1:]


def test_fx_finds_the_last_modules_where_gradients_are_off():
    from timm.models._features_fx import create_feature_extractor

    vit, images = small_vit(), torch.randn(1, 3, 16, 16).to(BF16)
    features = create_feature_extractor(vit, {"norm": "norm", "head": "head"})(images)
    torch.testing.assert_close(features["head"], vit(images), atol=3e-2, rtol=3e-2)
