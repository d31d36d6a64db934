"""Google's npz files, judged by timm, which reads them too, on random weights."""

import numpy as np
import pytest
import torch
from checkpoints import CLASSES, HEADS, SIZE, SMALL, TOL, D, N, agree, google, images, logits, pick, stacked
from timm.models import vision_transformer as timm_vit

from vitfast import ViT, load_checkpoint


@pytest.mark.parametrize(
    "big_vision, prefix, stack",
    [
        (False, "", False),
        (False, "opt/target/", False),
        (True, "", False),
        (True, "", True),
        (True, "params/", False),
        (True, "params/", True),
        (True, "params/img/", False),
    ],
)
def test_google_npz_as_timm_reads_it(tmp_path, big_vision, prefix, stack):
    w = google(big_vision)
    w = stacked(w) if stack else w
    extra = (
        {"opt/state/step": np.array(7)}
        if "opt" in prefix
        else {"params/t": np.zeros(1, np.float32)}
        if "img" in prefix
        else {}
    )
    np.savez(tmp_path / "w.npz", **{prefix + k: v for k, v in w.items()}, **extra)
    truth = timm_vit.VisionTransformer(**SMALL, no_embed_class=big_vision, act_layer="gelu_tanh").eval()
    truth.load_pretrained(str(tmp_path / "w.npz"))
    state = load_checkpoint(tmp_path / "w.npz")
    assert state.keys() == truth.state_dict().keys()
    assert all(torch.equal(state[k], v) for k, v in truth.state_dict().items())
    model = ViT.from_pretrained(tmp_path / "w.npz")  # the head count is in the shape of the query kernel
    agree(model, truth)
    assert pick(model.config, "act_layer", "norm_eps", "num_heads", "no_embed_class") == dict(
        act_layer="gelu_tanh", norm_eps=1e-6, num_heads=HEADS, no_embed_class=big_vision
    )
    assert model.mean == model.std == (0.5,) * 3


def test_google_pre_logits(tmp_path):
    """The 21k head: tanh(x W + b) before the last layer, which timm drops."""
    w = google() | {
        "pre_logits/kernel": np.random.rand(D, 40).astype("f4"),
        "pre_logits/bias": np.random.rand(40).astype("f4"),
    }
    w["head/kernel"] = np.random.rand(40, CLASSES).astype("f4")
    np.savez(tmp_path / "w.npz", **w)
    model, x = ViT.from_pretrained(tmp_path / "w.npz").eval(), images()
    assert model.config["representation_size"] == 40
    truth = timm_vit.VisionTransformer(**{**SMALL, "num_classes": 0}, act_layer="gelu_tanh").eval()
    truth.load_pretrained(str(tmp_path / "w.npz"))
    hidden = np.tanh(logits(truth, x).numpy() @ w["pre_logits/kernel"] + w["pre_logits/bias"])
    np.testing.assert_allclose(logits(model, x), hidden @ w["head/kernel"] + w["head/bias"], **TOL)


@pytest.mark.parametrize("cls", [False, True])
def test_big_vision_computed_positions(tmp_path, cls):
    """No table in the file: big_vision's posemb_sincos_2d, written out here entry by entry.

    Without a class token it pools after the norm.
    """
    table = [
        [
            fun(at / 10_000 ** (j / (D // 4 - 1)))
            for at, fun in ((i % 4, np.sin), (i % 4, np.cos), (i // 4, np.sin), (i // 4, np.cos))
            for j in range(D // 4)
        ]
        for i in range(N)
    ]
    w = google(big_vision=True, cls=cls, table=False)
    np.savez(tmp_path / "w.npz", **w)
    np.savez(tmp_path / "full.npz", **w, pos_embedding=np.array([table], np.float32))
    pooling = dict(class_token=cls, global_pool="token" if cls else "avg", fc_norm=False)
    truth = timm_vit.VisionTransformer(**SMALL, **pooling, no_embed_class=True, act_layer="gelu_tanh").eval()
    truth.load_pretrained(str(tmp_path / "full.npz"))
    model = ViT.from_pretrained(tmp_path / "w.npz", img_size=SIZE)
    assert pick(model.config, "pos_embed", *pooling) == dict(pos_embed="sincos2d", **pooling)
    torch.testing.assert_close(model.state_dict()["pos_embed"], truth.pos_embed.data, atol=1e-6, rtol=0)
    agree(model, truth)


def test_bfloat16_npz(tmp_path):
    """NumPy stores bfloat16 as two raw bytes; the values are the upper halves of the floats."""
    w = {k: (v.view(np.uint32) & 0xFFFF0000).view(np.float32) for k, v in google().items()}
    np.savez(
        tmp_path / "w.npz",
        **{k: (np.ascontiguousarray(v).view(np.uint32) >> 16).astype(np.uint16).view("V2") for k, v in w.items()},
    )
    np.savez(tmp_path / "full.npz", **w)
    state, full = load_checkpoint(tmp_path / "w.npz"), load_checkpoint(tmp_path / "full.npz")
    assert state["cls_token"].dtype == torch.bfloat16 and all(torch.equal(state[k].float(), v) for k, v in full.items())
    model = ViT.from_pretrained(tmp_path / "w.npz")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.cls_token, full["cls_token"])
