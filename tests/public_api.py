"""The public names as README and the documentation use them: `make lint` checks these types, nothing here runs."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import vitfast
import vitfast.timm_models
from vitfast import Embedder, InputError, PackedImages, ViT, ops, pack, ref
from vitfast.adapters import Entry, Report
from vitfast.data.datasets import Digits
from vitfast.data.eval_transforms import EvalTransform
from vitfast.data.image_files import image_files
from vitfast.data.resize import resize
from vitfast.eval.accuracy import evaluate_weights
from vitfast.eval.embed import read
from vitfast.eval.embedder import Embedded, Embeddings
from vitfast.eval.pixels import Transform
from vitfast.eval.predict import predict
from vitfast.train.log import read_metrics
from vitfast.train.recipes import resolve
from vitfast.train.trainer import train


class Block(nn.Module):
    """A layer of one's own."""


class Classifier(ViT):
    """A ViT of one's own."""


def models(images: Tensor, path: Path) -> None:
    assert_type(vitfast.__version__, str)
    model = ViT(img_size=224, patch_size=16, in_chans=3, num_classes=1000, embed_dim=768, depth=12, num_heads=12)
    assert_type(ViT.from_preset("B/16", num_classes=10, img_size=(384, 224)), ViT)
    assert_type(Classifier.from_pretrained(path, num_classes=10), Classifier)
    assert_type(Classifier.from_pretrained("hf-hub:timm/vit_base_patch16_224.augreg_in21k").eval(), Classifier)
    model.save_pretrained(path)
    model(images)
    packed = pack([images[0]], 16)
    assert_type(packed.to("cuda", non_blocking=True), PackedImages)
    assert_type(vitfast.pack(list(images), (16, 16)).cpu().pin_memory().device, torch.device)
    print(model(packed).shape, model([images[0], images[1]]).softmax(-1))
    tokens = model.forward_features(images, change_patches=lambda x: x * 2)
    assert_type(model.forward_features([images[0], images[1]])[0], Tensor)
    assert_type(model.forward_head(tokens, pre_logits=True), Tensor)
    assert_type(model.pool(tokens, "avg"), Tensor)
    model.forward_intermediates(images, indices=4)
    assert_type(model.get_intermediate_layers(images, n=2), list)
    assert_type(model.attention_maps(images)[0], Tensor)
    assert_type(next(model.each_attention_map(images)), Tensor)
    assert_type(model.packs(images), bool)
    model.check_many_sizes()
    assert_type(model.prune_intermediate_layers([0, 3]), list[int])
    model.reset_classifier(10, global_pool="avg")
    model.set_input_size(img_size=384)
    model.set_grad_checkpointing(True)
    model.set_keep("auto")
    assert_type(model.decide_keep(batch=256, dtype=torch.bfloat16), str)
    assert_type(model.get_classifier(), nn.Module)
    assert_type(model.no_weight_decay(), set[str])
    assert_type(model.group_matcher(coarse=True), dict)
    model.init_weights("jax")
    print(model.config, model.mean, model.std, model.class_names, model.keep)
    if model.class_names is not None:
        assert_type(model.class_names[int(model(images).argmax())], str)
    assert_type(vitfast.load_checkpoint(path), dict[str, Tensor])
    model.load_state_dict(vitfast.load_checkpoint("B_16.npz"), strict=True)
    run = vitfast.graphed(model.eval(), images, most=4)
    print(run(images).clone(), vitfast.graphed(model, packed)([images[0], images[1]]))


def other_libraries(block: Block, images: Tensor) -> None:
    assert_type(vitfast.accelerate(block, residual_in_fp32=True, keep="all"), Block)
    report = vitfast.acceleration_report(block)
    assert_type(report, Report)
    assert_type(report.replaced, list[Entry])
    assert_type(report.summary(), str)
    assert_type(vitfast.restore(block), Block)
    assert_type(vitfast.adapters.accelerate(block), Block)
    torch.compile(block, backend="vitfast", options={"inner": "eager"})(images)
    assert_type(vitfast.backend.compile(block, dynamic=True), Block)
    vitfast.backend.compile(mode="max-autotune")(block)(images)
    assert_type(vitfast.backend.report(graphs=2).left, list[vitfast.backend.Entry])


def operations(x: Tensor, weight: Tensor, bias: Tensor | None, qkv: Tensor, offsets: Tensor) -> None:
    with ops.use_kernels("on"), ops.batch_invariant(True), vitfast.batch_invariant(False):
        ops.use_kernels("auto")
    assert_type(ops.patch_embed(x, weight, bias, weight, weight, mean=0.5, std=(0.5, 0.5, 0.5)), Tensor)
    assert_type(ops.layer_norm(x, weight, bias, eps=1e-6), Tensor)
    assert_type(ops.rms_norm(x, weight), Tensor)
    assert_type(ops.add_layer_norm(x, x, None, None, layer_scale=weight, drop_path=bias), tuple[Tensor, Tensor])
    assert_type(ops.attention(qkv, scale=0.125), Tensor)
    q, k, v = qkv.unbind(2)
    assert_type(ops.attention(q, k, v, rope=(weight, weight), rope_layout="interleaved", num_prefix=1), Tensor)
    assert_type(ops.attention(q, k, v, bias=bias, key_lengths=offsets), Tensor)
    assert_type(ops.attention(q, k, v, offsets=offsets, longest=65), Tensor)
    assert_type(ops.attention(q, k, v, cu_seqlens=offsets, max_seqlen=65), Tensor)
    assert_type(ops.linear_gelu(x, weight, bias, approximate="tanh"), Tensor)
    assert_type(ops.norm_linear(x, weight, None, weight, bias, norm="rms"), Tensor)
    assert_type(ops.linear_residual(x, weight, bias, x, layer_scale=weight), Tensor)
    assert_type(ops.norm_linear(x, weight, bias, weight, bias, eps=1e-5), Tensor)
    assert_type(ops.mlp(x, weight, bias, weight, bias, activation="quick_gelu"), Tensor)
    assert_type(ops.gated_mlp(x, weight, bias, weight, bias, weight, bias, activation="silu"), Tensor)
    half = ops.attention_block(x, weight, bias, weight, bias, weight, bias, num_heads=12, norm="rms", save_policy="all")
    assert_type(half, Tensor)
    assert_type(ops.mlp_block(half, weight, bias, weight, bias, weight, bias, keep="least"), Tensor)
    assert_type(ops.gated_mlp_block(half, weight, bias, weight, bias, weight, bias, weight, bias), Tensor)
    torch.testing.assert_close(ref.attention(*qkv.unbind(2), upcast=True), ref.layer_norm(x, weight, bias, upcast=True))


def images_and_vectors(model: ViT, paths: list[Path], pixels: Tensor) -> None:
    prepare = vitfast.transform(model)
    assert_type(prepare, Transform)
    assert_type(prepare("photo.jpg"), Tensor)
    assert_type(prepare(np.zeros((60, 80, 3), np.uint8))[None], Tensor)
    embedder = Embedder("b16", pool="avg", device="cuda", dtype=torch.bfloat16, normalize=True)
    assert_type(vitfast.Embedder(model).dim, int)
    assert_type(embedder.embed(paths), Tensor)
    assert_type(embedder.embed(["photo.jpg", b"bytes", pixels], errors="skip"), Embeddings)
    for one in embedder.stream(paths):
        assert_type(one, Embedded)
    small = resize([pixels, pixels], (224, 224), "bicubic")
    assert_type(small, Tensor | list[Tensor])
    assert_type(EvalTransform.timm(224, crop_pct=0.9)([pixels]), Tensor)
    for record in predict(model, image_files("photos"), top_k=1):
        print(record["predictions"][0]["probability"])
    scan, label = Digits(train=True)[0]
    scan.save(f"{label}.png")
    ids, vectors = read("embedded")
    print(np.array([name.startswith("gallery/") for name in ids]), vectors[0])


def training() -> None:
    settings = dict(recipe="digits", data="digits", output="runs/python", device="cpu")
    config = resolve("pretrain", settings, dict(steps=12, batch_size=32, eval_every=6))
    try:
        print(train(config)["accuracy"], evaluate_weights(resolve("eval", settings))["accuracy"])
    except InputError as error:
        print(error)
    print([row["step"] for row in read_metrics(Path(config.output)) if row["split"] == "val"])
