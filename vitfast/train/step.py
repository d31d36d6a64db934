"""What one optimiser step does: model, objective, optimiser, average, on one device or on many."""

import copy

import torch
from timm.data import Mixup
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from .. import ref
from ..config import Config
from ..data.samples import seed_everything
from ..device import autocast
from ..distributed import Ranks, data_parallel, load_model, load_optimizer, reducing, shard, whole
from ..errors import InputError
from ..model import ViT
from .losses import OBJECTIVES
from .optim import learning_rate, make_optimizer


class Learner:
    """A model that learns: `train_step` on the rank's part of a global batch, `state` and `load` for what the next step needs.

    `model` is the plain module (sharded in place under FSDP2), `runner` what gradients flow through (DDP's wrapper where there is one).
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        classes: int,
        device: torch.device,
        dtype: torch.dtype | None,
        ranks: Ranks,
    ):
        if config.batch_size < config.accumulate * ranks.world:
            raise InputError(
                f"batch_size {config.batch_size} is less than one image for each of {ranks.world} ranks and {config.accumulate} micro-batches"
            )
        mixing = config.mixup or config.cutmix
        if mixing and config.batch_size % (2 * config.accumulate * ranks.world):
            raise InputError(
                f"mixup and cutmix pair up images: batch_size {config.batch_size} must be a multiple of "
                f"2 x {config.accumulate} micro-batches x {ranks.world} ranks = {2 * config.accumulate * ranks.world}"
            )
        self.config, self.device, self.dtype, self.ranks = config, device, dtype, ranks
        self.masked = config.objective == "masked"
        self.model = self.runner = model
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.objective = None if self.masked else OBJECTIVES[config.objective]
        self.mixup = (
            Mixup(config.mixup, config.cutmix, label_smoothing=config.label_smoothing, num_classes=classes)
            if mixing
            else None
        )
        self.ema = ModelEmaV3(model, decay=config.ema_decay) if config.ema_decay else None
        sharded = ranks.world > 1 and config.parallel == "fsdp"
        if sharded and dtype == torch.float16:
            raise InputError("fp16 with parallel=fsdp is not supported: use bf16, or parallel=ddp")
        self.template = copy.deepcopy(self.trained).to("meta") if sharded else None
        if sharded:
            shard(model, dtype)
            if self.ema:
                shard(self.ema.module, dtype)
        self.optimizer = make_optimizer(config, model)
        vit = model.vit if self.masked else model
        if isinstance(vit, ViT):  # before torch.compile, for which it is a constant
            vit.decide_keep(-(-config.batch_size // (config.accumulate * ranks.world)), dtype)
        if config.compile if config.compile is not None else device.type == "cuda":
            for module in model.blocks if sharded and hasattr(model, "blocks") else (model,):
                module.compile()
        if ranks.world > 1 and not sharded:
            self.runner = data_parallel(model, device)

    @property
    def trained(self) -> nn.Module:
        """What is evaluated and kept: the average where there is one."""
        return self.ema.module if self.ema else self.model

    @property
    def rate(self) -> float:
        """The learning rate of the last step."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def _loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and number of right answers (masked patches: their share times the images) of one micro-batch."""
        target, smoothing = labels, self.config.label_smoothing
        if self.mixup:
            mean, std = self.model.mean, self.model.std
            images, target = self.mixup(ref.normalize(images, mean, std, torch.float32), target)
            smoothing = 0.0  # the mixed targets are smooth already
        with autocast(self.device, self.dtype):
            out = self.runner(images)
        if self.masked:
            loss, share = out
            return loss, share.detach() * len(images)
        return self.objective(out, target, smoothing), (out.detach().argmax(-1) == labels).sum()

    def accumulate(self, images: Tensor, labels: Tensor, parts: int) -> tuple[Tensor, Tensor]:
        """Adds the gradients of this rank's part of the global batch, in micro-batches. Returns its share of (loss, right answers), on the device."""
        loss_sum, correct = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for index, (part, target) in enumerate(zip(images.tensor_split(parts), labels.tensor_split(parts))):
            part, target = part.to(self.device, non_blocking=True), target.to(self.device, non_blocking=True)
            with reducing(self.runner, index == parts - 1):
                loss, right = self._loss(part, target)
                loss = loss * (len(part) / self.config.batch_size)
                self.scaler.scale(loss * self.ranks.world).backward()  # the ranks' gradients are averaged
            loss_sum += loss.detach()
            correct += right
        return loss_sum, correct

    def train_step(self, images: Tensor, labels: Tensor, step: int, total: int) -> tuple[Tensor, Tensor]:
        """Optimiser step `step` of `total` on this rank's uint8 images (B, C, H, W) and labels (B,). Returns its share of (loss, right answers)."""
        seed_everything(self.config.seed, step, 1 + self.ranks.rank)
        rate = learning_rate(self.config, step, total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        result = self.accumulate(images, labels, self.config.accumulate)
        if self.config.clip_norm:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema:
            self.ema.update(self.model, step=step + 1)
        return result

    def micro_batches_that_fit(self, images: Tensor, labels: Tensor) -> int | None:
        """After running out of memory: the smallest multiple of `accumulate` whose micro-batches fit, None where one image is too much."""
        parts = self.config.accumulate * 2
        while parts <= len(images):
            self.optimizer.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            try:
                self.accumulate(images, labels, parts)
                return parts
            except torch.OutOfMemoryError:
                parts *= 2
        return None

    def state(self) -> dict:
        """Whole tensors of model, optimiser and average; collective where the model is sharded."""
        ema = whole(self.ema.module.state_dict()) if self.ema else None
        optimizer = whole(self.optimizer.state_dict())
        return dict(model=whole(self.model.state_dict()), optimizer=optimizer, scaler=self.scaler.state_dict(), ema=ema)

    def load(self, saved: dict) -> None:
        """Takes what `state` gave, on any number of ranks."""
        load_model(self.model, saved["model"])
        load_optimizer(self.optimizer, saved["optimizer"])
        self.scaler.load_state_dict(saved["scaler"])
        if self.ema:
            load_model(self.ema.module, saved["ema"])

    def network(self, state: dict) -> nn.Module:
        """The trained model with whole weights, as it is saved for use."""
        model = self.trained
        if self.template is not None:
            model = copy.deepcopy(self.template)
            model.load_state_dict({k: v.cpu() for k, v in (state["ema"] or state["model"]).items()}, assign=True)
        return model.vit if self.masked else model
