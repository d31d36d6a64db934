"""Transforms of an evaluation on tensors, against timm's and those of transformers' processors, in every pixel."""

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from timm.data import create_transform
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from vitfast import InputError
from vitfast.data.eval_transforms import EvalTransform
from vitfast.model.checkpoint import hugging_face


def images(seed: int, count: int) -> list[np.ndarray]:
    """RGB noise (H, W, 3) of many sizes, from a few pixels to three hundred, and of every aspect up to 1 : 100."""
    rng = np.random.default_rng(seed)
    sides = [tuple(int(2 ** rng.uniform(1, 8.2)) for _ in range(2)) for _ in range(count - 4)]
    sides += [(224, 224), (32, 48), (3, 300), (301, 4)]
    return [rng.integers(0, 256, (*side, 3), dtype=np.uint8) for side in sides]


def tensors(arrays: list[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(array).permute(2, 0, 1) for array in arrays]


@pytest.mark.parametrize("size", [32, (24, 40), (57, 33)], ids=str)
@pytest.mark.parametrize("mode", ["center", "squash", "border"])
def test_pixels_are_those_of_timm(mode, size):
    for seed, (pct, name) in enumerate([(1.0, "bicubic"), (0.875, "bilinear"), (0.9, "lanczos"), (0.95, "nearest")]):
        arrays, mean = images(seed, 60), (0.485, 0.456, 0.406)
        sides = (size, size) if isinstance(size, int) else size
        options = dict(crop_mode=mode, crop_pct=pct, interpolation=name, mean=mean)
        theirs = create_transform((3, *sides), is_training=False, use_prefetcher=True, **options)
        ours = EvalTransform.timm(size, **options)
        wanted = []
        for array in arrays:
            try:
                wanted.append(torch.as_tensor(np.asarray(theirs(Image.fromarray(array)))))
            except ValueError:  # an image so long that the other side would be no pixel
                wanted.append(None)
        for got, want, array in zip(ours(tensors(arrays)), wanted, arrays):
            assert want is None or torch.equal(got, want), (array.shape, pct, name)
        assert sum(want is None for want in wanted) <= (10 if mode == "border" else 0)
        assert torch.equal(ours(tensors(arrays)[-4]), wanted[-4])


PROCESSORS = {
    "vit": (ViTImageProcessorPil, dict(size=dict(height=33, width=48))),
    "vit, cut": (ViTImageProcessorPil, dict(size=40, do_center_crop=True, crop_size=dict(height=31, width=36))),
    "deit": (DeiTImageProcessorPil, dict(size=dict(height=64, width=64), crop_size=dict(height=57, width=56))),
    "siglip": (SiglipImageProcessorPil, dict(size=dict(height=48, width=48))),
    "clip": (CLIPImageProcessorPil, dict(size=dict(shortest_edge=32), crop_size=dict(height=32, width=32))),
    "dinov2": (BitImageProcessorPil, dict(size=dict(shortest_edge=64), crop_size=dict(height=57, width=58))),
    "padded": (
        BitImageProcessorPil,
        dict(size=dict(shortest_edge=32), crop_size=dict(height=63, width=40), resample=1),
    ),
    "not resized": (BitImageProcessorPil, dict(do_resize=False, crop_size=dict(height=50, width=61))),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_are_those_of_hugging_face(name):
    make, options = PROCESSORS[name]
    processor, arrays = make(**options, do_rescale=False, do_normalize=False), images(len(name), 30)
    theirs = [torch.from_numpy(np.stack(processor(Image.fromarray(a))["pixel_values"]))[0] for a in arrays]
    ours = EvalTransform.hugging_face(processor.to_dict())(tensors(arrays))
    for got, want, array in zip(ours, theirs, arrays):
        assert torch.equal(got, want), array.shape


def test_processors_of_older_files_have_their_classes_defaults():
    old = EvalTransform.hugging_face(dict(feature_extractor_type="ViTFeatureExtractor", size=224))
    assert old == EvalTransform.hugging_face(ViTImageProcessorPil().to_dict()) and old.resample == "bilinear"
    for name in hugging_face.PROCESSORS:
        told = getattr(transformers, f"{name}ImageProcessorPil")().to_dict()
        bare = dict(image_processor_type=told["image_processor_type"])
        assert EvalTransform.hugging_face(bare) == EvalTransform.hugging_face(told)


def test_what_a_transform_does_not_know_is_refused():
    wrong = {
        "unknown image processor 'DINOv3ViTImageProcessorFast'": dict(
            image_processor_type="DINOv3ViTImageProcessorFast"
        ),
        "ViTImageProcessor: give size as height and width.*got size={'longest_edge'": dict(
            image_processor_type="ViTImageProcessor", size=dict(longest_edge=500, shortest_edge=400)
        ),
        "ViTImageProcessor: give size.*got size={'shortest_edge": dict(
            image_processor_type="ViTImageProcessor", size=dict(shortest_edge=400)
        ),
        "CLIPImageProcessor: give .* a resample from 0 to 5; .*resample=6": dict(
            image_processor_type="CLIPImageProcessor", resample=6
        ),
    }
    for message, processor in wrong.items():
        with pytest.raises(InputError, match=message):
            EvalTransform.hugging_face(processor)
    with pytest.raises(InputError, match="unknown crop_mode 'middle'"):
        EvalTransform.timm(224, crop_mode="middle")
    with pytest.raises(InputError, match="unknown interpolation 'cubic'; did you mean bicubic"):
        EvalTransform.timm(224, interpolation="cubic")
