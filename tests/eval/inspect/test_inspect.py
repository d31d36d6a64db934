"""`inspect`: measures of models whose answer is known, the files that it writes, and its page."""

import base64
import csv
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.spatial.distance import cdist

from vitfast import InputError, ViT
from vitfast.cli import main
from vitfast.eval.inspect import measures
from vitfast.eval.inspect.figures import as_png, draw_curves, draw_similarity
from vitfast.eval.inspect.page import columns, gallery, matrix, page, picture, table

SIZE, GRID, PATCH, WIDTH, HEADS = (16, 24), (4, 6), (4, 4), 64, 2  # the grid is not square
PATCHES = GRID[0] * GRID[1]
TINY = dict(img_size=SIZE, patch_size=PATCH, num_classes=5, embed_dim=WIDTH, depth=3, num_heads=HEADS)
POOLED = dict(class_token=False, global_pool="avg")
TOL = 2e-6  # fp32 attention, relative


def vit(**options) -> ViT:
    return ViT(**{**TINY, **options}).eval()


def sharp(**options) -> ViT:
    """Whose attention tells patches apart."""
    model = vit(**options)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(30)
    return model


def images(count: int = 3, size: tuple[int, int] = SIZE) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, *size), dtype=torch.uint8)


def all_distances(grid=GRID, patch=PATCH) -> np.ndarray:
    """(N, N) pixels between patches, by scipy."""
    corners = np.array([(y * patch[0], x * patch[1]) for y in range(grid[0]) for x in range(grid[1])], dtype=float)
    return cdist(corners, corners)


# ---- filters and positions


@pytest.mark.parametrize("options", [{}, dict(embed_dim=12, num_heads=2), dict(in_chans=1)], ids=str)
def test_filters_are_scikit_learns_components(options):
    from sklearn.decomposition import PCA

    model = vit(**options)
    filters = model.patch_embed.proj.weight.detach()
    components, share = measures.filter_components(model)
    count = min(28, len(filters) - 1, filters[0].numel())
    truth = PCA(count).fit(filters.flatten(1).double().numpy())
    assert components.shape == (count, *filters.shape[1:])
    np.testing.assert_allclose(share.numpy(), truth.explained_variance_ratio_, rtol=1e-9)
    ours = components.flatten(1).numpy()
    signs = np.sign((ours * truth.components_).sum(1, keepdims=True))
    np.testing.assert_allclose(ours, signs * truth.components_, atol=1e-7)
    assert (ours[np.arange(count), np.abs(ours).argmax(1)] > 0).all()


def test_filters_stop_at_their_rank():
    model = vit()
    basis, mixed = torch.randn(3, 48), torch.randn(WIDTH, 3)
    with torch.no_grad():
        model.patch_embed.proj.weight.copy_((mixed @ basis + torch.randn(48)).view(WIDTH, 3, *PATCH))
    components, share = measures.filter_components(model)
    assert len(components) == 3 and share.sum().item() == pytest.approx(1)
    left = components.flatten(1).float() - components.flatten(1).float() @ torch.linalg.pinv(basis) @ basis
    assert left.abs().max() < 1e-5  # they span what the filters were made of
    torch.nn.init.ones_(model.patch_embed.proj.weight)
    assert len(measures.filter_components(model)[0]) == 0


@pytest.mark.parametrize(
    "options",
    [{}, dict(reg_tokens=2), dict(pos_embed="sincos2d", **POOLED), dict(pos_embed="learn2d", pos_embed_at="layers")],
    ids=str,
)
def test_similarity_is_scikit_learns(options):
    """Of tables of columns and rows their concatenation, of several layers the first."""
    from sklearn.metrics.pairwise import cosine_similarity

    model = vit(**options)
    if "pos_embed_at" in options:
        x, y = model.pos_embed_x[0], model.pos_embed_y[0]
        table = torch.stack([torch.cat([x[column], y[row]]) for row in range(GRID[0]) for column in range(GRID[1])])
    else:
        table = model.pos_embed[0, -PATCHES:]  # prefix tokens come first
    truth = cosine_similarity(table.detach().double().numpy()).reshape(GRID + GRID)
    np.testing.assert_allclose(measures.position_similarity(model).numpy(), truth, atol=1e-6)
    for kind in ("none", "relative"):
        with pytest.raises(InputError, match="no position embeddings"):
            measures.position_similarity(vit(pos_embed=kind))


# ---- attention distance


@pytest.mark.parametrize(
    "options", [dict(reg_tokens=1), POOLED | dict(img_size=(16, 32), patch_size=(2, 8))], ids=["registers", "average"]
)
def test_distance_of_any_model_is_the_weighted_mean(monkeypatch, options):
    """Sharp random attention, prefix tokens or none, several batches: against loops in float64."""
    model = sharp(**options)
    x, prefix, patches = images(5, model.patch_embed.img_size), model.num_prefix_tokens, model.patch_embed.num_patches
    truth, distances = np.zeros((3, HEADS)), all_distances(model.patch_embed.grid_size, model.patch_embed.patch_size)
    for layer, maps in enumerate(model.attention_maps(x)):
        maps = maps.double().numpy()[:, :, prefix:, prefix:]
        for head in range(HEADS):
            weights = [np.average(distances[q], weights=maps[b, head, q]) for b in range(5) for q in range(patches)]
            truth[layer, head] = np.mean(weights)
    assert np.ptp(truth) > 0.5
    whole = measures.attention_distance(model, x)
    np.testing.assert_allclose(whole, truth, rtol=TOL)
    monkeypatch.setattr(measures, "HELD", 2 * 4 * HEADS * (patches + prefix) ** 2)  # two images at a time
    sizes, each_attention_map = [], ViT.each_attention_map

    def counted(self, batch):
        sizes.append(len(batch))
        return each_attention_map(self, batch)

    monkeypatch.setattr(ViT, "each_attention_map", counted)
    np.testing.assert_allclose(measures.attention_distance(model, x), truth, rtol=TOL)
    assert sizes == [2, 2, 1]


# ---- rollout


@pytest.mark.parametrize("options", [{}, dict(global_pool="avg"), dict(global_pool="map"), POOLED], ids=str)
def test_rollout_of_any_model(options):
    """Against matrix products in float64."""
    model, x = sharp(**options), images(2)
    prefix = model.num_prefix_tokens
    for b in range(2):
        product = np.eye(PATCHES + prefix)
        for maps in model.attention_maps(x):
            mixed = maps[b].double().numpy().mean(0) + np.eye(PATCHES + prefix)
            product = mixed / mixed.sum(1, keepdims=True) @ product
        row = product[0, prefix:] if not options else product[prefix:, prefix:].mean(0)
        np.testing.assert_allclose(measures.attention_rollout(model, x)[b].flatten(), row / row.sum(), rtol=1e-5)


# ---- the command


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    vit(img_size=16, representation_size=8).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """An image at the top, two in a class folder, of other kinds and sizes, one broken, one hidden, and a text."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    (folder / "cat").mkdir()
    for name, shape in (("a.png", (20, 30, 3)), ("cat/b.JPG", (40, 18, 3)), ("cat/c.bmp", (16, 16))):
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(
            folder / name, "JPEG" if name.endswith("JPG") else None
        )
    (folder / "notes.txt").write_text("no image")
    (folder / "cat" / "broken.jpg").write_bytes((folder / "cat" / "b.JPG").read_bytes()[:300])
    (folder / ".hidden").mkdir()
    Image.new("RGB", (20, 20)).save(folder / ".hidden" / "a.png")
    return folder


def run(capsys, *args) -> tuple[int, str]:
    code = main(["inspect", *map(str, args), "--device", "cpu"])
    out = capsys.readouterr()
    return code, out.out + out.err


@pytest.mark.slow
def test_command_writes_figures_numbers_and_a_page(capsys, caplog, weights, pictures, tmp_path):
    output = tmp_path / "new" / "look"
    flags = ("--weights", weights, "--data", pictures, "--output", output, "--img-size", 16, 24)
    code, said = run(capsys, *flags)
    assert code == 0 and str(output / "report.html") in said
    names = ("filters", "positions", "distance", "rollout")
    others = {"report.html", "numbers.json", "distance.csv", "arrays.npz", "inspect.origin.json"}
    assert {p.name for p in output.iterdir()} == others | {f"{n}.png" for n in names}
    page = (output / "report.html").read_text()
    sources = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(sources) == page.count(" src=") == 4 and not re.search(r" (href|srcset|data|action)=", page)
    embedded = {base64.b64decode(source) for source in sources}
    assert embedded == {(output / f"{n}.png").read_bytes() for n in names}
    for name in names:
        with Image.open(output / f"{name}.png") as image:
            pixels = np.asarray(image.convert("RGB"))
        assert min(pixels.shape[:2]) > 100 and len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20, name

    model = ViT.from_pretrained(weights, img_size=SIZE).eval()
    numbers, arrays = json.loads((output / "numbers.json").read_text()), np.load(output / "arrays.npz")
    assert numbers["images"] == f"3 of {pictures} (1 more could not be read)" and numbers["not_drawn"] == []
    assert f"left out: {pictures}/cat/broken.jpg cannot be read as an image" in caplog.text
    assert numbers["rollout_from"] == "class token"
    assert numbers["distance_pixels_spread_evenly"] == pytest.approx(all_distances().mean())
    rows = list(csv.DictReader(open(output / "distance.csv")))
    assert [(r["layer"], r["head"]) for r in rows] == [(str(i), str(j)) for i in (1, 2, 3) for j in (1, 2)]
    np.testing.assert_allclose([float(r["pixels"]) for r in rows], np.ravel(numbers["distance_pixels"]), rtol=1e-5)
    np.testing.assert_allclose(arrays["distance"], numbers["distance_pixels"], rtol=1e-6)
    np.testing.assert_allclose(arrays["positions"], measures.position_similarity(model), rtol=1e-6)
    # the images as torchvision would resize and crop them, up to the order of the two
    from torchvision.transforms import v2

    resize = v2.Compose([v2.Resize(16, interpolation=v2.InterpolationMode.BICUBIC), v2.CenterCrop(SIZE)])
    with Image.open(pictures / "a.png") as image:
        same = torch.from_numpy(np.array(resize(image))).permute(2, 0, 1)[None]
    assert arrays["rollout"].shape == (3, *GRID)
    np.testing.assert_allclose(arrays["rollout"][0], measures.attention_rollout(model, same)[0], rtol=1e-2)


@pytest.mark.slow
def test_command_without_positions_on_digits(capsys, tmp_path):
    torch.manual_seed(0)
    output = tmp_path / "out"
    command = ("--weights", tmp_path / "w", "--data", "digits", "--output", output, "--images", 2)
    vit(in_chans=1, **POOLED).save_pretrained(tmp_path / "w")
    assert run(capsys, *command)[0] == 0 and (output / "positions.png").exists()
    vit(pos_embed="none", in_chans=1, **POOLED).save_pretrained(tmp_path / "w")
    code, said = run(capsys, *command)
    assert code == 0, said
    assert not (output / "positions.png").exists() and "no position embeddings" in (output / "report.html").read_text()
    numbers = json.loads((output / "numbers.json").read_text())
    assert numbers["not_drawn"] == ["positions"] and numbers["images"] == "2 of digits"
    assert numbers["rollout_from"] == "mean of the patches"
    assert not list(output.glob(".*"))


BAD = [
    (dict(data="EMPTY"), "no images in"),
    (dict(data="nowhere"), "no folder nowhere"),
    (dict(data="BROKEN"), "bad.png cannot be read as an image"),
    (dict(data="FILE"), "is a file; give a folder"),
    (dict(weights="FILE"), "not a whole"),
    (dict(output="FILE"), "is a file; give a folder"),
    (dict(img_size=17), "no multiple of the patch size"),
]


@pytest.mark.parametrize("change, told", BAD, ids=str)
def test_bad_input_is_one_line(capsys, weights, pictures, tmp_path, change, told):
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "BROKEN").mkdir()
    (tmp_path / "BROKEN" / "bad.png").write_bytes(b"not a picture")
    (tmp_path / "FILE.safetensors").write_bytes(b"neither")
    places = {"EMPTY": tmp_path / "EMPTY", "BROKEN": tmp_path / "BROKEN", "FILE": tmp_path / "FILE.safetensors"}
    options = dict(weights=weights, data=pictures, output=tmp_path / "out", images=1)
    options |= {name: places.get(value, value) for name, value in change.items()}
    code, said = run(capsys, *(word for k, v in options.items() for word in (f"--{k.replace('_', '-')}", v)))
    assert code == 2 and told in said and said.count("\n") == 1, said
    assert not (tmp_path / "out").exists()


# ---- the page that `inspect`, runs and the demo write, and figures in it


def test_page_holds_all_it_is_given_in_order_and_escapes_it():
    sections = {"One & two": ("a < b", picture(b"png", 'a "picture"')), "Bare": ("", "")}
    text = page("<title>", {"k<": "v&"}, sections, "in the beginning")
    wanted = [
        "<title>&lt;title&gt;</title>",
        "<h1>&lt;title&gt;</h1>",
        '<p class="small">in the beginning</p>',
        "<td>k&lt;</td><td class=n>v&amp;</td>",
        "<h2>One &amp; two</h2>",
        '<p class="small">a &lt; b</p>',
        '<img alt="a &quot;picture&quot;" src="data:image/png;base64,cG5n">',
        "<h2>Bare</h2>",
        "</html>",
    ]
    places = [text.index(piece) for piece in wanted]
    assert places == sorted(places) and text.count("<p ") == 2
    assert "<p" not in page("t", {}, {"Heading": ("", "")})


def test_galleries_and_tables_escape_what_they_are_given():
    text = gallery([(picture(b"png", "a"), "<i>", True), (picture(b"png", "b"), "b & c", False)])
    assert "<figcaption class=marked>&lt;i&gt;</figcaption>" in text and "<figcaption>b &amp; c</figcaption>" in text
    assert text.count("<figure><img ") == 2
    assert table({"<k>": "1 < 2"}) == "<table><tr><td>&lt;k&gt;</td><td class=n>1 &lt; 2</td></tr></table>"
    names = ["<b>", "&"]
    for text in (columns(names, [names]), matrix(np.eye(2, dtype=int), names)):
        assert text.count("&lt;b&gt;") >= 2 and text.count("&amp;") >= 2 and "<b>" not in text


@pytest.mark.slow
def test_curves_leave_gaps_where_a_number_is_none():
    values = [2.0, float("nan"), 1.5, float("inf"), 1.0, None]
    records = [dict(epoch=i, split="train", loss=v, accuracy=None, lr=0.1) for i, v in enumerate(values)]
    records += [dict(epoch=5.0, split="val", loss=float("nan"), accuracy=float("nan"), lr=None)]
    figure = draw_curves({"run": records, "nothing yet": []})
    lines = {axis.get_ylabel(): axis.lines for axis in figure.axes[::2]}
    assert np.isnan(lines["loss"][0].get_ydata()).tolist() == [False, True, False, True, False, True]
    assert np.isnan(lines["accuracy"][0].get_ydata()).all()
    assert lines["learning rate"][0].get_ydata().tolist() == [0.1] * 6
    assert as_png(figure).startswith(b"\x89PNG")


def test_few_of_many_patches_are_drawn_with_their_own_numbers():
    table = np.random.default_rng(0).standard_normal((37 * 37, 8))
    similarity = (table @ table.T / 8).reshape(37, 37, 37, 37)
    axis = draw_similarity(similarity, pixels=400).axes[0]
    shown = axis.images[0].get_array()
    assert max(shown.shape) <= 400
    tick, label = axis.get_xticks()[1], int(axis.get_xticklabels()[1].get_text())
    left = int(tick - 18)  # the tile's first column: 37 of them, the tick in the middle
    row = int(axis.get_yticklabels()[0].get_text())
    np.testing.assert_array_equal(shown[:37, left : left + 37], similarity[row - 1, label - 1])
    assert draw_similarity(similarity[:4, :4, :4, :4], pixels=400).axes[0].images[0].get_array().shape == (19, 19)
