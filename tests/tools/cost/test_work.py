"""The work of every operation, and of the benchmarks' whole models, counted by hand and by torch."""

import pytest
import shapes
import torch
from shapes import Shape
from timm.models.vision_transformer import VisionTransformer
from torch.utils.flop_counter import FlopCounterMode

from vitfast.tools.cost import work
from vitfast.tools.cost.gpus import name_of

M, N, D, F = 10, 5, 192, 768  # Ti/16 at 32 pixels, a batch of 2: H 3, Dh 64, u = M D = 1920 numbers

# Numbers that move, written out: operands of every product once, results once.
# W1 and W2 have 147,456, Wqkv 110,592, Wproj 36,864.
FC1, FC2 = 1920 + 147_456 + 7680 + 768, 7680 + 147_456 + 1920 + 192  # forward, biases of F and D included
FC1_BACKWARD = (7680 + 147_456 + 1920) + (7680 + 1920 + 147_456 + 768)  # dX, dW
FC2_BACKWARD = (1920 + 147_456 + 3 * 7680) + (1920 + 7680 + 147_456 + 192)  # dpre: reads pre, writes dpre and act; dW
BY_HAND = {  # op: (flops, elements) of forward, training, backward
    "attention": ((38_400, 4 * 1920), (38_400, 4 * 1920), (96_000, 8 * 1920)),
    "biased_attention": ((38_400, 4 * 1920 + 75), (38_400, 4 * 1920 + 75), (96_000, 8 * 1920 + 150)),
    "layer_norm": ((0, 2 * 1920 + 384), (0, 2 * 1920 + 384), (0, 3 * 1920 + 576)),
    "add_layer_norm": ((0, 4 * 1920 + 384), (0, 4 * 1920 + 384), (0, 4 * 1920 + 576)),
    "linear_gelu": ((2_949_120, FC1), (2_949_120, FC1 + 7680), (5_898_240, FC1_BACKWARD + 2 * 7680)),
    "mlp": ((5_898_240, FC1 + FC2), (5_898_240, FC1 + FC2 + 7680), (11_796_480, FC1_BACKWARD + FC2_BACKWARD)),
    "gated_mlp": (  # up and gate: 1,920 + 294,912 + 1,536 of weights and biases; they put out 15,360, h is 7,680
        (8_847_360, 1920 + 294_912 + 1536 + 7680 + FC2),
        (8_847_360, 1920 + 294_912 + 1536 + 15_360 + 7680 + FC2),
        # dup, dgate and h again of dout, up and gate; dW down; dx of both; dW of both
        (17_694_720, (1920 + 147_456 + 5 * 7680) + (1920 + 7680 + 147_456 + 192) + 312_192 + 313_728),
    ),
    "rms_norm": ((0, 2 * 1920 + 192), (0, 2 * 1920 + 192), (0, 3 * 1920 + 384)),
    "mlp_block": (
        (5_898_240, 2 * 1920 + 384 + FC1 + FC2 + 1920),
        (5_898_240, 2 * 1920 + 384 + FC1 + FC2 + 1920 + 7680),
        (11_796_480, 4 * 1920 + 576 + FC1_BACKWARD + FC2_BACKWARD),
    ),
    "attention_block": (
        (2_987_520, 173_568),  # LayerNorm 4,224, qkv 118,848, attention 7,680, proj with its residual 42,816
        (2_987_520, 173_568),
        (5_994_240, 342_336),  # 8,256; 118,272 + 118,848; 15,360; 40,704 + 40,896
    ),
}

SIZES = {
    "attention": (M, N, D),
    "biased_attention": (M, N, D, 3),
    "layer_norm": (M, D),
    "rms_norm": (M, D),
    "add_layer_norm": (M, D),
    "attention_block": (M, N, D),
}


@pytest.mark.parametrize("op", BY_HAND)
def test_work_by_hand(op):
    found = getattr(work, op)(*SIZES.get(op, (M, D, F)), 2)
    directions = (found.forward, found.training, found.backward)
    assert [(work.total_flops(k), work.total_bytes(k) / 2) for k in directions] == list(BY_HAND[op])
    both = work.total_flops(found.of("both"))
    assert both == work.total_flops(found.training) + work.total_flops(found.backward)


# 8 patches of 768 values; pixels 2 x 3 x 32 x 32; tokens, weight, and 1,344 of bias, class token and 5 positions.
PIXELS, PATCH_EMBED = 6_144, 1_920 + 147_456 + 1_344


def test_work_of_patch_embed_by_hand():
    for size, pixel in ((2, 1), (4, 4)):
        found = shapes.patch_embed_work(Shape("Ti/16", 32, 2), size, pixel)
        assert found.forward == ((2_359_296, PIXELS * pixel + PATCH_EMBED * size),)
        assert found.backward == found.forward


def test_the_floor_adds_up_kernels_one_after_the_other():
    kernels = ((10.0, 1.0), (1.0, 10.0)) + ((0.0, 4.0),)
    assert work.floor_seconds(kernels, flops_per_second=2.0, bytes_per_second=4.0) == 10 / 2 + 10 / 4 + 4 / 4


def test_a_whole_models_flops_are_what_torch_counts():
    with torch.device("meta"):
        model, images = VisionTransformer(), torch.randn(2, 3, 224, 224)
    with FlopCounterMode(display=False) as counter:
        model(images)
    flops = work.total_flops(shapes.model_work(Shape("B/16", 224, 2), 2).forward)
    assert flops == counter.get_total_flops() == 2 * 35_127_656_448


def test_datasheet_names_one_device_each():
    assert name_of("NVIDIA H200") == "H200" and name_of("NVIDIA H100 80GB HBM3") == "H100"
    assert name_of("NVIDIA A100-SXM4-80GB") == "A100" and name_of("NVIDIA A100-PCIE-40GB") == "A100-40"
    for other in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "cpu"):
        assert name_of(other) is None
