"""The queue of what a GPU has still to answer, as data, for `bench/gpu.sh decide` (decide.py).

A question is open on a kind of GPU until there is an answer for the current contents of its files. The open ones are
asked by worth per second, those first that decide a whole step. To ask one, add an entry to QUEUE. Seconds are
estimates where nothing else is said.
"""

from asking import Command, Prediction, Question, Rivals, curves, exit_code, faster, info, pair, peaks
from result_files import ACCELERATED, BACKEND

B16, BF16, TIMM = "B/16 224 B256", "vitfast compile bf16", "timm compile bf16"

# ---- files

KERNELS = "attention/* matmul/* patch_embed/* libraries/* dependent layer_norm rows launch plans tiles".split()
BESIDE = (*(f"kernels/{name}.py" for name in KERNELS), "kernels/libraries/*.cpp", "vitfast/ops/*.py")
OURS = (*BESIDE, "vitfast/model/*.py")
DOOR = (*BESIDE, "vitfast/backend/*.py")
ADAPTERS = (*DOOR, "vitfast/adapters/*.py")
EMBED = ("vitfast/eval/embed*.py", "vitfast/data/resize.py", "vitfast/data/jpeg.py", "kernels/resize/*.py")
EVERY_KERNEL = ("kernels/*/*.py", "kernels/*.py", "vitfast/ops/*.py")
FAMILIES = dict(attention="attention/*", linear_gelu="matmul/*", mlp_block="matmul/*", add_layer_norm="layer_norm")
FAMILIES |= {"patch_embed uint8": "patch_embed/*"}
# files of operations; those of whole models are OURS or ADAPTERS
FILES = {op: (f"kernels/{files}.py", "kernels/rows.py") for op, files in FAMILIES.items()}

# ---- rows of README's table

STEP, INFERENCE = "B/16 224 training step, batch 256", "B/16 inference"
OTHERS = "S/16, L/16, H/14, B/16@384 training step"
BY_BACKEND, BY_EMBED = 'timm\'s B/16 by `torch.compile(backend="vitfast")`', "`vitfast.Embedder`"
CURVES, MEMORY = "loss curves, ours against timm", "peak memory of the B/16 training step"

FIGURE = ("README's figure stands", "README's figure falls to this one")
PROFILE = ("README and the backend's page have it", "a profile says what is more than in the rival")

# ---- questions of one kind


def rivals(
    name: str, asks: str, what: str, names: tuple[str, ...], prediction: Prediction, follows, **more
) -> Question:
    """Rivals at B/16's main shape, if no other is given; their files are the operation's or the models'."""
    ours = ADAPTERS if any(library in name for library in (BACKEND, ACCELERATED) for name in names) else OURS
    files, shape = FILES.get(what.rpartition(" ")[0], ours), more.pop("shape", B16)
    return Question(name, asks, Rivals(what, shape, names), prediction, follows, files=files, **more)


def variant(name: str, asks: str, what: str, others: str, says: str, least: float, follows, worth: float) -> Question:
    """Asks whether what ships is `least` times as fast as others.

    These are "OPERATION=PROVIDER", with commas between them. A candidate in place of these, "candidate
    OPERATION=PROVIDER", should be so many times as fast as what ships. Instructions were counted, not timed
    (`tests/codegen.csv`): at the power limit each costs time, so fewer should be faster. The loser leaves.
    """
    ours = BF16 if what == "train" else "vitfast"
    names = (ours, *(f"{ours} | {other}" for other in others.removeprefix("candidate ").split(", ")))
    reads = faster(*reversed(names)) if others.startswith("candidate ") else faster(ours)
    seconds = 75 if what == "train" else 40
    return rivals(name, asks, what, names, Prediction(says, reads, least), follows, seconds=seconds, worth=worth)


def backend(what: str, precision: str, rival: str, says: str, least: float, worth: float, **rows: float) -> Question:
    """timm's B/16 through the compile backend, which has never run on a GPU, and through `accelerate`."""
    libraries = (BACKEND, "timm", ACCELERATED, *["vitfast"] * (precision == "bf16"))
    names = tuple(f"{library} compile {precision}" for library in libraries)
    asks = f"timm's B/16 by the backend, {what} in {precision}: is it right, and as fast as wanted?"
    figures = {(BY_BACKEND, figure.replace("_", " ")): value for figure, value in rows.items()}
    prediction, name = Prediction(says, faster(names[0], rival), least), f"backend_{what}_{precision}"
    seconds = 100 if precision == "bf16" else 90
    return rivals(name, asks, what, names, prediction, PROFILE, seconds=seconds, worth=worth, rows=figures)


def graphs(ours: str, model: str, batch: int, expected: float, seconds: int, worth: float = 0.0) -> Question:
    """A model's training step as CUDA graphs, ours and timm's, in amp where ours is `accelerate`."""
    precision, accelerate = ("amp", "accelerate ") if ours == ACCELERATED else ("bf16", "")
    names, figure = tuple(f"{each} reduce-overhead {precision}" for each in (ours, "timm")), f"{accelerate}{precision}"
    row = (STEP, f"{figure} by timm {precision}") if model == "B/16 224" else (OTHERS, f"{model} {figure}")
    return rivals(
        f"graphs_{model.replace('/', '').replace(' ', '_').lower()}_{precision}",
        f"How much faster is a step of {model} in {precision}, both as CUDA graphs?",
        "train",
        names,
        Prediction(f"{expected:.2f} times timm's speed", faster(*names), expected - 0.03),
        ("README's figure stands, without a star", FIGURE[1]),
        shape=f"{model} B{batch}",
        seconds=seconds,
        worth=worth,
        rows={row: expected},
    )


ALL_PASS = Prediction("all pass", exit_code, most=0)


def tests(name: str, asks: str, no: str, seconds: int, files: tuple[str, ...], *arguments: str) -> Question:
    """Asks whether tests that need a GPU pass, all of them."""
    follows = ("README's first row and docs/measured.md have it", no)
    return Question(name, asks, Command("tests", arguments), ALL_PASS, follows, seconds, files)


def paths(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}test_{name}.py" for name in names.split())


# ---- the queue

LEAN, TIMM_GRAPHS = f"{BF16} least memory", "timm reduce-overhead bf16"
GRAPHED, TENSORRT = "vitfast graphed bf16", "timm tensorrt bf16"
SEPARATE = f"{GRAPHED} | norm_linear_fwd=none"
BY_LT = f"{SEPARATE} | linear_residual_fwd=cublaslt"
QUEUE = (
    backend("train", "bf16", BF16, "59 ms, 0.98 of our ViT's speed", 0.97, 12.5, bf16_by_our_own_ViT=0.98),
    backend("train", "amp", "timm compile amp", "66 ms, 1.15 times timm's speed", 1.1, 10.1, amp_by_timm_amp=1.15),
    backend("throughput", "bf16", BF16, "0.98 of our ViT's speed", 0.97, 4.0, throughput_by_our_own_ViT=0.98),
    backend("throughput", "amp", "timm compile amp", "1.2 times timm's speed", 1.1, 3.0),
    rivals(
        "one_image",
        "One image in five kernels a layer: how fast, and what are dependent launches and those kernels worth?",
        "latency",
        (GRAPHED, f"{GRAPHED} | pdl=off", SEPARATE, BY_LT, f"{ACCELERATED} graphed bf16", TIMM_GRAPHS, TENSORRT),
        Prediction(
            "0.25 ms (by L2's traffic 0.28 to 0.32 is likelier), 0.28 without dependent launches, 0.36 by split sums, "
            "0.50 separate; timm 0.55",
            faster(GRAPHED, TIMM_GRAPHS),
            least=1.7,
        ),
        ("cuBLASLt leaves", "a profile of the five kernels says which; the faster of the rivals ships"),
        shape="B/16 224 B1",
        seconds=110,
        worth=6.0,
        rows={(INFERENCE, "latency of one image by the best peer's"): 0.55},
    ),
    *(
        rivals(
            f"images_{shape.lower().replace('/16 224 ', '_')}",
            f"{shape}: is it as fast in five kernels a layer as predicted, beside {rival} and timm?",
            "latency",
            tuple(dict.fromkeys((GRAPHED, rival, TIMM_GRAPHS))),
            Prediction(says, faster(GRAPHED, rival), least=1.0),
            ("it stays", "so many rows of such a width take separate kernels"),
            shape=shape,
            seconds=120 if shape.endswith("B1") else 75,
            worth=0.8,
        )
        for shape, rival, says in (
            ("B/16 224 B1", "timm max-autotune-graphs bf16", "timm 0.45 ms by max-autotune and CUDA graphs"),
            ("B/16 224 B2", SEPARATE, "0.30 ms, separate 0.52, timm 0.60"),
            ("B/16 224 B4", SEPARATE, "0.45 ms, separate 0.58, timm 0.62"),
            ("B/16 224 B8", TIMM_GRAPHS, "0.70 ms, by separate kernels, as from 1,025 rows on; timm 0.75"),
            ("L/16 224 B1", SEPARATE, "0.75 ms, separate 1.3"),
            ("L/16 224 B4", SEPARATE, "1.8 ms, separate 1.6: in blocks of 32 rows L2 delivers each weight 25 times"),
        )
    ),
    rivals(
        "kept",
        'What do keep="all" and keep="least" take, in one run?',
        "train",
        (BF16, LEAN, TIMM),
        Prediction("least: 2.6 % longer, in 0.67 of timm's memory", peaks(LEAN, TIMM), most=0.65),
        ("the target of memory is reached", "what dGELU keeps is the next to leave"),
        seconds=75,
        worth=1.5,
        rows={(MEMORY, "vitfast compile bf16 least memory by timm bf16 compiled"): 0.67},
    ),
    variant(
        "one_loop_fc1",
        "fc1 + GELU: is one loop, whose sums start at the bias, faster than two that Triton flattens?",
        "linear_gelu forward",
        "linear_gelu_fwd=flattened",
        "515 us become 465: 14 instructions an element in place of 19 with the same GELU, of 23 with the one before",
        1.03,
        ("the flattened loop leaves", "it ships again"),
        0.5,
    ),
    variant(
        "one_loop_residual",
        "fc2 + residual: the same, with the residual read ahead?",
        "mlp_block forward",
        "linear_residual_fwd=flattened",
        "its 329 us become 320, in a block of 880: 6 instructions an element in place of 11",
        1.0,
        ("the flattened loop leaves", "it ships again"),
        0.3,
    ),
    variant(
        "one_loop_dgelu",
        "dGELU: is one program a multiprocessor, which reads pre ahead, faster than two with a prologue each?",
        "train",
        "dgelu_matmul=tma",
        "its 569 us become 480, a step 1.5 % shorter: 19 instructions an element in place of 24",
        1.003,
        ("dgelu_matmul=tma leaves", "descriptors and a program for each block ship again, in two pieces"),
        1.1,
    ),
    variant(
        "slope_kept",
        "Is a step faster where the MLP keeps GELU's slope in place of its input?",
        "train",
        "candidate mlp_kept=slope",
        "60 us a layer, 1.3 % of a step: fc1 six instructions an element more, dGELU fourteen fewer",
        1.0127,
        ('"slope" is what keep="all" keeps', "mlp_kept=slope leaves"),
        0.8,
    ),
    variant(
        "attention_boxes",
        "Attention's forward: are queries and outputs by TMA faster than by pointers?",
        "attention forward",
        "attention_fwd=single_pass",
        "171 us become 165: 820 instructions for 64 queries in place of 883, and 984 with the exponential before",
        1.0,
        ("attention_fwd=single_pass leaves", "pointers ship again"),
        0.1,
    ),
    variant(
        "attention_roles",
        "Attention's backward: are four warpgroups with roles, in Gluon, right, and faster than four warps without?",
        "attention backward",
        "candidate attention_bwd=specialized",
        "393 us, less 1 % by the folded logarithm, become 300: 14 full waits in a row in place of 84",
        1.1,
        ("specialized ships for 193 to 207 tokens", "it leaves"),
        1.0,
    ),
    variant(
        "patches_of_bytes",
        "uint8 patches, an instruction a pixel: is our kernel faster than unfold + cuBLAS, and which of its tiles?",
        "patch_embed uint8 forward",
        "patch_embed_fwd=cublas, patch_embed_fwd=triton",
        "1.1 times cuBLAS's; the tile of 128 k, with 11 instructions a number of the result in place of 15, is faster",
        1.0,
        ("both others leave", "the fastest of the three ships"),
        0.1,
    ),
    graphs("vitfast", "B/16 224", 256, 1.29, 75, 1.0),
    graphs(ACCELERATED, "B/16 224", 256, 1.20, 75, 1.0),
    graphs("vitfast", "S/16 224", 512, 1.28, 75),
    graphs(ACCELERATED, "S/16 224", 512, 1.27, 75),
    graphs("vitfast", "L/16 224", 128, 1.13, 100),
    graphs("vitfast", "H/14 224", 64, 1.10, 115),
    graphs("vitfast", "B/16 384", 64, 1.11, 80),
    rivals(
        "host_time",
        "How long is Python busy with a step of B/16: our ViT's, timm's through the backend, and timm's?",
        "train",
        (BF16, f"{BACKEND} compile bf16", TIMM),
        Prediction("25 ms, where it was 40 to 50; the backend's 25; timm's 17", faster(BF16, TIMM, "host_ms"), 0.6),
        ("NOTES.md says what the host takes now", "`bench/host.py --shares` says what leaves next"),
        seconds=85,
        worth=1.0,
    ),
    rivals(
        "compiled_s16_224_bf16",
        "How much faster is a step of S/16 without CUDA graphs, where Python has the least time?",
        "train",
        (BF16, TIMM),
        Prediction("1.28 times timm's speed, as with them", faster(BF16), 1.25),
        ("the page of the fastest settings asks no CUDA graphs of S/16", "it asks for them: the host still binds"),
        shape="S/16 224 B512",
        seconds=75,
        worth=0.5,
    ),
    rivals(
        "graphs_inference",
        "How fast is throughput of B/16 beside timm's, compiled and as CUDA graphs?",
        "throughput",
        (BF16, TIMM, TIMM_GRAPHS),
        Prediction("1.20 times the best of them", faster(BF16), 1.17),
        FIGURE,
        seconds=80,
        worth=0.4,
        rows={(INFERENCE, "throughput by the best peer's"): 1.20},
    ),
    *(
        rivals(
            f"autotune_{what}_{ours.split()[-1]}",
            f"How fast is {what} of B/16 beside timm's with max-autotune?",
            what,
            (ours, f"timm max-autotune {ours.split()[-1]}"),
            Prediction(f"{expected} times its speed", faster(ours), expected - 0.03),
            FIGURE,
            seconds=120,
            worth=worth,
        )
        for what, ours, expected, worth in (
            ("train", BF16, 1.21, 1.0),
            ("train", f"{ACCELERATED} compile amp", 1.15, 0.8),
            ("throughput", BF16, 1.19, 0.4),
        )
    ),
    rivals(
        "norm_backward",
        "LayerNorm + residual backward, D 1280, four times the rows: is it its start that is missing?",
        "add_layer_norm backward",
        ("vitfast", "eager"),
        Prediction("90 % of the copy bandwidth: 10 us of any size", info("percent_of_floor", 0.01), 0.88),
        ("its second kernel is the part to spare", "its loop is too slow: two rows a program are tried"),
        shape="H/14 224 B256",
        seconds=30,
        worth=0.2,
    ),
    *(
        Question(
            f"embed_{stage}",
            f"How fast does B/16 embed {what}, beside a script of timm's parts?",
            Command("bench", ("bench/bench_embed.py::test_embed", "-k", f"B/16 and {stage}")),
            Prediction(f"{expected:.1f} times the script's images/s", info("ratio"), least=1.0),
            ("README's row has it", "the page on embeddings says where the script is faster"),
            seconds,
            EMBED,
            rows={(BY_EMBED, f"B/16 224 B256, {stage}, by a script of timm's parts"): expected},
        )
        for stage, what, expected, seconds in (
            ("forward", "pixels in memory", 1.2, 60),
            ("memory", "images in memory, resized", 2.0, 80),
            ("files", "JPEG files", 1.3, 90),
        )
    ),
    *(
        Question(
            f"losses_{seed}",
            f"Are 1,000 losses of S/16 by the backend timm's, from seed {seed}?",
            Command("bench", ("bench/bench_train.py::test_loss_curve", "-k", f"bf16-{seed} and (backend or timm)")),
            Prediction("at most 0.10 apart in a window of 50 steps (timm's seeds: 0.13 to 0.21)", curves, most=0.15),
            ("README's row has it", "the first window that differs is run in float64"),
            110,
            DOOR,
            rows={(CURVES, f"S/16 224 B128 bf16, {BACKEND}, in deviations"): 1.5},
        )
        for seed in range(3)
    ),
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
    Question(
        "aoti_package",
        "Does AOTInductor's package of a ViT load and run?",
        Command("tests", ("tests/model/test_export.py", "-k", "aoti_package and cuda")),
        Prediction("no: torch 2.11's loader crashes on it", exit_code, least=1),
        ("`vitfast export --format aoti` refuses torch 2.11 on a GPU and says why", "the pages have it"),
        40,
        ("vitfast/model/export.py", "tests/model/test_export.py"),
    ),
    *(
        tests(
            checker,
            f"Does {checker} find nothing, now that no library computes?",
            "the kernel that it names is mended first",
            120,
            (*EVERY_KERNEL, "tests/helpers/sanitized.py"),
            *("tests/kernels/test_gpu.py", "-k", f"sanitizer and {checker}"),
        )
        for checker in ("racecheck", "memcheck")
    ),
    tests(
        "gpu_tests_of_kernels",
        "Do the GPU tests of kernels pass, and are images that are resized there Pillow's, byte for byte?",
        "the log names what failed",
        120,
        (*EVERY_KERNEL, "tests/kernels/test_gpu.py", "vitfast/data/resize.py"),
        *(*paths("kernels/", "gpu plans cublaslt gelu patch_embed resize"), "-k", "not sanitizer"),
    ),
    tests(
        "gpu_tests_of_roles",
        "Does attention's backward by warpgroups with roles end, and give float64's numbers and the same bits twice?",
        "the kernel leaves",
        45,
        FILES["attention"],
        *paths("kernels/", "backward_specialized"),
    ),
    tests(
        "gpu_tests_of_models",
        "Do the GPU tests of models, operations and tools pass, but for AOTInductor's package?",
        "the log names what failed",
        120,
        (*OURS, "vitfast/adapters/*.py", *EMBED, "vitfast/train/s*.py"),
        *(*paths("model/", "same_bits export graphs"), *paths("eval/", "embedder"), *paths("train/", "speed")),
        *(*paths("tools/cost/", "memory"), *paths("adapters/", "accelerate_gpu"), "-k", "not package"),
    ),
    Question(
        "vitfast_doctor",
        "Does every operation pass `vitfast doctor` in each dtype?",
        Command("doctor"),
        Prediction("87 of 87", exit_code, most=0),
        ("README's first row has it", "the operation that failed is mended first"),
        56,
        (*EVERY_KERNEL, "vitfast/tools/doctor.py", "vitfast/tools/verify/*.py"),
        6.0,  # after the two that decide a whole step
        measured=True,
    ),
)
QUESTIONS = {question.name: question for question in QUEUE}
