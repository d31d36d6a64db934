"""What a GPU has still to answer, as data: `bench/gpu.sh decide OUT` works through it (decide.py).

A question is open on a kind of GPU until there is an answer for the current contents of its files. The open ones are
asked by worth per second, those first that decide a whole step. To ask one, add an entry to QUEUE.
"""

from asking import Command, Prediction, Question, Rivals, curves, exit_code, faster, info, pair, peaks

BACKEND, ACCELERATED = "vitfast backend (timm)", "vitfast.accelerate(timm)"
B16 = "B/16 224 B256"

# ---- files

KERNELS = tuple(f"kernels/{name}/*.py" for name in ("attention", "layer_norm", "matmul", "patch_embed", "configs"))
BESIDE = (*KERNELS, "kernels/rows.py", "kernels/launch.py", "kernels/libraries/*", "vitfast/ops/*.py")
OURS = (*BESIDE, "vitfast/model/*.py")
DOOR = (*BESIDE, "vitfast/backend/*.py")
ADAPTERS = (*BESIDE, "vitfast/adapters/*.py")
ATTENTION = ("kernels/attention/*.py", "kernels/configs/attention.py", "kernels/rows.py")
NORM = ("kernels/layer_norm/*.py", "kernels/configs/layer_norm.py", "kernels/rows.py")
EMBED = ("vitfast/eval/embed*.py", "vitfast/data/resize.py", "vitfast/data/jpeg.py", "kernels/resize/*.py")
SANITIZED = ("kernels/*/*.py", "vitfast/ops/*.py", "tests/helpers/sanitized.py")

# ---- rows of README's table, and what often follows

STEP, INFERENCE = "B/16 224 training step, batch 256", "B/16 inference"
OTHERS = "S/16, L/16, H/14, B/16@384 training step"
BY_BACKEND, BY_EMBED = 'timm\'s B/16 by `torch.compile(backend="vitfast")`', "`vitfast.Embedder`"
CURVES, ATTENTIONS = "loss curves, ours against timm", "attention N = 197, 257, 577, forward and backward"
MEMORY = "peak memory of the B/16 training step"
STAR = ("README's figure stands, without a star", "README's figure falls to this one")
AUTOTUNE = ("README no longer says that max-autotune has no time", "README's figure falls to this one")


def train(*names: str, shape: str = B16) -> Rivals:
    return Rivals("train", shape, names)


def throughput(*names: str) -> Rivals:
    return Rivals("throughput", B16, names)


def graphs(model: str, batch: int, ours: str, precision: str, predicted: float, seconds: int) -> Question:
    """A model's training step where ours and timm's run as CUDA graphs."""
    names = f"{ours} reduce-overhead {precision}", f"timm reduce-overhead {precision}"
    figure = f"{model} {'accelerate ' if ours == ACCELERATED else ''}{precision}"
    return Question(
        f"graphs_{model.replace('/', '').replace(' ', '_').lower()}_{precision}",
        f"How much faster is {model} in {precision}, both as CUDA graphs?",
        train(*names, shape=f"{model} B{batch}"),
        Prediction(f"{predicted:.2f} times timm's speed", faster(*names), least=predicted - 0.03),
        STAR,
        seconds,
        ADAPTERS if ours == ACCELERATED else OURS,
        rows={(OTHERS, figure): predicted},
    )


def attention(name: str, shape: str, direction: str, others: tuple[str, ...], predicted: float, **more) -> Question:
    """An attention beside others; in equal conditions it should not be slower."""
    return Question(
        f"{name}_{direction}",
        f"Attention at {shape}, {direction}: ours beside {' and '.join(others)}",
        Rivals(f"attention {direction}", shape, ("vitfast", *others)),
        Prediction(f"{predicted:.2f} times the fastest of them", faster("vitfast"), least=1.0),
        ("the tiles stay", "`vitfast tune --only attention` searches for other tiles"),
        40,
        ATTENTION,
        worth=0.2,
        rows={(ATTENTIONS, f"attention {shape.rpartition(' ')[0]} {direction}"): predicted},
        **more,
    )


def embed(stage: str, what: str, predicted: float, seconds: int) -> Question:
    return Question(
        f"embed_{stage}",
        f"How fast does B/16 embed {what}, beside a script of timm's parts?",
        Command("bench", ("bench/bench_embed.py::test_embed", "-k", f"B/16 and {stage}")),
        Prediction(f"{predicted:.1f} times the script's images/s", info("ratio"), least=1.0),
        ("README's row has it", "the page on embeddings says where the script is faster"),
        seconds,
        EMBED,
        rows={(BY_EMBED, f"B/16 224 B256, {stage}, by a script of timm's parts"): predicted},
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


def tests(name: str, asks: str, predicted: str, no: str, arguments: tuple[str, ...], **more) -> Question:
    """Tests that need a GPU; `check` is their name in README's first row."""
    prediction, row = Prediction(predicted, exit_code, most=0), "README's first row and docs/measured.md have it"
    return Question(name, asks, Command("tests", arguments), prediction, (row, no), **more)


QUEUE = (
    Question(
        "backend_bf16",
        "Is timm's B/16, compiled by the backend, right on a GPU and as fast as our ViT?",
        train(f"{BACKEND} compile bf16", "timm compile bf16", "vitfast compile bf16", f"{ACCELERATED} compile bf16"),
        Prediction(
            "59 ms: 0.98 of our ViT's speed, 1.21 times timm's",
            faster(f"{BACKEND} compile bf16", "vitfast compile bf16"),
            least=0.97,
        ),
        ("README and the backend's page say that it has run on a GPU", "one step is profiled beside our ViT's"),
        100,
        DOOR,
        worth=12.5,  # of timm's 71.5 ms
        rows={(BY_BACKEND, "bf16 by our own ViT"): 0.98},
    ),
    Question(
        "backend_amp",
        "The same in amp, beside timm's and accelerate's",
        train(f"{BACKEND} compile amp", "timm compile amp", f"{ACCELERATED} compile amp"),
        Prediction(
            "66 ms, bound by the host: 1.15 times timm's speed",
            faster(f"{BACKEND} compile amp", "timm compile amp"),
            least=1.1,
        ),
        ("README names the backend for amp", "one step is profiled beside accelerate's"),
        90,
        DOOR,
        worth=10.1,  # of timm's 76.1 ms
        rows={(BY_BACKEND, "amp by timm amp"): 1.15},
    ),
    Question(
        "backend_inference",
        "Is inference by the backend as fast as our ViT's?",
        throughput(*(f"{of} compile bf16" for of in (BACKEND, "timm", "vitfast", ACCELERATED))),
        Prediction(
            "0.98 of our ViT's speed, 1.19 times timm's",
            faster(f"{BACKEND} compile bf16", "vitfast compile bf16"),
            least=0.97,
        ),
        ("README's row has it", "one forward pass is profiled beside our ViT's"),
        100,
        DOOR,
        worth=4.0,  # of a batch's 23.3 ms
        rows={(BY_BACKEND, "throughput by our own ViT"): 0.98},
    ),
    Question(
        "backend_inference_amp",
        "The same in amp",
        throughput(*(f"{of} compile amp" for of in (BACKEND, "timm", ACCELERATED))),
        Prediction("1.2 times timm's speed", faster(f"{BACKEND} compile amp", "timm compile amp"), least=1.1),
        ("the backend's page names amp for inference", "casts of weights are looked for in a profile"),
        80,
        DOOR,
        worth=3.0,
    ),
    Question(
        "one_image",
        "One image: 0.50 ms by the rule for few rows, and less with proj and fc2 by cuBLASLt?",
        Rivals(
            "latency",
            "B/16 224 B1",
            (
                "vitfast compile bf16",
                "vitfast compile bf16 | linear_residual_fwd=cublaslt",
                "timm compile bf16",
                "timm reduce-overhead bf16",
            ),
        ),
        Prediction(
            "0.50 ms, and 0.45 by cuBLASLt (24 kernels of 2 us less); timm 0.55, with reduce-overhead 0.60",
            faster("vitfast compile bf16 | linear_residual_fwd=cublaslt", "vitfast compile bf16"),
            least=1.05,
        ),
        ("few rows of linear_residual_fwd go to cuBLASLt (_FEW_ROWS)", "the rule stays with cuBLAS"),
        70,
        OURS,
        worth=1.0,
        rows={(INFERENCE, "latency of one image by the best peer's"): 0.91},
    ),
    Question(
        "graphs_bf16",
        "B/16 as CUDA graphs: does timm gain as much as ours?",
        train("vitfast reduce-overhead bf16", "timm reduce-overhead bf16"),
        Prediction(
            "57.6 and 71.0 ms, 1.23: neither waits for the host",
            faster("vitfast reduce-overhead bf16", "timm reduce-overhead bf16"),
            least=1.2,
        ),
        STAR,
        75,
        OURS,
        worth=1.0,
        rows={(STEP, "bf16 by timm bf16"): 1.23},
    ),
    Question(
        "graphs_amp",
        "The same in amp, by accelerate",
        train(f"{ACCELERATED} reduce-overhead amp", "timm reduce-overhead amp"),
        Prediction(
            "62.8 and 75.5 ms, 1.20",
            faster(f"{ACCELERATED} reduce-overhead amp", "timm reduce-overhead amp"),
            least=1.17,
        ),
        STAR,
        75,
        ADAPTERS,
        worth=1.0,
        rows={(STEP, "accelerate amp by timm amp"): 1.20},
    ),
    Question(
        "autotune_bf16",
        "Does max-autotune make timm's B/16 faster?",
        train("vitfast compile bf16", "timm max-autotune bf16"),
        Prediction("by 1 % at most: cuBLAS stays everywhere; 1.21", faster("vitfast compile bf16"), least=1.19),
        AUTOTUNE,
        120,
        OURS,
        worth=1.0,
    ),
    Question(
        "autotune_amp",
        "The same in amp",
        train(f"{ACCELERATED} compile amp", "timm max-autotune amp"),
        Prediction("by 1 % at most; 1.15", faster(f"{ACCELERATED} compile amp"), least=1.1),
        AUTOTUNE,
        120,
        ADAPTERS,
        worth=0.8,
    ),
    Question(
        "graphs_inference",
        "Does reduce-overhead make timm's inference faster?",
        throughput("vitfast compile bf16", "timm compile bf16", "timm reduce-overhead bf16"),
        Prediction("by 1 %: 1.20 times the best of timm", faster("vitfast compile bf16"), least=1.17),
        STAR,
        80,
        OURS,
        worth=0.4,
        rows={(INFERENCE, "throughput by the best peer's"): 1.20},
    ),
    Question(
        "autotune_inference",
        "Does max-autotune?",
        throughput("vitfast compile bf16", "timm max-autotune bf16"),
        Prediction("by 2 % at most: 1.19", faster("vitfast compile bf16"), least=1.17),
        AUTOTUNE,
        100,
        OURS,
        worth=0.4,
    ),
    Question(
        "kept",
        'What do keep="all" and keep="least" take, in one run?',
        train("vitfast compile bf16", "vitfast compile bf16 least memory", "timm compile bf16"),
        Prediction(
            "least: 2.6 % longer, in 0.67 of timm's memory",
            peaks("vitfast compile bf16 least memory", "timm compile bf16"),
            most=0.65,
        ),
        ("the target of memory is reached", "what dGELU keeps is the next to leave"),
        75,
        OURS,
        worth=1.5,
        rows={(MEMORY, "vitfast compile bf16 least memory by timm bf16 compiled"): 0.67},
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
        worth=0.2,
    ),
    graphs("S/16 224", 512, "vitfast", "bf16", 1.28, 75),
    graphs("S/16 224", 512, ACCELERATED, "amp", 1.27, 75),
    graphs("L/16 224", 128, "vitfast", "bf16", 1.13, 100),
    graphs("H/14 224", 64, "vitfast", "bf16", 1.10, 115),
    graphs("B/16 384", 64, "vitfast", "bf16", 1.11, 80),
    tests(
        "corrected_tests",
        "Do the five corrected tests pass: strides under libraries, nvJPEG's pixels?",
        "all pass",
        "the judge is wrong once more, and the log says which",
        (
            "tests/kernels/test_libraries.py",
            "tests/eval/test_embedder.py",
            "-k",
            "any_strides_on_a_gpu or resized_there",
        ),
        seconds=30,
        files=("kernels/libraries/*", "tests/kernels/test_libraries.py", *EMBED),
        check="the five corrected gpu tests",
    ),
    tests(
        "aoti_linear",
        "Does AOTInductor's package of one nn.Linear, with nothing of ours, load and run?",
        "no: torch 2.11's loader crashes on it too",
        "`vitfast export --format aoti` refuses torch 2.11 on a GPU and says why",
        ("tests/model/test_export.py", "-k", "package_of_one_linear and cuda"),
        seconds=40,
        files=("vitfast/model/export.py", "tests/model/test_export.py"),
        check="AOTInductor's package of one nn.Linear",
    ),
    *(
        tests(
            checker,
            f"Does {checker} find anything, now that no library computes?",
            "nothing",
            "the kernel that it names is mended first",
            ("tests/kernels/test_gpu.py", "-k", f"sanitizer and {checker}"),
            seconds=120,
            files=SANITIZED,
            check=checker,
        )
        for checker in ("racecheck", "memcheck")
    ),
    tests(
        "resize",
        "Are images that are resized on the GPU Pillow's, byte for byte?",
        "every byte",
        "the filter that differs goes back to the CPU",
        ("tests/kernels/test_resize.py",),
        seconds=25,
        files=("kernels/resize/*.py", "vitfast/data/resize.py"),
        check="Pillow's bytes",
    ),
    embed("forward", "pixels in memory", 1.2, 60),
    embed("memory", "images in memory, resized", 2.0, 80),
    embed("files", "JPEG files", 1.3, 90),
    *(losses(seed) for seed in range(3)),
    Question(
        "gemms",
        "What does cuBLAS reach at fc1, by which the rest is judged?",
        Rivals("gemm fc1 forward", B16, ("eager",)),
        Prediction("650 to 680 TFLOP/s at the power limit", info("tflops"), least=640),
        ("the products' share of a step's floor stands", "`vitfast cost` assumes another clock"),
        25,
        ("vitfast/tools/cost/work.py",),
        worth=0.05,
    ),
    Question(
        "from_files",
        "How fast is training from JPEG files, beside timm's loader?",
        Command("bench", ("bench/bench_train.py::test_train_from_files", "-k", "B/16")),
        Prediction("both wait for the cores; 1.1 times timm's images/s", pair("images_per_second"), least=1.0),
        ("the page of the fastest settings has it", "the loader's stages are timed one by one"),
        110,
        ("vitfast/data/*.py", "vitfast/train/step.py"),
        worth=0.1,
    ),
    tests(
        "gpu_tests_kernels",
        "Do the GPU tests of kernels pass?",
        "all pass",
        "the log names what failed",
        tuple(f"tests/kernels/test_{name}.py" for name in "gpu cublaslt libraries patch_embed resize".split())
        + ("-k", "not sanitizer"),
        seconds=120,
        files=("kernels/*/*.py", "vitfast/ops/*.py", "tests/kernels/test_gpu.py"),
        check="gpu tests of kernels",
    ),
    tests(
        "gpu_tests_models",
        "Do the GPU tests of models, operations and tools pass?",
        "all pass but AOTInductor's package",
        "the log names what failed",
        tuple(f"tests/{name}.py" for name in "model/test_same_bits model/test_export ops/test_sdpa".split())
        + ("tests/eval/test_embedder.py", "tests/tools/cost/test_memory.py", "tests/adapters/test_accelerate_gpu.py"),
        seconds=120,
        files=(*OURS, "vitfast/adapters/*.py", "vitfast/eval/embed*.py"),
        check="gpu tests of models",
    ),
    Question(
        "doctor",
        "Does every operation pass `vitfast doctor` in each dtype?",
        Command("doctor"),
        Prediction("78 of 78", exit_code, most=0),
        ("README's first row has it", "the operation that failed is mended first"),
        56,
        ("kernels/*/*.py", "vitfast/ops/*.py", "vitfast/tools/doctor.py", "vitfast/tools/verify/*.py"),
        measured=True,
        check="vitfast doctor",
    ),
)
QUESTIONS = {question.name: question for question in QUEUE}
