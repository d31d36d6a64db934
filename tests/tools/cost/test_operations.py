"""The FLOPs of a step against torch's counter and the paper, bytes and floors by hand."""

import json
from pathlib import Path

import pytest
import torch
from commands import run_cli
from cost_models import MEASURED, TINY, on_meta
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitfast import ViT
from vitfast.model.baselines import baseline
from vitfast.model.config import ViTConfig
from vitfast.tools.cost.gpus import rates
from vitfast.tools.cost.steps import flops_per_image, forward_flops, operations
from vitfast.tools.cost.training import estimate, estimate_baseline
from vitfast.train.lejepa import LeJEPA
from vitfast.train.recipes import resolve, vit_arguments

ROOT = Path(__file__).parents[3]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name, options",
    [
        ("B/16", {}),
        ("H/14", dict(img_size=518, depth=2)),
        ("S/16", dict(img_size=(80, 208), global_pool="avg", class_token=False, num_classes=10)),
        ("Ti/16", dict(reg_tokens=4, representation_size=100, in_chans=1, mlp_ratio=3.5, qkv_bias=False)),
        ("L/32", dict(num_classes=0, depth=3)),
        ("Nano/8", dict(img_size=24, patch_size=(6, 8), global_pool="")),
        ("DINOv3-S+/16", dict(img_size=(80, 208), depth=3)),
        ("DINOv3-7B/16", dict(depth=1)),
        ("EVA02-B/14", dict(depth=2)),
        ("CLIP-B/32", dict(norm_layer="rmsnorm")),
    ],
    ids=str,
)
def test_flops_are_those_torch_counts(name, options):
    with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH):  # torch 2.11 does not count the CPU's flash attention
        model = ViT.from_preset(name, weight_init="skip", **options)
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(2, model.in_chans, *model.patch_embed.img_size))
    assert 2 * flops_per_image(on_meta(name, **options)) == counter.get_total_flops() > 0


@pytest.mark.parametrize(
    "name, options", [("R50+B/16", {}), ("SigLIP2-So400m/16", dict(num_heads=6, num_classes=0, reg_tokens=2))], ids=str
)
def test_flops_of_small_models_are_those_torch_counts(name, options):
    """A hybrid; MAP heads, which see no prefix tokens."""
    model = ViT.from_preset(name, **dict(img_size=(32, 48), depth=1, embed_dim=96) | options)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.rand(1, 3, 32, 48))
    assert flops_per_image(model) == counter.get_total_flops() > 0


def test_flops_of_crops_are_those_torch_counts_in_a_pass_for_each_size(capsys):
    """LeJEPA's encoder and projector by ssl/small, without the drop path, which leaves out branches; and parameters."""
    arguments = vit_arguments(resolve("pretrain", dict(recipe="ssl/small")), 0)
    with torch.device("meta"), sdpa_kernel(SDPBackend.MATH):
        model = LeJEPA(ViT(**arguments | dict(weight_init="skip", dynamic_img_size=True))).eval()
        with FlopCounterMode(display=False) as counter:
            for count, side in ((2, 128), (6, 56)):
                model.projector(model.vit(torch.empty(count, 3, side, side)))
    found = json.loads(run_cli(capsys, "cost", "--recipe", "ssl/small", "--images", 9469, "--json")[1])
    assert found["flops_per_image"] == counter.get_total_flops() > 0
    assert found["params"] == sum(p.numel() for p in model.parameters())
    assert found["train_images"] == 800 * 9469 and found["tokens"] == 2 * 16**2 + 6 * 7**2
    assert found["train_flops"] == 3 * counter.get_total_flops() * 800 * 9469


def test_crops_cost_what_images_of_their_sizes_do():
    model = ViTConfig(**on_meta("S/16").config)
    alone, cropped = (estimate(model, rates(), batch_size=64, crops=crops) for crops in ((), [(1, (224, 224))]))
    assert cropped == alone | dict(crops=[[1, [224, 224]]])
    sizes = [(2, (224, 224)), (6, (96, 96))]
    found = estimate(model, rates(), batch_size=64, keep="all", crops=sizes)
    each = [estimate(on_meta("S/16", img_size=side), rates(), batch_size=64 * n, keep="all") for n, side in sizes]
    for whole, *parts in zip(*(one["operations"][:-1] for one in (found, *each))):
        for key in ("forward_flops", "backward_bytes", "forward_floor", "backward_floor"):
            assert whole[key] == pytest.approx(sum(part[key] for part in parts)), whole["name"]
    update = found["operations"][-1]["backward_floor"]  # once
    step = sum(one["floor"]["step_seconds"] - one["operations"][-1]["backward_floor"] for one in each) + update
    assert found["floor"]["step_seconds"] == pytest.approx(step)


@pytest.mark.parametrize(
    "name, epochs, published",
    [
        *(("B/32", 7, 55), ("B/16", 7, 224), ("L/32", 7, 196), ("L/16", 14, 1567), ("H/14", 14, 4262)),
        *(("R50+B/32", 7, 106), ("R50+L/16", 14, 1668)),
    ],
)
def test_flops_are_the_papers(name, epochs, published):
    """Table 6 in exaFLOPs: JFT-300M's images, forward and backward."""
    assert 3 * flops_per_image(on_meta(name)) * 303e6 * epochs == pytest.approx(published * 1e18, rel=0.025)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name, epochs, published", [("R50x1", 7, 50), ("R50x2", 7, 199), ("R152x2", 14, 1126)])
def test_flops_of_resnets_are_the_papers(name, epochs, published):
    with torch.device("meta"):
        model = baseline(name, 1000)
    found = estimate_baseline(model, (224, 224), images=303e6 * epochs)
    assert found["train_flops"] == pytest.approx(published * 1e18, rel=0.05)
    assert found["train_flops"] == 3 * found["flops_per_image"] * 303e6 * epochs


def test_the_command_gives_the_papers_flops(capsys):
    code, out, _ = run_cli(capsys, "cost", "--model", "L/16", "--epochs", 14, "--images", "303e6", "--json")
    found = json.loads(out)
    assert code == 0 and found["train_flops"] == pytest.approx(1567e18, rel=0.001) and found["params"] == 304_326_632
    assert found["train_flops"] == found["train_flops_per_image"] * 303e6 * 14 and found["largest_batch"] > 256


def test_a_convolution_by_hand():
    """The stem of a hybrid whose ResNet has one unit.

    7 x 7 filters at half the size, 1 x 1 and 3 x 3 ones at a quarter.
    """
    found = {op.name: op for op in operations(ViT(**TINY | dict(backbone=dict(layers=[1]))), 2)}
    image, half, quarter = 16 * 24, 8 * 12, 4 * 6  # pixels
    products = [
        (3 * 49, 64, image, half),
        (64, 256, quarter, quarter),
        (64, 64, quarter, quarter),
        (64 * 9, 64, quarter, quarter),
        (64, 256, quarter, quarter),
    ]
    flops = [2 * 2 * pixels * k * n for k, n, _, pixels in products]
    assert sorted(f for f, _ in found["ResNet"].forward if f) == sorted(map(float, flops))
    assert sum(f for f, _ in found["ResNet"].backward) == 2 * sum(flops) - flops[0]  # no gradient of the images
    assert found["ResNet"].forward[0] == (flops[0], 2 * (2 * 3 * image + 2 * 64 * half + 64 * 3 * 49))
    assert len(found["patch embedding"].backward) == 2  # but one of the map


def test_floors_of_a_base_layer():
    """ViT-B/16, batch 256, on an H200's measured rates, against the budget of the kernels' plan.

    GFLOP, traffic in units of the tokens (B N D numbers), floors in microseconds, forward and backward; and a step of
    38.7 ms.
    """
    budget = {
        "LayerNorm 1": ((0, 0), (2, 4), (36, 72)),
        "QKV": ((178, 357), (4, 8), (226, 452)),
        "attention": ((31, 76), (4, 8), (72, 144)),
        "projection + residual": ((59, 119), (3, 4), (75, 151)),
        "LayerNorm 2": ((0, 0), (2, 4), (36, 72)),
        "fc1 + GELU": ((238, 476), (9, 10), (301, 602)),
        "fc2 + residual": ((238, 476), (6, 18), (301, 602)),
    }
    found = estimate(on_meta("B/16"), MEASURED)
    rows, u = {row["name"]: row for row in found["operations"]}, 2 * 256 * 197 * 768
    for name, (gigaflops, traffic, floors) in budget.items():
        row = rows[name]
        assert (row["forward_flops"] / 1e9, row["backward_flops"] / 1e9) == pytest.approx(gigaflops, abs=0.6), name
        assert (round(row["forward_bytes"] / u), round(row["backward_bytes"] / u)) == traffic, name
        assert (1e6 * row["forward_floor"], 1e6 * row["backward_floor"]) == pytest.approx(floors, abs=1), name
    assert found["floor"]["step_seconds"] == pytest.approx(38.7e-3, rel=0.01) and found["micro_batch"] == 256
    assert found["floor"]["images_per_second"] == pytest.approx(6610, rel=0.01)
    assert found["predicted"]["step_seconds"] == pytest.approx(
        found["floor"]["step_seconds"] / found["predicted"]["efficiency"]
    )


def test_relative_positions_add_one_product_to_attention():
    """A query of each patch with an embedding of every offset: n x n products of the head size, for each head."""
    plain, relative = (on_meta("B/16", pos_embed=kind, depth=3) for kind in ("learn", "relative"))
    more = forward_flops(relative, (3, 224, 224)) - flops_per_image(plain)
    assert more == 3 * 2 * 196 * 196 * 768
