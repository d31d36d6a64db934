"""The pixels of a model by timm's functions and `vitfast.transform`; vectors of other libraries' models."""

import copy
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pictures
import pytest
import timm
import torch
import transformers
from embedding_models import CLOSE, IMAGES, SIDE, TEXT, TINY, as_timm_does, drawn, processors
from PIL import Image
from speed import first
from timm.data import create_transform, resolve_model_data_config
from torchvision.datasets import ImageFolder

import vitfast
import vitfast.timm_models.vision_transformer  # noqa: F401  registers the entry points
from vitfast import Embedder, InputError, ViT
from vitfast.eval.predict import predict
from vitfast.model.baselines import baseline
from vitfast.run.config import Config

STATS = dict(mean=(0.48, 0.45, 0.41), std=(0.23, 0.22, 0.3))
SIZES = [(90, 60), (50, 130), (20, 17), (48, 48), (47, 31)]  # height, width


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for seed, size in enumerate(SIZES):
        pictures.smooth(seed, *size).convert("L" if seed == 2 else "RGB").save(folder / f"{seed}.png")
    return sorted(map(str, folder.iterdir()))


def vit(**options) -> ViT:
    torch.manual_seed(0)
    arguments = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=7, **STATS)
    model = ViT(**arguments | options)
    torch.nn.init.normal_(model.head.weight, std=0.5)
    return model.eval()


def by_timm(model: torch.nn.Module, files: list[str]) -> torch.Tensor:
    """The images as timm's users make them, in timm's words alone."""
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    return torch.stack([transform(Image.open(path).convert("RGB")) for path in files])


def probabilities(model: ViT, files: list[str], **options) -> torch.Tensor:
    """What predict says, the best class first, each in its place."""
    rows = torch.zeros(len(files), model.num_classes)
    names = list(model.class_names or range(model.num_classes))
    records = list(predict(model, files, Config(workers=0), top_k=99, **options))
    assert [record["image"] for record in records] == files
    for row, record in zip(rows, records):
        shares = [found["probability"] for found in record["predictions"]]
        assert shares == sorted(shares, reverse=True)
        row[[names.index(found["label"]) for found in record["predictions"]]] = torch.tensor(shares)
    return rows


@pytest.mark.quick(4)
@pytest.mark.parametrize("mode", ["center", "squash", "border", None])
@pytest.mark.parametrize("size", [32, (24, 40)], ids=str)
def test_timms_functions_give_predicts_answers(mode, size, files, tmp_path):
    crop = dict(crop_mode=mode, crop_pct=0.9 if mode else None, interpolation="bilinear" if mode else None)
    vit(img_size=size, class_names=[f"class {i}" for i in range(7)], **crop).save_pretrained(tmp_path / "weights")
    model = ViT.from_pretrained(tmp_path / "weights").eval()
    for change in (lambda: None, lambda: model.set_input_size((40, 24)), lambda: model.reset_classifier(3)):
        change()
        torch.nn.init.normal_(model.head.weight, std=0.5, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            images = by_timm(model, files)
            logits = model(images)
        truth = logits.softmax(-1)
        torch.testing.assert_close(probabilities(model, files), truth, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(probabilities(model, files, sigmoid=True), logits.sigmoid(), atol=1e-6, rtol=1e-5)
        assert truth.std() > 0.01
        transform = vitfast.transform(model)
        assert torch.equal(torch.stack([transform(path) for path in files]), images)


@pytest.mark.slow
def test_a_configuration_for_timm():
    model = vit(class_names=list("abcdefg"), img_size=(24, 40), interpolation="lanczos")
    keys = model.state_dict().keys()
    told = model.pretrained_cfg
    assert told == model.default_cfg and told["input_size"] == (3, 24, 40) and told["fixed_input_size"]
    assert told["label_names"] == tuple("abcdefg") and told["num_classes"] == 7 and told["interpolation"] == "lanczos"
    assert (told["crop_mode"], told["crop_pct"]) == ("center", 1.0)  # as predict takes what is unset
    modules = dict(model.named_modules())
    assert isinstance(modules[told["first_conv"]], torch.nn.Conv2d) and modules[told["classifier"]] is model.head
    model.pretrained_cfg = dict(told, license="mit", mean=(0.1,) * 3)  # as timm sets it
    model.reset_classifier(2)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.compile(model)):
        told = made.pretrained_cfg
        assert (told["license"], told["num_classes"], told["mean"]) == ("mit", 2, STATS["mean"])
        assert "label_names" not in told
    assert model.state_dict().keys() == keys and "pretrained_cfg" not in model.config
    assert vit(in_chans=1, mean=0.5, std=0.5).pretrained_cfg["input_size"] == (1, 32, 32)
    mixed = ViT.from_preset("R50+B/32", backbone=dict(layers=[1]), patch_size=32, depth=1)
    assert isinstance(dict(mixed.named_modules())[mixed.pretrained_cfg["first_conv"]], torch.nn.Conv2d)


def test_an_entry_point_of_timm_is_cut_as_timm_says(files):
    size = dict(depth=1, num_classes=5)
    model = timm.create_model("vit_fast_tiny_patch16_224", **size).eval()
    theirs = timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k", **size)
    assert model.crop_pct == 0.9 and torch.equal(by_timm(model, files), by_timm(theirs, files))
    assert torch.equal(vitfast.transform(model)(files[0]), by_timm(theirs, files[:1])[0])


def test_every_form_of_an_image(files):
    model = vit()
    transform, path = vitfast.transform(model), files[0]
    image = Image.open(path).convert("RGB")
    array = np.array(image)
    (truth,) = by_timm(model, [path])
    assert truth.dtype == torch.float32
    content = open(path, "rb").read()
    forms = [image, Image.open(path), path, Path(path), content, bytearray(content), array]
    forms += [entry for entry in os.scandir(os.path.dirname(os.fsencode(path))) if entry.path == os.fsencode(path)]
    forms += [torch.from_numpy(array).permute(2, 0, 1), array.transpose(2, 0, 1)]
    forms += [np.dstack([array, array[..., :1]])]  # alpha is left out
    for form in forms:
        assert torch.equal(transform(form), truth), type(form)
    assert len(forms) == 11
    found = vitfast.Embedder(model, workers=2).embed(iter([*forms, files[1]]))
    assert all(torch.equal(vector, found[0]) for vector in found[:-1]) and not torch.equal(found[-1], found[0])
    grey = np.array(image.convert("L"))
    (truth,) = (create_transform(**resolve_model_data_config(model))(Image.fromarray(grey).convert("RGB")),)
    for form in (grey, grey[None], torch.from_numpy(grey), Image.fromarray(grey)):
        assert torch.equal(transform(form), truth)
    together = torch.from_numpy(np.stack([array.transpose(2, 0, 1)] * 2))
    assert torch.equal(vitfast.Embedder(model).embed(together), found[:2])
    with pytest.raises(InputError, match=r"the image must be uint8 pixels .* got float64 \(90, 60, 3\)"):
        transform(array / 255)


@pytest.mark.slow
def test_a_data_set_reads_with_it_in_processes(files, tmp_path):
    for number, path in enumerate(files):
        (tmp_path / f"{number % 2}").mkdir(exist_ok=True)
        (tmp_path / f"{number % 2}" / f"{number}.png").write_bytes(open(path, "rb").read())
    model = vit()
    data = ImageFolder(tmp_path, transform=vitfast.transform(model))
    loader = torch.utils.data.DataLoader(data, 8, num_workers=1, multiprocessing_context="spawn")
    ((images, labels),) = list(loader)
    assert labels.tolist() == [0, 0, 0, 1, 1]
    assert torch.equal(images, by_timm(model, [path for path, _ in data.samples]))


def test_transforms_of_timms_and_of_transformers_models(files):
    model = timm.create_model("deit_tiny_patch16_224.fb_in1k", depth=1)
    for accelerated in (False, True):
        model = vitfast.accelerate(model) if accelerated else model
        got = torch.stack([vitfast.transform(model)(path) for path in files])
        assert torch.equal(got, by_timm(model, files))
    model, kind, options, _ = processors()["clip of both"]()
    processor = getattr(transformers, f"{kind}ImageProcessorPil")(**options)
    wanted = processor(images=[Image.open(path) for path in files], return_tensors="pt")["pixel_values"]
    for given in (model, vitfast.accelerate(model)):
        got = torch.stack([vitfast.transform(given, processor)(path) for path in files])
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)  # the same pixels, normalised in another order


def test_a_model_in_wrappers_has_the_transform_of_its_own():
    model = vit()
    for wrap in (torch.nn.DataParallel, torch.optim.swa_utils.AveragedModel):  # DDP keeps a model as DataParallel does
        for wrapped in (wrap(model), torch.compile(wrap(model))):
            assert vitfast.transform(wrapped) == vitfast.transform(model)


def test_models_without_a_transform():
    with pytest.raises(InputError, match="transform: images have 3 channels, and the model takes 1"):
        vitfast.transform(vit(in_chans=1, mean=0.5, std=0.5))
    with pytest.raises(InputError, match="nothing says how images for CLIPModel are prepared"):
        vitfast.transform(processors()["clip of both"]()[0])
    with pytest.raises(InputError, match="the model must be a ViT of vitfast, .* got torch.nn.modules.linear.Linear"):
        vitfast.transform(torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match="sees each image at a size of its own"):
        vitfast.transform(timm.create_model("naflexvit_base_patch16_gap", depth=1))


@pytest.mark.parametrize("wrong", ["photo.jpg", Image.new("RGB", (32, 32)), np.zeros((32, 32, 3), np.uint8)], ids=type)
def test_a_model_names_the_transform(wrong):
    with pytest.raises(TypeError, match=r"vitfast\.transform\(model\)"):
        vit()(wrong)


def test_a_list_of_pil_images_names_the_transform():
    with pytest.raises(TypeError, match=r"images\[0\] is a PIL image; vitfast\.transform\(model\)"):
        vit()([Image.new("RGB", (32, 32))])


# ---- vectors of other libraries' models, with their preprocessing; what has no vector is refused


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
    truth = as_timm_does(model, IMAGES, input_size=(3, *model.patch_embed.img_size))
    for given in (model, torch.compile(model, backend="eager")):
        torch.testing.assert_close(Embedder(given).embed(IMAGES), truth, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", first(1, ["timm:convnext_atto", "R50x1"]))
def test_a_baseline_has_its_own_mean_and_std(name, tmp_path):
    model = baseline(name, 5, (64, 64)).eval()
    model.mean, model.std = (0.1, 0.5, 0.2), (0.3, 0.9, 0.4)
    model.save_pretrained(tmp_path)
    truth = as_timm_does(model, IMAGES[:3], input_size=(3, 64, 64), mean=model.mean, std=model.std)
    for given in (model, tmp_path):
        torch.testing.assert_close(Embedder(given, device="cpu").embed(IMAGES[:3]), truth, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
@pytest.mark.parametrize("name, side", [("dinov2", 32), ("clip", 48)])
def test_a_processor_is_found_beside_the_weights(file, name, side, tmp_path):
    """transformers 5 saves that of images and texts in one file, with that of images in it.

    Where an odd number is cut off, its crop begins a pixel before timm's; DINOv2's table is for larger images.
    """
    model, kind, _, pick = processors()[name]()
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


@pytest.mark.parametrize("accelerated", first(1, [False, True]))
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
