"""Vectors of images, against timm's and transformers' own preprocessing and models."""

import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pictures
import pytest
import taped_graphs
import timm
import torch
import transformers
from adapter_models import timm_vit
from checks import randomize, slow_but
from embedding_models import CLOSE, IMAGES, TINY, as_timm_does, drawn, processors
from frozen import tiny
from PIL import Image, ImageSequence
from speed import first
from torchvision.io import decode_jpeg

import vitfast
from vitfast import Embedder, InputError, ops
from vitfast.kernels.launch import INTERPRETED
from vitfast.model.convert import write

tapes = pytest.fixture(taped_graphs.tapes)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.quick(3)
@pytest.mark.parametrize("mode, share, kind", [("center", 0.8, "bilinear"), ("squash", 1.0, "lanczos"), (None,) * 3])
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_weights_give_the_vectors_that_timm_computes(tmp_path, mode, share, kind, pool):
    model = tiny(5, img_size=32, global_pool=pool)
    model.mean, model.std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    model.crop_mode, model.crop_pct, model.interpolation = mode, share, kind
    model.save_pretrained(tmp_path / "ours")
    write(model, tmp_path / "timm", "timm")
    truth = as_timm_does(timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval(), IMAGES)
    found = Embedder(tmp_path / "ours", device="cpu").embed(IMAGES)
    assert found.dtype == torch.float32 and found.shape == (len(IMAGES), model.embed_dim)
    torch.testing.assert_close(found, truth, **CLOSE)
    for tokens in (1, 40, 10**6):  # one image at once, a few, all of them
        torch.testing.assert_close(Embedder(model, tokens=tokens, workers=1).embed(IMAGES), truth, **CLOSE)


def test_images_are_copied_before_an_iterator_uses_them_again(tmp_path):
    """Threads read ahead; a list may also hold one image many times, whose file is not read yet."""
    embedder = Embedder(tiny(5), workers=4)
    frames = [image.resize((40, 30)) for image in IMAGES]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    arrays = [np.asarray(frame).transpose(2, 0, 1) for frame in frames]

    def filled():
        buffer = np.empty_like(arrays[0])
        for array in arrays * 3:
            buffer[:] = array
            yield buffer

    assert torch.equal(embedder.embed(filled()), embedder.embed(arrays * 3))
    with Image.open(tmp_path / "a.gif") as image:
        truth = embedder.embed([frame.convert("RGB") for frame in ImageSequence.all_frames(image)])
        assert torch.equal(embedder.embed(ImageSequence.Iterator(image)), truth)
    pictures.smooth(0, 900, 900).save(tmp_path / "large.jpg")
    found = embedder.embed([Image.open(tmp_path / "large.jpg")] * 9)
    assert torch.equal(found, found[:1].expand_as(found))


@pytest.mark.parametrize("pool", ["token", "avg", "map"])
def test_a_pool_of_the_callers_is_that_of_timm(tmp_path, pool):
    own = dict(global_pool="map") if pool == "map" else dict(global_pool="token", class_token=True)
    model = tiny(0, img_size=32, reg_tokens=2, **own)
    write(model, tmp_path / "timm", "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(theirs), is_training=False)
    with torch.inference_mode():
        tokens = theirs.forward_features(torch.stack([transform(i) for i in IMAGES]))
        truth = theirs.pool(tokens, None if pool == "map" else pool)
    for made in (model, theirs):
        torch.testing.assert_close(Embedder(made, pool=pool).embed(IMAGES), truth, **CLOSE)
    unit = Embedder(model, pool=pool, normalize=True).embed(IMAGES)
    torch.testing.assert_close(unit, truth / truth.norm(dim=1, keepdim=True), **CLOSE)


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", processors())
@pytest.mark.parametrize("accelerated", first(1, [False, True]))
def test_models_of_transformers_see_what_their_processor_gives(name, accelerated, tmp_path):
    model, kind, options, pick = processors()[name]()
    drawn(model)
    processor = getattr(transformers, f"{kind}ImageProcessorPil")(**options)
    run = getattr(model, "get_image_features", model)
    with torch.inference_mode():
        inputs = [processor(images=image, return_tensors="pt") for image in IMAGES]
        if name == "classifier":
            truth = torch.cat([model.vit(**given).last_hidden_state[:, 0] for given in inputs])
        else:
            truth = torch.cat([pick(run(**given)) for given in inputs])
    if accelerated:
        vitfast.accelerate(model)
    pool = "avg" if name == "dinov3" else None
    processor.save_pretrained(tmp_path)
    model.config._name_or_path = str(tmp_path)
    for given in (processor, processor.to_dict(), tmp_path, None):
        found = Embedder(model, pool=pool, processor=given, tokens=100).embed(IMAGES)
        torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-4)


def test_a_model_in_training_is_evaluated_and_trains_on():
    model = tiny(5, depth=2, drop_path_rate=0.9)
    embedder = Embedder(model)
    truth = embedder.embed(IMAGES)
    model.train()
    model.blocks[0].eval()
    for each in (embedder, Embedder(model)):
        assert torch.equal(each.embed(IMAGES), truth)
    assert model.training and model.blocks[1].training and not model.blocks[0].training


@pytest.mark.parametrize("pool", ["token", "avg", "map"])
def test_native_sizes_are_the_models_own_forward(pool):
    own = dict(global_pool="map", class_token=False) if pool == "map" else {}
    model = tiny(5, img_size=32, **own).double()  # the packed path and single images agree to rounding
    p = model.patch_embed.patch_size[0]
    found = Embedder(model, sizes="native", pool=pool, tokens=60).embed(IMAGES)
    for vector, image in zip(found, IMAGES):
        size = [max(1, round(side / p)) * p for side in image.size]
        pixels = torch.from_numpy(np.asarray(image.resize(size, Image.Resampling.BICUBIC)).copy()).permute(2, 0, 1)
        with torch.inference_mode():
            tokens = model.forward_features([pixels])
            truth = model.pool([tokens[0]], pool)[0]
            if pool != "map":
                truth = tokens[0][0] if pool == "token" else tokens[0][1:].mean(0)
        torch.testing.assert_close(vector, truth.float(), **CLOSE)


def test_bad_images_are_one_error_or_skipped_and_listed(tmp_path):
    embedder = Embedder(tiny(5), workers=2)
    good, cut = tmp_path / "good.jpg", tmp_path / "cut.jpg"
    for path in (good, cut):
        IMAGES[1].save(path)
    pictures.truncate(cut)
    bad = (
        (str(cut), "cut.jpg is a broken image"),
        (b"no image", "images[2] cannot be read as an image"),
        (tmp_path / "none.jpg", "none.jpg cannot be read as an image (No such file"),
        (torch.zeros(3, 8, 8), "images[2] must be uint8 pixels (3, H, W) or (1, H, W)"),
        (torch.zeros(8, 8, 3, dtype=torch.uint8), "must be uint8 pixels (3, H, W)"),
        (np.zeros((5, 5, 2), np.uint8), "as an array, (H, W, 3); got uint8 (5, 5, 2)"),
        (np.array([[["a"]]], object), "must be uint8 pixels (3, H, W)"),
        (np.zeros((3, 8, 8), ">u2"), "must be uint8 pixels (3, H, W)"),
        (Image.new("F", (8, 8)), "images[2] is a broken image (its pixels are 32-bit"),
        (3, "images[2] must be a path, bytes, a PIL image or uint8 pixels, got <class 'int'>"),
    )
    truth = embedder.embed([good, IMAGES[3]])
    for image, message in bad:
        with pytest.raises(InputError) as caught:
            embedder.embed([good, IMAGES[3], image])
        assert message in str(caught.value)
        found = embedder.embed([image, good, IMAGES[3]], errors="skip")
        assert torch.equal(found.vectors, truth) and [index for index, _ in found.skipped] == [0]
        assert message.replace("images[2]", "images[0]") in found.skipped[0][1]
    nothing = embedder.embed([image for image, _ in bad], errors="skip")
    assert nothing.vectors.shape == (0, 32) and len(nothing.skipped) == len(bad)
    assert embedder.embed([]).shape == (0, 32)
    for one in (str(good), good.read_bytes(), IMAGES[0], torch.zeros(3, 8, 8, dtype=torch.uint8)):
        with pytest.raises(TypeError, match="give .image."):
            embedder.embed(one)


@pytest.mark.parametrize("sizes", [None, "native"])
def test_images_decoded_on_the_device_are_those_of_torchvision(sizes, monkeypatch):
    """A chunk is resized together; what is no grey or RGB JPEG is decoded by Pillow."""
    import torchvision

    monkeypatch.setattr("vitfast.eval.embedder.CHUNK", 40_000)
    model = tiny(5, img_size=32)
    kinds = [dict(quality=80), dict(quality=95, subsampling=0), dict(progressive=True)]
    files = [pictures.encoded(image, "JPEG", **kinds[i % 3]) for i, image in enumerate(IMAGES)]
    files[2] = pictures.encoded(IMAGES[2].convert("L"), "JPEG")
    jpegs = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
    pixels = [torchvision.io.decode_jpeg(each, mode="RGB") for each in jpegs]
    truth = Embedder(model, sizes=sizes).embed(pixels)
    embedder = Embedder(model, sizes=sizes, decode="device", workers=2)
    torch.testing.assert_close(embedder.embed(files), truth, **CLOSE)
    others = [pictures.encoded(IMAGES[3]), pictures.encoded(IMAGES[4].convert("CMYK"), "JPEG"), IMAGES[5], pixels[6]]
    found = embedder.embed([files[0], *others, files[1][:-60], b"x", files[1]], errors="skip")
    host = Embedder(model, sizes=sizes).embed(others)
    torch.testing.assert_close(found.vectors, torch.cat([truth[:1], host, truth[1:2]]), **CLOSE)
    assert [index for index, _ in found.skipped] == [5, 6] and "truncated" in found.skipped[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one size", "native", "siglip2"])
@pytest.mark.parametrize("dtype", first(1, [torch.float32, torch.bfloat16]))
def test_with_batch_invariance_a_vector_is_the_same_alone_and_in_any_batch(kind, dtype):
    model = tiny(5, img_size=32, depth=2)
    if kind == "siglip2":
        model = vitfast.accelerate(drawn(processors()["siglip2"]()[0]), pack=True)
    options = dict(sizes="native") if kind == "native" else {}
    processor = transformers.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=40)
    options |= dict(processor=processor) if kind == "siglip2" else {}
    options |= dict(dtype=dtype, normalize=True)
    with vitfast.batch_invariant(True):
        alone = torch.cat([Embedder(model, **options).embed([image]) for image in IMAGES])
        for tokens in (1, 50, 10**6):
            embedder = Embedder(model, tokens=tokens, workers=2, **options)
            assert torch.equal(embedder.embed(IMAGES), alone)
            assert torch.equal(embedder.embed(IMAGES[::-1]), alone.flip(0))
    assert not torch.equal(alone[0], alone[1])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [None, "native"])
def test_on_a_gpu_images_are_resized_there_and_graphs_give_the_same_vectors(sizes, tmp_path):
    model = tiny(5, img_size=32).cuda()
    truth = Embedder(tiny(5, img_size=32), sizes=sizes).embed(IMAGES)
    for graphs in (False, True):
        embedder = Embedder(model, sizes=sizes, tokens=3 * 17, workers=2, graphs=graphs)
        for _ in range(2):
            torch.testing.assert_close(embedder.embed(IMAGES), truth, atol=1e-3, rtol=1e-3)
    assert sizes or len(embedder._run._captures) == len({3, len(IMAGES) % 3 or 3})
    files = [pictures.encoded(image, "JPEG", quality=95) for image in IMAGES]
    contents = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
    pixels = decode_jpeg(contents, mode="RGB", device="cuda")
    for mine, file in zip(pixels, files):  # nvJPEG's are not Pillow's, 6 levels of 255 apart at most on an H200
        theirs = torch.from_numpy(np.array(Image.open(io.BytesIO(file)))).movedim(-1, 0).float()
        assert (mine.cpu() - theirs).abs().mean() < 1.5
    decoded = Embedder(model, sizes=sizes, decode="device").embed(files)
    torch.testing.assert_close(decoded, Embedder(model, sizes=sizes).embed(pixels), atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels")
@pytest.mark.parametrize("kind", slow_but(["vit", "timm"], ["vit", "native", "pool", "timm", "transformers"]))
def test_graphs_give_the_same_vectors(kind, tapes):
    """Batches of 5 images are filled up to 6, whose graph serves 6 of other images too."""
    model, options = tiny(5, img_size=32, depth=1), {}
    if kind == "timm":
        model = randomize(timm_vit(num_classes=0)).eval()
    elif kind == "transformers":
        made, name, told, _ = processors()["vit"]()
        model, options["processor"] = drawn(made), getattr(transformers, f"{name}ImageProcessorPil")(**told)
    options |= dict(sizes="native") if kind == "native" else dict(pool="avg") if kind == "pool" else {}
    with ops.use_kernels("on"):
        truth, embedder = Embedder(model, **options), Embedder(model, graphs=True, **options)
        for images in (IMAGES[:5], (IMAGES * 2)[1:7], IMAGES[:1]):
            torch.testing.assert_close(embedder.embed(images), truth.embed(images), **CLOSE)
        again = pickle.loads(pickle.dumps(embedder))
        assert torch.equal(again.embed(IMAGES[:1]), embedder.embed(IMAGES[:1]))
    assert not any(tape.read for tape in tapes)
    if kind != "native":
        assert [tape.replays for tape in tapes] == [2, 2, 1]


def test_what_cannot_be_a_graph_is_refused_at_once(tapes, monkeypatch):
    naflex = timm.create_model("naflexvit_base_patch16_gap", depth=1)
    with pytest.raises(InputError, match="^graphs: a CUDA graph cannot hold NaFlexVit, whose positions the host"):
        Embedder(naflex, graphs=True)
    monkeypatch.undo()
    with pytest.raises(InputError, match="^graphs: a model that runs as CUDA graphs must be on one GPU.* is on cpu$"):
        Embedder(tiny(5), device="cpu", graphs=True)


def test_no_batch_has_images_of_two_groups(monkeypatch):
    """So what is computed with an image does not depend on where a job was cut off."""
    embedder, batches = Embedder(tiny(5), device="cpu"), []
    computed = embedder._computed
    monkeypatch.setattr(embedder, "_computed", lambda batch: batches.append(len(batch)) or computed(batch))
    image = pictures.smooth(0, 20, 20)
    found = list(embedder.stream_groups((group, image, "x") for group in (0, 0, 1, 1, 1, 2)))
    assert [group for group, _ in found] == [0, 0, 1, 1, 1, 2] and batches == [2, 3, 1]


def test_a_model_whose_output_is_no_number_says_which_image():
    model = tiny(5)
    model.norm.weight.data[0] = torch.inf
    with pytest.raises(InputError, match=r"images\[0\]: the model's output is not a number"):
        Embedder(model).embed(IMAGES)


def test_threads_and_pickles_share_one_embedder():
    embedder = Embedder(tiny(5), tokens=40, workers=2)
    truth = embedder.embed(IMAGES)
    again = pickle.loads(pickle.dumps(embedder))
    assert torch.equal(again.embed(IMAGES), truth)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: embedder.embed(IMAGES[i:] + IMAGES[:i]), range(7)))
    assert all(torch.equal(vectors.roll(i, 0), truth) for i, vectors in enumerate(found))


def test_it_works_in_the_parent_of_a_data_loaders_workers():
    """Threads that were alive at a fork would leave locks behind."""
    embedder = Embedder(tiny(5), workers=2)
    truth = embedder.embed(IMAGES)
    loader = torch.utils.data.DataLoader(range(7), batch_size=3, num_workers=2, multiprocessing_context="fork")
    found = [embedder.embed([IMAGES[i] for i in batch.tolist()]) for batch in loader]
    torch.testing.assert_close(torch.cat(found), truth, **CLOSE)


def test_dtypes_are_those_of_the_products(tmp_path):
    """Loaded weights are cast; a model that is given keeps its parameters, and autocast computes."""
    model = tiny(5)
    model.save_pretrained(tmp_path)
    truth = Embedder(model).embed(IMAGES)
    cast = Embedder(tmp_path, device="cpu", dtype=torch.bfloat16)
    assert {p.dtype for p in cast.backbone.model.parameters()} == {torch.bfloat16}
    given = Embedder(model, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for embedder in (cast, given):
        found = embedder.embed(IMAGES)
        error = ((found - truth).norm() / truth.norm()).item()
        assert found.dtype == torch.float32 and 1e-5 < error < 0.05  # 8 bits


def test_what_no_embedder_can_do_is_refused_by_name(tmp_path):
    model = tiny(5)
    for options, message in (
        (dict(pool="mean"), "pool must be one of token, avg, map"),
        (dict(pool="map"), "cannot pool by 'map'"),
        (dict(sizes="own"), "sizes must be None or 'native'"),
        (dict(decode="gpu"), "decode must be 'host' or 'device'"),
        (dict(dtype="bf16"), "dtype must be"),
        (dict(dtype=torch.int8), "dtype must be"),
        (dict(workers=-1), "workers must be a whole number from 0"),
        (dict(tokens=0), "tokens must be a whole number from 1"),
        (dict(img_size=32), "img_size is for weights"),
        (dict(device="tpu"), "no device tpu"),
        (dict(device="meta"), "no device meta; known are cpu, cuda"),
    ):
        with pytest.raises(InputError, match=message):
            Embedder(model, **options)
    with pytest.raises(InputError, match="images have 3 channels, and the model takes 1"):
        Embedder(tiny(5, in_chans=1))
    with pytest.raises(InputError, match="must be a ViT of vitfast"):
        Embedder(torch.nn.Identity())  # without parameters
    with pytest.raises(InputError, match="VisionTransformer has no class token"):
        Embedder(timm.create_model("vit_tiny_patch16_224", depth=1, class_token=False, global_pool="avg"), pool="token")
    with pytest.raises(InputError, match="nothing says how images for ViTModel are prepared; give processor="):
        Embedder(transformers.ViTModel(transformers.ViTConfig(**TINY)))
    with pytest.raises(InputError, match="nothing: no such file or folder"):
        Embedder(tmp_path / "nothing")
    with pytest.raises(ValueError, match="errors must be 'raise' or 'skip'"):
        Embedder(model).embed(IMAGES, errors="ignore")
