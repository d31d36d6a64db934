"""The Vision Transformer (Dosovitskiy et al., 2020, arXiv 2010.11929) with timm's names."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import InputError
from ..kernels.tiles import batch_invariant
from ..ops.packed import PackedImages
from . import config as arguments
from . import intermediates, positions, preprocessing, variable_size
from .activation_memory import choose_saved_activations
from .block import Block
from .checkpoint.load import load_model
from .checkpoint.writers import save
from .config import POOLS, Keep, Pool, ViTConfig, WeightInit, documented, with_arguments_of
from .heads import AttentionPoolLatent, PreLogits, _end_reason, ends_in_one_operation, norm_and_head
from .hybrid import HybridEmbed
from .init import init_weights
from .layers import NORMS, weights_dtype
from .patch_embed import PatchEmbed, checked_images, with_tokens
from .presets import preset
from .sizes import Sizes
from .variable_size import ManyImages, of_many_sizes

if TYPE_CHECKING:
    from typing_extensions import Self

Change = Callable[[Tensor], Tensor]  # of the patch embeddings (B, N, D)
SETTABLE = ("global_pool", "dynamic_img_size", *preprocessing.FIELDS)  # arguments that are attributes and may be set
for _leaf in ("checked_images", "with_tokens"):  # they look at shapes in Python, so they are leaves to FX
    torch.fx.wrap(_leaf)


@documented
class ViT(nn.Module):
    """Vision Transformer on vitfast's operations; ViT-B/16 unless told otherwise.

    Images are (B, in_chans, H, W): normalised floats, or raw uint8, which the patch projection normalises to
    (x / 255 - mean) / std. Images of many sizes come as a list of (in_chans, H_i, W_i), or as vitfast.pack packs such
    a list: nothing is padded, and positions are resampled for each grid. The arguments have timm's names. Raises
    InputError for values that no ViT can have.
    """

    mean: tuple[float, ...]  # (C,), like std; for raw uint8 images, on the 0..1 scale
    std: tuple[float, ...]
    crop_mode: str | None
    crop_pct: float | None
    interpolation: str | None

    @with_arguments_of(ViTConfig)  # which has their types, meanings and checks, and the same defaults
    def __init__(
        self, img_size=224, patch_size=16, in_chans=3, num_classes=1000, global_pool="token",
        embed_dim=768, depth=12, num_heads=12, mlp_ratio=4.0, qkv_bias=True, proj_bias=True, init_values=None,
        class_token=True, pos_embed="learn", no_embed_class=False, reg_tokens=0, fc_norm=None, dynamic_img_size=False,
        drop_rate=0.0, pos_drop_rate=0.0, proj_drop_rate=0.0, drop_path_rate=0.0, weight_init="", head_init_bias=None,
        representation_size=None, act_layer="gelu", norm_eps=1e-6, mean=0.5, std=0.5, residual_in_fp32=False,
        pos_embed_at="stem", backbone=None, crop_mode=None, crop_pct=None, interpolation=None, keep="auto",
        class_names=None, norm_layer="layernorm", drop_path_mode="mask", pre_norm=False, qk_norm=False,
        swiglu_mlp=False, scale_mlp_norm=False, rope=None, rope_temperature=None, ref_feat_shape=None,
        pos_resample="bicubic_antialias",
    ):  # fmt: skip
        c = ViTConfig.of(locals())
        sizes = Sizes(c)
        super().__init__()
        self.num_classes, self.in_chans, self.global_pool = c.num_classes, c.in_chans, c.global_pool
        self.embed_dim = self.num_features = c.embed_dim
        self.head_hidden_size, self.num_prefix_tokens = sizes.head_width, sizes.prefix
        self.num_reg_tokens, self.has_class_token = c.reg_tokens, c.class_token
        self.no_embed_class, self.dynamic_img_size = c.no_embed_class, c.dynamic_img_size
        self.grad_checkpointing, self.residual_in_fp32 = False, c.residual_in_fp32
        for name in (*preprocessing.FIELDS, "class_names"):
            if isinstance(getattr(type(self), name, property()), property):  # else it is an attribute of a subclass
                vars(self)[name] = getattr(c, name)
        plain, stem = c.backbone is None, (c.img_size, c.patch_size, c.in_chans, c.embed_dim)
        # pre_norm would normalise a bias away, as timm says.
        self.patch_embed = PatchEmbed(*stem, bias=not c.pre_norm) if plain else HybridEmbed(*stem, c.backbone)
        # What the layers are made with: only methods change it. The other arguments, SETTABLE, live in the attributes.
        self._config = {name: getattr(c, name) for name in arguments.ARGUMENTS if name not in SETTABLE}
        self._config |= dict(fc_norm=sizes.after_pooling, backbone=getattr(self.patch_embed, "spec", None))
        self.cls_token = nn.Parameter(torch.empty(1, 1, c.embed_dim)) if c.class_token else None
        self.reg_token = nn.Parameter(torch.empty(1, c.reg_tokens, c.embed_dim)) if c.reg_tokens else None
        positions.make_tables(self)
        self.pos_drop = nn.Dropout(c.pos_drop_rate)
        norm = partial(NORMS[c.norm_layer], eps=c.norm_eps)
        self.norm_pre = norm(c.embed_dim) if c.pre_norm else nn.Identity()
        rates = [c.drop_path_rate * i / max(1, c.depth - 1) for i in range(c.depth)]
        self.blocks = nn.Sequential(*(Block(c, norm, rate) for rate in rates))
        self.set_keep(c.keep)
        feature = dict(num_chs=c.embed_dim, reduction=self.patch_embed.feat_ratio())
        self.feature_info = [dict(module=f"blocks.{i}", **feature) for i in range(c.depth)]
        self.norm = nn.Identity() if sizes.after_pooling else norm(c.embed_dim)
        pool = (c.embed_dim, c.num_heads, sizes.block.hidden, c.act_layer, norm)
        self.attn_pool = AttentionPoolLatent(*pool) if c.global_pool == "map" else None
        self.fc_norm = norm(c.embed_dim) if sizes.after_pooling else nn.Identity()
        self.pre_logits = PreLogits(c.embed_dim, c.representation_size) if c.representation_size else nn.Identity()
        self.head_drop = nn.Dropout(c.drop_rate)
        self.head = nn.Linear(self.head_hidden_size, c.num_classes) if c.num_classes > 0 else nn.Identity()
        if c.weight_init != "skip":
            self.init_weights(needs_reset=False)

    _end_reason = _end_reason  # a method: torch 2.11 takes no function of a module for a constant
    # ---- running it: patch_embed, positions, norm_pre, blocks, norm; pool, fc_norm, head_drop, head

    def forward(self, images: Tensor | ManyImages) -> Tensor:
        """Images, as normalised floats or raw uint8 -> logits (B, num_classes).

        Images are (B, C, H, W) or, of many sizes, a list of (C, H, W), vitfast.pack's result or a nested tensor.
        """
        if of_many_sizes(images):
            return variable_size.head(self, variable_size.encode(self, images))
        if ends_in_one_operation(self):
            return norm_and_head(self, self._encode(*self._embed(self._checked(images)), norm=False))
        return self.forward_head(self.forward_features(images))

    @overload
    def forward_features(self, images: Tensor, change_patches: Change | None = None) -> Tensor: ...
    @overload
    def forward_features(self, images: list[Tensor] | tuple[Tensor, ...] | PackedImages) -> list[Tensor]: ...
    def forward_features(self, images: ManyImages, change_patches: Change | None = None) -> Tensor | list[Tensor]:
        """Images (B, C, H, W) -> all tokens after the last norm (B, T+N, D); a list gives a list.

        change_patches: a function of the patch embeddings (B, N, D), which is applied before prefix tokens and
        positions are added; masked patch prediction uses it.
        """
        if of_many_sizes(images):
            if change_patches is not None:
                raise NotImplementedError("ViT: change_patches is for images of one size, (B, C, H, W)")
            return variable_size.encode(self, images).apart(jagged=isinstance(images, Tensor))
        images = self._checked(images)
        if change_patches is None and self.packs(images):
            return variable_size.encode(self, images).x.unflatten(0, (len(images), -1))
        return self._encode(*self._embed(images, change_patches))

    def _checked(self, images: Tensor) -> Tensor:
        """The images. Raises TypeError or ValueError unless they have this model's channels and size."""
        return checked_images(images, self.in_chans, None if self.dynamic_img_size else self.patch_embed.img_size)

    def _embed(self, images: positions.Batch, change_patches: Change | None = None) -> tuple[Tensor, list[tuple]]:
        """Images -> the tokens (B, T+N, D), or packed (tokens, D), and each block's other arguments."""
        x, before_blocks = self._pos_embed(images, change_patches)
        x = self.norm_pre(self.pos_drop(x))
        options, subsets = positions.attention_options(self, images, x), variable_size.subsets_of_blocks(self, images)
        return x.float() if self.residual_in_fp32 else x, list(zip(before_blocks, options, subsets))

    def _pos_embed(self, images: positions.Batch, change_patches: Change | None) -> tuple[Tensor, list[Tensor | None]]:
        """Images -> patches with prefix tokens and positions; and the positions to add before each block."""
        tokens = [t for t in (self.cls_token, self.reg_token) if t is not None]
        prefix = None if not tokens else tokens[0] if len(tokens) == 1 else torch.cat(tokens, dim=1)
        table, of_prefix, before_blocks = positions.added_positions(self, images)
        if isinstance(images, PackedImages):
            prefix = prefix if of_prefix is None else prefix + of_prefix.to(prefix.dtype)
            x = self.patch_embed(images.patches, prefix, table, self.mean, self.std, images.offsets)
        elif change_patches is None:
            x = self.patch_embed(images, prefix, table, self.mean, self.std)
        else:
            x = with_tokens(change_patches(self.patch_embed(images, mean=self.mean, std=self.std)), prefix, table)
        return x, before_blocks

    def _encode(self, x: Tensor, block_inputs: list[tuple], norm: bool = True) -> Tensor:
        """Runs the blocks and the last norm on tokens; block_inputs: the other arguments of each block."""
        for block, inputs in zip(self.blocks, block_inputs):
            x = self._run(block, x, *inputs)
        return self._last_norm(x) if norm else x

    def _run(self, block: Block, x: Tensor, *inputs) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, *inputs, use_reentrant=False)
        return block(x, *inputs)

    def _last_norm(self, x: Tensor) -> Tensor:
        """Applies the norm after the last block, in the parameters' dtype even if the stream is fp32."""
        return self.norm(x.to(weights_dtype(self.patch_embed.proj)) if self.residual_in_fp32 else x)

    def forward_head(self, x: Tensor | list[Tensor], pre_logits: bool = False) -> Tensor:
        """Tokens -> logits (B, num_classes), or with `pre_logits=True` the input of the last linear layer."""
        if of_many_sizes(x):
            return variable_size.head(self, variable_size.together(x), pre_logits)
        return self._head(self.pool(x), pre_logits)

    def pool(self, x: Tensor, pool_type: Pool | None = None) -> Tensor:
        """Tokens (B, T+N, D), or a list of (T+N_i, D) -> one vector for each image (B, D); "" pools nothing."""
        pool_type = self.global_pool if pool_type is None else pool_type
        if pool_type and (of_many_sizes(x) or self.packs(x)):
            return variable_size.pool(self, variable_size.together(x), pool_type)
        if pool_type == "map":
            return self.attn_pool(x[:, self.num_prefix_tokens :])
        if pool_type == "token":
            return x[:, 0]
        return x[:, self.num_prefix_tokens :].mean(dim=1) if pool_type == "avg" else x

    def _head(self, x: Tensor, pre_logits: bool) -> Tensor:
        x = self.head_drop(self.pre_logits(self.fc_norm(x)))
        return x if pre_logits else self.head(x)

    def check_many_sizes(self) -> None:
        """Raises InputError where this model takes images of one size alone."""
        if what := variable_size.part_of_one_size(self):
            raise InputError(f"ViT: {what} takes images of one size, (B, C, H, W), not of many sizes")

    def packs(self, x: Tensor) -> bool:
        """Whether a batch, of images or their tokens, is computed as a list: to the same bits."""
        return batch_invariant() and variable_size.part_of_one_size(self) is None and len(x) > 0

    # ---- looking at its blocks

    def forward_intermediates(
        self,
        images: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Literal["NCHW", "NLC"] = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ):
        """The outputs of chosen blocks, as timm's method of the same name.

        indices: the last n blocks (int), these blocks (negative from the end), or all (None). Maps are (B, D, H/P, W/Q)
        with "NCHW" and (B, N, D) with "NLC". Returns (final tokens, list), the list alone with `intermediates_only`, or
        a dictionary with `output_dict`.
        """
        form = return_prefix_tokens, norm, stop_early, output_fmt, intermediates_only, output_dict
        return intermediates.intermediate_outputs(self, images, indices, *form)

    def get_intermediate_layers(
        self,
        images: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> list:
        """DINO's name for forward_intermediates: (B, N, D) each, or (B, D, H/P, W/Q) with `reshape`."""
        form = dict(output_fmt="NCHW" if reshape else "NLC", intermediates_only=True)
        return self.forward_intermediates(images, n, return_prefix_tokens, norm, **form)

    def attention_maps(self, images: Tensor, indices: int | Sequence[int] | None = None) -> list[Tensor]:
        """The exact attention matrices, one (B, H, N, N) per layer, prefix tokens first; rows sum to 1.

        indices: as in forward_intermediates. Each map, in fp32 at least, is computed from q and k beside the fused
        attention of its own layer, so training keeps nothing for it. The maps have no gradients.
        """
        return list(self.each_attention_map(images, indices))

    def each_attention_map(self, images: Tensor, indices: int | Sequence[int] | None = None) -> Iterator[Tensor]:
        """`attention_maps` one after another: each is computed when it is asked for, and none is held here."""
        return intermediates.attention_maps(self, images, indices)

    # ---- making one

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "Self":
        """Makes a new model by the name of a preset, such as "B/16"; arguments override the preset's."""
        return cls(**{**preset(name), **overrides})

    @classmethod
    def from_pretrained(cls, source: str | Path, **overrides) -> "Self":
        """Makes a model with the weights of a file, a folder or `hf-hub:owner/name`.

        The weights may have any format that load_checkpoint reads. Constructor arguments override the checkpoint's.
        Another `img_size` resamples the positions. Another `num_classes` replaces the whole head by a linear layer of
        zeros and drops the class names. Raises InputError if something does not fit, or if the weights belong to a
        model that is not this ViT.
        """
        return load_model(cls, source, overrides)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes `folder/model.safetensors` (timm's names) and `folder/config.json`, atomically."""
        save(self, folder)

    def init_weights(self, mode: WeightInit = "", needs_reset: bool = True) -> None:
        """Initialises every weight as timm's ViT does; mode "", "jax", "jax_nlhb", "moco" or "reset".

        "" is the mode of the constructor. `needs_reset=False` skips modules that have just initialised themselves.
        """
        init_weights(self, mode or self._config["weight_init"], needs_reset)

    # ---- what it was made with, and how its images are prepared

    @property
    def config(self) -> dict:
        """The constructor arguments that make this model as it is now."""
        values = self._config | {name: getattr(self, name) for name in SETTABLE}
        names = {} if self.class_names is None else dict(class_names=self.class_names)
        return {name: values[name] for name in arguments.ARGUMENTS} | names

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes, in the order of the logits; None if they are unknown."""
        return vars(self)["class_names"]

    @class_names.setter
    def class_names(self, names: Sequence[str] | None) -> None:
        vars(self)["class_names"] = None if names is None else arguments.class_names(names, self.num_classes)

    @property
    def pretrained_cfg(self) -> dict:
        """How images are prepared now, in the names that `timm.data.resolve_model_data_config` reads.

        timm sets it on the models that it builds. What is set supplies the entries that a ViT does not have itself,
        such as `license`; those on pixels and classes are always the model's own.
        """
        return preprocessing.pretrained_cfg(self, vars(self).get("pretrained_cfg"))

    @pretrained_cfg.setter
    def pretrained_cfg(self, entries: dict | None) -> None:
        vars(self)["pretrained_cfg"] = entries

    default_cfg = pretrained_cfg  # timm's earlier name

    # ---- changing it

    def reset_classifier(self, num_classes: int, global_pool: Pool | None = None) -> None:
        """Replaces the whole head, hidden layer included, by one linear layer of zeros (the paper, 3.2)."""
        num_classes = arguments.read("num_classes", num_classes, "reset_classifier: num_classes")
        if global_pool is not None:
            lacks = {"token": not self.has_class_token, "map": self.attn_pool is None}
            if global_pool not in POOLS or lacks.get(global_pool):
                raise InputError(f"reset_classifier: this model cannot pool by {global_pool!r}")
            self.global_pool = global_pool
        weight = next(self.patch_embed.proj.parameters())
        self.num_classes, self.head_hidden_size, self.pre_logits = num_classes, self.embed_dim, nn.Identity()
        like = dict(device=weight.device, dtype=weight.dtype)
        self.head = nn.Linear(self.embed_dim, num_classes, **like) if num_classes > 0 else nn.Identity()
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        for module in (self.pre_logits, self.head):
            module.train(self.training)
        self._config |= dict(num_classes=num_classes, representation_size=None)
        self.class_names = None

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Sets the image size; the patch size stays, and the positions are resampled in 2-D."""
        old = self.patch_embed.grid_size
        self.patch_embed.set_input_size(arguments.read("img_size", img_size, "set_input_size: img_size"))
        how = old, self.patch_embed.grid_size, positions.prefix_slots(self), self._config["pos_resample"]
        positions.change_tables(self, lambda name, table: positions.resize_table(name, table, *how))
        self._config["img_size"] = self.patch_embed.img_size

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops the blocks after the last of `indices`, and norm and head if asked; returns the indices."""
        take = arguments.block_indices(indices, len(self.blocks))
        self.blocks = self.blocks[: max(take) + 1]
        positions.change_tables(self, lambda name, table: table if len(table) == 1 else table[: len(self.blocks)])
        self._config["depth"] = len(self.blocks)
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.fc_norm, self.attn_pool = nn.Identity(), None
            self.reset_classifier(0, "")
        return take

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Sets whether backward computes blocks (and stages of a hybrid's CNN) again, to save memory."""
        changed, self.grad_checkpointing = enable != self.grad_checkpointing, enable
        if changed and self.keep == "auto":
            choose_saved_activations(self, 0)  # it was settled for the other mode
        if isinstance(self.patch_embed, HybridEmbed):
            self.patch_embed.backbone.set_grad_checkpointing(enable)

    def set_keep(self, keep: Keep) -> None:
        """Sets what blocks keep for backward: "least", "all" (see ops.mlp_block), or "auto".

        "auto" means "least" until `decide_keep` is called; the trainer calls it. On CPUs, and while blocks are
        checkpointed, it stays "least".
        """
        self.keep = arguments.read("keep", keep)
        choose_saved_activations(self, 0)

    def decide_keep(self, batch: int, dtype: torch.dtype | None = None) -> str:
        """Chooses what keep="auto" keeps, for training on `batch` images at once; returns "all" or "least".

        The choice depends on the free memory of the GPU. Call this before the first step and before torch.compile,
        because compiled code keeps the choice. dtype: that of the matrix products, by default that of the parameters.
        """
        return choose_saved_activations(self, batch * (self.num_prefix_tokens + self.patch_embed.num_patches), dtype)

    # ---- what optimisers ask

    def get_classifier(self) -> nn.Module:
        """Returns the last linear layer."""
        return self.head

    def no_weight_decay(self) -> set[str]:
        """Returns the names of parameters that usually have no weight decay."""
        return {"pos_embed", "cls_token", "reg_token", *self._tables}

    def group_matcher(self, coarse: bool = False) -> dict:
        """Returns patterns that sort parameters into layers, for layer-wise learning rates."""
        blocks = [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]
        return dict(stem=r"^cls_token|reg_token|pos_embed|patch_embed", blocks=blocks)
