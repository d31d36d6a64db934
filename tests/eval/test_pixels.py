"""The pixels of a model by timm's own functions and by `vitfast.transform`, against timm's and transformers'."""

import copy
import os
import pickle
from pathlib import Path

import numpy as np
import pictures
import pytest
import timm
import torch
import transformers
from embedding_models import processors
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torchvision.datasets import ImageFolder

import vitfast
import vitfast.timm_models.vision_transformer  # noqa: F401  registers the entry points
from vitfast import InputError, ViT
from vitfast.eval.predict import predict
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
    model, kind, options, _ = processors()["clip of both"]
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
        vitfast.transform(processors()["clip of both"][0])
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
