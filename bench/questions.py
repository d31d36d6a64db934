"""The queue of what a GPU has still to answer, as data, for `bench/gpu.sh decide` (decide.py).

A question is open on a kind of GPU until there is an answer for the current contents of its files. The open ones are
asked by worth per second, those first that decide a whole step. To ask one, add an entry: to QUEUE, or to a table of
questions of one kind. Seconds are estimates where nothing else is said.
"""

from asking import Command, Prediction, Question, Rivals, curves, exit_code, faster, info, pair, peaks
from counted import ATTENTION, B16, BF16, COUNTED, TIMM

BACKEND, ACCELERATED = "vitfast backend (timm)", "vitfast.accelerate(timm)"

# ---- files

KERNELS = tuple(f"kernels/{name}/*.py" for name in ("attention", "layer_norm", "matmul", "patch_embed", "configs"))
BESIDE = (*KERNELS, "kernels/rows.py", "kernels/launch.py", "kernels/libraries/*", "vitfast/ops/*.py")
OURS = (*BESIDE, "vitfast/model/*.py")
DOOR = (*BESIDE, "vitfast/backend/*.py")
ADAPTERS = (*DOOR, "vitfast/adapters/*.py")
NORM = ("kernels/layer_norm/*.py", "kernels/rows.py")
EMBED = ("vitfast/eval/embed*.py", "vitfast/data/resize.py", "vitfast/data/jpeg.py", "kernels/resize/*.py")
EVERY_KERNEL = ("kernels/*/*.py", "kernels/*.py", "vitfast/ops/*.py")

# ---- rows of README's table

STEP, INFERENCE = "B/16 224 training step, batch 256", "B/16 inference"
OTHERS = "S/16, L/16, H/14, B/16@384 training step"
BY_BACKEND, BY_EMBED = 'timm\'s B/16 by `torch.compile(backend="vitfast")`', "`vitfast.Embedder`"
CURVES, ATTENTIONS = "loss curves, ours against timm", "attention N = 197, 257, 577, forward and backward"
MEMORY = "peak memory of the B/16 training step"

STAR = ("README's figure stands, without a star", "README's figure falls to this one")
AUTOTUNE = ("README no longer says that max-autotune has no time", "README's figure falls to this one")
PROFILE = ("README and the backend's page have it", "a profile says what is more than in the rival")

# ---- questions of one kind


def backend(
    name: str, what: str, precision: str, rival: str, says: str, least: float, seconds: int, worth: float, **rows: float
) -> Question:
    """timm's B/16 through the compile backend, which has never run on a GPU."""
    libraries = (BACKEND, "timm", *["vitfast"] * (precision == "bf16"), ACCELERATED)
    names = tuple(f"{library} compile {precision}" for library in libraries)
    asks = f"timm's B/16 by the backend, {what} in {precision}: is it right, and as fast as wanted?"
    prediction = Prediction(says, faster(names[0], rival), least=least)
    figures = {(BY_BACKEND, figure.replace("_", " ")): value for figure, value in rows.items()}
    return Question(name, asks, Rivals(what, B16, names), prediction, PROFILE, seconds, DOOR, worth, figures)


def doors(name: str, what: str, precision: str, rival: str, says: str, least: float, worth: float) -> Question:
    """timm's B/16 through `accelerate` and torch.compile, and through the backend."""
    names = tuple(f"{library} compile {precision}" for library in (ACCELERATED, BACKEND))
    shape = "B/16 224 B1" if what == "latency" else B16
    asks = f"timm's B/16, {what} in {precision}: is it right through both doors, and as fast as by hand-made layers?"
    prediction = Prediction(says, faster(names[0], rival), least=least)
    return Question(
        f"doors_{name}", asks, Rivals(what, shape, (*names, rival)), prediction, PROFILE, 90, ADAPTERS, worth
    )


def graphs(ours: str, precision: str, model: str, batch: int, expected: float, seconds: int, worth: float) -> Question:
    """A model's training step where ours and timm's run as CUDA graphs."""
    names, main = tuple(f"{library} reduce-overhead {precision}" for library in (ours, "timm")), model == "B/16 224"
    figure = f"{model} {'accelerate ' if ours == ACCELERATED else ''}{precision}"
    if main:
        figure = f"{figure.removeprefix('B/16 224 ')} by timm {precision}"
    return Question(
        f"graphs_{model.replace('/', '').replace(' ', '_').lower()}_{precision}",
        f"How much faster is a step of {model} in {precision}, both as CUDA graphs?",
        Rivals("train", f"{model} B{batch}", names),
        Prediction(f"{expected:.2f} times timm's speed", faster(*names), least=expected - 0.03),
        STAR,
        seconds,
        ADAPTERS if ours == ACCELERATED else OURS,
        worth,
        {(STEP if main else OTHERS, figure): expected},
    )


def peers(name: str, what: str, ours: str, others: tuple[str, ...], says: str, least: float, **more) -> Question:
    """Ours beside settings of timm that have no time yet."""
    asks = f"How fast is {what} of B/16 beside {' and '.join(others)}?"
    prediction = Prediction(says, faster(ours), least=least)
    return Question(name, asks, Rivals(what, B16, (ours, *others)), prediction, **more)


def attention(name: str, shape: str, direction: str, others: tuple[str, ...], expected: float, **more) -> Question:
    """An attention beside others."""
    return Question(
        f"{name}_{direction}",
        f"Attention at {shape}, {direction}: is ours faster than {' and '.join(others)}?",
        Rivals(f"attention {direction}", shape, ("vitfast", *others)),
        Prediction(f"{expected:.2f} times the fastest of them", faster("vitfast"), least=1.0),
        ("the tiles stay", "`vitfast tune --only attention` searches for other tiles"),
        40,
        ATTENTION,
        0.2,
        {(ATTENTIONS, f"attention {shape.rpartition(' ')[0]} {direction}"): expected},
        **more,
    )


def embed(stage: str, what: str, expected: float, seconds: int) -> Question:
    return Question(
        f"embed_{stage}",
        f"How fast does B/16 embed {what}, beside a script of timm's parts?",
        Command("bench", ("bench/bench_embed.py::test_embed", "-k", f"B/16 and {stage}")),
        Prediction(f"{expected:.1f} times the script's images/s", info("ratio"), least=1.0),
        ("README's row has it", "the page on embeddings says where the script is faster"),
        seconds,
        EMBED,
        rows={(BY_EMBED, f"B/16 224 B256, {stage}, by a script of timm's parts"): expected},
    )


def losses(seed: int) -> Question:
    within = "at most 0.10 apart in a window of 50 steps (two of timm's seeds: 0.13 to 0.21)"
    return Question(
        f"losses_{seed}",
        f"Are 1,000 losses of S/16 by the backend timm's, from seed {seed}?",
        Command("bench", ("bench/bench_train.py::test_loss_curve", "-k", f"bf16-{seed} and (backend or timm)")),
        Prediction(within, curves, most=0.15),
        ("README's row has it", "the first window that differs is run in float64"),
        110,
        DOOR,
        rows={(CURVES, f"S/16 224 B128 bf16, {BACKEND}, in deviations"): 1.5},
    )


def tests(name: str, asks: str, says: str, no: str, seconds: int, files: tuple[str, ...], *arguments: str) -> Question:
    """Tests that need a GPU."""
    follows = ("README's first row and docs/measured.md have it", no)
    return Question(
        name, asks, Command("tests", arguments), Prediction(says, exit_code, most=0), follows, seconds, files
    )


def paths(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}test_{name}.py" for name in names.split())


LEAN, BY_LT = f"{BF16} least memory", f"{BF16} | linear_residual_fwd=cublaslt"
LOG = "the log names what failed"
QUEUE = (
    backend(
        "backend_bf16",
        "train",
        "bf16",
        BF16,
        "59 ms, 0.98 of our ViT's speed",
        0.97,
        100,
        12.5,
        bf16_by_our_own_ViT=0.98,
    ),
    backend(
        "backend_amp",
        "train",
        "amp",
        "timm compile amp",
        "66 ms, 1.15 times timm's speed",
        1.1,
        90,
        10.1,
        amp_by_timm_amp=1.15,
    ),
    backend(
        "backend_inference",
        "throughput",
        "bf16",
        BF16,
        "0.98 of our ViT's speed",
        0.97,
        100,
        4.0,
        throughput_by_our_own_ViT=0.98,
    ),
    backend("backend_inference_amp", "throughput", "amp", "timm compile amp", "1.2 times timm's speed", 1.1, 80, 3.0),
    doors("amp", "train", "amp", "timm compile amp", "1.21 times timm's speed, as before", 1.19, 9.0),
    doors("bf16", "train", "bf16", TIMM, "1.24 times timm's speed, as before", 1.22, 9.0),
    doors("one_image", "latency", "bf16", BF16, "0.497 ms, that of our ViT", 0.97, 2.0),
    Question(
        "one_image",
        "One image: 0.50 ms by the rule for few rows, and less with proj and fc2 by cuBLASLt?",
        Rivals("latency", "B/16 224 B1", (BF16, BY_LT, TIMM, "timm reduce-overhead bf16")),
        Prediction(
            "0.50 ms, and 0.45 by cuBLASLt (24 kernels of 2 us less); timm 0.55, with reduce-overhead 0.60",
            faster(BY_LT, BF16),
            least=1.05,
        ),
        ("few rows of linear_residual_fwd go to cuBLASLt (_FEW_ROWS)", "the rule stays with cuBLAS"),
        70,
        OURS,
        1.0,
        {(INFERENCE, "latency of one image by the best peer's"): 0.91},
    ),
    Question(
        "kept",
        'What do keep="all" and keep="least" take, in one run?',
        Rivals("train", B16, (BF16, LEAN, TIMM)),
        Prediction("least: 2.6 % longer, in 0.67 of timm's memory", peaks(LEAN, TIMM), most=0.65),
        ("the target of memory is reached", "what dGELU keeps is the next to leave"),
        75,
        OURS,
        1.5,
        {(MEMORY, "vitfast compile bf16 least memory by timm bf16 compiled"): 0.67},
    ),
    *COUNTED,
    graphs("vitfast", "bf16", "B/16 224", 256, 1.29, 75, 1.0),
    graphs(ACCELERATED, "amp", "B/16 224", 256, 1.20, 75, 1.0),
    graphs("vitfast", "bf16", "S/16 224", 512, 1.28, 75, 0.0),
    graphs(ACCELERATED, "amp", "S/16 224", 512, 1.27, 75, 0.0),
    graphs("vitfast", "bf16", "L/16 224", 128, 1.13, 100, 0.0),
    graphs("vitfast", "bf16", "H/14 224", 64, 1.10, 115, 0.0),
    graphs("vitfast", "bf16", "B/16 384", 64, 1.11, 80, 0.0),
    peers(
        "graphs_inference",
        "throughput",
        BF16,
        (TIMM, "timm reduce-overhead bf16"),
        "1.20 times the best of them",
        1.17,
        follows=STAR,
        seconds=80,
        files=OURS,
        worth=0.4,
        rows={(INFERENCE, "throughput by the best peer's"): 1.20},
    ),
    *(
        peers(f"autotune_{name}", what, ours, (f"timm max-autotune {name.split('_')[0]}",), says, least, **more)
        for name, what, ours, says, least, more in (
            ("bf16", "train", BF16, "1.21: cuBLAS stays everywhere", 1.19, dict(seconds=120, files=OURS, worth=1.0)),
            ("amp", "train", f"{ACCELERATED} compile amp", "1.15", 1.1, dict(seconds=120, files=ADAPTERS, worth=0.8)),
            ("bf16_inference", "throughput", BF16, "1.19", 1.17, dict(seconds=100, files=OURS, worth=0.4)),
        )
        for more in (more | dict(follows=AUTOTUNE),)
    ),
    attention("attention_577", "B/16 384 B64", "forward", ("sdpa cudnn", "sdpa flash"), 0.95),
    attention("attention_577", "B/16 384 B64", "backward", ("sdpa cudnn", "sdpa flash"), 1.2),
    attention("flash_attn", B16, "forward", ("flash-attn 3", "sdpa cudnn"), 1.0, needs="flash_attn_interface"),
    attention("flash_attn", B16, "backward", ("flash-attn 3", "sdpa cudnn"), 1.3, needs="flash_attn_interface"),
    Question(
        "norm_backward",
        "LayerNorm + residual backward, D 1280, four times the rows: is it its start that is missing?",
        Rivals("add_layer_norm backward", "H/14 224 B256", ("vitfast", "eager")),
        Prediction("90 % of the copy bandwidth: 10 us of any size", info("percent_of_floor", 0.01), least=0.88),
        ("its second kernel is the part to spare", "its loop is too slow: two rows a program are tried"),
        30,
        NORM,
        0.2,
    ),
    embed("forward", "pixels in memory", 1.2, 60),
    embed("memory", "images in memory, resized", 2.0, 80),
    embed("files", "JPEG files", 1.3, 90),
    *(losses(seed) for seed in range(3)),
    Question(
        "from_files",
        "How fast is training from JPEG files, beside timm's loader?",
        Command("bench", ("bench/bench_train.py::test_train_from_files", "-k", "B/16")),
        Prediction("both wait for the cores; 1.1 times timm's images/s", pair, least=1.0),
        ("the page of the fastest settings has it", "the loader's stages are timed one by one"),
        110,
        ("vitfast/data/*.py", "vitfast/train/step.py"),
        0.1,
    ),
    tests(
        "corrected_tests",
        "Do the two corrected tests pass: nvJPEG's pixels?",
        "all pass",
        "the judge is wrong once more, and the log says which",
        30,
        EMBED,
        *("tests/eval/test_embedder.py", "-k", "resized_there"),
    ),
    Question(
        "aoti_linear",
        "Does AOTInductor's package of one nn.Linear, with nothing of ours, load and run?",
        Command("tests", ("tests/model/test_export.py", "-k", "package_of_one_linear and cuda")),
        Prediction("no: torch 2.11's loader crashes on it too", exit_code, least=1),
        ("`vitfast export --format aoti` refuses torch 2.11 on a GPU and says why", "the ViT's package is bisected"),
        40,
        ("vitfast/model/export.py", "tests/model/test_export.py"),
    ),
    *(
        tests(
            checker,
            f"Does {checker} find anything, now that no library computes?",
            "nothing",
            "the kernel that it names is mended first",
            120,
            (*EVERY_KERNEL, "tests/helpers/sanitized.py"),
            *("tests/kernels/test_gpu.py", "-k", f"sanitizer and {checker}"),
        )
        for checker in ("racecheck", "memcheck")
    ),
    tests(
        "resize",
        "Are images that are resized on the GPU Pillow's, byte for byte?",
        "every byte",
        "the filter that differs goes back to the CPU",
        25,
        ("kernels/resize/*.py", "vitfast/data/resize.py"),
        "tests/kernels/test_resize.py",
    ),
    tests(
        "gpu_tests_of_kernels",
        "Do the GPU tests of kernels pass?",
        "all pass",
        LOG,
        120,
        (*EVERY_KERNEL, "tests/kernels/test_gpu.py"),
        *(*paths("kernels/", "gpu cublaslt gelu patch_embed resize"), "-k", "not sanitizer"),
    ),
    tests(
        "gpu_tests_of_roles",
        "Does attention's backward by warpgroups with roles end, and give float64's numbers and the same bits twice?",
        "all pass",
        "the kernel leaves",
        45,
        ATTENTION,
        *paths("kernels/", "backward_specialized"),
    ),
    tests(
        "gpu_tests_of_models",
        "Do the GPU tests of models, operations and tools pass?",
        "all pass, without AOTInductor's package",
        LOG,
        120,
        (*OURS, "vitfast/adapters/*.py", "vitfast/eval/embed*.py"),
        *(*paths("model/", "same_bits export"), *paths("eval/", "embedder")),
        *(*paths("tools/cost/", "memory"), *paths("adapters/", "accelerate_gpu"), "-k", "not package"),
    ),
    Question(
        "vitfast_doctor",
        "Does every operation pass `vitfast doctor` in each dtype?",
        Command("doctor"),
        Prediction("78 of 78", exit_code, most=0),
        ("README's first row has it", "the operation that failed is mended first"),
        56,
        (*EVERY_KERNEL, "vitfast/tools/doctor.py", "vitfast/tools/verify/*.py"),
        measured=True,
    ),
)
QUESTIONS = {question.name: question for question in QUEUE}
