"""Packaging of Longstride: one package, `longstride`, whose rooms are links to the folders beside it."""

from pathlib import Path

from setuptools import find_packages, setup

# What fsspec needs for https:// and s3://; s3fs asks for an fsspec of its own date. Extras gs, az, hf: other schemes.
SERVE = ["aiohttp>=3.11.11,<4"]
REMOTE = [*SERVE, "s3fs>=2025.5.1"]
# FLAC, Ogg and MP3 files, and sounds of another rate.
AUDIO = ["soundfile>=0.13,<1", "soxr>=0.5,<2"]
# What `data build` reads beside plain files: zstd (gzip, bzip2 and xz come with Python), and Parquet by a column.
FORMATS = ["zstandard>=0.23,<1", "pyarrow>=18.1,<27"]
# Scripts by which shells complete verbs and options: plain ones, so that a TAB starts no Python.
COMPLETION = ["shtab>=1.7.2,<2"]
# PPMd, which `make demo` measures beside gzip and xz.
DEMO = ["pyppmd>=1.2,<2"]

setup(
    name="longstride",
    version="0.1.0",
    description="Train deep Sparse Transformers on long sequences of raw bytes",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    project_urls={"Paper": "https://arxiv.org/abs/1904.10509"},  # the project itself has no public address yet
    keywords=["sparse attention", "long context", "transformer", "triton", "deepspeed", "byte-level"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *[f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)],
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10,<3.14",
    packages=[*find_packages(include=["longstride", "longstride.*"]), "longstride.ds_configs"],
    package_data={
        "longstride.ds_configs": ["*.json", "experiments/*.json"],
        "longstride.launcher.cluster": ["sbatch.sh"],
        "longstride.launcher.drawing": ["pattern.html", "pattern.css", "pattern.js"],
        "longstride.launcher.exports": ["model_card.jinja"],
        "longstride.launcher.reporting": ["report.html", "report.css", "report.js"],
        "longstride.launcher.verbs": ["keys.json"],
        "longstride.launcher.serving": ["serve.*"],
    },
    install_requires=[
        "torch>=2.9,<2.14",
        # torch's CUDA builds pin their own triton inside this range; on a CPU build the newest runs the interpreter.
        "triton>=3.5,<3.8; platform_system == 'Linux'",
        "deepspeed>=0.19.8,<0.20",
        "braceexpand>=0.1.7,<1",  # numbered names of tars; webdataset asks for it as well
        "webdataset>=1.0,<2",
        "mpi4py>=4.1,<5",  # how DeepSpeed finds its ranks under the openmpi and mpich launchers
        "numpy>=2.1,<3",
        "pillow>=11,<14",
        "simplejpeg>=1.8.2,<2",  # damage of JPEG files, which Pillow reads over
        "fsspec>=2025.5.1",  # older ones hang in a forked loader worker: they wait for the event loop of its parent
        "pydantic>=2.10.3,<3",
        "safetensors>=0.5.1,<1",
        "tqdm>=4.67,<5",
        "psutil>=6.1,<8",  # processes, and the interface of an address; deepspeed asks for it as well
        "matplotlib>=3.10.8,<4",
        "jinja2>=3.1.6,<4",  # torch asks for it as well
    ],
    extras_require={
        "remote": REMOTE,
        "gs": ["gcsfs>=2025.5.1"],
        "az": ["adlfs>=2024.12"],
        "hf": ["huggingface_hub>=1,<3"],
        "audio": AUDIO,
        "formats": FORMATS,
        "serve": SERVE,
        "transformers": ["transformers>=5.23,<6"],
        "completion": COMPLETION,
        "demo": DEMO,
        "lm_eval": ["lm_eval>=0.4.13,<0.5"],
        "onnx": ["onnx>=1.19,<2", "onnxscript>=0.7,<1", "onnxruntime>=1.22,<2"],  # `longstride export --format onnx`
        "clients": [
            # What `make clients` runs against, each in one version: docs/clients.md says what came of it.
            *SERVE,
            *FORMATS,
            "transformers==5.24.0",
            "accelerate==1.15.0",
            "lightning==2.6.6",
            "peft==0.21.2",
            "lm_eval[hf]==0.4.13",
            "linformer==0.2.3",
            "fla-core==0.6.0",
            "brc-pytorch==0.1.3",
            "product-key-memory==0.3.0",
            "tenacity==9.2.1",  # lm_eval asks servers by it
            "datasets==5.2.0",
            "huggingface_hub==2.4.0",
            "webdataset==1.0.2",
            "wids==0.1.11",
            "torchdata==0.11.0",
            "openai==3.54.0",
            "tensorboard==2.21.0",
            "wandb==0.31.0",
            "onnx==1.23.2",
            "onnxruntime==1.32.0",
            "onnxscript==0.7.2",
            "parameterized==0.9.0",  # transformers' own tests of models use it
        ],
        "docs": ["mkdocs-material==9.8.2"],
        "dev": [
            *REMOTE,
            *AUDIO,
            *FORMATS,
            *COMPLETION,
            *DEMO,
            "setuptools>=77",  # tests build the wheel
            "pytest>=8.3.4,<10",
            "pytest-xdist>=3.6,<4",
            "hypothesis>=6.122,<7",
            "ruff==0.17.5",
            "mypy==2.4.1",
            "pre-commit>=4,<5",
            "openmpi>=5.0.8,<6; platform_system == 'Linux'",  # mpirun, beside Python: tests build with several ranks
        ],
    },
    entry_points={"console_scripts": ["longstride = longstride.launcher.cli:main"]},
)
