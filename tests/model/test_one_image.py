"""What B/16 launches for one image in evaluation, by meta tensors: how many kernels, and how many bytes they move."""

import pytest
import torch
from torch import Tensor

from vitfast.kernels import tiles
from vitfast.kernels.launch import Launch
from vitfast.tools.machine_code.model_launches import launching_on_meta, model, step

TOKENS, WIDTH, HIDDEN, DEPTH = 197, 768, 3072, 12


def launches(images: torch.dtype = torch.bfloat16, preset: str = "B/16") -> list[Launch]:
    with tiles.using(sm=90), launching_on_meta():
        return step(model(preset, 224, train=False, amp=False), 1, images)


def moved(launch: Launch) -> dict[str, int]:
    """The bytes of each tensor that a launch reads or writes; of sums in parts twice, as it does both."""
    found = {}
    for name, value in launch.arguments.items():
        value = getattr(value, "base", value)  # of a descriptor
        if isinstance(value, Tensor):
            found[name] = value.numel() * value.itemsize * (1 + (name == "parts_ptr"))
        elif isinstance(value, tuple):
            found |= {f"{name}{i}": t.numel() * t.itemsize for i, t in enumerate(value) if isinstance(t, Tensor)}
    return found


@pytest.mark.parametrize("images, most", [(torch.bfloat16, 62), (torch.float32, 62), (torch.uint8, 63)], ids=str)
def test_five_kernels_a_layer_and_two_more(images, most):
    """And one more that folds the normalisation of raw pixels into the projection, at the first call."""
    names = [launch.kernel.__name__ for launch in launches(images)]
    fold, rest = names[: most - 62], names[most - 62 :]
    layer = ["norm_linear_kernel", "_attention_fwd_short_kernel", "split_linear_kernel"]
    layer += ["norm_linear_kernel", "split_linear_kernel"]
    assert len(layer) == 5 and fold == ["patch_embed_fold_kernel"] * (most - 62)
    assert rest == ["patch_embed_fwd_kernel", *layer * DEPTH, "norm_linear_kernel"]


@pytest.mark.parametrize("preset, most", [("Ti/16", 62), ("S/16", 62), ("L/16", 122)])
def test_as_many_of_other_sizes(preset, most):
    assert len(launches(preset=preset)) == most


def test_a_layer_moves_its_weights_once_and_little_else():
    """In MB of each layer: weights 14.2; activations 6.7; sums in parts 10.9 (split in 4 and 5, written and read)."""
    layer = launches()[1:6]
    sizes = [moved(launch) for launch in layer]
    weights = sum(size["weight_ptr"] for size in sizes if "weight_ptr" in size)
    assert weights == 2 * (4 * WIDTH**2 + 2 * WIDTH * HIDDEN)
    parts = sum(size.get("parts_ptr", 0) for size in sizes)
    assert parts <= 2 * 4 * TOKENS * WIDTH * (4 + 5)
    # Read and written: x, qkv; qkv, o; o, x, x; x, hidden; hidden, x, x. Vectors, lse and counters are the rest.
    activations = 2 * TOKENS * (9 * WIDTH + 2 * 3 * WIDTH + 2 * HIDDEN)
    vectors = 2 * (4 * WIDTH + 3 * WIDTH + HIDDEN + 2 * WIDTH) + 4 * TOKENS * WIDTH // 64 + 4 * 4 * 1024
    assert sum(sum(size.values()) for size in sizes) <= weights + parts + activations + vectors


def test_an_image_moves_the_weights_once():
    """In MB: weights 173; sums in parts 131, and activations 81, which a layer leaves in L2 for the next."""
    found = launches()
    total = sum(sum(moved(launch).values()) for launch in found)
    parameters = 2 * sum(p.numel() for p in model("B/16", 224, train=False, amp=False).parameters())
    assert 172e6 < parameters < 174e6 and parameters < total < 2.3 * parameters, total
    assert sum(size for launch in found for name, size in moved(launch).items() if name == "parts_ptr") < 135e6
