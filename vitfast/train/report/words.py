"""Settings and results of a run in words."""

from ...model.baselines import is_baseline
from ...run.config import Config, as_plain

# Fields whose names, with spaces for underscores, do not say what they are.
FIELDS = dict(
    name="recipe",
    img_size="image size",
    accumulate="micro-batches per step",
    scale_lr="batch size that the learning rate is meant for",
    optimizer="optimiser",
    lr="learning rate",
    sweep_lr="learning rates to try",
    sweep_hold_out="share held out to choose a learning rate",
    lr_decay="learning-rate schedule",
    lr_end="last learning rate",
    warmup_steps="warm-up steps",
    warmup_ratio="share of the run that warms up",
    momentum="momentum of SGD",
    betas="betas of AdamW and LAMB",
    layer_decay="factor of the learning rate per layer",
    clip_norm="largest norm of the gradients",
    non_finite="where gradients are not finite",
    ema_decay="decay of the averaged weights (EMA)",
    ema_warmup="warm-up of that decay",
    mask_target="what masked patches predict",
    mask_share="share of masked patches",
    global_crops="large crops of an image",
    local_crops="small crops of an image",
    local_size="pixels of a small crop",
    local_scale="area of a small crop",
    sigreg_lambda="LeJEPA's lambda",
    projector_width="width of the projector",
    projector_dim="dimensions of projections",
    sizes="range of image sizes",
    drop_tokens="share of dropped patches",
    train_crop_mode="training crop",
    crop_scale="area of a training crop",
    crop_ratio="aspect ratio of a training crop",
    hflip="share of flipped images",
    color_jitter="colour jitter",
    hue_jitter="hue jitter",
    jitter_share="share of images with colour jitter",
    grayscale="share of grey images",
    blur="share of blurred images",
    solarize="share of solarised images",
    auto_augment="augmentation policy",
    random_erasing="share of partly erased images",
    crop_mode="evaluation crop",
    crop_pct="share of an image's side that evaluation keeps",
    interpolation="filter of evaluation's resize",
    drop_path_mode="kind of drop path",
    init_values="initial layer scale",
    global_pool="pooling",
    pos_embed="position embeddings",
    pos_embed_at="where positions are added",
    act_layer="activation",
    hidden_head="hidden layer before the head",
    head_init_bias="initial bias of the head",
    weight_init="initialisation",
    residual_in_fp32="residual stream in fp32",
    probe="labelled images of evaluations",
    data_dir="folder of named data sets",
    num_classes="classes, where the data does not say",
    shots="training images of each class",
    train_images="training images",
    hold_out="share of the training images that validates",
    early_stop="evaluations to wait for a better accuracy",
    output="run folder",
    weights="starts from",
    amp="mixed precision",
    compile="torch.compile",
    compile_mode="mode of torch.compile",
    workers="loader processes",
    decode="where JPEGs are decoded",
    eval_batch_size="images at once in evaluations",
    eval_every="steps between evaluations",
    log_every="steps between records",
    save_every="steps between checkpoints",
    parallel="how ranks share the model",
    max_unreadable="unreadable images that are allowed",
)
# Fields in which None or "" means a default that depends on the machine, the data or the weights.
DEFAULT = frozenset("crop_mode crop_pct interpolation weight_init device compile workers eval_every save_every".split())
SHOWN = frozenset("model img_size epochs steps batch_size optimizer lr lr_decay weight_decay seed".split())
RESULTS = dict(
    loss="validation loss",
    top5="top-5 accuracy",
    map="mean average precision",
    knn="accuracy of 20 nearest neighbours",
    rank="effective rank of features",
    images_per_second="training speed",
    waiting_for_data="time spent waiting for data",
    seconds="time",
    ranks="processes",
    train_images="training images",
    val_images="validation images",
    unreadable_images="unreadable training images",
    val_unreadable_images="unreadable validation images",
    best_step="best step",
    threads="CPU threads",
)
FORMS = dict(
    images_per_second="{:,.0f} images/s", waiting_for_data="{:.0%}", top5="{:.4f}", accuracy="{:.4f}", knn="{:.4f}"
)
# Entries that the table of results leaves out: they are said elsewhere, or not for readers.
ELSEWHERE = frozenset("finished task sizes device ranks threads precision speed".split())


def value_in_words(name: str, value) -> str:
    """The value of a field of a Config as readable text."""
    if name == "img_size" and not value:
        return "that of the weights"
    if value in (None, "", [], ()):
        return "default" if name in DEFAULT else "unset"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return (
            " to ".join(f"{v:g}" for v in value)
            if name in ("crop_scale", "crop_ratio", "local_scale")
            else ", ".join(f"{v:g}" for v in value)
        )
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings(config: Config) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """(setting, value, field) of the settings in SHOWN or other than the defaults, and of the rest."""
    defaults, shown, rest = as_plain(Config()), [], []
    of_weights = config.weights and not is_baseline(config.model)
    for name, value in as_plain(config).items():
        if name != "about":
            part = shown if value != defaults[name] or (name in SHOWN and value is not None) else rest
            text = "that of the weights" if name == "model" and of_weights else value_in_words(name, value)
            part.append((FIELDS.get(name, name.replace("_", " ")), text, name))
    return shown, rest


def duration(seconds: float) -> str:
    """A time as "3.1 s", "2 min 5 s" or "5 h 12 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def results(summary: dict) -> dict[str, str]:
    """The entries of a run's summary as readable text."""

    def text(name: str, value) -> str:
        if name == "seconds":
            return duration(value)
        if name in FORMS:
            return FORMS[name].format(value)
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, float):
            return f"{value:,.4f}" if abs(value) < 10 else f"{value:,.1f}"
        return f"{value:,}" if isinstance(value, int) else str(value)

    known = {k: v for k, v in summary.items() if v is not None and k not in ELSEWHERE}
    found = {RESULTS.get(k, k.replace("_", " ")): text(k, v) for k, v in known.items()}
    if summary.get("knn") is not None:
        error = with_error(summary["accuracy"], summary["val_images"])
        found = {"linear probe" if k == "accuracy" else k: error if k == "accuracy" else v for k, v in found.items()}
    if summary.get("top5") is not None:
        found["accuracy"] = with_error(summary["accuracy"], summary["val_images"])
    return found


def with_error(accuracy: float, images: int) -> str:
    """An accuracy on `images` images, as text with its binomial standard error."""
    return f"{accuracy:.4f} ± {(accuracy * (1 - accuracy) / images) ** 0.5:.4f}"
