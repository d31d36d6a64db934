"""Vectors of other libraries' models, with their preprocessing; what has no vector is refused."""

import json

import pytest
import timm
import torch
import transformers
from embedding_models import CLOSE, IMAGES, SIDE, TEXT, TINY, drawn, processors

import vitfast
from vitfast import Embedder, InputError
from vitfast.model.baselines import baseline


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_processors_that_do_more_than_resize_and_cut_are_refused():
    """Levit resizes to 256 / 224 of its size, MobileViT swaps the channels; a file without a name is an old ViT's."""
    model = drawn(transformers.ViTModel(transformers.ViTConfig(**TINY)))
    for name in ("Levit", "MobileViT", "Perceiver"):
        with pytest.raises(InputError, match=f"unknown image processor '{name}ImageProcessor"):
            Embedder(model, processor=getattr(transformers, f"{name}ImageProcessorPil")())
    told = transformers.ViTImageProcessorPil(size=SIDE).to_dict()
    truth = Embedder(model, processor=told).embed(IMAGES)
    for kind in (None, "DINOv3ViTImageProcessorFast"):
        assert torch.equal(Embedder(model, processor=told | dict(image_processor_type=kind)).embed(IMAGES), truth)


def test_outputs_of_other_models_are_vectors_or_refused():
    processor = transformers.ViTImageProcessorPil(size=SIDE)
    pixels = torch.cat([processor(images=image, return_tensors="pt")["pixel_values"] for image in IMAGES])
    cnn = drawn(
        transformers.ResNetModel(transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8] * 4, depths=[1] * 4))
    )
    clip = transformers.CLIPConfig(vision_config=TINY, text_config=dict(TEXT), projection_dim=24)
    classifier = drawn(transformers.CLIPForImageClassification(clip))
    with torch.inference_mode():
        for model, run in ((cnn, cnn), (classifier, classifier.vision_model)):
            truth = run(pixel_values=pixels).pooler_output.flatten(1)
            found = Embedder(model, processor=processor).embed(IMAGES)
            torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-4)
    tokens = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0, global_pool="")
    backbone = transformers.Dinov2Backbone(transformers.Dinov2Config(hidden_size=32, num_hidden_layers=1))
    for model, message in (
        (tokens, "VisionTransformer makes .197, 192. for an image, no vector; give pool"),
        (backbone, "returns no last_hidden_state, only feature_maps"),
        (transformers.ViTMAEModel(transformers.ViTMAEConfig(**TINY)), "ViTMAEModel leaves out patches at random"),
    ):
        with pytest.raises(InputError, match=message):
            Embedder(model, processor=processor).embed(IMAGES)


@pytest.mark.parametrize("size", [64, (96, 64)])
def test_a_model_of_timm_gets_images_of_the_size_that_it_was_made_for(size):
    model = drawn(timm.create_model("vit_tiny_patch16_224", depth=1, img_size=size))
    told = timm.data.resolve_model_data_config(model) | dict(input_size=(3, *model.patch_embed.img_size))
    transform = timm.data.create_transform(**told)
    with torch.inference_mode():
        tokens = model.forward_features(torch.stack([transform(image) for image in IMAGES]))
        truth = model.forward_head(tokens, pre_logits=True)
    for given in (model, torch.compile(model, backend="eager")):
        torch.testing.assert_close(Embedder(given).embed(IMAGES), truth, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["timm:convnext_atto", "R50x1"])
def test_a_baseline_has_its_own_mean_and_std(name, tmp_path):
    model = baseline(name, 5, (64, 64)).eval()
    model.mean, model.std = (0.1, 0.5, 0.2), (0.3, 0.9, 0.4)
    model.save_pretrained(tmp_path)
    told = timm.data.resolve_model_data_config(model) | dict(input_size=(3, 64, 64), mean=model.mean, std=model.std)
    transform = timm.data.create_transform(**told)
    with torch.inference_mode():
        tokens = model.forward_features(torch.stack([transform(image) for image in IMAGES[:3]]))
        truth = model.forward_head(tokens, pre_logits=True)
    for given in (model, tmp_path):
        torch.testing.assert_close(Embedder(given, device="cpu").embed(IMAGES[:3]), truth, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
@pytest.mark.parametrize("name, side", [("dinov2", 32), ("clip", 48)])
def test_a_processor_is_found_beside_the_weights(file, name, side, tmp_path):
    """transformers 5 saves that of images and texts in one file, with that of images in it.

    Where an odd number is cut off, its crop begins a pixel before timm's; DINOv2's table is for larger images.
    """
    model, kind, _, pick = processors()[name]
    drawn(model).save_pretrained(tmp_path)
    options = dict(size=dict(shortest_edge=side + 5), crop_size=dict(height=side, width=side), resample=2)
    processor = getattr(transformers, f"{kind}ImageProcessorPil")(**options)
    told = processor.to_dict()
    content = dict(image_processor=told, processor_class="CLIPProcessor") if file[:3] == "pro" else told
    (tmp_path / file).write_text(json.dumps(content))
    with torch.inference_mode():
        truth = torch.cat([pick(model(**processor(images=i, return_tensors="pt"))) for i in IMAGES])
    again = type(model).from_pretrained(tmp_path)
    for given in (again, tmp_path):
        embedder = Embedder(given, device="cpu")
        assert given is again or embedder.backbone.size == (side, side)
        torch.testing.assert_close(embedder.embed(IMAGES), truth, atol=1e-5, rtol=1e-4)
    (tmp_path / file).write_text("{")
    with pytest.raises(InputError, match=f"{file}.* (is damaged|cannot be read)"):
        Embedder(again)


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("pool", [None, "token", "avg"])
def test_naflexvit_sees_images_in_their_own_aspect(accelerated, pool):
    from timm.data.naflex_transforms import Patchify, ResizeToSequence
    from torchvision.transforms import Compose, Normalize, ToTensor

    options = dict(class_token=True, reg_tokens=1, embed_dim=32, depth=2, num_heads=2, patch_size=16)
    model = drawn(timm.models.naflexvit.NaFlexVit(timm.models.naflexvit.NaFlexVitCfg(**options), num_classes=0))
    model.pretrained_cfg = dict(mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic", input_size=(3, 384, 384))
    steps = Compose([ResizeToSequence(16, 576), ToTensor(), Normalize(0.5, 0.5), Patchify(16)])
    with torch.inference_mode():
        truth = []
        for image in IMAGES:
            given = {k: v[None] for k, v in steps(image).items()}
            tokens = model.forward_features(**given)["patches"]
            truth.append(model.fc_norm(model._pool(tokens, pool, patch_valid=given["patch_valid"])))
    if accelerated:
        vitfast.accelerate(model)
    torch.testing.assert_close(Embedder(model, pool=pool, tokens=900).embed(IMAGES), torch.cat(truth), **CLOSE)
