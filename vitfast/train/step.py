"""One optimiser step: model, objective, optimiser and moving average, on one device or on many."""

import copy
import logging
import math

import torch
from timm.data import Mixup
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..data.loader import Data
from ..data.samples import mix_seed, seed_everything
from ..errors import InputError
from ..model.vit import ViT
from ..ops import reference as ref
from ..ops.packed import PackedImages
from ..run.config import Config
from ..run.device import autocast
from ..run.distributed import reducing, shard
from .losses import OBJECTIVES, correct, mix
from .optim import learning_rate, make_optimizer

logger = logging.getLogger("vitfast")
Images = Tensor | list[PackedImages]


class TrainStep:
    """A call is one optimiser step on this rank's share of a global batch.

    `model` is the plain module (sharded in place under FSDP2), `runner` is what gradients flow through (DDP's wrapper
    where there is one), and `unsharded` is a meta-device copy of a sharded model, into which whole weights fit.
    """

    def __init__(self, config: Config, model: nn.Module, data: Data):
        device, dtype, ranks = data.device, data.dtype, data.ranks
        micro_batches = config.accumulate * ranks.world
        if config.batch_size < micro_batches:
            raise InputError(
                f"batch_size {config.batch_size} is less than one image for each of {ranks.world} ranks "
                f"and {config.accumulate} micro-batches"
            )
        mixing = config.mixup or config.cutmix
        if mixing and config.batch_size % (2 * micro_batches):
            raise InputError(
                f"mixup and cutmix pair up images: batch_size {config.batch_size} must be a multiple of "
                f"2 x {config.accumulate} micro-batches x {ranks.world} ranks = {2 * micro_batches}"
            )
        sharded = ranks.world > 1 and config.parallel == "fsdp"
        if sharded and dtype == torch.float16:
            raise InputError("fp16 with parallel=fsdp is not supported: use bf16, or parallel=ddp")
        self.config, self.device, self.dtype, self.ranks = config, device, dtype, ranks
        self.model = self.runner = model
        # The scaler leaves out a step whose gradients are not finite, without waiting for the device to say so. Only
        # fp16 needs its factor too.
        self.scaled, self.skipping = dtype == torch.float16, config.non_finite == "skip"
        factor = 2.0**16 if self.scaled else 1.0
        self.scaler = torch.amp.GradScaler(device.type, factor, enabled=self.scaled or self.skipping)
        self.grad_norm = torch.zeros((), device=device)  # the last step's, if it must be finite
        self.objective = OBJECTIVES.get(config.objective)  # None: the model has its own loss
        self.views, self.seed = getattr(model, "views", 1), 0  # the crops of an image; the seed of all ranks in a step
        self.mixup = None
        if mixing:
            smoothing = config.label_smoothing
            self.mixup = Mixup(config.mixup, config.cutmix, label_smoothing=smoothing, num_classes=len(data.classes))
        self.ema = ModelEmaV3(model, config.ema_decay, use_warmup=config.ema_warmup) if config.ema_decay else None
        self.unsharded = copy.deepcopy(self.averaged).to("meta") if sharded else None
        vit = getattr(model, "vit", model)
        if isinstance(vit, ViT):  # before torch.compile, for which it is a constant
            tokens = vit.num_prefix_tokens + vit.patch_embed.num_patches
            images = config.tokens_per_step / tokens if config.tokens_per_step else config.batch_size
            if data.crops is not None:  # as many whole images as have the tokens of the crops
                images *= (self.views * vit.num_prefix_tokens + data.crops.patches) / tokens
            vit.decide_keep(math.ceil(images / micro_batches), dtype)
        self.compiled = config.compile if config.compile is not None else device.type == "cuda"
        if config.compile_mode == "reduce-overhead" and (need := no_graphs(data)):
            raise InputError(f"compile_mode=reduce-overhead records CUDA graphs, which need {need}; leave it out")
        if self.compiled:
            logger.info("the first step compiles the model, which may take minutes; --no-compile switches this off")
            for module in model.blocks if sharded and hasattr(model, "blocks") else (model,):
                module.compile(mode=config.compile_mode)
        if sharded:
            shard(model, dtype)
            if self.ema:
                shard(self.ema.module, dtype)
        self.optimizer = make_optimizer(config, model)
        # Whether Python waits in each step until the GPU says that all gradients are finite.
        self.asks = self.scaler.is_enabled() and not getattr(self.optimizer, "_step_supports_amp_scaling", False)
        if ranks.world > 1 and not sharded:
            devices = [device.index] if device.type == "cuda" else None
            self.runner = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
            self.runner._set_ddp_runtime_logging_sample_rate(20)  # which Meter reads; by default step 10 and then 100

    @property
    def averaged(self) -> nn.Module:
        """The model that is evaluated and kept: the moving average where there is one."""
        return self.ema.module if self.ema else self.model

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models that a checkpoint keeps: the trained one, and the moving average where there is one."""
        return {"model": self.model} | ({"ema": self.ema.module} if self.ema else {})

    @property
    def rate(self) -> float:
        """The learning rate of the last step."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def __call__(
        self, images: Images, labels: Tensor, step: int, total: int, count: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Takes optimiser step `step` of `total` on this rank's images and labels, (B,) or (B, K).

        images: uint8 (B, C, H, W), or PackedImages for each micro-batch. count: how many images all ranks have in this
        step (default: batch_size); all weigh the same. Returns its part of (loss, right answers), on the device.
        """
        seed_everything(self.config.seed, step, 1 + self.ranks.rank)
        self.seed = mix_seed(self.config.seed, step)
        rate = learning_rate(self.config, step, total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        result = self.accumulate(images, labels, self.config.accumulate, count)
        if self.config.clip_norm or self.skipping:
            self.scaler.unscale_(self.optimizer)
            self._measure_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update(None if self.scaled else 1.0)
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema:
            self.ema.update(self.model, step=step + 1)
        return result

    def _measure_gradients(self) -> None:
        """Clips the gradients to clip_norm if that is set; keeps their norm if it must be finite."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if self.config.clip_norm:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.clip_norm, norm)
        if self.skipping or not self.scaled:  # fp16 finds its factor by gradients that are too large
            self.grad_norm = _local(norm)

    @torch.no_grad()
    def is_finite(self) -> bool:
        """Whether all that this rank would save is finite: weights, average, optimiser. Waits for the device."""
        tensors = [parameter for model in self.models.values() for parameter in model.parameters()]
        tensors += [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return bool(torch.stack([_local(t).isfinite().all().to(self.device) for t in tensors]).all())

    def accumulate(
        self, images: Images, labels: Tensor, micro_batches: int, count: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Adds the gradients of this rank's share of a batch. Returns its share of (loss, right answers)."""
        loss_sum, correct = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        if isinstance(images, list):
            split = zip(images, labels.split([len(some) // self.views for some in images]))
        else:
            split = zip(images.tensor_split(micro_batches), labels.tensor_split(micro_batches))
        for index, (some, target) in enumerate(split):
            some, target = some.to(self.device, non_blocking=True), target.to(self.device, non_blocking=True)
            with reducing(self.runner, last=index == micro_batches - 1):
                loss, right = self._loss(some, target)
                loss = loss * (len(target) / (count or self.config.batch_size))
                self.scaler.scale(loss * self.ranks.world).backward()  # the ranks' gradients are averaged
            loss_sum += loss.detach()
            correct += right
        return loss_sum, correct

    def _loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(mean loss, right answers) of a micro-batch; without labels, the second result times images."""
        target, smoothing = labels, self.config.label_smoothing
        if self.mixup:
            mean, std = self.model.mean, self.model.std
            images = ref.normalize(images, mean, std, torch.float32)
            if labels.dim() == 2:  # an image has any number of classes
                images, target = mix(self.config.mixup, self.config.cutmix, images, target)
            else:
                images, target = self.mixup(images, target)
                smoothing = 0.0  # the mixed targets are smooth already
        with autocast(self.device, self.dtype):
            drawn = () if self.objective else self.model.drawn(self.seed, self.device)
            out = self.runner(images, *drawn)
        if self.objective is None:
            loss, score = out
            return loss, score.detach() * len(labels)
        return self.objective(out, target, smoothing), correct(out, labels)

    def micro_batches_that_fit(self, images: Tensor, labels: Tensor) -> int | None:
        """How many micro-batches fit, after running out of memory; None where one image is too much.

        It tries `accumulate` times 2, 4, 8, ...
        """
        micro_batches = self.config.accumulate * 2
        while micro_batches <= len(images):
            self.optimizer.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            try:
                self.accumulate(images, labels, micro_batches)
                return micro_batches
            except torch.OutOfMemoryError:
                micro_batches *= 2
        return None


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor that FSDP2 sharded, and other tensors unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def no_graphs(data: Data) -> str:
    """The need of compile_mode=reduce-overhead that a run does not meet, or ""."""
    if data.ranks.world > 1 or data.config.accumulate > 1:
        return "one process and accumulate=1"
    return "images of one size" if data.packing is not None or data.crops is not None else ""
