"""vitfast's ViT as timm entry points, with the interface of timm's VisionTransformer.

They have its arguments, state_dict and features; weights of the timm model whose name lacks `fast_` load unchanged.
TorchScript is not supported, because the operations choose between kernels and eager PyTorch in Python, which a script
cannot hold; use `torch.compile` or `vitfast export` instead.
"""

from contextlib import nullcontext
from pathlib import Path

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, resolve_pretrained_cfg
from timm.models.vision_transformer import checkpoint_filter_fn

from ..errors import InputError
from ..model.checkpoint.load import load_checkpoint
from ..model.preprocessing import CROP
from ..model.presets import preset
from ..model.vit import ViT

__all__ = ["TimmViT"]

# The preset and the image size of each model.
_MODELS = {
    "vit_fast_tiny_patch16_224": ("Ti/16", 224),
    "vit_fast_tiny_patch16_384": ("Ti/16", 384),
    "vit_fast_small_patch16_224": ("S/16", 224),
    "vit_fast_small_patch16_384": ("S/16", 384),
    "vit_fast_base_patch32_224": ("B/32", 224),
    "vit_fast_base_patch32_384": ("B/32", 384),
    "vit_fast_base_patch16_224": ("B/16", 224),
    "vit_fast_base_patch16_384": ("B/16", 384),
    "vit_fast_large_patch16_224": ("L/16", 224),
    "vit_fast_large_patch16_384": ("L/16", 384),
    "vit_fast_huge_patch14_224": ("H/14", 224),
}


def _cfg(size: int) -> dict:
    """Returns the entries of timm's pretrained_cfg that differ from its defaults, as of timm's ViTs."""
    return dict(
        url="",
        input_size=(3, size, size),
        crop_pct=0.9 if size < 384 else 1.0,
        fixed_input_size=True,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        first_conv="patch_embed.proj",
        classifier="head",
        license="apache-2.0",
    )


default_cfgs = generate_default_cfgs({name: _cfg(size) for name, (_, size) in _MODELS.items()})


class TimmViT(ViT):
    """A ViT that timm's factory can make and describe.

    device, dtype: those of the parameters. All other arguments are ViT's.
    """

    def __init__(self, *args, device=None, dtype=None, **kwargs):
        with nullcontext() if device is None else torch.device(device):
            super().__init__(*args, **kwargs)
        if dtype is not None:
            self.to(dtype)

    def load_pretrained(self, checkpoint_path: str | Path, prefix: str = "") -> None:
        """Loads weights of any format (timm calls this for an .npz).

        Positions are resampled as timm does for an .npz; a head for another number of classes stays as it is. As in
        timm, the activation is the one that the model was made with; Google's files need `act_layer="gelu_tanh"`.
        """
        state = checkpoint_filter_fn(load_checkpoint(checkpoint_path), self, interpolation="bilinear", antialias=False)
        ours = self.state_dict()
        unfit = {k for k, v in state.items() if k.startswith("head.") and k in ours and ours[k].shape != v.shape}
        self.load_state_dict({k: ours[k] if k in unfit else v for k, v in state.items()})

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        super().reset_classifier(num_classes, global_pool)
        if global_pool is not None:  # the norm is not moved, and timm's record of the arguments must say so
            self._model_args = {**getattr(self, "_model_args", {}), "fc_norm": self.config["fc_norm"]}

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        super().set_input_size(img_size)
        self._traits = {**getattr(self, "_traits", {}), "img_size": self.patch_embed.img_size}


def _create(name: str, pretrained: bool, pretrained_cfg=None, pretrained_cfg_overlay=None, out_indices=3, **args):
    """Makes a TimmViT by timm's factory. Raises InputError for `pretrained` without weights to load."""
    cfg = resolve_pretrained_cfg(name, pretrained_cfg, pretrained_cfg_overlay)
    if pretrained and not (cfg.has_weights or cfg.state_dict):
        twin = name.replace("fast_", "")
        raise InputError(
            f"{name}: vitfast has no weights of its own; those of timm's {twin} fit: checkpoint_path=FILE, or "
            f"pretrained=True with pretrained_cfg_overlay=dict(file=FILE) or dict(hf_hub_id='timm/{twin}.TAG')"
        )
    if args.get("in_chans", 3) == len(cfg.mean) == len(cfg.std):
        args = {"mean": tuple(cfg.mean), "std": tuple(cfg.std), **args}  # to normalise raw uint8 images
    args = {name: getattr(cfg, name) for name in CROP} | args
    return build_model_with_cfg(
        TimmViT,
        name,
        pretrained,
        pretrained_cfg=pretrained_cfg,
        pretrained_cfg_overlay=pretrained_cfg_overlay,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls="getter"),
        **args,
    )


def _entry_point(name: str, preset_name: str, size: int):
    def create(pretrained: bool = False, **kwargs) -> TimmViT:
        return _create(name, pretrained, **{**preset(preset_name), **kwargs})

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"ViT-{preset_name} at {size} x {size}."
    return register_model(create)


globals().update({name: _entry_point(name, *what) for name, what in _MODELS.items()})
